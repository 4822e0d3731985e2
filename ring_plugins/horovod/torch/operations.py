"""What Horovod's operations on tensors do, whether the script waits for them or not.

Gradients have the factors of Horovod 0.28, for which its scripts chose their learning rates. With n ranks, those of
`allgather` and `broadcast` are 1/n times, and those of `reducescatter` n times the gradients of `ring_plugins.torch`,
which are those of the sum of all ranks' losses.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

import ring_plugins as ring
import ring_plugins.torch as differentiable
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.collectives.validation import check_splits, rows_of
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.world import current
from ring_plugins.horovod.basics import JOIN, Average, Sum, begin, op_of, reduction_of, scaled, size
from ring_plugins.horovod.common.process_sets import group_of
from ring_plugins.horovod.named import NamedOperations, operations_of


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


class Operation(NamedTuple):
    """What an operation does, whether the script waits for it or not.

    Attributes:
        kind: its name.
        process_set: whose ranks take part.
        call: what must be equal on all ranks.
        tensors: that it reads.
        operate: called with whether to wait, and the group; returns results, or a `Work` for each.
        finish: makes the script's result out of these.
    """

    kind: str
    process_set: Any
    call: dict[str, Any]
    tensors: Sequence[torch.Tensor]
    operate: Callable[[bool, Group | None], Sequence[Any]]
    finish: Callable[..., Any] = lambda result: result

    def run(self, name: str | None) -> Any:
        """Wait for the result."""
        passes_gradient = any(map(_needs_gradient, self.tensors))
        if name is not None and not passes_gradient and (operations := self._named()) is not None:
            return self._begin(operations, name).wait()
        try:
            return self.finish(*self.operate(True, begin(self.kind, name, self.process_set)))
        except MismatchError as error:
            # On one host, all ranks are in step after it, and make the call again as one that the joined take part in.
            operations = self._named() if JOIN in str(error) and not passes_gradient else None
            if operations is None:
                raise
            communicator_of(group_of(self.process_set)).check()
            return self._begin(operations, f"call {next(operations.numbers)} after hvd.join").wait()

    def start(self, name: str | None) -> Handle:
        """Begin it."""
        if name is not None and (operations := self._named()) is not None:
            return self._begin(operations, name)
        return Handle(self.operate(False, begin(self.kind, name, self.process_set)), self.finish)

    def _named(self) -> NamedOperations | None:
        return operations_of(communicator_of(group_of(self.process_set)).ranks, _rebuilt)

    def _begin(self, operations: NamedOperations, name: str) -> Handle:
        devices = {tensor.device for tensor in self.tensors if tensor.is_cuda}
        streams = [torch.cuda.current_stream(device) for device in devices]

        def run(group: Group) -> Sequence[Any]:
            with contextlib.ExitStack() as stack, torch.no_grad():
                for stream in streams:  # the script's, so that what it queues there later comes after this
                    stack.enter_context(torch.cuda.stream(stream))
                return self.operate(True, group)

        work = operations.start(name, {"kind": self.kind, **self.call}, run)
        return Handle([work], lambda results: self.finish(*results))


def follow_names() -> NamedOperations | None:
    """Be ready to take part in named operations of all ranks as one that has joined."""
    return operations_of(current().communicator.ranks, _rebuilt)


def prepare_names() -> None:
    """Be ready for named operations of all ranks; collective, for `hvd.init`."""
    if (operations := follow_names()) is not None:
        operations.prepare()


def _rebuilt(call: dict[str, Any]) -> Callable[[Group], Sequence[Any]] | None:
    """The part in a call of other ranks of one that has joined: zeros; None where it has none."""
    if not call.get("joins"):
        return None
    op = next(op for op in Op if op.name == call["op"])
    zeros = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape, device in call["tensors"]]
    before, after = call["before"], call["after"]
    if call["kind"] == "grouped_allreduce":
        operation = grouped_reduction(zeros, op, before, after, None)
    else:
        operation = all_reduction(zeros[0], op, before, after, None)
    return lambda group: operation.operate(True, group)


def _described(tensors: Sequence[torch.Tensor], rows_differ: bool = False) -> list[Any]:
    """What of tensors must be equal on all ranks: dtype, shape and kind of device."""
    return [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)[rows_differ:], tensor.device.type]
        for tensor in tensors
    ]


def together(kind: str, operations: Sequence[Operation], process_set: Any) -> Operation:
    """Several operations as one, which gives the list of their results."""
    lengths: list[int] = []

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        parts = [one.operate(wait, group) for one in operations]
        lengths[:] = map(len, parts)
        return [work for part in parts for work in part]

    def finish(*results: Any) -> list[Any]:
        left = iter(results)
        return [one.finish(*islice(left, n)) for one, n in zip(operations, lengths, strict=True)]

    tensors = [tensor for one in operations for tensor in one.tensors]
    return Operation(kind, process_set, {"parts": [one.call for one in operations]}, tensors, operate, finish)


class _Reduction(NamedTuple):
    """What of Horovod's arguments says how to reduce a tensor.

    Attributes:
        op: to call; averages of integers are scaled sums.
        before, after: factors.
        is_whole: whether the tensor holds integers.
        given_after: the factor that the script has given.
    """

    op: Op
    before: float
    after: float
    is_whole: bool
    given_after: float

    @classmethod
    def of(cls, tensor: Any, op: Op, before: float, after: float, n: int) -> _Reduction:
        """That of a tensor, among n ranks."""
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"tensor={tensor!r:.60} is a {type(tensor).__name__}; pass torch.tensor(...) of it.")
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        reduction, scale = reduction_of(op, after, n, is_whole)
        return cls(reduction, before, scale, is_whole, after)

    def call(self, op: Op, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What must be equal on all ranks; "joins" is whether one that has joined can take part."""
        factors = {"before": float(self.before), "after": float(self.given_after)}  # which may be numpy's
        return {"op": op.name, **factors, "tensors": _described(tensors), "joins": op in (Average, Sum)}

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is reduced."""
        return torch.as_tensor(scaled(tensor, self.before, self.is_whole))

    def end(self, result: torch.Tensor) -> torch.Tensor:
        """What the script gets."""
        return torch.as_tensor(scaled(result, self.after, self.is_whole))


def all_reduction(tensor: torch.Tensor, op: Op, before: float, after: float, process_set: Any) -> Operation:
    """Into a new tensor; passes a gradient where the tensor needs one."""
    how = _Reduction.of(tensor, op, before, after, size(process_set))

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [differentiable.all_reduce(how.begin(tensor), how.op, group=group)]
        return [ring.all_reduce(how.begin(tensor.detach()), how.op, wait=wait, group=group)]

    return Operation("allreduce", process_set, how.call(op, [tensor]), [tensor], operate, how.end)


def all_reduction_in_place(tensor: torch.Tensor, op: Op, before: float, after: float, process_set: Any) -> Operation:
    """Into the tensor itself, without a gradient."""
    how = _Reduction.of(tensor, op, before, after, size(process_set))
    values = tensor.detach()

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        return [ring.all_reduce(how.begin(values), how.op, out=values, wait=wait, group=group)]

    def finish(result: torch.Tensor) -> torch.Tensor:
        if how.after != 1.0:
            values.copy_(how.end(result))
        return tensor

    return Operation("allreduce", process_set, how.call(op, [tensor]), [values], operate, finish)


def grouped_reduction(
    tensors: Sequence[torch.Tensor], op: Op, before: float, after: float, process_set: Any
) -> Operation:
    """One all-reduce for the tensors of a dtype and device, which are laid one behind the other."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    hows = [_Reduction.of(tensor, op, before, after, size(process_set)) for tensor in tensors]
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    shapes = zlib.crc32(repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]).encode())

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        if len({device for _, device in kinds}) > 1:
            raise ArgumentError("tensors of one group are on several devices; make a group for each.")
        with purpose(f"grouped_allreduce of {len(tensors)} tensors ({shapes:08x})"):
            return [
                part
                for indices in kinds.values()
                for part in all_reduction(
                    torch.cat([tensors[i].reshape(-1) for i in indices]), hows[indices[0]].op, before, 1.0, process_set
                ).operate(wait, group)
            ]

    def finish(*flat: torch.Tensor) -> list[torch.Tensor]:
        results: list[Any] = [None] * len(tensors)
        for values, indices in zip(flat, kinds.values(), strict=True):
            parts = torch.split(values, [tensors[i].numel() for i in indices])
            for i, part in zip(indices, parts, strict=True):
                own = part.clone() if part.requires_grad else part  # torch lets nobody change one of several views
                results[i] = hows[i].end(own.view(tensors[i].shape))
        return results

    call = hows[0].call(op, tensors) if hows else {}
    return Operation("grouped_allreduce", process_set, call, tensors, operate, finish)


