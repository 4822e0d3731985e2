"""A callback that shows where the time of training steps goes."""

from __future__ import annotations

from typing import Any

import keras

from ring_plugins.core.observe import monitor


class BalanceMonitor(keras.callbacks.Callback):
    """Puts computing, waiting for the slowest rank and moving bytes into the `logs` of each epoch.

    On rank 0 the callbacks behind it, `History` and `CSVLogger` among them, find "ring/computing_ms",
    "ring/waiting_ms", "ring/moving_ms", "ring/slowest_rank" and "ring/slowest_share" there, averaged over the ranks and
    the steps of the epoch; see `ring_plugins.torch.BalanceMonitor.figures`. At the end of `fit` rank 0 prints a page
    with all ranks. With one rank there is nothing to say.

    Args:
        summary: whether rank 0 prints the page.
    """

    def __init__(self, summary: bool = True) -> None:
        super().__init__()
        self._monitor = monitor.BalanceMonitor(summary)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._monitor.start()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self._monitor.figures())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._monitor.finish()
