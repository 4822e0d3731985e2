"""Where ranks may be lost: what autograd still has of a pass, so that the pass can be repeated without a copy.

A step's averages are taken again when a rank dies in the middle of them (core/gradients/repetition), from the gradients
themselves. Autograd has made a new tensor for each, and it is intact, if nothing writes to it:

- Tensors that were moved into a bucket are held until the pass is over.
- The average of a large gradient, which is not moved, is written to other memory, and that becomes `p.grad`. The tensor
  itself is the memory for the next step's average, so two of them take turns.

A tensor to which something was written after autograd made it (`_version`) is left to be copied. It may lie in a bucket
or belong to somebody who expects it to stay `p.grad`, as after `zero_grad(set_to_none=False)`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import nn

from ring_plugins.core.arrays.memory import HostMemory, Memory
from ring_plugins.core.gradients.fusion import Bucket
from ring_plugins.core.gradients.repetition import SavedInputs
from ring_plugins.torch.tensor_memory import dense_memory, is_shared, memory_like

_version_of = operator.attrgetter("_version")


class SavedGradients:
    """The gradients of some buckets that need no copy.

    Args:
        kept: of the buckets' reducer.
    """

    def __init__(self, kept: SavedInputs) -> None:
        self._kept = kept
        self._spare: dict[int, torch.Tensor] = {}  # by entry, memory for its average

    def moved(self, bucket: Bucket, gradients: list[torch.Tensor], views: list[torch.Tensor]) -> None:
        """Hold what was just moved into a bucket, unless other gradients lie in it.

        Args:
            bucket: which.
            gradients: autograd's tensors.
            views: their places in the bucket.
        """
        if gradients and len(gradients) == len(bucket.entries) - len(bucket.direct) and _are_new(gradients):
            self._kept.refill_by(bucket.index, partial(_move, views, gradients))

    def memories(
        self,
        bucket: Bucket,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[nn.Parameter],
        but: Collection[int],
        memory_of: Callable[[torch.Tensor], Memory] = dense_memory,
    ) -> list[HostMemory]:
        """The memory of direct gradients, whose averages go to other memory where that is possible.

        Args:
            bucket: which.
            gradients: the direct ones.
            parameters: by entry.
            but: entries whose averages must stay where the gradients are.
            memory_of: that of a dense tensor, whose strides are its parameter's.
        """
        found = []
        for i, gradient in zip(bucket.direct, gradients, strict=True):
            memory, spare = memory_of(gradient), self._spare.pop(i, None)
            assert isinstance(memory, HostMemory)
            if i not in but and _are_new([gradient]):
                average = memory_like(parameters[i]) if spare is None or _is_used(spare) else spare
                self._spare[i], parameters[i].grad = gradient, average
                target = memory_of(average)
                assert isinstance(target, HostMemory)
                memory = target._replace(source=memory.array)
            found.append(memory)
        return found


def _are_new(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether nothing has written to these since autograd made them."""
    try:
        return not any(map(_version_of, gradients))
    except RuntimeError:  # of inference mode, which counts no versions
        return False


def _move(views: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(views, gradients)


def _is_used(spare: torch.Tensor) -> bool:
    """Whether somebody else refers to a tensor that a local variable of the caller holds."""
    return sys.getrefcount(spare) > _REFERENCES or is_shared(spare)


def _references() -> int:
    """What `sys.getrefcount` says in `_is_used` of an object that only a local variable of the caller holds."""
    one = object()

    def count(spare: object) -> int:
        return sys.getrefcount(spare)

    return count(one)


_REFERENCES = _references()
