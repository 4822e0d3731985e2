"""Whether the state of a user's metric is a sum, found out by trying it."""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.types import Array
from ring_plugins.keras.state import value_of


class Trial:
    """Tries whether the state of a metric is a sum: whether what a batch adds does not depend on the state.

    The metric's `update_state` is called on made-up data, in a scope in which its variables have other values: neither
    they nor the attributes of the metric change, and random numbers go on as before.

    Args:
        metric: the metric, as it is before this callback has seen an update.

    Attributes:
        met: checksum of that state.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = weakref.ref(metric)
        self._initial = [value_of(variable) for variable in metric.variables]
        self.met = zlib.crc32(b"".join(value.tobytes() for value in self._initial))
        self._seen: dict[str, Any] = {}  # arguments of `update_state`, which may trace, and of `reset_state`
        self._found: bool | None = None
        self._start: list[Array] = []
        self._is_reset: list[bool] = []
        self._is_moved: list[bool] = []  # by the trial

    def watch(self) -> None:
        """Record what the next `update_state` gets, and whether `reset_state` is called.

        TensorFlow traces the first step, which builds Keras's list of metrics, after the first epoch's reset.
        """
        metric = self._metric()

        def noting(name: str, original: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
            vars(metric).pop(name, None)
            self._seen[name] = keras.tree.map_structure(_shape, (args, options))
            return original(*args, **options)

        for name in {"update_state", "reset_state"} - self._seen.keys():
            # Past Keras's `__setattr__`, which tracks what is assigned.
            vars(metric)[name] = functools.partial(noting, name, getattr(metric, name))

    def begin(self, is_met_alike: bool) -> list[Array]:
        """The state with which each rank begins to add, once it is known that the state is a sum; else nothing.

        Args:
            is_met_alike: whether all ranks had the same state when this began. What a rank had added by itself counts.
        """
        if not self._start:
            return []
        metric = self._metric()
        assert metric is not None
        return [  # what the trial has not moved no rank has
            begin if is_moved else value_of(variable)
            for begin, is_moved, variable in zip(
                self._begins(is_met_alike), self._is_moved, metric.variables, strict=True
            )
        ]

    def _begins(self, is_met_alike: bool) -> list[Array]:
        initial = self._initial if is_met_alike and len(self._initial) == len(self._start) else None
        has_reset = "reset_state" in self._seen
        return [
            start if has_reset and is_reset else np.zeros_like(start) if initial is None else initial[i]
            for i, (start, is_reset) in enumerate(zip(self._start, self._is_reset, strict=True))
        ]

    def shows_sum(self) -> bool:
        """Whether the state is a sum, as far as this rank's data have changed it.

        False as long as `update_state` has not been called, and if it cannot be tried, or if a variable has changed
        that no made-up data change, such as a maximum of what they do not reach.
        """
        metric = self._metric()
        assert metric is not None
        if self._found is None and "update_state" in self._seen:
            seen = dict(self._seen)
            with _undisturbed(metric):
                self._found = self._try(metric)
            self._seen = seen
        if not self._found:
            return False
        variables = zip(metric.variables, self._begins(True), self._is_moved, strict=True)
        return all(is_moved or np.array_equal(value_of(variable), begin) for variable, begin, is_moved in variables)

    def _try(self, metric: Any) -> bool:
        begin: list[list[Array]] = []  # the state after `reset_state`, from the present one and from another
        try:
            for offset in (0, 1):
                mapping = [
                    (variable, keras.ops.cast(variable + offset, variable.dtype)) for variable in metric.variables
                ]
                with keras.StatelessScope(state_mapping=mapping) as scope:
                    metric.reset_state()
                begin.append([copied(scope.get_current_value(variable)) for variable in metric.variables])
        except Exception:  # of any kind, since the class is the script's: it cannot be tried
            return False
        is_reset = [np.array_equal(one, other) for one, other in zip(*begin, strict=True)]
        start = [one if whether else np.zeros_like(one) for one, whether in zip(begin[0], is_reset, strict=True)]
        is_moved = [False] * len(start)
        generator = np.random.default_rng(0)
        for scales in ((1.0, 1.0), (1.0, 10.0), (1.0, 0.1), (1e3, 1e3)):
            try:
                batches = [_made_up(self._seen["update_state"], generator, scale) for scale in (*scales, 1.0)]
                states = [start]
                for args, options in batches[1:]:
                    states.append(_updated(metric, states[-1], args, options))
                args, options = batches[0]
                updated = [_updated(metric, state, args, options) for state in states]
            except Exception:  # of any kind: the data are made up
                continue
            if not all(np.all(np.isfinite(value)) for state in (*states, *updated) for value in state):
                continue
            # How much the elements are rounded: each for itself, since some count samples and others operations.
            rounding = [1e-5 * np.max(np.abs(values), axis=0) for values in zip(*states, *updated, strict=True)]
            added = [
                [one.astype(np.float64) - other for one, other in zip(after, before, strict=True)]
                for after, before in zip(updated, states, strict=True)
            ]
            for other in added[1:]:
                for one, two, error in zip(added[0], other, rounding, strict=True):
                    if np.any(np.abs(one - two) > 1e-3 * np.abs(two) + error):
                        return False
            is_moved = [before or bool(np.any(value)) for before, value in zip(is_moved, added[0], strict=True)]
        if any(is_moved):
            self._start, self._is_reset, self._is_moved = start, is_reset, is_moved
        return any(is_moved)

    def forget(self) -> bool:
        """Watch no longer; returns whether no update has been seen."""
        if (metric := self._metric()) is not None:
            for name in ("update_state", "reset_state"):
                vars(metric).pop(name, None)
        return "update_state" not in self._seen


def _shape(value: Any) -> Any:
    """The shape of a tensor, which may be symbolic, with 4 samples where that is unknown; any other argument itself."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value
    shape = tuple(size or 4 for size in value.shape)
    return keras.KerasTensor(shape, keras.backend.standardize_dtype(value.dtype))


def _made_up(arguments: Any, generator: np.random.Generator, scale: float) -> Any:
    """Arguments with tensors of numbers from 0 to `scale`; of 0 and 1 if they are integers, which may be classes."""

    def made_up(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        is_float = "float" in leaf.dtype
        value = generator.random(leaf.shape) * scale if is_float else generator.integers(2, size=leaf.shape)
        return keras.ops.convert_to_tensor(value, dtype=leaf.dtype)

    return keras.tree.map_structure(made_up, arguments)


def _updated(metric: Any, state: list[Array], args: Any, options: Any) -> list[Array]:
    values = [
        keras.ops.convert_to_tensor(value, dtype=variable.dtype)
        for variable, value in zip(metric.variables, state, strict=True)
    ]
    return list(map(copied, metric.stateless_update_state(values, *args, **options)))


@contextlib.contextmanager
def _undisturbed(metric: Any) -> Iterator[None]:
    """Restore what an `update_state` may change besides its variables in a scope: attributes and random numbers."""
    attributes, state = dict(vars(metric)), [value_of(variable) for variable in metric.variables]
    drawn = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        vars(metric).clear()
        vars(metric).update(attributes)
        for variable, value in zip(metric.variables, state, strict=True):
            if not np.array_equal(value_of(variable), value, equal_nan=value.dtype.kind == "f"):
                variable.assign(value)


def copied(value: Any) -> Any:
    """A tensor, variable or array as an array with memory of its own; any other value itself."""
    return np.array(keras.ops.convert_to_numpy(value)) if hasattr(value, "dtype") else value
