"""Means and variances of all ranks' batches, out of those of each (Chan, Golub and LeVeque 1983)."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator


class BatchMoments:
    """The host's part.

    Args:
        communicator: used for nothing else. One serves all layers, since they come in the same order on every rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def combine(self, count: Array, own: Array) -> tuple[Array, Array]:
        """Means and variances of all batches together; collective.

        Args:
            count: values that each of this rank's moments was taken of, 0-d.
            own: this rank's means and variances, of shape (2, channels).

        Returns:
            What `own` is for all ranks together, and this rank's share of the values.
        """
        mine = np.concatenate([np.reshape(count, 1), np.ravel(own)]).astype(np.float64)
        everyones = np.empty(mine.size * self.communicator.size)
        self.communicator.all_gather(
            HostMemory(mine, "float64"), HostMemory(everyones, "float64"), [mine.size] * self.communicator.size
        )
        table = everyones.reshape(self.communicator.size, -1)
        shares = table[:, :1] / (table[:, 0].sum() or 1.0)
        means, variances = np.split(table[:, 1:], 2, axis=1)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean) ** 2)).sum(0)
        return np.stack([mean, variance]).astype(own.dtype), np.array(shares[self.communicator.rank, 0], own.dtype)

    def add_up(self, upstream: Array) -> Array:
        """What the losses of all ranks together gain by the moments; collective, in backward."""
        total = np.array(upstream, np.float64, order="C")
        self.communicator.all_reduce(HostMemory(total.reshape(-1), "float64"), Op.SUM)
        return total.astype(upstream.dtype)


def gradient_of_own(own: Any, everyones: Any, share: Any, total: Any) -> Any:
    """The derivative of `combine` by this rank's moments; in the running backend's tensors.

    Args:
        own, everyones, share: as `combine` takes and returns them.
        total: what `add_up` returned.
    """
    by_mean, by_variance = total[0], total[1]
    return ops.stack([share * (by_mean + 2 * (own[0] - everyones[0]) * by_variance), share * by_variance])
