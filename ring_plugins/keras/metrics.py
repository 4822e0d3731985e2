"""Compute metrics of all ranks' data.

A metric has state (a count and a total, a histogram of thresholds) and computes its result from that. The sum of all
ranks' states is the state of all data, so the result from the sum is exact. A mean of results is not: with uneven
shards, the mean AUC was 0.845, while all data gave 0.820.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import random
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.keras.averaging import make_train_function
from ring_plugins.keras.broadcast import synchronize_fit
from ring_plugins.keras.callback_list import call_when_over, show_on_one_rank
from ring_plugins.keras.first_step import expect_broadcast
from ring_plugins.keras.interrupted_fit import argument_of_fit
from ring_plugins.keras.job import connect
from ring_plugins.keras.state import value_of
from ring_plugins.keras.validation import check_equal_validation


class MetricAverageCallback(keras.callbacks.Callback):
    """Computes the metrics at the end of each epoch and evaluation from all ranks' data.

    The state of each metric is summed over the ranks, and its result is computed from the sum. That is exact for AUC,
    precision, R2 and similar metrics, and for shards of different sizes. It happens where Keras reads its metrics,
    before any callback sees them, so the position of this callback in the list does not matter. `History`,
    `EarlyStopping`, `ModelCheckpoint` and `model.evaluate(callbacks=[MetricAverageCallback()])` get the same numbers on
    every rank. Numbers shown during an epoch are those of the rank. Of `evaluate` and `predict` with this callback only
    rank 0 shows the progress bar.

    For a metric whose state is not a sum (a maximum, the last value, a moving average) the results are averaged
    instead, with one warning; each rank's has the same weight, however many samples it has seen. Metrics of Keras are
    sums. Your own are tried once, with made-up data of the shapes that they get: in a sum, what a batch adds does not
    depend on the state.

    Args:
        averaged: names of other metrics whose results should be averaged.

    All ranks must call `fit` and `evaluate`.

    Raises:
        ArgumentError: `averaged` is not a list of names, or the model has no metric of such a name.
        MismatchError: some ranks have validation data and others have none.
    """

    def __init__(self, averaged: Sequence[str] = ()) -> None:
        super().__init__()
        if isinstance(averaged, str) or not all(isinstance(name, str) for name in averaged):
            raise ArgumentError(f"averaged={averaged!r} must be a list of names of metrics.")
        self.averaged = tuple(averaged)
        self._warned, self._known = set[str](), set[str]()
        self._trials: weakref.WeakKeyDictionary[Any, Trial] = weakref.WeakKeyDictionary()
        self._depth = 0
        self._communicator: Communicator | None = None
        self._over: weakref.finalize[..., Any] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        connect()
        expect_broadcast(self)
        self._restore()  # an earlier fit may have been interrupted
        is_new = self._enter()
        if self._communicator is not None:
            data, frequency = argument_of_fit("validation_data"), argument_of_fit("validation_freq")
            check_equal_validation(data, frequency, self._communicator)
        if is_new:
            make_train_function(self.model)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._depth == 0:
            show_on_one_rank(self)
        if self._enter():
            self.model.make_test_function(force=True)

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        show_on_one_rank(self)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._leave()

    # Keras 3.15.1, trainers/trainer.py:1035: fit and evaluate read their metrics with this method, once, at the end.
    _METHOD = "_get_metrics_result_or_logs"

    def _enter(self) -> bool:
        """Begin to read metrics; returns whether to trace the step anew, with metrics that have yet to be tried."""
        self._depth += 1
        world = connect()
        if self._depth > 1 or world.topology.size == 1:
            return False
        self._over = call_when_over(self, self._restore)
        self._communicator = world.new_communicator("metrics")
        read = getattr(self._model, self._METHOD)

        self._model.__dict__[self._METHOD] = lambda logs: self._read(read, logs)
        new = [metric for metric in _given(self._model) if metric not in self._trials]
        self._trials.update((metric, Trial(metric)) for metric in new)
        for trial in self._trials.values():
            trial.watch()
        return bool(new)

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._restore()

    def _restore(self) -> None:
        self._depth = 0
        if self._over is not None:
            self._over.detach()
            self._over = None
        if self._communicator is None:
            return
        self._model.__dict__.pop(self._METHOD, None)
        for metric, trial in list(self._trials.items()):
            if trial.forget():
                del self._trials[metric]
        self._communicator.close()
        self._communicator = None

    def _read(self, read: Any, logs: Any) -> Any:
        assert self._communicator is not None
        synchronize_fit(self._model)  # if another rank is still in its epoch, all get an error that says so
        metrics = _flat(self._model.metrics)
        self._known |= {metric.name for metric in metrics} | set(logs if isinstance(logs, dict) else ())
        self._check_names(self._known)
        averaged, starting_alike = self._averaged(metrics)
        self._warn(averaged)
        begins = {id(metric): trial.begin(metric in starting_alike) for metric, trial in self._trials.items()}
        summed = [metric for metric in metrics if metric not in averaged]
        with self._averaging(averaged), _summed(summed, begins, self._communicator):
            result = read(logs)
            if result is not logs:  # results may be variables, or share their memory, which soon have own values again
                return keras.tree.map_structure(_copied, result)
        # Returned by the user's own train_step or test_step.
        return keras.tree.map_structure(self._mean, logs) if isinstance(logs, dict) else logs

    def _check_names(self, known: set[str]) -> None:
        if unknown := [name for name in self.averaged if name not in known]:
            raise ArgumentError(
                f"averaged={list(self.averaged)!r}: the model has no metric {unknown[0]!r}. It has "
                f"{', '.join(map(repr, sorted(known)))}."
            )

    @contextlib.contextmanager
    def _averaging(self, metrics: list[Any]) -> Iterator[None]:
        """Let these metrics return the average of the ranks' results inside this block."""
        for metric in metrics:
            vars(metric)["result"] = lambda of=metric.result: keras.tree.map_structure(self._mean, of())
        try:
            yield
        finally:
            for metric in metrics:
                vars(metric).pop("result", None)

    def _averaged(self, metrics: list[Any]) -> tuple[list[Any], list[Any]]:
        """The metrics whose state is not a sum, for any rank, and those that all ranks met alike. Collective."""
        assert self._communicator is not None
        trials = [self._trials.get(metric) for metric in metrics]
        own = [
            (metric.name in self.averaged or not self._is_sum(metric), trial is not None and trial.met)
            for metric, trial in zip(metrics, trials, strict=True)
        ]
        found = list(zip(*self._communicator.all_gather_object(own, "MetricAverageCallback"), strict=True))
        averaged = [metric for metric, ranks in zip(metrics, found, strict=True) if any(flag for flag, _ in ranks)]
        alike = [metric for metric, ranks in zip(metrics, found, strict=True) if len({met for _, met in ranks}) == 1]
        return averaged, alike

    def _is_sum(self, metric: Any) -> bool:
        if any(variable.aggregation not in (None, "sum") for variable in metric.variables):
            return False
        if _is_of_keras(metric):
            return True
        trial = self._trials.get(metric)
        return trial is not None and trial.shows_sum()

    def _mean(self, value: Any) -> Any:
        """Average a number or an array over ranks; return anything else unchanged, and arrays of unequal shapes."""
        assert self._communicator is not None
        try:
            array = np.array(_copied(value))
            numbers = array.astype(np.float64, casting="same_kind").reshape(-1)
        except (TypeError, ValueError):
            return value
        if array.ndim and len(set(self._communicator.all_gather_object(array.shape, "shapes of metrics"))) > 1:
            return value
        with purpose("average of metrics"):
            self._communicator.all_reduce(HostMemory(numbers, "float64"), Op.AVERAGE)
        return float(numbers[0]) if array.size == 1 else numbers.reshape(array.shape)

    def _warn(self, averaged: list[Any]) -> None:
        assert self._communicator is not None
        new = [metric.name for metric in averaged if metric.name not in self._warned | set(self.averaged)]
        self._warned.update(new)
        if new and self._communicator.rank == 0:
            warnings.warn(
                f"the state of {', '.join(new)} is not a sum, or cannot be tried, so the ranks' results are averaged "
                "instead, which may differ from the result of all data.",
                stacklevel=2,
            )


