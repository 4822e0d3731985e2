"""Compute metrics of all ranks' data.

A metric has state (a count and a total, a histogram of thresholds) and computes its result from that. The sum of all
ranks' states is the state of all data, so the result from the sum is exact. A mean of results is not: with uneven
shards, the mean AUC was 0.845, while all data gave 0.820.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.groups import Group
from ring_plugins.keras.averaging import make_train_function
from ring_plugins.keras.job import are_several, connect, members
from ring_plugins.keras.metric_trials import Trial, copied
from ring_plugins.keras.patches import Patch, replaced
from ring_plugins.keras.running_fit import argument_of, argument_of_fit, call_when_over, expect_broadcast, group_of
from ring_plugins.keras.shard import is_empty
from ring_plugins.keras.state import value_of
from ring_plugins.keras.synchronized_fit import fits_of
from ring_plugins.keras.validation import check_equal
from ring_plugins.keras.writers import show_on_one_rank


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
        group: the ranks whose data counts, by default those with which the model trains or has last been trained by a
            `fit` with a callback of ring_plugins, or all.

    All ranks must call `fit` and `evaluate`.

    Raises:
        ArgumentError: `averaged` is not a list of names, or the model has no metric of such a name.
        MismatchError: some ranks have validation data and others have none.
    """

    def __init__(self, averaged: Sequence[str] = (), *, group: Group | None = None) -> None:
        super().__init__()
        self.group = group
        if isinstance(averaged, str) or not all(isinstance(name, str) for name in averaged):
            raise ArgumentError(f"averaged={averaged!r} must be a list of names of metrics.")
        self.averaged = tuple(averaged)
        self._warned, self._known = set[str](), set[str]()
        self._trials: weakref.WeakKeyDictionary[Any, Trial] = weakref.WeakKeyDictionary()
        self._depth, self._counts = 0, True
        self._communicator: Communicator | None = None
        self._over: weakref.finalize[..., Any] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        connect()
        expect_broadcast(self)
        self._restore()  # an earlier fit may have been interrupted
        is_new = self._enter()
        if self._communicator is not None:
            every = argument_of_fit("validation_freq")
            has_data = argument_of_fit("validation_data") is not None
            check_equal(
                f"validation_data, with validation_freq={every!r}" if has_data else "no validation_data",
                self._communicator,
                "MetricAverageCallback computes metrics from all ranks' data, but the ranks would validate in other "
                "epochs",
                "Pass validation_data, as ring_plugins.keras.shard divides it, and validation_freq to fit() on all "
                "ranks.",
            )
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
        self._depth -= 1
        if self._depth <= 0:
            self._restore()

    # Keras 3.15.1, trainers/trainer.py:1035: fit and evaluate read their metrics with this method, once, at the end.
    _METHOD = "_get_metrics_result_or_logs"

    def _enter(self) -> bool:
        """Begin to read metrics; returns whether to trace the step anew, with metrics that have yet to be tried."""
        self._depth += 1
        ranks = members(group_of(self))
        if self._depth > 1 or not are_several(ranks.communicator):
            return False
        self._over = call_when_over(self, self._restore)
        self._communicator = ranks.new_communicator("metrics")
        read = getattr(self._model, self._METHOD)
        self._patch = Patch(self._model, **{self._METHOD: lambda logs: self._read(read, logs)})
        new = [metric for metric in _given(self._model) if metric not in self._trials]
        self._trials.update((metric, Trial(metric)) for metric in new)
        for trial in self._trials.values():
            trial.watch()
        return bool(new)

    def _restore(self) -> None:
        self._depth = 0
        if self._over is not None:
            self._over.detach()
            self._over = None
        if self._communicator is None:
            return
        self._patch.restore()
        for metric, trial in list(self._trials.items()):
            if trial.forget():
                del self._trials[metric]
        self._communicator.close()
        self._communicator = None

    def _read(self, read: Any, logs: Any) -> Any:
        assert self._communicator is not None
        for fit in fits_of(self._model):  # if another rank is still in its epoch, all get an error that says so
            fit.synchronize_state()
        metrics = _flat(self._model.metrics)
        self._known |= {metric.name for metric in metrics} | set(logs if isinstance(logs, dict) else ())
        if unknown := [name for name in self.averaged if name not in self._known]:
            raise ArgumentError(
                f"averaged={list(self.averaged)!r}: the model has no metric {unknown[0]!r}. It has "
                f"{', '.join(map(repr, sorted(self._known)))}."
            )
        averaged, starting_alike = self._averaged(metrics)
        new = [metric.name for metric in averaged if metric.name not in self._warned | set(self.averaged)]
        self._warned.update(new)
        if new and self._communicator.rank == 0:
            warnings.warn(
                f"the state of {', '.join(new)} is not a sum, or cannot be tried, so the ranks' results are averaged "
                "instead, which may differ from the result of all data.",
                stacklevel=2,
            )
        self._counts = not is_empty(argument_of("evaluate", "x"))
        begins = {id(metric): trial.begin(metric in starting_alike) for metric, trial in self._trials.items()}
        summed = [metric for metric in metrics if metric not in averaged]
        with contextlib.ExitStack() as stack:
            for metric in averaged:
                own = metric.result
                average = lambda own=own: keras.tree.map_structure(self._mean, own())  # noqa: E731
                stack.enter_context(replaced(metric, result=average))
            stack.enter_context(_summed(summed, begins, self._communicator, self._counts))
            result = read(logs)
            if result is not logs:  # results may be variables, or share their memory, which soon have own values again
                return keras.tree.map_structure(copied, result)
        # Returned by the user's own train_step or test_step.
        return keras.tree.map_structure(self._mean, logs) if isinstance(logs, dict) else logs

    def _averaged(self, metrics: list[Any]) -> tuple[list[Any], list[Any]]:
        """The metrics whose state is not a sum, for any rank, and those that all ranks met alike. Collective."""
        assert self._communicator is not None
        trials = [self._trials.get(metric) for metric in metrics]
        own = []
        for metric, trial in zip(metrics, trials, strict=True):
            is_sum = metric.name not in self.averaged  # the script's own word: such a metric is not tried
            is_sum = is_sum and all(variable.aggregation in (None, "sum") for variable in metric.variables)
            is_sum = is_sum and (_is_of_keras(metric) or (trial is not None and trial.shows_sum()))
            own.append((not is_sum, trial is not None and trial.met))
        found = list(zip(*self._communicator.all_gather_object(own, "MetricAverageCallback"), strict=True))
        averaged = [metric for metric, ranks in zip(metrics, found, strict=True) if any(flag for flag, _ in ranks)]
        alike = [metric for metric, ranks in zip(metrics, found, strict=True) if len({met for _, met in ranks}) == 1]
        return averaged, alike

    def _mean(self, value: Any) -> Any:
        """Average a number or an array over ranks; return anything else unchanged, and arrays of unequal shapes."""
        assert self._communicator is not None
        try:
            array = np.array(copied(value))
            numbers = array.astype(np.float64, casting="same_kind").reshape(-1)
        except (TypeError, ValueError):
            return value
        if array.ndim and len(set(self._communicator.all_gather_object(array.shape, "shapes of metrics"))) > 1:
            return value
        numbers = np.append(numbers, 1.0) * self._counts
        with purpose("average of metrics"):
            self._communicator.all_reduce(HostMemory(numbers, "float64"), Op.SUM)
        numbers = numbers[:-1] / numbers[-1]
        return float(numbers[0]) if array.size == 1 else numbers.reshape(array.shape)


@contextlib.contextmanager
def _summed(
    metrics: list[Any], begins: dict[int, list[Array]], communicator: Communicator, counts: bool
) -> Iterator[None]:
    """Set metrics to the sum of all ranks' states inside this block. Collective.

    Args:
        metrics: whose states are sums.
        begins: by the id of a metric, the state with which each rank begins to add, if that is not zero.
        communicator: of all ranks.
        counts: whether what this rank has added is to count.
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
                total = ((value.astype(kind) - begin.astype(kind)) * counts).reshape(-1)
                with purpose("sum of metrics"):
                    communicator.all_reduce(HostMemory(total, total.dtype.name), Op.SUM)
                variable.assign((total.reshape(value.shape) + begin.astype(kind)).astype(value.dtype))
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)


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


def _flat(metrics: list[Any]) -> list[Any]:
    """The metrics inside the containers that `compile` creates."""
    found: list[Any] = []
    for metric in metrics:
        # Keras 3.15.1, trainers/compile_utils.py: CompileMetrics lists its metrics under `metrics`.
        inner = getattr(metric, "metrics", None)
        found.extend(_flat(list(inner)) if inner else [metric])
    return found
