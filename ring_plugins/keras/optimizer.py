"""Averaging for those who want to see it in their script, or who write the loop themselves."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import keras

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.averaging import BUCKET_BYTES, averaging_of
from ring_plugins.keras.backends import backend
from ring_plugins.keras.connection import check_root, connect
from ring_plugins.keras.state import broadcast_state, build_optimizers

O = TypeVar("O", bound=keras.optimizers.Optimizer)  # noqa: E741 - one letter, as type variables are


def DistributedOptimizer(  # noqa: N802 - known by this name
    optimizer: O,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    compression: Literal["fp16", "bf16"] | None = None,
    error_feedback: bool = False,
) -> O:
    """Let an optimizer average the gradients it is given, among all ranks, before it uses them.

    For loops of one's own (`GradientTape`, `train_step` overrides, several optimizers); `BroadcastCallback` does it by
    itself. All ranks call it in the same order. It stays until `undistribute`.

    Args:
        optimizer: any Keras optimizer; for mixed precision the outermost, a `LossScaleOptimizer`.
        bucket_bytes: size in bytes of the buckets.
        compression: "fp16" or "bf16" sends gradients in 16 bits between hosts; those of ranks on one host are added up
            in full.
        error_feedback: whether what this rounding loses in a step is added to the next.

    Returns:
        The same object: its `apply` (on JAX `stateless_apply` too) is replaced, its class is not, so that files saved
        with it load without this package.

    Raises:
        ArgumentError: not a Keras optimizer, or another `compression`.
        MismatchError: when it is first used, if the variables differ among ranks.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentError(f"optimizer={type(optimizer).__name__} is not a keras.optimizers.Optimizer.")
    if connect().topology.size > 1 and averaging_of(optimizer) is None:
        backend().GradientAveraging(
            optimizer, bucket_bytes, compression=compression, error_feedback=error_feedback
        ).install()
    return optimizer


def undistribute(optimizer: O) -> O:
    """Make a `DistributedOptimizer` an ordinary one again; all ranks call it."""
    averaging = averaging_of(optimizer)
    if averaging is not None:
        averaging.remove()
    return optimizer


def broadcast_variables(model: Any, root_rank: int = 0) -> None:
    """What `BroadcastCallback` does before the first update, for loops of one's own; collective.

    Args:
        model: a built model; its compiled optimizer, and optimizers it holds, are included.
        root_rank: whose state everyone gets.

    Raises:
        ArgumentError: `root_rank` is no rank.
        MismatchError: the models differ among ranks.
    """
    world = connect()
    check_root(root_rank, world)
    if world.topology.size > 1:
        build_optimizers(model)
        broadcast_state(model, root_rank, world.communicator)
