"""The callback that makes metrics those of all ranks' data."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.additive import is_additive, leaves
from ring_plugins.keras.callback_list import when_over
from ring_plugins.keras.connection import connect
from ring_plugins.keras.state import value_of


class MetricAverageCallback(keras.callbacks.Callback):
    """Makes the metrics at the end of an epoch, and of an evaluation, those of all ranks' data together.

    The state of each metric is summed over the ranks and its result taken from the sum, which is exact for AUC,
    precision, R2 and the like, and for shards of different sizes, where a mean of results is not. This happens where
    Keras reads its metrics, before any callback is told: its place in the list does not matter, and `History`,
    `EarlyStopping`, `ModelCheckpoint` and the value of `model.evaluate(callbacks=[MetricAverageCallback()])` all have
    the same numbers on every rank. Numbers during an epoch stay those of the rank.

    A metric whose state is no sum (a maximum, say) has its results averaged instead, and a warning says so once.

    Args:
        averaged: names of further metrics whose results are to be averaged.

    All ranks must evaluate, as they all must train.
    """

    def __init__(self, averaged: Sequence[str] = ()) -> None:
        super().__init__()
        self.averaged = tuple(averaged)
        self._warned: set[str] = set()
        self._depth = 0
        self._communicator: Communicator | None = None
        self._over: weakref.finalize[..., Any] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._leave_entirely()  # a fit before this one may have been interrupted
        self._enter()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._leave_entirely()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._enter()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._leave()

    # Keras 3.15.1, trainers/trainer.py:1035: fit and evaluate read their metrics by this method, once, at the end.
    _METHOD = "_get_metrics_result_or_logs"

    def _enter(self) -> None:
        self._depth += 1
        world = connect()
        if self._depth > 1 or world.topology.size == 1:
            return
        self._over = when_over(self, self._leave_entirely)
        self._communicator = world.new_communicator("metrics")
        read = getattr(self._model, self._METHOD)

        def read_of_all_ranks(logs: Any) -> Any:
            return self._read(read, logs)

        self._model.__dict__[self._METHOD] = read_of_all_ranks

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._leave_entirely()

    def _leave_entirely(self) -> None:
        self._depth = 0
        if self._over is not None:
            self._over.detach()
            self._over = None
        if self._communicator is None:
            return
        self._model.__dict__.pop(self._METHOD, None)
        self._communicator.close()
        self._communicator = None

    def _read(self, read: Any, logs: Any) -> Any:
        assert self._communicator is not None
        metrics = leaves(self._model.metrics)
        averaged = [metric for metric in metrics if metric.name in self.averaged or not is_additive(metric)]
        self._say(averaged)
        with _summed([metric for metric in metrics if metric not in averaged], self._communicator):
            result = read(logs)
        if result is logs and isinstance(logs, dict):  # of a train_step or test_step of the user's own
            return {name: self._mean(value) for name, value in logs.items()}
        for metric in averaged:
            for name in result:
                if name == metric.name or name.endswith(f"_{metric.name}"):
                    result[name] = self._mean(result[name])
        return result

    def _mean(self, value: Any) -> Any:
        """The average of a number; what is no number stays as it is."""
        assert self._communicator is not None
        try:
            number = np.array([float(keras.ops.convert_to_numpy(value))])
        except (TypeError, ValueError):
            return value
        self._communicator.all_reduce(HostMemory(number, "float64"), Op.AVERAGE)
        return float(number[0])

    def _say(self, averaged: list[Any]) -> None:
        assert self._communicator is not None
        new = [metric.name for metric in averaged if metric.name not in self._warned | set(self.averaged)]
        self._warned.update(new)
        if new and self._communicator.rank == 0:
            warnings.warn(
                f"the state of {', '.join(new)} is no sum, so each rank's result is averaged instead, which is not the "
                "result of all data.",
                stacklevel=2,
            )


@contextlib.contextmanager
def _summed(metrics: list[Any], communicator: Communicator) -> Iterator[None]:
    """Let metrics have the sum of all ranks' states for a moment; collective."""
    variables = [variable for metric in metrics for variable in metric.variables]
    own = [value_of(variable) for variable in variables]
    try:
        for variable, value in zip(variables, own, strict=True):
            total = value.astype(np.float64 if value.dtype.kind not in "iu" else np.int64).reshape(-1)
            communicator.all_reduce(HostMemory(total, total.dtype.name), Op.SUM)
            variable.assign(total.reshape(value.shape).astype(value.dtype))
        yield
    finally:
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
