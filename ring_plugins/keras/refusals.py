"""What is refused before training starts, because it would hang or train apart."""

from __future__ import annotations

from typing import Any

import keras

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.backends import backend


def refuse_other_parallelism(model: Any) -> None:
    """Refuse a model that something else already trains in parallel.

    Raises:
        ArgumentError: a TensorFlow strategy, `keras.distribution` or DistributedDataParallel is at work.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ArgumentError(
            f"keras.distribution is set to {type(distribution).__name__}, which places the model itself. Call "
            "keras.distribution.set_distribution(None) before the model is built, or fit without this callback."
        )
    backend().refuse_other_parallelism(model)


def refuse_unequal_steps(params: dict[str, Any] | None, communicator: Communicator) -> None:
    """Compare how long every rank will train; collective.

    A rank with more steps would wait forever for gradients of those that have finished.

    Raises:
        MismatchError: naming the numbers by rank.
    """
    given = params or {}
    everyones = communicator.all_gather_object((given.get("steps"), given.get("epochs")))
    for what, place in (("steps per epoch", 0), ("epochs", 1)):
        numbers = [other[place] for other in everyones]
        if len(set(numbers)) > 1:
            said = ", ".join(f"rank {rank}: {number}" for rank, number in zip(communicator.ranks, numbers, strict=True))
            raise MismatchError(
                f"ranks would take different numbers of {what} ({said}). Give every rank as much data, as "
                "ring_plugins.keras.shard does, or pass steps_per_epoch to fit()."
            )


def refuse_different_epochs(epoch: int, communicator: Communicator) -> None:
    """Compare where every rank begins; collective.

    Raises:
        MismatchError: naming the epochs by rank.
    """
    everyones = communicator.all_gather_object(epoch)
    if len(set(everyones)) > 1:
        said = ", ".join(f"rank {rank}: {number}" for rank, number in zip(communicator.ranks, everyones, strict=True))
        raise MismatchError(
            f"ranks begin with different epochs ({said}). Pass the same initial_epoch on all; a checkpoint that "
            "decides it must be seen by every rank."
        )
