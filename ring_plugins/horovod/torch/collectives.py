"""Horovod's functions on tensors; what they do is in operations.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod.basics import Average, Compression, Compressor, Sum, compressor_of, op_of
from ring_plugins.horovod.basics import told as _told
from ring_plugins.horovod.torch.operations import (
    Handle,
    all_reduction,
    all_reduction_in_place,
    broadcasting,
    exchange,
    gathering,
    gathering_of_entries,
    grouped_gathering,
    grouped_reduction,
    grouped_reduction_in_place,
    grouped_scattering,
    scattering,
)

told = partial(_told, by_name=True)

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]


def poll(handle: Handle) -> bool:
    """Whether an operation is over."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result: a tensor, a list for a group, and for `alltoall_async` a pair."""
    return handle.wait()


# All-reduce ---------------------------------------------------------------------------------------


def _compressed(compression: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Callable[[Any], Any]]:
    """What is sent of tensors, and what makes the results, in a list, out of what comes back."""
    compressor: Compressor = compressor_of(compression)
    sent = [compressor.compress(tensor) for tensor in tensors]
    return [one for one, _ in sent], lambda results: [
        compressor.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)
    ]


@told
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Combine a tensor of all ranks. Where it requires a gradient, Average and Sum pass one.

    Args:
        tensor: of equal shape and dtype on all ranks. Averages of integers are cut off, towards zero.
        average: Horovod's older argument: False sums.
        name: compared among the ranks.
        compression: `Compression.fp16` sends floats in 16 bits; or a class with its methods.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: factors before and after.
        process_set: whose ranks call, by default all.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_reduce`.
    """
    reduction = op_of(average, op)
    (sent,), restore = _compressed(compression, [tensor])
    operation = all_reduction(sent, reduction, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = restore([operation.run(name)])[0]
    return result


@told
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin an all-reduce into a new tensor, which passes no gradient."""
    operation = all_reduction(tensor, op_of(average, op), prescale_factor, postscale_factor, process_set)
    return operation.start(name)


@told
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin an all-reduce in place."""
    operation = all_reduction_in_place(tensor, op_of(average, op), prescale_factor, postscale_factor, process_set)
    return operation.start(name)


@told
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """`allreduce` in place."""
    operation = all_reduction_in_place(tensor, op_of(average, op), prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = operation.run(name)
    return result


@told
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors as one operation; further arguments as there."""
    reduction = op_of(average, op)
    sent, restore = _compressed(compression, tensors)
    operation = grouped_reduction(sent, reduction, prescale_factor, postscale_factor, process_set)
    results: list[torch.Tensor] = restore(operation.run(name))
    return results


@told
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin a `grouped_allreduce`, which passes no gradient."""
    operation = grouped_reduction(tensors, op_of(average, op), prescale_factor, postscale_factor, process_set)
    return operation.start(name)


@told
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin a `grouped_allreduce` in place."""
    operation = grouped_reduction_in_place(tensors, op_of(average, op), prescale_factor, postscale_factor, process_set)
    return operation.start(name)


@told
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """`grouped_allreduce` in place."""
    operation = grouped_reduction_in_place(tensors, op_of(average, op), prescale_factor, postscale_factor, process_set)
    results: list[torch.Tensor] = operation.run(name)
    return results


@told
def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: Op, process_set: Any = None) -> Handle:
    """Begin to combine sparse tensors of all ranks, by concatenating their entries.

    Args:
        tensor: in the layout `torch.sparse_coo`, of equal shape on all ranks.
        name: compared among the ranks.
        op: `Average` or `Sum`.
        process_set: whose ranks call, by default all.

    Returns:
        A handle, whose result is a sparse tensor that is not coalesced; for `synchronize`, or to be called.

    Raises:
        ArgumentError: `tensor` is not sparse, or another `op`.
        MismatchError: names or shapes differ among ranks.
    """
    if not tensor.is_sparse:
        raise ArgumentError(f"tensor has layout={tensor.layout}; call hvd.allreduce_async(tensor) for dense tensors.")
    reduction = op_of(None, op)
    if reduction not in (Average, Sum):
        raise ArgumentError(f"op={op!r} of a sparse tensor must be hvd.Average or hvd.Sum.")
    operation = gathering_of_entries(tensor, reduction, process_set)
    return operation.start(f"{name} of shape {tuple(tensor.shape)}")


# The others ---------------------------------------------------------------------------------------


@told
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks, whose first dimensions may differ; averages gradients."""
    result: torch.Tensor = gathering(tensor, process_set).run(name)
    return result


@told
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin an `allgather`, which passes no gradient."""
    return gathering(tensor, process_set).start(name)


@told
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> list[torch.Tensor]:
    """`allgather` of several tensors as one operation."""
    results: list[torch.Tensor] = grouped_gathering(tensors, process_set).run(name)
    return results


@told
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin a `grouped_allgather`, which passes no gradient."""
    return grouped_gathering(tensors, process_set).start(name)


@told
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The root's tensor, on every rank; its gradient is the average of the ranks' gradients."""
    result: torch.Tensor = broadcasting(tensor, root_rank, False, process_set).run(name)
    return result


@told
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast`, which passes no gradient."""
    return broadcasting(tensor, root_rank, False, process_set).start(name)


@told
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin to overwrite a tensor with the root's."""
    return broadcasting(tensor, root_rank, True, process_set).start(name)


@told
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Overwrite a tensor with the root's."""
    result: torch.Tensor = broadcasting(tensor, root_rank, True, process_set).run(name)
    return result


@told
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows to each rank; gradients go back the same way.

    Args:
        tensor: of at least one dimension.
        splits: how many rows each rank gets, in a list or tensor; equal parts by default.
        name: compared among the ranks.
        process_set: whose ranks call, by default all.

    Returns:
        The rows that came, in rank order; with `splits` also how many came from each rank.
    """
    rows, received = exchange(tensor, splits, process_set).run(name)
    return rows if splits is None else (rows, received)


@told
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin an `alltoall`, which passes no gradient; its result is a pair also without `splits`."""
    return exchange(tensor, splits, process_set).start(name)


@told
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine a tensor of all ranks and keep this rank's rows; the first ranks get one more if it does not divide.

    Average and Sum pass gradients: with Average the concatenation of the ranks' gradients, with Sum n times that.
    """
    (sent,), restore = _compressed(compression, [tensor])
    operation = scattering(sent, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = restore([operation.run(name)])[0]
    return result


@told
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`, which passes no gradient."""
    return scattering(tensor, op, prescale_factor, postscale_factor, process_set).start(name)


@told
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors as one operation; further arguments as there."""
    sent, restore = _compressed(compression, tensors)
    operation = grouped_scattering(sent, op, prescale_factor, postscale_factor, process_set)
    results: list[torch.Tensor] = restore(operation.run(name))
    return results


@told
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`, which passes no gradient."""
    return grouped_scattering(tensors, op, prescale_factor, postscale_factor, process_set).start(name)
