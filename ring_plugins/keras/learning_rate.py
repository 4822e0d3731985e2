"""Scale learning rates with the number of ranks.

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

The rate is always set through `self.model.optimizer`, since Keras on JAX synchronizes the optimizer's state on that
access; setting it on an older reference has no effect there. SGD's velocities include the rate of earlier steps, so
they are scaled along with it (Goyal et al. 2017, arXiv 1706.02677, section 3). Changing `momentum` instead would have
no effect once the step is traced.
"""

from __future__ import annotations

import abc
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.core.functions import was_size_asked
from ring_plugins.keras.averaging import make_train_function
from ring_plugins.keras.backends import backend
from ring_plugins.keras.callback_list import call_when_over
from ring_plugins.keras.first_step import expect_broadcast
from ring_plugins.keras.job import connect
from ring_plugins.keras.validation import updating_optimizers

Scaling = Literal["linear", "sqrt", "none"]
_ATTRIBUTE = "_ring_rate"
#: Attributes of an optimizer: with a schedule, multipliers by owner; the methods that read the rate, and that update.
_TABLES, _METHOD, _UPDATE = "_ring_multipliers", "_get_current_learning_rate", "_backend_apply_gradients"


class _RateCallback(keras.callbacks.Callback):
    """Sets the rate to base x multiplier(epoch), where `epoch` may be fractional."""

    def __init__(
        self, steps_per_epoch: int | None, initial_learning_rate: float | None, momentum_correction: bool
    ) -> None:
        super().__init__()
        if steps_per_epoch is not None and (not is_number(steps_per_epoch) or steps_per_epoch < 1):
            raise ArgumentError(f"steps_per_epoch={steps_per_epoch!r} is not a positive number.")
        given = initial_learning_rate
        if given is not None and (not is_number(given) or not 0 <= given < math.inf):
            raise ArgumentError(
                f"initial_learning_rate={given!r} is not a learning rate: pass the number that is right for one "
                "process."
            )
        self.steps_per_epoch = steps_per_epoch
        self.initial_learning_rate = initial_learning_rate
        self.momentum_correction = momentum_correction
        self._rate: Rate | None = None
        self._epoch = 0
        self._size = 0  # ranks of the job when the rate was last computed
        self._started = self._is_restored = False
        self._over: weakref.finalize[..., Any] | None = None
        self._multiplied: Any = None  # the optimizer whose schedule this callback multiplies

    def state_dict(self) -> dict[str, Any]:
        """What a process that joins in the middle of a `fit` has to know; see keras/joining.py."""
        has_rate = self._started and self._rate is not None
        rate = {name: getattr(self._rate, name) for name in ("base", "scale", "_last")} if has_rate else None
        return {"rate": rate, "size": self._size, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a rate that is a number. One that a schedule computes is multiplied anew in the next epoch."""
        if state["rate"] is not None:
            self._rate = Rate.restored(innermost(self.model.optimizer), state["rate"])
            self._rate.begin_fit(self.model.optimizer, self.momentum_correction)
            self._started, self._size, self._epoch = True, state["size"], state["epoch"]

    @abc.abstractmethod
    def _multiplier(self, epoch: float) -> float | None:
        """The multiplier of the base at this epoch; None if this callback does not set the rate there."""

    def _scale(self) -> float:
        """The multiplier of the base after warm-up."""
        return self._rate.scale if self._rate else 1.0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # Before a callback restores a backup: a fit that was interrupted may not have been freed yet.
        rate = None if self.model.optimizer is None else vars(innermost(self.model.optimizer)).get(_ATTRIBUTE)
        if rate is not None:
            rate.end_fit(is_late=True)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        connect()
        expect_broadcast(self)
        self._undo()  # an earlier fit may have been interrupted
        self._started = False
        self._over = call_when_over(self, self._undo)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._undo()

    def _undo(self) -> None:
        """Leave a scheduled rate as the schedule computes it, and one that is a number as it is for one process."""
        if self._over is not None:
            self._over.detach()
            self._over = None
        if self._rate is not None:
            _ = self.model  # on JAX, gives the variables their values of the last step
            self._rate.end_fit()
        optimizer, self._multiplied = self._multiplied, None
        if optimizer is not None:
            stop_multiplying(optimizer, self)
            self._model.train_function = None  # traced with the multipliers

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if not self._started:
            self._started = True
            self._start(innermost(self.model.optimizer), epoch)

    def _start(self, optimizer: Any, epoch: int) -> None:
        """Find or create the optimizer's rate, when the number of the first epoch is known."""
        self._rate, self._size = None, connect().topology.size
        if has_schedule(optimizer):
            self._multiply(optimizer, epoch, 0)
            return
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise ArgumentError(
                f"{type(self).__name__} can set a learning rate that is a number, or multiply a LearningRateSchedule; "
                f"this {type(optimizer).__name__} has neither. Pass it one of these instead of a function."
            )
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            raise ArgumentError(
                f"a MultiOptimizer has a learning rate for each of its optimizers, so {type(self).__name__} has none "
                "to set. Leave the callback out, and multiply the rates of the optimizers in the script."
            )
        is_new = _ATTRIBUTE not in vars(optimizer) and self.initial_learning_rate is None
        # An update of before, and no fit of ours: a checkpoint may have brought the rate of a job.
        self._is_restored = is_new and int(keras.ops.convert_to_numpy(optimizer.iterations)) > 0
        self._rate = Rate.of(optimizer, self.initial_learning_rate)
        self._rate.begin_fit(self.model.optimizer, self.momentum_correction)

    def _multiply(self, optimizer: Any, epoch: int, batch: int) -> None:
        """Multiply a scheduled rate from this batch on."""
        steps, epochs = self._steps(), int((self.params or {}).get("epochs") or 1)
        wanted = [self._multiplier(epoch + step / steps) for step in range(batch, (epochs - epoch) * steps + 1)]
        multiply_schedule(optimizer, self, [1.0 if multiplier is None else multiplier for multiplier in wanted])
        self._multiplied = optimizer
        make_train_function(self.model)

    def _follow_losses(self, batch: int) -> bool:
        """Whether the rate must be set because ranks were lost; a scheduled rate is multiplied anew."""
        self._size = connect().topology.size
        if self._multiplied is not None:
            self._multiply(self._multiplied, self._epoch, batch)
        return False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch == 0 and self._rate is not None:
            self._rate.follow(innermost(self.model.optimizer))
        is_due = self._size != connect().topology.size and self._follow_losses(batch)
        if self._rate is None or not (self._sets_at(batch) or is_due):
            return
        multiplier = self._multiplier(self._epoch + (batch / self._steps() if batch else 0.0))
        if multiplier is not None:
            self._rate.set(innermost(self.model.optimizer), multiplier, self.momentum_correction)

    def _sets_at(self, batch: int) -> bool:
        """Whether this callback sets the rate at this batch of an epoch."""
        return True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _steps(self) -> int:
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not steps:
            raise ArgumentError(
                f"{type(self).__name__} does not know the number of steps per epoch of this data; pass steps_per_epoch."
            )
        return int(steps)


class LearningRateWarmupCallback(_RateCallback):
    """Raises the learning rate step by step from the rate for one process to the rate for all ranks.

    A batch k times as large needs a rate k times as large, but not in the first steps; so the rate grows linearly over
    the first epochs (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2). Compile the model with the rate
    for one process.

    The rate may be a number or a `LearningRateSchedule`, whose values are multiplied. `ReduceLROnPlateau` and schedule
    callbacks still take effect. A rate that the script sets between two fits is the rate for one process, and so is
    the one in a file, whatever number of ranks has saved it; with `initial_epoch`, warm-up continues there. If ranks
    are lost and the job goes on, the rate follows the number of those that are left.

    Args:
        warmup_epochs: epochs until the full rate; 0 uses the full rate from the first step.
        momentum_correction: whether to scale the velocities of SGD along with the rate.
        steps_per_epoch: required if Keras does not know it, as for a generator.
        verbose: 1 prints on rank 0 when warm-up is over.
        scaling: "linear", or "sqrt" for the square root of the number of ranks.
        initial_learning_rate: the rate for one process, if the optimizer was compiled with another.

    Raises:
        ArgumentError: an argument is invalid, or the number of steps is unknown.
    """

    def __init__(
        self,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *,
        scaling: Scaling = "linear",
        initial_learning_rate: float | None = None,
    ) -> None:
        super().__init__(steps_per_epoch, initial_learning_rate, momentum_correction)
        if not is_number(warmup_epochs) or not 0 <= warmup_epochs < math.inf:
            raise ArgumentError(f"warmup_epochs={warmup_epochs!r} is not a number of epochs, 0 or more.")
        scale_for(scaling, 1)
        self.warmup_epochs, self.verbose, self.scaling = warmup_epochs, verbose, scaling
        self._is_over = self._has_said_rate = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_over": self._is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_over = state["is_over"]

    def _multipliers(self) -> tuple[float, float]:
        """The multipliers of the base at the first step and after warm-up."""
        return 1.0, scale_for(self.scaling, connect().topology.size)

    def _multiplier(self, epoch: float) -> float | None:
        first, full = self._multipliers()
        if epoch >= self.warmup_epochs:
            return full
        return first + (full - first) * max(epoch, 0.0) / self.warmup_epochs

    def _start(self, optimizer: Any, epoch: int) -> None:
        super()._start(optimizer, epoch)
        self._say_rate()
        self._is_over = False
        if self._rate is not None:
            _, self._rate.scale = self._multipliers()

    def _follow_losses(self, batch: int) -> bool:
        before = scale_for(self.scaling, self._size)
        super()._follow_losses(batch)
        after = scale_for(self.scaling, self._size)
        if self._rate is not None:
            self._rate.scale = after
            if self._is_over:  # others may have set the rate since
                self._rate.rescale(innermost(self.model.optimizer), after / before, self.momentum_correction)
        if connect().topology.rank == 0 and after != before:
            ranks = "1 rank" if self._size == 1 else f"{self._size} ranks"
            logger.info(f"learning rate after warm-up: {after / before:.3g} times what it was, for {ranks}")
        return False

    def _say_rate(self) -> None:
        """Print the rate after warm-up on rank 0, once; warn if the script may have multiplied it too."""
        topology = connect().topology
        lowest, highest = self._multipliers()
        was_read = None
        if self._rate is not None:
            was_read, self._rate.was_read = self._rate.was_read, None
        if topology.rank != 0 or lowest == highest or (self._has_said_rate and was_read is None):
            return
        self._has_said_rate = True
        base = f"{self._rate.base * lowest:g}" if self._rate is not None else "the schedule's"
        full = f"{self._rate.base * highest:g}" if self._rate is not None else f"{highest:g} times that"
        text = f"learning rate: {base} for one process, {full} for {topology.size} ranks after warm-up"
        if self._is_restored:
            logger.warning(
                f"{text}. The optimizer has made updates before: if a callback wrote its variables during fit() by "
                "tf.train.Checkpoint, HDF5 or Orbax, they hold the rate of that job, which is multiplied once more. "
                f"Pass the rate for one process then: {type(self).__name__}(initial_learning_rate=...). Other files "
                "hold that already."
            )
        elif was_read is not None:
            logger.warning(
                f"{text}. Since the last fit(), the script has read its rate, {was_read:g}, and has set another: what "
                "it sets is taken as the rate for one process."
            )
        elif was_size_asked():
            logger.warning(
                f"{text}. This script also reads ring_plugins.size(): if it has multiplied the rate by that, the rate "
                "is multiplied twice. Compile the model with the rate for one process."
            )
        else:
            logger.info(text)

    def _sets_at(self, batch: int) -> bool:
        """True until the full rate has been set once; afterwards other callbacks may set the rate."""
        if self._is_over:
            return False
        self._is_over = self._epoch + batch / self._steps() >= self.warmup_epochs
        return True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 >= self.warmup_epochs > epoch and connect().topology.rank == 0:
            print(f"\nEpoch {epoch + 1}: learning rate warm-up is over.")


class LearningRateScheduleCallback(_RateCallback):
    """Multiplies the learning rate in a range of epochs.

    Args:
        multiplier: factor of the rate that the model was compiled with (and of the scale of a
            `LearningRateWarmupCallback`); a number, or a function of the epoch, fractional without `staircase`.
        start_epoch: the first epoch in which it sets the rate.
        end_epoch: the first epoch in which it no longer sets the rate; None for no end.
        staircase: whether to change the rate only at the beginning of epochs.
        momentum_correction: whether to scale the velocities of SGD along with the rate.
        steps_per_epoch: required if Keras does not know it.
        scaling: how the rate grows with the number of ranks if there is no warm-up: "linear", "sqrt", "none".
        initial_learning_rate: the rate for one process, if the optimizer was compiled with another.

    Raises:
        ArgumentError: an argument is invalid, or the number of steps is required and unknown.
    """

    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        *,
        scaling: Scaling = "none",
        initial_learning_rate: float | None = None,
    ) -> None:
        super().__init__(steps_per_epoch, initial_learning_rate, momentum_correction)
        if not callable(multiplier) and not (is_number(multiplier) and 0 <= multiplier < math.inf):
            raise ArgumentError(
                f"multiplier={multiplier!r} is neither a number nor a function: pass a factor of the rate, or a "
                "function of the epoch that returns one."
            )
        for name, given in (("start_epoch", start_epoch), ("end_epoch", end_epoch)):
            if not is_number(given) and (given is not None or name == "start_epoch"):
                raise ArgumentError(f"{name}={given!r} is not the number of an epoch.")
        if end_epoch is not None and end_epoch <= start_epoch:
            raise ArgumentError(f"end_epoch={end_epoch!r} is not after start_epoch={start_epoch!r}.")
        scale_for(scaling, 1)
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start_epoch, self.end_epoch, self.staircase, self.scaling = start_epoch, end_epoch, staircase, scaling

    def _multiplier(self, epoch: float) -> float | None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return None
        own = self.multiplier(int(epoch) if self.staircase else epoch)
        if not is_number(own) or not 0 <= own < math.inf:
            raise ArgumentError(
                f"the multiplier of {type(self).__name__} returned {own!r} for epoch {epoch:g}, not a number that a "
                "rate can be multiplied by."
            )
        scale = self._scale()
        return own * (scale if scale != 1.0 else scale_for(self.scaling, connect().topology.size))

    def _sets_at(self, batch: int) -> bool:
        return batch == 0 or not self.staircase

    def _follow_losses(self, batch: int) -> bool:
        super()._follow_losses(batch)
        return self._scale() == 1.0 and self.scaling != "none"