def grouped_reduction_in_place(
    tensors: Sequence[torch.Tensor], op: Op, before: float, after: float, process_set: Any
) -> Operation:
    """Into the tensors themselves, without gradients."""
    operation = grouped_reduction([tensor.detach() for tensor in tensors], op, before, after, process_set)

    def finish(*flat: torch.Tensor) -> list[torch.Tensor]:
        for tensor, result in zip(tensors, operation.finish(*flat), strict=True):
            tensor.detach().copy_(result)
        return list(tensors)

    return operation._replace(finish=finish)


def gathering(tensor: torch.Tensor, process_set: Any) -> Operation:
    """Of the rows of all; passes a gradient where the tensor needs one, as the ones below do."""

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [differentiable.all_gather(_with_gradient_times(1 / size(process_set), tensor), group=group)]
        return [ring.all_gather(tensor.detach(), wait=wait, group=group)]

    call = {"tensors": _described([tensor], rows_differ=True)}
    return Operation("allgather", process_set, call, [tensor], operate, torch.as_tensor)


def broadcasting(tensor: torch.Tensor, root: int, in_place: bool, process_set: Any) -> Operation:
    """Of the tensor of the root, a rank of the job."""

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        values = tensor.detach()
        if in_place:
            return [ring.broadcast(values, root, out=values, wait=wait, group=group)]
        if wait and _needs_gradient(tensor):
            return [differentiable.broadcast(_with_gradient_times(1 / size(process_set), tensor), root, group=group)]
        return [ring.broadcast(values, root, wait=wait, group=group)]

    number = int(root) if hasattr(root, "__index__") else root  # it may be numpy's
    call = {"root": number, "tensors": _described([tensor])}
    return Operation(
        *("broadcast", process_set, call, [tensor.detach() if in_place else tensor], operate),
        lambda result: tensor if in_place else torch.as_tensor(result),
    )


