"""The best model of all ranks, written once."""

from __future__ import annotations

from typing import Any

import keras


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` that keeps the best model only.

    Beside a `BroadcastCallback` one rank writes; beside a `MetricAverageCallback` "best" is judged on all ranks' data.

    Args:
        filepath: where to, ending in `.keras`.
        monitor: name of the metric.
        **options: as `ModelCheckpoint` takes them, such as `mode` and `save_weights_only`.
    """

    def __init__(self, filepath: Any, monitor: str = "val_loss", **options: Any) -> None:
        super().__init__(filepath, monitor=monitor, save_best_only=True, **options)