def is_number(value: Any) -> bool:
    """Whether a value is a number, also one of numpy or a framework, and not a bool."""
    if isinstance(value, bool | str) or value is None:
        return False
    try:
        return not math.isnan(float(value))
    except (TypeError, ValueError):
        return False


def scale_for(scaling: Scaling, size: int) -> float:
    """The factor by which the rate grows with the number of ranks.

    Args:
        scaling: "linear" as in Goyal et al. 2017, "sqrt" as is common with Adam, "none".
        size: number of ranks, and so the factor of the batch size.

    Raises:
        ArgumentError: `scaling` is none of these.
    """
    if scaling not in ("linear", "sqrt", "none"):
        raise ArgumentError(f'scaling={scaling!r} must be "linear", "sqrt" or "none".')
    return {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}[scaling]


class Rate:
    """The learning rate of one optimizer, stored as base times multiplier.

    Attributes:
        base: the rate for one process.
        scale: the multiplier after warm-up.
        was_read: the rate of the last `fit`, if a script has read it since, and then set another.
    """

    def __init__(self, base: float) -> None:
        self.base, self.scale = base, 1.0
        self._last = base
        self._is_fitting = False
        self._corrects = True  # whether velocities are scaled along
        self.was_read: float | None = None
        self._optimizer: weakref.ref[Any] = lambda: None  # type: ignore[assignment]

    @classmethod
    def of(cls, optimizer: Any, given: float | None) -> Rate:
        """Return the rate of this optimizer, which is one for all callbacks of a `fit`.

        Args:
            optimizer: an optimizer whose learning rate is a number.
            given: the rate for one process, if the user passed it.
        """
        rate: Rate = optimizer.__dict__.setdefault(_ATTRIBUTE, cls(0.0))
        if not rate._is_fitting:
            rate.base = rate._last = _read_variable(optimizer)
        rate.base = rate.base if given is None else given
        return rate

    def begin_fit(self, outer: Any, momentum_correction: bool) -> None:
        """From now on, others that change the rate change the job's, and files hold the one for one process.

        Args:
            outer: the optimizer, or a LossScaleOptimizer around it.
            momentum_correction: whether SGD's velocities are scaled along with the rate.
        """
        optimizer = innermost(outer)
        _forget(optimizer)
        self._is_fitting, self._corrects, self._optimizer = True, momentum_correction, weakref.ref(optimizer)
        vars(optimizer)["get_config"] = functools.partial(self._config, weakref.ref(optimizer))
        self.replace_saving(outer)

    def end_fit(self, is_late: bool = False) -> None:
        """Give the optimizer the rate for one process, and let it tell the one of this fit until it is used again.

        Args:
            is_late: whether a script may have set the rate since: what no callback has set is the one for one process.
        """
        optimizer = self._optimizer()
        variable = None if optimizer is None else optimizer._learning_rate
        # An exception in a step of JAX may have left the variables without values.
        if not self._is_fitting or not isinstance(variable, keras.Variable) or variable._value is None:
            self._is_fitting = False
            return
        current = _read(optimizer)
        if is_late and current != self._last:
            self._is_fitting = False
            _scale(optimizer, self.base / self._last if self._corrects and self._last > 0 else 1.0)
            return
        self._follow(current)
        self._is_fitting = False
        self._assign(optimizer, current, self.base, self._corrects)
        if self._last != current:
            _show(optimizer, self, current)

    def replace_saving(self, outer: Any) -> None:
        """Let files hold the rate for one process; called again after the sharding has put back its own methods."""
        while outer is not None:
            before = vars(outer).get("save_own_variables")
            if not isinstance(before, functools.partial):
                vars(outer)["save_own_variables"] = functools.partial(self._save, weakref.ref(outer), before)
            outer = getattr(outer, "inner_optimizer", None)

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
            current = _read(optimizer)
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

    @classmethod
    def restored(cls, optimizer: Any, state: dict[str, float]) -> Rate:
        """The rate of this optimizer with another's attributes; the callbacks of an optimizer share one object."""
        rate: Rate = optimizer.__dict__.setdefault(_ATTRIBUTE, cls(0.0))
        vars(rate).update(state)
        return rate

    def set(self, optimizer: Any, multiplier: float, momentum_correction: bool) -> None:
        """Set the rate to base x multiplier.

        Args:
            optimizer: the optimizer of this rate.
            multiplier: multiplier of the base.
            momentum_correction: whether to scale SGD's velocities along with the rate.
        """
        current = _read(optimizer)
        self._follow(current)
        self._assign(optimizer, current, self.base * multiplier, momentum_correction)

    def rescale(self, optimizer: Any, factor: float, momentum_correction: bool) -> None:
        """Multiply the rate, whoever has set it; the base stays. Arguments as for `set`."""
        current = _read(optimizer)
        self._follow(current)
        self._assign(optimizer, current, current * factor, momentum_correction)

    def _assign(self, optimizer: Any, current: float, wanted: float, momentum_correction: bool) -> None:
        new = self._last = float(np.float32(wanted))
        if new == current:
            return
        optimizer.learning_rate = new
        _scale(optimizer, new / current if momentum_correction and current > 0 else 1.0)

    def follow(self, optimizer: Any) -> None:
        """Note what others have set in this fit."""
        self._follow(_read(optimizer))

    def _follow(self, current: float) -> None:
        self.base, self._last = self._for_one_process(current), current