def exchange(tensor: torch.Tensor, splits: Any, process_set: Any) -> Operation:
    """Its result is a pair: the rows that came, and how many from each rank."""
    if isinstance(splits, torch.Tensor):
        sent = splits.detach().cpu()
    else:
        rows = check_splits(splits, rows_of(tensor.shape, "alltoall"), size(process_set))
        sent = torch.tensor(rows, dtype=torch.int32, device="cpu")  # of the dtype that Horovod returns numbers in

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [
                differentiable.all_to_all(tensor, sent.tolist(), group=group),
                ring.all_to_all(sent, group=group),
            ]
        return [
            ring.all_to_all(tensor.detach(), sent.tolist(), wait=wait, group=group),
            ring.all_to_all(sent, wait=wait, group=group),
        ]

    call = {"tensors": _described([tensor], rows_differ=True)}
    return Operation("alltoall", process_set, call, [tensor], operate, lambda rows, received: (rows, received))


def scattering(tensor: torch.Tensor, op: Op, before: float, after: float, process_set: Any) -> Operation:
    """Of a sum or average, of which each rank gets some rows."""
    if op_of(None, op) not in (Average, Sum):
        raise ArgumentError(f"op={op!r} of reducescatter must be hvd.Average or hvd.Sum.")
    how = _Reduction.of(tensor, op, before, after, size(process_set))
    rows_of(tensor.shape, "reducescatter")

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        if wait and _needs_gradient(tensor):
            return [
                differentiable.reduce_scatter(
                    _with_gradient_times(size(process_set), how.begin(tensor)), how.op, group=group
                )
            ]
        return [ring.reduce_scatter(how.begin(tensor.detach()), how.op, wait=wait, group=group)]

    return Operation(
        "reducescatter", process_set, how.call(op, [tensor]) | {"joins": False}, [tensor], operate, how.end
    )


def gathering_of_entries(tensor: torch.Tensor, reduction: Op, process_set: Any) -> Operation:
    """Of a sparse tensor; its result is their sum or average, not coalesced."""
    entries = tensor.detach()

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        return [
            ring.all_gather(entries._indices().t().contiguous(), wait=wait, group=group),
            ring.all_gather(entries._values(), wait=wait, group=group),
        ]

    def finish(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        values = values / size(process_set) if reduction is Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape)

    call = {"op": reduction.name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
    return Operation("sparse_allreduce", process_set, call, [entries], operate, finish)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _with_gradient_times(factor: float, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose gradient is multiplied on its way back."""
    same = tensor.view_as(tensor)
    same.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return same
