"""Callbacks that show where training time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ring_plugins.core.base.arguments import check_calls
from ring_plugins.observe import balance_monitor as monitor
from ring_plugins.observe import timeline

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    from ring_plugins.lightning.packages import Callback


class BalanceMonitor(Callback):
    """Logs through the Trainer's loggers how long steps compute, wait for the slowest rank and communicate.

    ``Trainer(strategy=RingStrategy(), callbacks=[BalanceMonitor()])``. Every ``log_every_n_steps`` rank 0 logs the
    figures of `ring_plugins.torch.BalanceMonitor.figures`, averaged over the ranks and over the steps since the last
    time, and at the end of ``fit`` it prints a summary of all ranks. At world size 1 it does nothing.

    It works with the Trainer of `lightning` and of `pytorch_lightning`, which call callbacks by their hooks' names.

    Args:
        summary: Whether rank 0 prints the summary.

    """

    def __init__(self, summary: bool = True) -> None:
        super().__init__()
        self._monitor = monitor.BalanceMonitor(summary)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._monitor.start()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0 or trainer.global_step % trainer.log_every_n_steps != 0:
            return
        figures = self._monitor.figures()
        if figures:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._monitor.finish()


class TimelineCallback(Callback):
    """Writes a timeline of all ranks for some batches of ``fit``; RING_TIMELINE writes one of a whole job.

    Args:
        directory: Where rank 0 writes ``timeline.json``, for ui.perfetto.dev.
        first_batch: Number of batches of ``fit`` to skip first.
        batches: Number of batches to record.

    """

    def __init__(self, directory: str | Path, first_batch: int = 10, batches: int = 20) -> None:
        super().__init__()
        self._timeline = timeline.Timeline(directory)
        self._first, self._end = first_batch, first_batch + batches
        self._batch = 0

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._batch == self._first:
            self._timeline.start()
        self._batch += 1

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._batch == self._end:
            self._timeline.stop()

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._timeline.stop()


check_calls(globals(), ("BalanceMonitor", "TimelineCallback"))
