"""Whether ranks begin to train on the same samples, since nothing has divided the data."""

from __future__ import annotations

from typing import Any

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator

_told: list[str] = []


def tell_if_same(checksum: int, communicator: Communicator[Any]) -> None:
    """Warn once in a job, on its first rank, if ranks have begun with the same samples. Collective.

    Args:
        checksum: of the first batch, or of this rank's own gradients of it; 0 says nothing.
        communicator: of the ranks that average.
    """
    told = communicator.all_gather_object(checksum, "checksums of the first batch")
    same = [rank for rank, one in zip(communicator.ranks, told, strict=True) if one and told.count(one) > 1]
    if same and communicator.rank == 0 and not _told:
        _told.append(name_ranks(same))
        logger.warning(
            f"{name_ranks(same)} have the same samples, or equal gradients, in their first batch. Unless that is "
            "meant, divide the data, so that each rank reads a part of its own (in PyTorch by a DistributedSampler, in "
            "Keras by ring_plugins.keras.shard), or shuffle it with another seed on each rank."
        )
