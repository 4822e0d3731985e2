"""BatchNormalization over the batches of all ranks, as one process would normalise them in one piece."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.backends import backend
from ring_plugins.keras.connection import connect
from ring_plugins.keras.moments import BatchMoments


class SynchronizedBatchNorm:
    """Lets `BatchNormalization` layers of a model take their moments over all ranks, until `remove`.

    Methods of the layers are replaced, not their class, so that saved files know nothing of it.

    Args:
        model: a Keras model.
        every: all layers; otherwise those made with `BatchNormalization(synchronized=True)`.
    """

    _METHOD = "_moments"  # Keras 3.15.1, layers/normalization/batch_normalization.py:437

    def __init__(self, model: Any, every: bool) -> None:
        self._layers = [
            layer
            for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization)
            and (every or layer.synchronized)
            and self._METHOD not in vars(layer)
        ]
        self._communicator: Communicator | None = None

    def install(self) -> None:
        """Replace the methods; collective."""
        world = connect()
        if world.topology.size == 1 or not self._layers:
            return
        self._communicator = world.new_communicator("batch normalization")
        moments = BatchMoments(self._communicator)
        for layer in self._layers:
            vars(layer)[self._METHOD] = functools.partial(_moments_of_all, layer, getattr(layer, self._METHOD), moments)

    def remove(self) -> None:
        """Put the methods back."""
        for layer in self._layers:
            vars(layer).pop(self._METHOD, None)
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


def synchronize_batch_norm(model: Any) -> Any:
    """Let all `BatchNormalization` layers of a model take mean and variance over all ranks' batches, in training.

    For loops of one's own; `BroadcastCallback(synchronized_batch_norm=True)` does it while `fit` runs. All ranks call
    it, before the training step is traced.

    Args:
        model: a Keras model.

    Returns:
        The same model.
    """
    SynchronizedBatchNorm(model, every=True).install()
    return model


def _moments_of_all(
    layer: Any, moments_of_rank: Callable[..., Any], moments: BatchMoments, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Stands in for a layer's `_moments`; takes and returns the same."""
    marked, vars(layer)["synchronized"] = layer.synchronized, False
    try:
        mean, variance = moments_of_rank(inputs, mask)
    finally:
        vars(layer)["synchronized"] = marked
    count = ops.size(inputs) / inputs.shape[layer.axis] if mask is None else ops.sum(ops.cast(mask, "float32"))
    own = ops.stack([mean, variance])
    result = backend().moments_of_all(moments, ops.cast(count, own.dtype), own)
    return result[0], result[1]
