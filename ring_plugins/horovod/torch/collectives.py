"""Horovod's operations on tensors, and their gradients.

Gradients have the factors of Horovod 0.28, for which its scripts chose their learning rates. With n ranks, those of
`allgather` and `broadcast` are 1/n times, and those of `reducescatter` n times the gradients of `ring_plugins.torch`,
which are those of the sum of all ranks' losses.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

import ring_plugins as ring
import ring_plugins.torch as differentiable
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.collectives.validation import check_splits, rows_of
from ring_plugins.core.functions import all_or_none
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    Compressor,
    Sum,
    begin,
    compressor_of,
    op_of,
    reduction_of,
    scaled,
    size,
)

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


class _Operation(NamedTuple):
    """What an operation does, whether the script waits for it or not.

    Attributes:
        kind: its name.
        operate: called with whether to wait; returns results, or a `Work` for each.
        finish: makes the script's result out of these.
    """

    kind: str
    operate: Callable[[bool], Sequence[Any]]
    finish: Callable[..., Any] = lambda result: result

    def run(self, name: str | None, process_set: Any) -> Any:
        """Wait for the result."""
        begin(self.kind, name, process_set)
        return self.finish(*self.operate(True))

    def start(self, name: str | None, process_set: Any) -> Handle:
        """Begin it."""
        begin(self.kind, name, process_set)
        return Handle(self.operate(False), self.finish)


def _together(kind: str, operations: Sequence[_Operation]) -> _Operation:
    """Several operations as one, which gives the list of their results."""
    lengths: list[int] = []

    def operate(wait: bool) -> Sequence[Any]:
        parts = [one.operate(wait) for one in operations]
        lengths[:] = map(len, parts)
        return [work for part in parts for work in part]

    def finish(*results: Any) -> list[Any]:
        left = iter(results)
        return [one.finish(*islice(left, n)) for one, n in zip(operations, lengths, strict=True)]

    return _Operation(kind, operate, finish)


# All-reduce ---------------------------------------------------------------------------------------


class _Reduction(NamedTuple):
    """What of Horovod's arguments says how to reduce a tensor.

    Attributes:
        op: to call; averages of integers are scaled sums.
        before, after: factors.
        is_whole: whether the tensor holds integers.
    """

    op: Op
    before: float
    after: float
    is_whole: bool

    @classmethod
    def of(cls, tensor: Any, op: Op, prescale_factor: float, postscale_factor: float) -> _Reduction:
        """That of a tensor."""
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"tensor={tensor!r:.60} is a {type(tensor).__name__}; pass torch.tensor(...) of it.")
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        return cls(*_factors(op, prescale_factor, postscale_factor, is_whole), is_whole)

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is reduced."""
        return torch.as_tensor(scaled(tensor, self.before, self.is_whole))

    def end(self, result: torch.Tensor) -> torch.Tensor:
        """What the script gets."""
        return torch.as_tensor(scaled(result, self.after, self.is_whole))


def _factors(op: Op, before: float, after: float, is_whole: bool) -> tuple[Op, float, float]:
    reduction, after = reduction_of(op, after, size(), is_whole)
    return reduction, before, after


def _all_reduction(tensor: torch.Tensor, op: Op, before: float, after: float) -> _Operation:
    """Into a new tensor; passes a gradient where the tensor needs one."""
    how = _Reduction.of(tensor, op, before, after)

    def operate(wait: bool) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [differentiable.all_reduce(how.begin(tensor), how.op)]
        return [ring.all_reduce(how.begin(tensor.detach()), how.op, wait=wait)]

    return _Operation("allreduce", operate, how.end)


def _all_reduction_in_place(tensor: torch.Tensor, op: Op, before: float, after: float) -> _Operation:
    how = _Reduction.of(tensor, op, before, after)
    values = tensor.detach()

    def operate(wait: bool) -> Sequence[Any]:
        if before != 1.0:
            values.copy_(how.begin(values))
        return [ring.all_reduce(values, how.op, out=values, wait=wait)]

    def finish(result: torch.Tensor) -> torch.Tensor:
        if how.after != 1.0:
            values.copy_(how.end(result))
        return tensor

    return _Operation("allreduce", operate, finish)


