"""Synchronize BatchNormalization: normalize the batches of all ranks as one batch.

Each layer's `_moments` is replaced. Ranks gather their means and variances and combine them (Chan, Golub and LeVeque
1983, "Algorithms for computing the sample variance"), weighted by the number of values on each rank, which differs with
masks. In backward, the gradients with respect to the combined moments are summed over ranks, since every rank's loss
depends on them, and propagated to the rank's own moments. The arrays have the shape (2, channels), so numpy does the
arithmetic in host calls; a backend only makes those calls from inside the compiled step.

The layers' own `synchronized=True` does this on TensorFlow only, and only under `tf.distribute`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.groups import Group
from ring_plugins.core.job import World
from ring_plugins.keras.backends import backend
from ring_plugins.keras.job import connect, members
from ring_plugins.keras.patches import Patch, replaced


def synchronize_batch_norm(model: keras.Model, *, group: Group | None = None) -> Any:
    """Make all `BatchNormalization` layers use mean and variance of all ranks' batches in training.

    For custom training loops; `BroadcastCallback(synchronized_batch_norm=True)` does it while `fit` runs. All ranks
    call it, before the training step is traced.

    Args:
        model: a Keras model.
        group: the ranks whose batches count, all by default.

    Returns:
        The same model.
    """
    SynchronizedBatchNorm(model, every=True, group=group).install()
    return model


@keras.saving.register_keras_serializable("ring_plugins")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """A `BatchNormalization` that uses mean and variance of all ranks' batches in training.

    For models that contain it by name; `BroadcastCallback(synchronized_batch_norm=True)` does the same with layers of
    Keras, whose saved files do not need this package. All ranks call their layers in the same order.

    Args:
        options: as for `keras.layers.BatchNormalization`.

    Raises:
        ArgumentError: in training, the step is compiled by XLA on TensorFlow, or the job goes on when ranks are lost.
    """

    #: Keras's default, jit_compile="auto", heeds this, and would set it.
    supports_jit = property(lambda _: False, lambda _, value: None)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        world = connect()
        if world.topology.size == 1:
            return _moments_here(self, inputs, mask)
        world.refuse_to_recover(_WHAT)
        if world not in _shared:
            _shared[world] = BatchMoments(world.new_communicator("batch normalization"))
        return _combined_moments(self, functools.partial(_moments_here, self), _shared[world], inputs, mask)


#: Of the layers that synchronize by themselves.
_shared: weakref.WeakKeyDictionary[World, BatchMoments] = weakref.WeakKeyDictionary()
_WHAT = "Batch normalization over the batches of all ranks"


def _moments_here(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """The moments of this rank's own batch."""
    with replaced(layer, synchronized=False):
        found: tuple[Any, Any] = keras.layers.BatchNormalization._moments(layer, inputs, mask)
    return found


class SynchronizedBatchNorm:
    """Makes the `BatchNormalization` layers of a model compute their moments over all ranks, until `remove`.

    The layers' classes do not change, so saved files are not affected.

    Args:
        model: a Keras model.
        every: whether to include all layers; None for those made with `BatchNormalization(synchronized=True)`. Those of
            `SyncBatchNormalization` are always included.
        group: the ranks whose batches count, all by default.
    """

    _communicator: Communicator | None
    _METHOD = "_moments"  # Keras 3.15.1, layers/normalization/batch_normalization.py:437

    def __init__(self, model: Any, every: bool | None, group: Group | None = None) -> None:
        self._layers = [
            layer
            for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization)
            and (every or (every is None and layer.synchronized) or isinstance(layer, SyncBatchNormalization))
            and self._METHOD not in vars(layer)
        ]
        self._group, self._communicator = group, None
        self._patches: list[Patch] = []

    def install(self) -> None:
        """Replace the methods. Collective."""
        ranks = members(self._group)
        if ranks.communicator.size == 1:
            for layer in self._layers:  # by itself one of ours would wait for all ranks of the job
                if isinstance(layer, SyncBatchNormalization):
                    self._patches.append(Patch(layer, **{self._METHOD: functools.partial(_moments_here, layer)}))
        if ranks.communicator.size == 1 or not self._layers:
            return
        connect().refuse_to_recover(_WHAT)
        # One communicator serves all layers, since every rank runs them in the same order.
        self._communicator = ranks.new_communicator("batch normalization")
        moments = BatchMoments(self._communicator)
        for layer in self._layers:
            is_ours = isinstance(layer, SyncBatchNormalization)
            own = functools.partial(_moments_here, layer) if is_ours else getattr(layer, self._METHOD)
            combined = functools.partial(_combined_moments, layer, own, moments)
            self._patches.append(Patch(layer, **{self._METHOD: combined}))

    def remove(self) -> None:
        """Restore the methods."""
        for patch in self._patches:
            patch.restore()
        self._patches = []
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


