"""What Horovod's operations on tensors do, whether the script waits for them or not.

Gradients have the factors of Horovod 0.28, for which its scripts chose their learning rates. With n ranks, those of
`allgather` and `broadcast` are 1/n times, and those of `reducescatter` n times the gradients of `ring_plugins.torch`,
which are those of the sum of all ranks' losses.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import ring_plugins as ring
import ring_plugins.torch as differentiable
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.collectives.validation import check_splits, rows_of
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.world import current
from ring_plugins.horovod.basics import Average, Sum, begin, op_of, reduction_of, scaled, size
from ring_plugins.horovod.common.process_sets import group_of
from ring_plugins.horovod.named import NamedOperations, in_order_or_by_name, operations_of


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
        if any(map(_needs_gradient, self.tensors)):  # which passes where it has been computed
            return self.finish(*self.operate(True, begin(self.kind, name, self.process_set)))
        return in_order_or_by_name(
            name,
            self.process_set,
            _rebuilt,
            lambda: self.finish(*self.operate(True, begin(self.kind, name, self.process_set))),
            lambda operations, name: self._begin(operations, name).wait(),
        )

    def start(self, name: str | None) -> Handle:
        """Begin it."""
        if name is not None and (operations := self._named()) is not None:
            return self._begin(operations, name)
        return Handle(self.operate(False, begin(self.kind, name, self.process_set)), self.finish)

    def _named(self) -> NamedOperations | None:
        return operations_of(communicator_of(group_of(self.process_set)).ranks, _rebuilt)

    def _begin(self, operations: NamedOperations, name: str) -> Handle:
        devices = {tensor.device for tensor in self.tensors if tensor.is_cuda}
        _zeros_on[:] = [*devices] or _zeros_on
        streams = [torch.cuda.current_stream(device) for device in devices]

        def run(group: Group) -> Sequence[Any]:
            with contextlib.ExitStack() as stack, torch.no_grad():
                for stream in streams:  # the script's, so that what it queues there later comes after this
                    stack.enter_context(torch.cuda.stream(stream))
                return self.operate(True, group)

        work = operations.start(name, {"kind": self.kind, **self.call}, run)
        return Handle([work], lambda results: self.finish(*results))


#: The GPU where a rank that has joined has its zeros for operations on GPUs.
_zeros_on: list[torch.device] = []


def follow_names(gpu: int = -1) -> NamedOperations | None:
    """Be ready to take part in named operations of all ranks as one that has joined.

    Args:
        gpu: where to have zeros for those on GPUs; by default that of the last one, or the current GPU.
    """
    if gpu >= 0:
        _zeros_on[:] = [torch.device("cuda", gpu)]
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
    zeros = [
        torch.zeros(shape, dtype=getattr(torch, dtype), device=_zeros_on[0] if _zeros_on and on == "cuda" else on)
        for dtype, shape, on in call["tensors"]
    ]
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
    """One all-reduce for the tensors of a dtype, which are laid one behind the other."""
    hows = [_Reduction.of(tensor, op, before, after, size(process_set)) for tensor in tensors]
    kinds = _by_dtype(tensors)

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        with _one_group("grouped_allreduce", tensors):
            return [
                part
                for indices in kinds
                for part in all_reduction(
                    torch.cat([tensors[i].reshape(-1) for i in indices]), hows[indices[0]].op, before, 1.0, process_set
                ).operate(wait, group)
            ]

    def finish(*flat: torch.Tensor) -> list[torch.Tensor]:
        return [how.end(own) for how, own in zip(hows, _taken_apart(flat, kinds, tensors), strict=True)]

    call = hows[0].call(op, tensors) if hows else {}
    return Operation("grouped_allreduce", process_set, call, tensors, operate, finish)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of the tensors of each dtype."""
    kinds: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype, []).append(i)
    return list(kinds.values())


@contextlib.contextmanager
def _one_group(kind: str, tensors: Sequence[torch.Tensor], rows_differ: bool = False) -> Iterator[None]:
    """Let the ranks compare dtypes and shapes of the tensors in the collectives of this block.

    Raises:
        ArgumentError: the tensors are on several devices.
    """
    if len({tensor.device for tensor in tensors}) > 1:
        raise ArgumentError("tensors of one group are on several devices; make a group for each.")
    shapes = zlib.crc32(repr([(tuple(one.shape)[rows_differ:], str(one.dtype)) for one in tensors]).encode())
    with purpose(f"{kind} of {len(tensors)} tensors ({shapes:08x})"):
        yield


