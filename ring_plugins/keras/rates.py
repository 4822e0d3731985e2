"""The learning rate of one optimizer while a `fit` scales it, and afterwards.

A rate is stored as base times multiplier: the base is the rate for one process, and warm-up or a schedule determines
the multiplier. A change by other callbacks (`ReduceLROnPlateau`) changes the base permanently. A rate computed by a
`LearningRateSchedule` cannot be set; instead the optimizer's method that reads it is replaced by one that multiplies.

One rule tells what a number means. Outside of `fit`, and in every file, the optimizer's variables are those for one
process; while `fit` runs, they are the job's, and so is what a callback sets. When `fit` ends, also by an exception,
the optimizer gets back the rate for one process (and SGD's velocities). Nobody has to guess where a value between two
fits has come from, and a file can be continued with any number of ranks, or without this package. While `fit` runs, the
optimizer's methods that save write the values for one process, too.

Scripts print `optimizer.learning_rate` after `fit`, to see with which rate it has trained. So until the optimizer makes
another update or gets a rate from anywhere, its method that reads the rate returns that one.

Considered and rejected: to leave the variable alone and multiply wherever the update reads the rate. Then
`ReduceLROnPlateau` would read the product and write it into the variable, and JAX would have to compile the step again
for each change.

SGD's velocities include the rate of earlier steps, so they are scaled along with it (Goyal et al. 2017, arXiv
1706.02677, section 3). Changing `momentum` instead would have no effect once the step is traced.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.keras.backends import backend
from ring_plugins.keras.state import innermost, nested

_ATTRIBUTE = "_ring_rate"
#: Attributes of an optimizer: with a schedule, multipliers by owner; the methods that read the rate, and that update.
_TABLES, _METHOD, _UPDATE = "_ring_multipliers", "_get_current_learning_rate", "_backend_apply_gradients"


class Rate:
    """The learning rate of one optimizer, stored as base times multiplier; one for all callbacks of a `fit`.

    Attributes:
        base: the rate for one process.
        scale: the multiplier after warm-up.
        was_read: the rate of the last `fit`, if a script has read it since, and then set another.
    """

    def __init__(self) -> None:
        self.base = self._last = 0.0
        self.scale = 1.0
        self.was_read: float | None = None
        self._is_fitting = False
        self._corrects = True  # whether velocities are scaled along
        self._optimizer: weakref.ref[Any] = lambda: None  # type: ignore[assignment]

    @property
    def state(self) -> dict[str, float]:
        """What a process that joins has to know."""
        return {name: getattr(self, name) for name in ("base", "scale", "_last")}

    def begin_fit(
        self,
        outer: Any,
        momentum_correction: bool,
        given: float | None = None,
        state: dict[str, float] | None = None,
    ) -> None:
        """From now on, others that change the rate change the job's, and files hold the one for one process.

        Args:
            outer: the optimizer, whose learning rate is a number, or a LossScaleOptimizer around it.
            momentum_correction: whether SGD's velocities are scaled along with the rate.
            given: the rate for one process, if the user passed it.
            state: of another rank, in a process that has joined.
        """
        optimizer = innermost(outer)
        if state is not None:
            vars(self).update(state)
        elif not self._is_fitting:
            self.base = self._last = _number(optimizer._learning_rate)
        self.base = self.base if given is None else given
        forget_last_rate(optimizer)
        self._is_fitting, self._corrects, self._optimizer = True, momentum_correction, weakref.ref(optimizer)
        vars(optimizer)["get_config"] = functools.partial(self._config, weakref.ref(optimizer))
        self.replace_saving(outer)

    def end_fit(self, is_late: bool = False) -> None:
        """Give the optimizer the rate for one process, and let it tell the one of this fit until it is used again.

        Args:
            is_late: whether a script may have set the rate since: what no callback has set is the one for one process.
        """
        optimizer: Any = self._optimizer()
        variable = None if optimizer is None else optimizer._learning_rate
        # An exception in a step of JAX may have left the variables without values.
        if not self._is_fitting or not isinstance(variable, keras.Variable) or variable._value is None:
            self._is_fitting = False
            return
        current = _number(optimizer.learning_rate)
        if is_late and current != self._last:
            self._is_fitting = False
            _scale(optimizer, self.base / self._last if self._corrects and self._last > 0 else 1.0)
            return
        self.follow(optimizer)
        self._is_fitting = False
        self._assign(optimizer, current, self.base, self._corrects)
        if self._last != current:
            _show(optimizer, self, current)

    def replace_saving(self, outer: Any) -> None:
        """Let files hold the rate for one process; called again after the sharding has put back its own methods."""
        for one in nested(outer):
            before = vars(one).get("save_own_variables")
            if getattr(before, "func", None) != self._save:
                vars(one)["save_own_variables"] = functools.partial(self._save, weakref.ref(one), before)

    def _for_one_process(self, current: float) -> float:
        if not self._is_fitting:
            return current
        if math.isclose(current, self._last, rel_tol=1e-6) or self._last <= 0:
            return self.base
        return self.base * current / self._last

    def _config(self, reference: weakref.ref[Any]) -> dict[str, Any]:
        """Replaces `get_config`."""
        optimizer: Any = reference()
        config: dict[str, Any] = type(optimizer).get_config(optimizer)
        return {**config, "learning_rate": self._for_one_process(config["learning_rate"])}

    def _save(self, reference: weakref.ref[Any], before: Callable[[Any], None] | None, store: Any) -> None:
        """Replaces `save_own_variables`: while it runs, the variables have the values for one process."""
        saved: Any = reference()
        optimizer = innermost(saved)
        variables, values = [], []
        if self._is_fitting and isinstance(optimizer._learning_rate, keras.Variable):
            current = _number(optimizer.learning_rate)
            wanted = self._for_one_process(current)
            velocities = _velocities(optimizer) if self._corrects and current > 0 and wanted != current else []
            variables = [optimizer._learning_rate, *velocities]
            values = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
        try:
            for variable, value in zip(variables[1:], values[1:], strict=True):
                variable.assign((value * (wanted / current)).astype(value.dtype))
            if variables:
                variables[0].assign(wanted)
            if before is None:
                type(saved).save_own_variables(saved, store)
            else:
                before(store)
        finally:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def set(self, optimizer: Any, multiplier: float, momentum_correction: bool, of_base: bool = True) -> None:
        """Set the rate to base x multiplier.

        Args:
            optimizer: the optimizer of this rate.
            multiplier: multiplier of the base.
            momentum_correction: whether to scale SGD's velocities along with the rate.
            of_base: False multiplies the rate, whoever has set it; the base stays.
        """
        current = self.follow(optimizer)
        self._assign(optimizer, current, (self.base if of_base else current) * multiplier, momentum_correction)

    def _assign(self, optimizer: Any, current: float, wanted: float, momentum_correction: bool) -> None:
        new = self._last = float(np.float32(wanted))
        if new != current:
            optimizer.learning_rate = new
            _scale(optimizer, new / current if momentum_correction and current > 0 else 1.0)

    def follow(self, optimizer: Any) -> float:
        """Note what others have set in this fit; returns the rate."""
        current = _number(optimizer.learning_rate)
        self.base, self._last = self._for_one_process(current), current
        return current


def rate_of(optimizer: Any) -> Rate:
    """The rate of this optimizer, made if it has none."""
    rate: Rate = vars(optimizer).setdefault(_ATTRIBUTE, Rate())
    return rate


def known_rate_of(optimizer: Any) -> Rate | None:
    """The rate of this optimizer; None if no `fit` has scaled it."""
    rate: Rate | None = vars(optimizer).get(_ATTRIBUTE)
    return rate


def _show(optimizer: Any, rate: Rate, seen: float) -> None:
    """Let `optimizer.learning_rate` be the last one of `fit`, until the optimizer makes an update or gets a rate."""
    reference, variable, left = weakref.ref(optimizer), optimizer._learning_rate, _number(optimizer._learning_rate)
    was_read: list[float] = []
    with backend().at_once():
        shown = keras.Variable(seen, trainable=False, dtype=variable.dtype, name="learning_rate")

    def read() -> Any:
        optimizer: Any = reference()
        with backend().at_once():  # tf.train.Checkpoint restores without `assign`; during `fit` JAX has it elsewhere
            is_other = variable._value is None or _number(variable._value) != left
        if optimizer._learning_rate is not variable or is_other:
            forget_last_rate(optimizer)
            return optimizer._get_current_learning_rate()
        was_read.append(seen)
        return shown

    def update(*args: Any, **options: Any) -> None:
        optimizer: Any = reference()
        forget_last_rate(optimizer)
        optimizer._backend_apply_gradients(*args, **options)

    def assign(value: Any) -> Any:
        if (optimizer := reference()) is not None:
            forget_last_rate(optimizer)
        rate.was_read = was_read[-1] if was_read else None
        vars(variable).pop("assign", None)
        return variable.assign(value)

    vars(shown)["assign"] = vars(variable)["assign"] = assign
    vars(optimizer).update({_METHOD: read, _UPDATE: update})


def forget_last_rate(optimizer: Any) -> None:
    """Let `optimizer.learning_rate` be what it is; does nothing if no `fit` with callbacks of ours has ended."""
    if _UPDATE in vars(optimizer):
        del vars(optimizer)[_UPDATE], vars(optimizer)[_METHOD]
        if isinstance(optimizer._learning_rate, keras.Variable):
            vars(optimizer._learning_rate).pop("assign", None)


def _scale(optimizer: Any, factor: float) -> None:
    for velocity in _velocities(optimizer) if factor != 1.0 else ():
        velocity.assign(velocity * factor)


def _velocities(optimizer: Any) -> list[Any]:
    """Those of SGD, which include the rate of earlier steps."""
    return list(getattr(optimizer, "momentums", None) or []) if isinstance(optimizer, keras.optimizers.SGD) else []


def has_schedule(optimizer: Any) -> bool:
    """Whether the rate is computed from the number of updates and cannot be set."""
    # Keras 3.15.1, optimizers/base_optimizer.py:777.
    return isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)


def multiply_schedule(optimizer: Any, owner: Any, multipliers: Sequence[float]) -> None:
    """Multiply a scheduled rate in each following update; the last multiplier remains in effect.

    The multipliers of several owners are multiplied. Only the instance's method that reads the rate is replaced, not
    the schedule, so files saved with it load without this package (with the rate for one process).

    Args:
        optimizer: an optimizer with a `LearningRateSchedule`.
        owner: the callback that multiplies; its earlier multipliers are replaced.
        multipliers: one for each following update.
    """
    # Keras 3.15.1, optimizers/base_optimizer.py: `iterations` counts updates, this one also what only accumulates.
    first = int(keras.ops.convert_to_numpy(optimizer._iterations))
    tables: dict[int, tuple[int, np.ndarray[Any, Any]]] = optimizer.__dict__.setdefault(_TABLES, {})
    tables[id(owner)] = first, np.asarray(multipliers, np.float32)
    scheduled: Callable[[], Any] = type(optimizer)._get_current_learning_rate.__get__(optimizer)

    def rate() -> Any:
        current = scheduled()
        for begin, table in tables.values():
            update = keras.ops.clip(keras.ops.cast(optimizer._iterations, "int32") - begin, 0, len(table) - 1)
            current = current * keras.ops.take(keras.ops.convert_to_tensor(table), update)
        return current

    optimizer.__dict__[_METHOD] = rate


def stop_multiplying(optimizer: Any, owner: Any) -> None:
    """Undo this owner's `multiply_schedule`; without owners the optimizer has its class's method again."""
    tables = optimizer.__dict__.get(_TABLES, {})
    tables.pop(id(owner), None)
    if not tables:
        optimizer.__dict__.pop(_TABLES, None)
        optimizer.__dict__.pop(_METHOD, None)


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