class _Counted:
    """By what numbers of values are multiplied in what is traced, or runs eagerly, now."""

    factor = 1


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Let batches count nothing in the moments of all ranks' batches that are computed, or traced, in this block."""
    _Counted.factor = 0
    try:
        yield
    finally:
        _Counted.factor = 1


def synchronizes(layer: Any) -> bool:
    """Whether a layer's moments are those of all ranks' batches."""
    return isinstance(layer, SyncBatchNormalization) or SynchronizedBatchNorm._METHOD in vars(layer)


def _combined_moments(
    layer: Any, own_moments: Callable[..., Any], moments: BatchMoments, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Replaces a layer's `_moments`, with the same arguments and results."""
    with replaced(layer, synchronized=False):
        mean, variance = own_moments(inputs, mask)
    count = ops.size(inputs) / inputs.shape[layer.axis] if mask is None else ops.sum(ops.cast(mask, "float32"))
    count = count * _Counted.factor if _Counted.factor != 1 else count
    own = ops.stack([mean, variance])
    combined = backend().host_call_with_gradient(moments.combine, moments.gradient, own, ops.cast(count, own.dtype))
    return combined[0], combined[1]


class BatchMoments:
    """Combines the means and variances of all ranks' batches.

    Args:
        communicator: used for nothing else.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def combine(self, own: Array, count: Array) -> tuple[Array, Array]:
        """Compute the means and variances of all batches together. Collective.

        Args:
            own: this rank's means and variances, of shape (2, channels).
            count: number of values per channel on this rank, 0-d.

        Returns:
            Means and variances of all ranks, as `own`, and this rank's share of the values, 0-d, of the same dtype.
        """
        size = self._communicator.size
        mine = np.concatenate([np.reshape(count, 1), np.ravel(own)]).astype(np.float64)
        gathered = np.empty(mine.size * size)
        memories = HostMemory(mine, "float64"), HostMemory(gathered, "float64")
        self._wait(lambda: self._communicator.all_gather(*memories, [mine.size] * size))
        table = gathered.reshape(size, -1)
        table[table[:, 0] == 0] = 0  # a rank without values has NaN as their mean
        shares = table[:, :1] / (table[:, 0].sum() or 1.0)
        means, variances = np.split(table[:, 1:], 2, axis=1)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean) ** 2)).sum(0)
        return np.stack([mean, variance]).astype(own.dtype), np.array(shares[self._communicator.rank, 0], own.dtype)

    def gradient(self, own: Array, combined: Array, share: Array, upstream: Array) -> Array:
        """Compute the gradient of all ranks' losses with respect to this rank's moments. Collective, in backward.

        Args:
            own, combined, share: argument and results of `combine`.
            upstream: gradient of this rank's loss with respect to `combined`.
        """
        total = np.array(upstream, np.float64, order="C")
        self._wait(lambda: self._communicator.all_reduce(HostMemory(total.reshape(-1), "float64"), Op.SUM))
        by_mean, by_variance = total
        mean_offset = own[0].astype(np.float64) - combined[0]
        return (float(share) * np.stack([by_mean + 2 * mean_offset * by_variance, by_variance])).astype(own.dtype)

    def _wait(self, function: Callable[[], None]) -> None:
        # TensorFlow calls this in a thread of its own, and the script waits: deadlocks count.
        self._communicator.run_synchronously("batch normalization of all ranks' batches", function)