def _grouped_reduction(tensors: Sequence[torch.Tensor], op: Op, before: float, after: float) -> _Operation:
    """One all-reduce for the tensors of a dtype and device, which are laid one behind the other."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    hows = [_Reduction.of(tensor, op, before, after) for tensor in tensors]
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    shapes = zlib.crc32(repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]).encode())

    def operate(wait: bool) -> Sequence[Any]:
        if len({device for _, device in kinds}) > 1:
            raise ArgumentError("tensors of one group are on several devices; make a group for each.")
        with purpose(f"grouped_allreduce of {len(tensors)} tensors ({shapes:08x})"):
            return [
                part
                for indices in kinds.values()
                for part in _all_reduction(
                    torch.cat([tensors[i].reshape(-1) for i in indices]), hows[indices[0]].op, before, 1.0
                ).operate(wait)
            ]

    def finish(*flat: torch.Tensor) -> list[torch.Tensor]:
        results: list[Any] = [None] * len(tensors)
        for values, indices in zip(flat, kinds.values(), strict=True):
            parts = torch.split(values, [tensors[i].numel() for i in indices])
            for i, part in zip(indices, parts, strict=True):
                own = part.clone() if part.requires_grad else part  # torch lets nobody change one of several views
                results[i] = hows[i].end(own.view(tensors[i].shape))
        return results

    return _Operation("grouped_allreduce", operate, finish)


def _grouped_reduction_in_place(tensors: Sequence[torch.Tensor], op: Op, before: float, after: float) -> _Operation:
    operation = _grouped_reduction([tensor.detach() for tensor in tensors], op, before, after)

    def finish(*flat: torch.Tensor) -> list[torch.Tensor]:
        for tensor, result in zip(tensors, operation.finish(*flat), strict=True):
            tensor.detach().copy_(result)
        return list(tensors)

    return operation._replace(finish=finish)


def _compressed(compression: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Callable[[Any], Any]]:
    """What is sent of tensors, and what makes the results, in a list, out of what comes back."""
    compressor: Compressor = compressor_of(compression)
    sent = [compressor.compress(tensor) for tensor in tensors]
    return [one for one, _ in sent], lambda results: [
        compressor.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)
    ]


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
        tensor: of equal shape and dtype on all ranks. Averages of integers are cut off, towards zero.
        average: Horovod's older argument: False sums.
        name: compared among the ranks.
        compression: `Compression.fp16` sends floats in 16 bits; or a class with its methods.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: factors before and after.
        process_set: all processes.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_reduce`.
    """
    reduction = op_of(average, op)
    (sent,), restore = _compressed(compression, [tensor])
    operation = _all_reduction(sent, reduction, prescale_factor, postscale_factor)
    result: torch.Tensor = restore([operation.run(name, process_set)])[0]
    return result


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
    operation = _all_reduction(tensor, op_of(average, op), prescale_factor, postscale_factor)
    return operation.start(name, process_set)


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
    operation = _all_reduction_in_place(tensor, op_of(average, op), prescale_factor, postscale_factor)
    return operation.start(name, process_set)


@all_or_none
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
    operation = _all_reduction_in_place(tensor, op_of(average, op), prescale_factor, postscale_factor)
    result: torch.Tensor = operation.run(name, process_set)
    return result


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
    """`allreduce` of several tensors as one operation; further arguments as there."""
    reduction = op_of(average, op)
    sent, restore = _compressed(compression, tensors)
    operation = _grouped_reduction(sent, reduction, prescale_factor, postscale_factor)
    results: list[torch.Tensor] = restore(operation.run(name, process_set))
    return results


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
    """Begin a `grouped_allreduce`, which passes no gradient."""
    operation = _grouped_reduction(tensors, op_of(average, op), prescale_factor, postscale_factor)
    return operation.start(name, process_set)


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
    """Begin a `grouped_allreduce` in place."""
    operation = _grouped_reduction_in_place(tensors, op_of(average, op), prescale_factor, postscale_factor)
    return operation.start(name, process_set)


