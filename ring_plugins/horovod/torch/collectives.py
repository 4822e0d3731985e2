"""Horovod's operations on tensors, and their gradients.

Gradients have the factors of Horovod 0.28, for which its scripts chose their learning rates. With n ranks, those of
`allgather` and `broadcast` are 1/n times, and those of `reducescatter` n times the gradients of `ring_plugins.torch`,
which are those of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import ring_plugins as ring
import ring_plugins.torch as differentiable
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.validation import check_splits, rows_of
from ring_plugins.core.functions import all_or_none
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    Sum,
    check_compression,
    check_name,
    check_process_set,
    op_of,
    size,
)
from ring_plugins.horovod.torch.handles import Handle

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


@all_or_none
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
    return _begin_allreduce(tensor.detach(), None, average, name, op, prescale_factor, postscale_factor, process_set)


@all_or_none
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
    return _begin_allreduce(tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def _begin_allreduce(
    tensor: torch.Tensor,
    out: torch.Tensor | None,
    average: bool | None,
    name: str | None,
    op: Op | None,
    before: float,
    after: float,
    process_set: Any,
) -> Handle:
    """Begin `after` x reduction of (`before` x `tensor`), into `out` or a new tensor."""
    check_process_set(process_set)
    reduction = op_of(average, op)
    check_name("allreduce", name)
    if before != 1.0 and out is None:
        tensor = _times(tensor, before)
    elif before != 1.0:
        tensor.detach().copy_(_times(tensor.detach(), before))
    values = tensor.detach()
    work = ring.all_reduce(values, reduction, out=None if out is None else values, wait=False)

    def finish(result: torch.Tensor) -> torch.Tensor:
        if after != 1.0:
            result.copy_(_times(result, after))
        return result if out is None else out

    return Handle([work], finish)


@all_or_none
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
        tensor: of equal shape and dtype on all ranks.
        average: Horovod's older argument: False sums.
        name: compared among the ranks.
        compression: `Compression.fp16` sends floats in 16 bits.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: factors before and after.
        process_set: all processes.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_reduce`.
    """
    is_sent_in_half = check_compression(compression) and tensor.is_floating_point()
    sent = tensor.half() if is_sent_in_half else tensor
    if _needs_gradient(sent):
        check_process_set(process_set)
        reduction = op_of(average, op)
        check_name("allreduce", name)
        result = differentiable.all_reduce(sent * prescale_factor, reduction) * postscale_factor
    else:
        result = allreduce_async(sent, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return result.to(tensor.dtype)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Combine a tensor of all ranks in place."""
    return torch.as_tensor(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    )


@all_or_none
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
    """Combine several tensors of all ranks."""
    arguments = (average, None, compression, op, prescale_factor, postscale_factor, process_set)
    check_name("grouped_allreduce", name)
    return [allreduce(tensor, *arguments) for tensor in tensors]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Combine several tensors of all ranks in place."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return list(grouped_allreduce_async_(tensors, *arguments).wait())


@all_or_none
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin to combine several tensors of all ranks; the results pass no gradients."""
    arguments = (average, None, op, prescale_factor, postscale_factor, process_set)
    check_name("grouped_allreduce", name)
    return Handle([allreduce_async(tensor, *arguments) for tensor in tensors], _listed)


@all_or_none
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin to combine several tensors of all ranks in place."""
    arguments = (average, None, op, prescale_factor, postscale_factor, process_set)
    check_name("grouped_allreduce", name)
    return Handle([allreduce_async_(tensor, *arguments) for tensor in tensors], _listed)


@all_or_none
def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: Op, process_set: Any = None) -> Handle:
    """Begin to combine sparse tensors of all ranks, by concatenating their entries.

    Args:
        tensor: in the layout `torch.sparse_coo`, of equal shape on all ranks.
        name: compared among the ranks.
        op: `Average` or `Sum`.
        process_set: all processes.

    Returns:
        A handle, whose result is a sparse tensor that is not coalesced; for `synchronize`, or to be called.

    Raises:
        ArgumentError: `tensor` is not sparse, or another `op`.
        MismatchError: names or shapes differ among ranks.
    """
    check_process_set(process_set)
    if not tensor.is_sparse:
        raise ArgumentError(f"tensor has layout={tensor.layout}; call hvd.allreduce_async(tensor) for dense tensors.")
    reduction = op_of(None, op)
    if reduction not in (Average, Sum):
        raise ArgumentError(f"op={op!r} of a sparse tensor must be hvd.Average or hvd.Sum.")
    check_name("sparse_allreduce", f"{name} of shape {tuple(tensor.shape)}")
    entries = tensor.detach()
    indices = ring.all_gather(entries._indices().t().contiguous(), wait=False)
    values = ring.all_gather(entries._values(), wait=False)

    def finish(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        values = values / size() if reduction is Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    return Handle([indices, values], finish)


@all_or_none
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks, whose first dimensions may differ; averages gradients."""
    if not _needs_gradient(tensor):
        return torch.as_tensor(allgather_async(tensor, name, process_set).wait())
    check_process_set(process_set)
    check_name("allgather", name)
    return differentiable.all_gather(_with_gradient_times(1 / size(), tensor))


@all_or_none
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin an `allgather`, which passes no gradient."""
    check_process_set(process_set)
    check_name("allgather", name)
    return Handle([ring.all_gather(tensor.detach(), wait=False)], _as_it_is)


@all_or_none
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> list[torch.Tensor]:
    """`allgather` several tensors."""
    check_name("grouped_allgather", name)
    return [allgather(tensor, None, process_set) for tensor in tensors]


@all_or_none
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin to `allgather` several tensors; the results pass no gradients."""
    check_name("grouped_allgather", name)
    return Handle([allgather_async(tensor, None, process_set) for tensor in tensors], _listed)


@all_or_none
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The root's tensor, on every rank; its gradient is the average of the ranks' gradients."""
    if not _needs_gradient(tensor):
        return torch.as_tensor(broadcast_async(tensor, root_rank, name, process_set).wait())
    check_process_set(process_set)
    check_name("broadcast", name)
    return differentiable.broadcast(_with_gradient_times(1 / size(), tensor), root_rank)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Overwrite a tensor with the root's."""
    return torch.as_tensor(broadcast_async_(tensor, root_rank, name, process_set).wait())


@all_or_none
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast`, which passes no gradient."""
    check_process_set(process_set)
    check_name("broadcast", name)
    return Handle([ring.broadcast(tensor.detach(), root_rank, wait=False)], _as_it_is)


@all_or_none
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast_`."""
    check_process_set(process_set)
    check_name("broadcast", name)
    values = tensor.detach()
    return Handle([ring.broadcast(values, root_rank, out=values, wait=False)], lambda _: tensor)


@all_or_none
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows to each rank; gradients go back the same way.

    Args:
        tensor: of at least one dimension.
        splits: how many rows each rank gets, in a list or tensor; equal parts by default.
        name: compared among the ranks.
        process_set: all processes.

    Returns:
        The rows that came, in rank order; with `splits` also how many came from each rank.
    """
    if _needs_gradient(tensor):
        check_process_set(process_set)
        check_name("alltoall", name)
        sent = _rows_sent(tensor, splits)
        rows, received = differentiable.all_to_all(tensor, sent.tolist()), ring.all_to_all(sent)
    else:
        rows, received = alltoall_async(tensor, splits, name, process_set).wait()
    return rows if splits is None else (rows, received)


@all_or_none
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin an `alltoall`, which passes no gradient; its result is a pair also without `splits`."""
    check_process_set(process_set)
    check_name("alltoall", name)
    sent = _rows_sent(tensor, splits)
    works = ring.all_to_all(tensor.detach(), sent.tolist(), wait=False), ring.all_to_all(sent, wait=False)
    return Handle(works, lambda rows, received: (rows, received))


def _rows_sent(tensor: torch.Tensor, splits: Any) -> torch.Tensor:
    """How many rows go to each rank, of the dtype that Horovod returns numbers of rows in."""
    if isinstance(splits, torch.Tensor):
        return splits.detach().cpu()
    return torch.tensor(check_splits(splits, rows_of(tensor.shape, "alltoall"), size()), dtype=torch.int32)


@all_or_none
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
    is_sent_in_half = check_compression(compression) and tensor.is_floating_point()
    sent = tensor.half() if is_sent_in_half else tensor
    if _needs_gradient(sent):
        check_process_set(process_set)
        check_name("reducescatter", name)
        scaled = _with_gradient_times(size(), sent) * prescale_factor
        result = differentiable.reduce_scatter(scaled, op_of(None, op)) * postscale_factor
    else:
        result = reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor).wait()
    return result.to(tensor.dtype)


@all_or_none
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`, which passes no gradient."""
    check_process_set(process_set)
    check_name("reducescatter", name)
    values = tensor.detach() if prescale_factor == 1.0 else _times(tensor.detach(), prescale_factor)
    work = ring.reduce_scatter(values, op_of(None, op), wait=False)
    return Handle([work], lambda result: result if postscale_factor == 1.0 else _times(result, postscale_factor))


@all_or_none
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` several tensors."""
    check_name("grouped_reducescatter", name)
    arguments = (None, compression, op, process_set, prescale_factor, postscale_factor)
    return [reducescatter(tensor, *arguments) for tensor in tensors]


@all_or_none
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to `reducescatter` several tensors; the results pass no gradients."""
    check_name("grouped_reducescatter", name)
    arguments = (None, op, process_set, prescale_factor, postscale_factor)
    return Handle([reducescatter_async(tensor, *arguments) for tensor in tensors], _listed)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _with_gradient_times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose gradient is multiplied on its way back."""
    same = tensor.view_as(tensor)
    same.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return same


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in the tensor's dtype; integers as Horovod does, which computes in float64 and cuts off the rest."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return (tensor.double() * factor).to(tensor.dtype) if is_whole else tensor * factor


def _as_it_is(result: torch.Tensor) -> torch.Tensor:
    return result


def _listed(*results: torch.Tensor) -> list[torch.Tensor]:
    return list(results)
