"""Converts torch's arguments for the core: to flat memory, counts of elements, a reduction.

Copies are made only where a tensor's layout forces them. Everything here checks its arguments and raises
`ArgumentError` before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.torch.device import is_on_gpu, is_only_moved, is_supported, memory_of
from ring_plugins.torch.tensor_memory import check_plain

T = TypeVar("T")

#: torch's reductions, and ours.
OPERATIONS = [
    (dist.ReduceOp.SUM, Op.SUM),
    (dist.ReduceOp.AVG, Op.AVERAGE),
    (dist.ReduceOp.MIN, Op.MIN),
    (dist.ReduceOp.MAX, Op.MAX),
    (dist.ReduceOp.PRODUCT, Op.PRODUCT),
]


# Memory -------------------------------------------------------------------------------------------


def flat_source(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A 1-d contiguous tensor with the values of `tensor`: a view where possible, else a copy.

    Raises:
        ArgumentError: the tensor is not dense, or not on a CPU or CUDA GPU.
    """
    check_dense(tensor, name)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def flat_sources(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """A 1-d contiguous tensor with the values of several tensors of one type, in order; a view where possible."""
    check_same_type(tensors, name)
    parts = [flat_source(tensor, name) for tensor in tensors]
    joined = _joined(parts)
    return torch.cat(parts) if joined is None else joined


class Target:
    """Receives results in the tensors' own memory, or in a staging buffer that `store` copies into the tensors.

    Tensors that are adjacent in memory (the chunks of one big tensor) need no copy.

    Args:
        tensors: receive the results, in order; all of one type.
        name: for errors.
        keep: whether the operation reads the tensors' present values; if not they are only overwritten.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], name: str, keep: bool = False) -> None:
        check_same_type(tensors, name)
        self._tensors = [tensor.detach() for tensor in tensors]
        self.counts = [tensor.numel() for tensor in tensors]
        joined = _joined(self._tensors)
        self._staged = joined is None
        if joined is not None:
            self.flat = joined
        elif keep:
            self.flat = flat_sources(tensors, name)
        else:
            self.flat = torch.empty(sum(self.counts), dtype=tensors[0].dtype, device=tensors[0].device)

    @property
    def memory(self) -> Memory:
        """The memory that the core writes to."""
        return memory_of(self.flat)

    def store(self) -> None:
        """Copy the results into the tensors unless they are there already."""
        if self._staged:
            for tensor, part in zip(self._tensors, torch.split(self.flat, self.counts), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one flat view, if they are contiguous and adjacent in one storage."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.view(-1) if first.is_contiguous() and not (first.is_conj() or first.is_neg()) else None
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return None
        if tensor.storage_offset() != end or tensor.dtype != first.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Check that the tensor is dense, and in the memory of a CPU or a CUDA GPU.

    Raises:
        ArgumentError: it is not; the text names the class, the device or the layout, and what to pass.
    """
    check_plain(tensor, name)
    if not is_supported(tensor):
        raise ArgumentError(
            f"{name} is on device {tensor.device}; the 'ring' backend takes tensors of CPUs and of CUDA GPUs. "
            f"Pass {name}.cpu()."
        )


def check_same_type(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Check that a list holds dense tensors of exactly one type.

    Raises:
        ArgumentError: it does not; the text names the types.
    """
    for tensor in tensors:
        check_dense(tensor, name)
    if not tensors or any(tensor.dtype is not tensors[0].dtype for tensor in tensors):
        types = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors))
        raise ArgumentError(f"{name} has tensors of types {types}; all must have one type.")


# Lists and counts ---------------------------------------------------------------------------------


def operation(op: Any, tensor: torch.Tensor) -> Op:
    """The core's reduction for torch's.

    Raises:
        ArgumentError: the backend does not have it.
    """
    check_dense(tensor, "tensor")
    if is_only_moved(tensor.dtype) and not is_on_gpu(tensor):
        raise ArgumentError(f"tensors of {tensor.dtype} can be sent, but not reduced. Pass tensor.float().")
    known = next((ours for theirs, ours in OPERATIONS if op == theirs), None)
    if known is None:
        raise ArgumentError(
            f"op={getattr(op, 'op', op)} is not offered by the 'ring' backend; it has SUM, AVG, MIN, MAX and PRODUCT. "
            "For bitwise operations and PREMUL_SUM gather first, or use a gloo group: "
            "torch.distributed.new_group(backend='gloo')."
        )
    return known


def single(items: Sequence[T], name: str) -> T:
    """The only element of a list. torch's interface dates from a time when one process drove several devices.

    Raises:
        ArgumentError: the list does not have exactly one element.
    """
    if len(items) != 1:
        raise ArgumentError(f"{name} has {len(items)} elements; the 'ring' backend takes one tensor a rank.")
    return items[0]


def by_type(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors of each type together, in order."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    yield from groups.values()


def one_per_rank(tensors: Sequence[torch.Tensor], name: str, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """A list that has one tensor for each rank of the group.

    Raises:
        ArgumentError: it has another length.
    """
    size, rank = group.size(), group.rank()
    if len(tensors) != size:
        raise ArgumentError(
            f"{name} on rank {rank} has {len(tensors)} tensors; it must have one for each of {size} ranks."
        )
    return list(tensors)


def elements_by_rank(tensor: torch.Tensor, splits: Sequence[int], name: str, group: dist.ProcessGroup) -> list[int]:
    """Elements for each rank of the group.

    Args:
        tensor: whose rows (first dimension) are split.
        splits: rows for each rank; empty for equal numbers.
        name: for errors.
        group: the ranks.

    Raises:
        ArgumentError: the splits do not add up, or the rows do not divide.
    """
    size, rank = group.size(), group.rank()
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ArgumentError(
                f"{name} on rank {rank} has {rows} rows, which do not divide among {size} ranks; "
                f"give {name}_split_sizes."
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ArgumentError(
            f"{name}_split_sizes={list(splits)} on rank {rank} must be {size} numbers that add up to {rows} rows."
        )
    return [split * (tensor.numel() // rows if rows else 0) for split in splits]


def equal_parts(tensor: torch.Tensor, name: str, group: dist.ProcessGroup) -> list[int]:
    """Elements for each rank of the group, if all get equally many.

    Raises:
        ArgumentError: the elements do not divide.
    """
    size = group.size()
    if tensor.numel() % size:
        raise ArgumentError(f"{name} has {tensor.numel()} elements, which do not divide among {size} ranks.")
    return [tensor.numel() // size] * size


def all_at(root: int, count: int, group: dist.ProcessGroup) -> list[int]:
    """Elements for each rank of the group where the root has all of them."""
    return [count if rank == root else 0 for rank in range(group.size())]


# Collectives that move different data to different ranks ------------------------------------------
# Each checks its tensors at once and returns the rest of the work, a function of a communicator.

Exchange = Callable[[Communicator[Any]], None]


def all_gather(triples: Sequence[tuple[torch.Tensor, Target, list[int]]], group: dist.ProcessGroup) -> Exchange:
    """Gather every rank's tensors on every rank.

    Args:
        triples: this rank's flat tensor, the target of all ranks' tensors, and the number of elements of each rank.
        group: the ranks.

    Raises:
        ArgumentError: a target has no place for this rank's tensor.
    """
    rank = group.rank()
    for source, target, counts in triples:
        if counts[rank] != source.numel() or target.flat.dtype != source.dtype:
            raise ArgumentError(
                f"all_gather on rank {rank}: the input has {source.numel()} elements of {source.dtype}, the "
                f"output for rank {rank} has {counts[rank]} of {target.flat.dtype}."
            )

    def run(communicator: Communicator[Any]) -> None:
        for source, target, counts in triples:
            communicator.all_gather(memory_of(source), target.memory, counts)
            target.store()

    return run


def reduce_scatter(
    triples: Sequence[tuple[torch.Tensor, torch.Tensor, list[int]]], reduction: Any, group: dist.ProcessGroup
) -> Exchange:
    """Reduce tensors over all ranks and leave one part of each result on each rank.

    Args:
        triples: this rank's output, its whole flat input, and the number of elements that each rank gets.
        reduction: torch's.
        group: the ranks.

    Raises:
        ArgumentError: the counts do not fit the tensors.
    """
    rank, steps = group.rank(), []
    for output, full, counts in triples:
        if counts[rank] != output.numel() or sum(counts) != full.numel() or output.dtype != full.dtype:
            raise ArgumentError(
                f"reduce_scatter on rank {rank}: the input has {full.numel()} elements of {full.dtype}, the "
                f"outputs {sum(counts)}, of which this rank's {output.numel()} of {output.dtype}."
            )
        steps.append((Target([output], "output"), full, counts, operation(reduction, full)))

    def run(communicator: Communicator[Any]) -> None:
        for target, full, counts, op in steps:
            communicator.reduce_scatter(memory_of(full), target.memory, counts, op)
            target.store()

    return run


def all_to_all(
    description: str,
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup,
    send_counts: list[int] | None = None,
    receive_counts: list[int] | None = None,
) -> Exchange:
    """Send a part of the inputs to every rank and receive a part of the outputs from every rank.

    Args:
        description: for errors.
        outputs, inputs: in rank order; an empty list exchanges nothing in that direction.
        group: the ranks.
        send_counts, receive_counts: elements for each rank; by default one tensor a rank.

    Raises:
        ArgumentError: inputs and outputs have different types.
    """
    rank, nothing = group.rank(), [0] * group.size()
    any_tensor = (outputs or inputs)[0]
    dtype = any_tensor.dtype
    empty = torch.empty(0, dtype=dtype, device=any_tensor.device)
    source = flat_sources(inputs, "input") if inputs else empty
    target = Target(outputs, "output") if outputs else None
    if source.dtype != dtype:
        raise ArgumentError(f"{description} on rank {rank}: input is {source.dtype}, output is {dtype}.")
    sent = send_counts or ([tensor.numel() for tensor in inputs] if inputs else nothing)
    received = receive_counts or (target.counts if target else nothing)

    def run(communicator: Communicator[Any]) -> None:
        memory = target.memory if target else memory_of(empty)
        communicator.all_to_all(memory_of(source), sent, memory, received)
        if target:
            target.store()

    return run
