"""What torch hands to a process group, checked and in the core's terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch.tensors import check_dense

T = TypeVar("T")

_OPERATIONS = [
    (dist.ReduceOp.SUM, Op.SUM),
    (dist.ReduceOp.AVG, Op.AVERAGE),
    (dist.ReduceOp.MIN, Op.MIN),
    (dist.ReduceOp.MAX, Op.MAX),
    (dist.ReduceOp.PRODUCT, Op.PRODUCT),
]


def operation(op: Any, tensor: torch.Tensor) -> Op:
    """torch's reduction as the core's.

    Raises:
        ArgumentError: one that this backend does not have, for the type or at all.
    """
    check_dense(tensor, "tensor")
    known = next((ours for theirs, ours in _OPERATIONS if op == theirs), None)
    if known is None:
        raise ArgumentError(
            f"op={getattr(op, 'op', op)} is not offered by the 'ring' backend; it has SUM, AVG, MIN, MAX and PRODUCT. "
            "For bitwise operations and PREMUL_SUM gather first, or use a gloo group: "
            "torch.distributed.new_group(backend='gloo')."
        )
    return known


def single(items: Sequence[T], name: str) -> T:
    """The only element of a list; torch's interface has lists from the time of several devices a process.

    Raises:
        ArgumentError: there is none, or more than one.
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
    """A list with a tensor for each rank of the group.

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
    """Elements for each rank of the group, from rows for each rank; without splits, equal numbers.

    Raises:
        ArgumentError: the rows do not add up, or do not divide.
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


def all_at(root: int, count: int, group: dist.ProcessGroup) -> list[int]:
    """Elements for each rank of the group where the root has all of them."""
    return [count if rank == root else 0 for rank in range(group.size())]
