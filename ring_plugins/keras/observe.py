"""Callbacks that report how training spends its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from ring_plugins.observe import balance_monitor as monitor
from ring_plugins.observe import timeline


class BalanceMonitor(keras.callbacks.Callback):
    """Adds the time of computing, of waiting for the slowest rank and of moving bytes to the `logs` of each epoch.

    On rank 0, later callbacks such as `History` and `CSVLogger` find "ring/computing_ms", "ring/waiting_ms",
    "ring/moving_ms", "ring/slowest_rank" and "ring/slowest_share" there, averaged over the ranks and the steps of the
    epoch; see `ring_plugins.torch.BalanceMonitor.figures`. At the end of `fit` rank 0 prints a summary of all ranks.
    With one rank it does nothing.

    Args:
        summary: whether rank 0 prints the summary.
    """

    def __init__(self, summary: bool = True) -> None:
        super().__init__()
        self._monitor = monitor.BalanceMonitor(summary)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._monitor.start()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        figures = self._monitor.figures(wait=True)
        if logs is not None:
            logs.update(figures)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._monitor.finish()


class TimelineCallback(keras.callbacks.Callback):
    """Writes a timeline of all ranks for some batches of `fit`; RING_TIMELINE records the whole job.

    Args:
        directory: directory in which rank 0 writes `timeline.json`, for ui.perfetto.dev.
        first_batch: number of batches to skip.
        batches: number of batches to record.
    """

    def __init__(self, directory: str | Path, first_batch: int = 10, batches: int = 20) -> None:
        super().__init__()
        self._timeline = timeline.Timeline(directory)
        self._first, self._end = first_batch, first_batch + batches
        self._batch = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._batch == self._first:
            self._timeline.start()
        self._batch += 1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._batch == self._end:
            self._timeline.stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._timeline.stop()
