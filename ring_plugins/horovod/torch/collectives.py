"""Horovod's operations on tensors, and their gradients.

Gradients have the factors of Horovod 0.28, for which its scripts chose their learning rates. With n ranks, those of
`allgather` and `broadcast` are 1/n times, and those of `reducescatter` n times the gradients of `ring_plugins.torch`,
which are those of the sum of all ranks' losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

import torch

import ring_plugins as ring
import ring_plugins.torch as differentiable
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.validation import check_splits, rows_of
from ring_plugins.core.functions import all_or_none
from ring_plugins.horovod.basics import Average, Compression, Sum, begin, check_compression, grouped, op_of, size

P = ParamSpec("P")

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


class Handle:
    """An operation under way, for `poll` and `synchronize`.

    Args:
        works: what it waits for, in this order.
        finish: makes the result out of theirs.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[..., Any] = lambda result: result) -> None:
        self._works, self._finish = works, finish
        self._results: list[Any] = []

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._results) or all(work.done() for work in self._works)

    def wait(self) -> Any:
        """The result."""
        if not self._results:
            self._results.append(self._finish(*[work.wait() for work in self._works]))
        return self._results[0]

    __call__ = wait  # as scripts end a `sparse_allreduce_async`


def poll(handle: Handle) -> bool:
    """Whether an operation is over."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result: a tensor, a list for a group, and for `alltoall_async` a pair."""
    return handle.wait()


def _completed(begin: Callable[P, Handle], name: str, returns: str = "torch.Tensor") -> Callable[P, Any]:
    """The operation that waits for what `begin` begins, and returns the result."""
    function: Callable[..., Handle] = vars(begin)["__wrapped__"]

    @wraps(function)
    def operation(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options).wait()

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"`{begin.__name__}`, and wait for the result."
    operation.__signature__ = inspect.signature(begin).replace(return_annotation=returns)  # type: ignore[attr-defined]
    return all_or_none(operation)


def _of_all(handles: list[Handle]) -> Handle:
    return Handle(handles, lambda *results: list(results))


# All-reduce ---------------------------------------------------------------------------------------


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
    sent, reduction = _sent(tensor, compression), op_of(average, op)
    begin("allreduce", name, process_set)
    reduce = differentiable.all_reduce if _needs_gradient(sent) else ring.all_reduce
    result: torch.Tensor = reduce(_times(sent, prescale_factor), reduction)
    return _times(result, postscale_factor).to(tensor.dtype)


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
    reduction = op_of(average, op)
    begin("allreduce", name, process_set)
    work = ring.all_reduce(_times(tensor.detach(), prescale_factor), reduction, wait=False)
    return Handle([work], lambda result: _times(result, postscale_factor))


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
    reduction, values = op_of(average, op), tensor.detach()
    begin("allreduce", name, process_set)
    if prescale_factor != 1.0:
        values.copy_(_times(values, prescale_factor))

    def finish(result: torch.Tensor) -> torch.Tensor:
        if postscale_factor != 1.0:
            result.copy_(_times(result, postscale_factor))
        return tensor

    return Handle([ring.all_reduce(values, reduction, out=values, wait=False)], finish)


allreduce_ = _completed(allreduce_async_, "allreduce_")
grouped_allreduce = grouped(allreduce, list)
grouped_allreduce_async = grouped(allreduce_async, _of_all)
grouped_allreduce_async_ = grouped(allreduce_async_, _of_all)
grouped_allreduce_ = _completed(grouped_allreduce_async_, "grouped_allreduce_", "list[torch.Tensor]")


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
    if not tensor.is_sparse:
        raise ArgumentError(f"tensor has layout={tensor.layout}; call hvd.allreduce_async(tensor) for dense tensors.")
    reduction = op_of(None, op)
    if reduction not in (Average, Sum):
        raise ArgumentError(f"op={op!r} of a sparse tensor must be hvd.Average or hvd.Sum.")
    begin("sparse_allreduce", f"{name} of shape {tuple(tensor.shape)}", process_set)
    entries = tensor.detach()
    indices = ring.all_gather(entries._indices().t().contiguous(), wait=False)
    values = ring.all_gather(entries._values(), wait=False)

    def finish(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        values = values / size() if reduction is Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    return Handle([indices, values], finish)


# The others ---------------------------------------------------------------------------------------


@all_or_none
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks, whose first dimensions may differ; averages gradients."""
    if not _needs_gradient(tensor):
        return torch.as_tensor(allgather_async(tensor, name, process_set).wait())
    begin("allgather", name, process_set)
    return differentiable.all_gather(_with_gradient_times(1 / size(), tensor))


@all_or_none
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin an `allgather`, which passes no gradient."""
    begin("allgather", name, process_set)
    return Handle([ring.all_gather(tensor.detach(), wait=False)])


grouped_allgather = grouped(allgather, list)
grouped_allgather_async = grouped(allgather_async, _of_all)


@all_or_none
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The root's tensor, on every rank; its gradient is the average of the ranks' gradients."""
    if not _needs_gradient(tensor):
        return torch.as_tensor(broadcast_async(tensor, root_rank, name, process_set).wait())
    begin("broadcast", name, process_set)
    return differentiable.broadcast(_with_gradient_times(1 / size(), tensor), root_rank)


@all_or_none
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast`, which passes no gradient."""
    begin("broadcast", name, process_set)
    return Handle([ring.broadcast(tensor.detach(), root_rank, wait=False)])


@all_or_none
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin to overwrite a tensor with the root's."""
    begin("broadcast", name, process_set)
    values = tensor.detach()
    return Handle([ring.broadcast(values, root_rank, out=values, wait=False)], lambda _: tensor)


broadcast_ = _completed(broadcast_async_, "broadcast_")


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
        begin("alltoall", name, process_set)
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
    begin("alltoall", name, process_set)
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
    sent, reduction = _sent(tensor, compression), op_of(None, op)
    begin("reducescatter", name, process_set)
    result: torch.Tensor
    if _needs_gradient(sent):
        scaled = _with_gradient_times(size(), _times(sent, prescale_factor))
        result = differentiable.reduce_scatter(scaled, reduction)
    else:
        result = ring.reduce_scatter(_times(sent, prescale_factor), reduction)
    return _times(result, postscale_factor).to(tensor.dtype)


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
    reduction = op_of(None, op)
    begin("reducescatter", name, process_set)
    work = ring.reduce_scatter(_times(tensor.detach(), prescale_factor), reduction, wait=False)
    return Handle([work], lambda result: _times(result, postscale_factor))


grouped_reducescatter = grouped(reducescatter, list)
grouped_reducescatter_async = grouped(reducescatter_async, _of_all)


# Helpers ------------------------------------------------------------------------------------------


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _with_gradient_times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose gradient is multiplied on its way back."""
    same = tensor.view_as(tensor)
    same.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return same


def _sent(tensor: torch.Tensor, compression: Any) -> torch.Tensor:
    return tensor.half() if check_compression(compression) and tensor.is_floating_point() else tensor


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in the tensor's dtype; integers as Horovod does, which computes in float64 and cuts off the rest."""
    if factor == 1.0:
        return tensor
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return (tensor.double() * factor).to(tensor.dtype) if is_whole else tensor * factor