@contextlib.contextmanager
def _summed(metrics: list[Any], begins: dict[int, list[Array]], communicator: Communicator) -> Iterator[None]:
    """Set metrics to the sum of all ranks' states inside this block. Collective.

    Args:
        metrics: whose states are sums.
        begins: by the id of a metric, the state with which each rank begins to add, if that is not zero.
        communicator: of all ranks.
    """
    variables = [variable for metric in metrics for variable in metric.variables]
    first = [begins.get(id(metric)) or [np.zeros(())] * len(metric.variables) for metric in metrics]
    own = [value_of(variable) for variable in variables]
    try:
        ranks: tuple[int, ...] = ()
        while ranks != communicator.ranks:  # all sums must be of the same ranks, if one is lost meanwhile
            ranks = communicator.ranks
            for variable, value, begin in zip(variables, own, itertools.chain(*first), strict=True):
                kind = np.float64 if value.dtype.kind not in "iu" else np.int64
                total = (value.astype(kind) - begin.astype(kind)).reshape(-1)
                with purpose("sum of metrics"):
                    communicator.all_reduce(HostMemory(total, total.dtype.name), Op.SUM)
                variable.assign((total.reshape(value.shape) + begin.astype(kind)).astype(value.dtype))
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


def _copied(value: Any) -> Any:
    """A tensor, variable or array as an array with memory of its own; any other value itself."""
    return np.array(keras.ops.convert_to_numpy(value)) if hasattr(value, "dtype") else value