def _show(optimizer: Any, rate: Rate, seen: float) -> None:
    """Let `optimizer.learning_rate` be the last one of `fit`, until the optimizer makes an update or gets a rate."""
    reference, variable, left = weakref.ref(optimizer), optimizer._learning_rate, _read_variable(optimizer)
    was_read: list[float] = []
    with backend().at_once():
        shown = keras.Variable(seen, trainable=False, dtype=variable.dtype, name="learning_rate")

    def read() -> Any:
        optimizer: Any = reference()
        with backend().at_once():  # tf.train.Checkpoint restores without `assign`; during `fit` JAX has it elsewhere
            is_other = variable._value is None or float(keras.ops.convert_to_numpy(variable._value)) != left
        if optimizer._learning_rate is not variable or is_other:
            _forget(optimizer)
            return optimizer._get_current_learning_rate()
        was_read.append(seen)
        return shown

    def update(*args: Any, **options: Any) -> None:
        optimizer: Any = reference()
        _forget(optimizer)
        optimizer._backend_apply_gradients(*args, **options)

    def assign(value: Any) -> Any:
        if (optimizer := reference()) is not None:
            _forget(optimizer)
        rate.was_read = was_read[-1] if was_read else None
        vars(variable).pop("assign", None)
        return variable.assign(value)

    vars(shown)["assign"] = vars(variable)["assign"] = assign
    vars(optimizer).update({_METHOD: read, _UPDATE: update})