def _taken_apart(
    flat: Sequence[torch.Tensor], kinds: Sequence[Sequence[int]], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What lies one behind the other, by `_by_dtype`, in the shapes of these tensors."""
    results = list(tensors)
    for values, indices in zip(flat, kinds, strict=True):
        counts = [tensors[i].numel() for i in indices]
        for i, part in zip(indices, torch.split(values[: sum(counts)], counts), strict=True):
            own = part.clone() if part.requires_grad else part  # torch lets nobody change one of several views
            results[i] = own.view(tensors[i].shape)
    return results


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


def grouped_gathering(tensors: Sequence[torch.Tensor], process_set: Any) -> Operation:
    """One all-gather for the tensors of a dtype, and one that tells how many rows each rank has of which tensor."""
    kinds = _by_dtype(tensors)

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        with _one_group("grouped_allgather", tensors, rows_differ=True):
            rows = torch.tensor([len(one) if one.dim() else 1 for one in tensors], dtype=torch.int64, device="cpu")
            return [
                ring.all_gather(rows, wait=wait, group=group),
                *(
                    part
                    for indices in kinds
                    for part in gathering(torch.cat([tensors[i].reshape(-1) for i in indices]), process_set).operate(
                        wait, group
                    )
                ),
            ]

    def finish(rows: torch.Tensor, *flat: torch.Tensor) -> list[torch.Tensor]:
        by_rank = rows.view(size(process_set), len(tensors)).tolist()
        results = list(tensors)
        for values, indices in zip(flat, kinds, strict=True):
            shapes = [(of_rank[i], *tensors[i].shape[1:]) for of_rank in by_rank for i in indices]
            parts = torch.split(values, [math.prod(shape) for shape in shapes])
            for place, i in enumerate(indices):
                which = range(place, len(parts), len(indices))
                results[i] = torch.cat([parts[number].view(shapes[number]) for number in which])
        return results

    call = {"tensors": _described(tensors, rows_differ=True)}
    return Operation("grouped_allgather", process_set, call, tensors, operate, finish)


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
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
    return Operation(
        "alltoall", process_set, call, [tensor], operate, lambda rows, received: (rows, received.to(device))
    )


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


def grouped_scattering(
    tensors: Sequence[torch.Tensor], op: Op, before: float, after: float, process_set: Any
) -> Operation:
    """One reduce-scatter for the tensors of a dtype: of rows of equal length, each of which holds what a rank gets."""
    kinds, ranks = _by_dtype(tensors), size(process_set)
    own = communicator_of(group_of(process_set)).rank
    hows = [_Reduction.of(tensor, op, before, after, ranks) for tensor in tensors]
    for tensor in tensors:
        scattering(tensor, op, before, after, process_set)  # raises what it would

    def row(indices: Sequence[int], rank: int) -> torch.Tensor:
        return torch.cat([torch.tensor_split(tensors[i], ranks)[rank].reshape(-1) for i in indices])

    def operate(wait: bool, group: Group | None) -> Sequence[Any]:
        with _one_group("grouped_reducescatter", tensors):
            found: list[Any] = []
            for indices in kinds:
                rows = [row(indices, rank) for rank in range(ranks)]  # the first is the longest
                packed = torch.stack([torch.nn.functional.pad(one, (0, len(rows[0]) - len(one))) for one in rows])
                found += scattering(packed, hows[indices[0]].op, before, 1.0, process_set).operate(wait, group)
            return found

    def finish(*flat: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.tensor_split(tensor.detach(), ranks)[own] for tensor in tensors]
        found = _taken_apart([values.view(-1) for values in flat], kinds, parts)
        return [how.end(one) for how, one in zip(hows, found, strict=True)]

    call = (hows[0].call(op, tensors) if hows else {}) | {"joins": False}
    return Operation("grouped_reducescatter", process_set, call, tensors, operate, finish)


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
