"""What torch hands to a process group, checked and in the core's terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ring_plugins.core.errors import ArgumentError
from ring_plugins.core.operations import Op
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