def _is_of_keras(metric: Any) -> bool:
    """Whether Keras itself updates and resets the metric: all such states are sums that begin with zero."""
    methods = [inspect.unwrap(getattr(type(metric), name)) for name in ("update_state", "reset_state")]
    return all(method.__module__.split(".")[0] == "keras" for method in methods)


def _given(model: Any) -> list[Any]:
    """A model's metrics of the user's own classes, also those that are built only in the first step."""
    # Keras 3.15.1, trainers/compile_utils.py:135: CompileMetrics lists none before it is built.
    compiled = getattr(model, "_compile_metrics", None)
    names = "_user_metrics", "_user_weighted_metrics"
    leaves = keras.tree.flatten([getattr(compiled, name, None) for name in names])
    found = [leaf for leaf in leaves if isinstance(leaf, keras.metrics.Metric)] + _flat(model.metrics)
    return [metric for metric in dict.fromkeys(found) if not _is_of_keras(metric)]


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
        self._given: Any = None
        self._found: bool | None = None
        self._start: list[Array] = []
        self._is_reset: list[bool] = []
        self._is_moved: list[bool] = []  # by the trial
        self._was_reset = False

    def watch(self) -> None:
        """Record the arguments of the next `update_state`, which may trace, and whether `reset_state` is called."""
        metric = self._metric()
        assert metric is not None
        if self._given is None:
            self._call_once(metric, "update_state", self._note_arguments)
        # TensorFlow traces the first step, which builds Keras's list of metrics, after the first epoch's reset.
        if not self._was_reset:
            self._call_once(metric, "reset_state", self._note_reset)

    def _call_once(self, metric: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(metric, name)

        def noting(*args: Any, **options: Any) -> Any:
            vars(metric).pop(name, None)
            note(args, options)
            return original(*args, **options)

        vars(metric)[name] = noting  # past Keras's `__setattr__`, which tracks what is assigned

    def _note_arguments(self, args: Any, options: Any) -> None:
        self._given = keras.tree.map_structure(_shape, (args, options))

    def _note_reset(self, args: Any, options: Any) -> None:
        self._was_reset = True

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
        return [
            start if self._was_reset and is_reset else np.zeros_like(start) if initial is None else initial[i]
            for i, (start, is_reset) in enumerate(zip(self._start, self._is_reset, strict=True))
        ]

    def shows_sum(self) -> bool:
        """Whether the state is a sum, as far as this rank's data have changed it.

        False as long as `update_state` has not been called, and if it cannot be tried, or if a variable has changed
        that no made-up data change, such as a maximum of what they do not reach.
        """
        metric = self._metric()
        assert metric is not None
        if self._found is None and self._given is not None:
            was_reset = self._was_reset
            with _undisturbed(metric):
                self._found = self._try(metric)
            self._was_reset = was_reset
        if not self._found:
            return False
        variables = zip(metric.variables, self._begins(True), self._is_moved, strict=True)
        return all(is_moved or np.array_equal(value_of(variable), begin) for variable, begin, is_moved in variables)

    def _try(self, metric: Any) -> bool:
        try:
            begin = [_begin(metric, offset) for offset in (0, 1)]
        except Exception:
            return False
        is_reset = [np.array_equal(one, other) for one, other in zip(*begin, strict=True)]
        start = [one if whether else np.zeros_like(one) for one, whether in zip(begin[0], is_reset, strict=True)]
        is_moved = [False] * len(start)
        generator = np.random.default_rng(0)
        for scales in ((1.0, 1.0), (1.0, 10.0), (1.0, 0.1), (1e3, 1e3)):
            try:
                batches = [self._batch(generator, by) for by in (*scales, 1.0)]
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
            added = [_difference(after, before) for after, before in zip(updated, states, strict=True)]
            for other in added[1:]:
                for one, two, error in zip(added[0], other, rounding, strict=True):
                    if np.any(np.abs(one - two) > 1e-3 * np.abs(two) + error):
                        return False
            is_moved = [before or bool(np.any(value)) for before, value in zip(is_moved, added[0], strict=True)]
        if any(is_moved):
            self._start, self._is_reset, self._is_moved = start, is_reset, is_moved
        return any(is_moved)

    def _batch(self, generator: np.random.Generator, scale: float) -> Any:
        return keras.tree.map_structure(
            lambda leaf: leaf.made_up(generator, scale) if isinstance(leaf, _Shape) else leaf, self._given
        )

    def forget(self) -> bool:
        """Watch no longer; returns whether no update has been seen."""
        if (metric := self._metric()) is not None:
            for name in ("update_state", "reset_state"):
                vars(metric).pop(name, None)
        return self._given is None


@dataclasses.dataclass
class _Shape:
    """Of an argument, and its dtype."""

    shape: tuple[int, ...]
    dtype: str

    def made_up(self, generator: np.random.Generator, scale: float) -> Any:
        """A tensor of numbers from 0 to `scale`; of 0 and 1 if they are integers, which may be classes."""
        value = (
            generator.random(self.shape) * scale if "float" in self.dtype else generator.integers(2, size=self.shape)
        )
        return keras.ops.convert_to_tensor(value, dtype=self.dtype)


def _shape(value: Any) -> Any:
    """The shape of a tensor, which may be symbolic, with 4 samples where that is unknown; any other argument itself."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value
    return _Shape(tuple(size or 4 for size in value.shape), keras.backend.standardize_dtype(value.dtype))


def _updated(metric: Any, state: list[Array], args: Any, options: Any) -> list[Array]:
    values = [
        keras.ops.convert_to_tensor(value, dtype=variable.dtype)
        for variable, value in zip(metric.variables, state, strict=True)
    ]
    return _arrays(metric.stateless_update_state(values, *args, **options))


def _begin(metric: Any, offset: int) -> list[Array]:
    """The state after `reset_state`, from the present state plus an offset."""
    mapping = [(variable, keras.ops.cast(variable + offset, variable.dtype)) for variable in metric.variables]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        metric.reset_state()
    return _arrays([scope.get_current_value(variable) for variable in metric.variables])


def _arrays(values: Sequence[Any]) -> list[Array]:
    return [np.array(keras.ops.convert_to_numpy(value)) for value in values]


def _difference(after: list[Array], before: list[Array]) -> list[Array]:
    return [one.astype(np.float64) - other for one, other in zip(after, before, strict=True)]


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


def _flat(metrics: list[Any]) -> list[Any]:
    """The metrics inside the containers that `compile` creates."""
    found: list[Any] = []
    for metric in metrics:
        # Keras 3.15.1, trainers/compile_utils.py: CompileMetrics lists its metrics under `metrics`.
        inner = getattr(metric, "metrics", None)
        found.extend(_flat(list(inner)) if inner else [metric])
    return found


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A `keras.callbacks.ModelCheckpoint` that saves only the best model.

    With a `BroadcastCallback` only the root writes; with a `MetricAverageCallback` the metric is of all ranks' data.

    Args:
        filepath: path ending in `.keras`.
        monitor: name of the metric.
        **options: options of `ModelCheckpoint`, such as `mode` and `save_weights_only`.
    """

    def __init__(self, filepath: str | os.PathLike[str], monitor: str = "val_loss", **options: Any) -> None:
        super().__init__(filepath, monitor=monitor, save_best_only=True, **options)
