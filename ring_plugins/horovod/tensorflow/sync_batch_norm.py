"""Horovod's `SyncBatchNormalization`, with its argument."""

from __future__ import annotations

from typing import Any

import keras

from ring_plugins import keras as ring_keras
from ring_plugins.core.base.errors import ArgumentError


@keras.saving.register_keras_serializable("ring_plugins.horovod")
class SyncBatchNormalization(ring_keras.SyncBatchNormalization):
    """`ring_plugins.keras.SyncBatchNormalization`; ranks with more values count for more, unlike with Horovod.

    Args:
        fused: False.
        options: as for `keras.layers.BatchNormalization`.

    Raises:
        ArgumentError: `fused` is something else.
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused is not False:
            raise ArgumentError(f"fused={fused!r} is not supported by SyncBatchNormalization: leave it out.")
        super().__init__(**options)