@all_or_none
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
    operation = _grouped_reduction_in_place(tensors, op_of(average, op), prescale_factor, postscale_factor)
    results: list[torch.Tensor] = operation.run(name, process_set)
    return results


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
    entries = tensor.detach()

    def operate(wait: bool) -> Sequence[Any]:
        return [
            ring.all_gather(entries._indices().t().contiguous(), wait=wait),
            ring.all_gather(entries._values(), wait=wait),
        ]

    def finish(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        values = values / size() if reduction is Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    operation = _Operation("sparse_allreduce", operate, finish)
    return operation.start(f"{name} of shape {tuple(tensor.shape)}", process_set)


# The others ---------------------------------------------------------------------------------------


def _gathering(tensor: torch.Tensor) -> _Operation:
    def operate(wait: bool) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [differentiable.all_gather(_with_gradient_times(1 / size(), tensor))]
        return [ring.all_gather(tensor.detach(), wait=wait)]

    return _Operation("allgather", operate, torch.as_tensor)


@all_or_none
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks, whose first dimensions may differ; averages gradients."""
    result: torch.Tensor = _gathering(tensor).run(name, process_set)
    return result


@all_or_none
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin an `allgather`, which passes no gradient."""
    return _gathering(tensor).start(name, process_set)


@all_or_none
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> list[torch.Tensor]:
    """`allgather` of several tensors."""
    results: list[torch.Tensor] = _together("grouped_allgather", list(map(_gathering, tensors))).run(name, process_set)
    return results


@all_or_none
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin a `grouped_allgather`, which passes no gradient."""
    return _together("grouped_allgather", list(map(_gathering, tensors))).start(name, process_set)


def _broadcasting(tensor: torch.Tensor, root: int, in_place: bool) -> _Operation:
    def operate(wait: bool) -> Sequence[Any]:
        values = tensor.detach()
        if in_place:
            return [ring.broadcast(values, root, out=values, wait=wait)]
        if wait and _needs_gradient(tensor):
            return [differentiable.broadcast(_with_gradient_times(1 / size(), tensor), root)]
        return [ring.broadcast(values, root, wait=wait)]

    return _Operation("broadcast", operate, lambda result: tensor if in_place else torch.as_tensor(result))


@all_or_none
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The root's tensor, on every rank; its gradient is the average of the ranks' gradients."""
    result: torch.Tensor = _broadcasting(tensor, root_rank, False).run(name, process_set)
    return result


@all_or_none
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast`, which passes no gradient."""
    return _broadcasting(tensor, root_rank, False).start(name, process_set)


@all_or_none
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin to overwrite a tensor with the root's."""
    return _broadcasting(tensor, root_rank, True).start(name, process_set)


@all_or_none
def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Overwrite a tensor with the root's."""
    result: torch.Tensor = _broadcasting(tensor, root_rank, True).run(name, process_set)
    return result


def _exchange(tensor: torch.Tensor, splits: Any) -> _Operation:
    """Its result is a pair: the rows that came, and how many from each rank."""
    if isinstance(splits, torch.Tensor):
        sent = splits.detach().cpu()
    else:
        rows = check_splits(splits, rows_of(tensor.shape, "alltoall"), size())
        sent = torch.tensor(rows, dtype=torch.int32, device="cpu")  # of the dtype that Horovod returns numbers in

    def operate(wait: bool) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [differentiable.all_to_all(tensor, sent.tolist()), ring.all_to_all(sent)]
        return [ring.all_to_all(tensor.detach(), sent.tolist(), wait=wait), ring.all_to_all(sent, wait=wait)]

    return _Operation("alltoall", operate, lambda rows, received: (rows, received))


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
    rows, received = _exchange(tensor, splits).run(name, process_set)
    return rows if splits is None else (rows, received)


@all_or_none
def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin an `alltoall`, which passes no gradient; its result is a pair also without `splits`."""
    return _exchange(tensor, splits).start(name, process_set)


def _scattering(tensor: torch.Tensor, op: Op, before: float, after: float) -> _Operation:
    if op_of(None, op) not in (Average, Sum):
        raise ArgumentError(f"op={op!r} of reducescatter must be hvd.Average or hvd.Sum.")
    how = _Reduction.of(tensor, op, before, after)
    rows_of(tensor.shape, "reducescatter")

    def operate(wait: bool) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [differentiable.reduce_scatter(_with_gradient_times(size(), how.begin(tensor)), how.op)]
        return [ring.reduce_scatter(how.begin(tensor.detach()), how.op, wait=wait)]

    return _Operation("reducescatter", operate, how.end)


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
    (sent,), restore = _compressed(compression, [tensor])
    operation = _scattering(sent, op, prescale_factor, postscale_factor)
    result: torch.Tensor = restore([operation.run(name, process_set)])[0]
    return result


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
    return _scattering(tensor, op, prescale_factor, postscale_factor).start(name, process_set)


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
    """`reducescatter` of several tensors; further arguments as there."""
    sent, restore = _compressed(compression, tensors)
    operations = [_scattering(one, op, prescale_factor, postscale_factor) for one in sent]
    results: list[torch.Tensor] = restore(_together("grouped_reducescatter", operations).run(name, process_set))
    return results


@all_or_none
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`, which passes no gradient."""
    operations = [_scattering(one, op, prescale_factor, postscale_factor) for one in tensors]
    return _together("grouped_reducescatter", operations).start(name, process_set)


# Helpers ------------------------------------------------------------------------------------------


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _with_gradient_times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose gradient is multiplied on its way back."""
    same = tensor.view_as(tensor)
    same.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return same