def forget_last_rate(outer: Any) -> None:
    """Let `optimizer.learning_rate` be what it is; does nothing if no `fit` with callbacks of ours has ended."""
    for optimizer in updating_optimizers(outer):
        _forget(optimizer)


def _forget(optimizer: Any) -> None:
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


def innermost(optimizer: Any) -> Any:
    """The optimizer inside any LossScaleOptimizer."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def has_schedule(optimizer: Any) -> bool:
    """Whether the rate is computed from the number of updates and cannot be set."""
    # Keras 3.15.1, optimizers/base_optimizer.py:777.
    return isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)


def warn_of_steps(model: Any, epoch: int, steps: int | None) -> None:
    """Warn on rank 0 of a scheduled rate that goes on elsewhere than the epochs: another job has counted the steps.

    Args:
        model: whose `fit` begins, perhaps with a checkpoint.
        epoch: the first of this `fit`, counted from 0.
        steps: of each epoch, if they are known.
    """
    optimizer = model.optimizer
    if not epoch or not steps or optimizer is None or connect().topology.rank:
        return
    for one in filter(has_schedule, updating_optimizers(optimizer)):
        found, expected = int(keras.ops.convert_to_numpy(one._iterations)), epoch * steps
        if found not in (0, expected):  # a new optimizer begins with 0 on one process, too
            logger.warning(
                f"the learning rate's {type(one._learning_rate).__name__} goes on at step {found}, and epoch "
                f"{epoch + 1} of this fit() begins with step {expected}, at {steps} steps an epoch: the optimizer has "
                "counted the steps of another number of ranks, or of other data. Make the schedule for the steps from "
                f"{found} on, or call optimizer.iterations.assign({expected}) before fit()."
            )


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


def _read(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _read_variable(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer._learning_rate))
