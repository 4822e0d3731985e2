"""Gradients that a script keeps, or made itself, while the memory that they lie in serves another pass.

**Problem.** A script may keep `p.grad`, or a view or an array of it, and clear `p.grad`: it expects the values to stay,
as they do in one process. Small gradients lie in a bucket, which the next pass fills. Or the script assigns to `p.grad`
a tensor that it reads later, as a part of one long buffer: it expects sums and averages there.

**Idea.** Before a bucket is filled, counts of references tell whether anybody else has its memory. If so, the pass runs
in it all the same, since where ranks share memory they reduce in each other's. Afterwards the averages get memory of
their own, and the old values come back. Nobody reads them in between, while backward runs. A gradient that autograd has
added to, and that others refer to, gets its average when the pass is over, and is `p.grad` again. A gradient that is
`p.grad` still is accumulated and averaged in place, as in one process.

torch counts the tensors that share memory, numpy arrays and DLPack hold one of them, and Python counts the references
to tensors. Both counts together take 9 µs for 400 gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from ring_plugins.core.gradients.fusion import Bucket
from ring_plugins.torch.tensor_memory import is_shared, memory_like


class HeldGradients:
    """What others hold of the gradients of some buckets, in one pass.

    Args:
        buckets: of the plan.
        tensors: by bucket its memory, in which nobody else has a tensor yet.
        parameters: by entry.
        views: by entry the gradient's place in its bucket, None for those that are reduced in place.

    Attributes:
        values: by bucket and entry, what somebody holds.
        staying: by entry, what gets the average and is `p.grad` again.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        tensors: Sequence[torch.Tensor],
        parameters: Sequence[nn.Parameter],
        views: Sequence[torch.Tensor | None],
    ) -> None:
        self._buckets, self._tensors, self._parameters, self._views = buckets, tensors, parameters, views
        self._uses = list(map(_uses_of, tensors))
        self.values: dict[int, dict[int, torch.Tensor]] = {}
        self.staying: dict[int, torch.Tensor] = {}

    def keep(self, bucket: Bucket, entries: Sequence[int], views: Sequence[torch.Tensor], references: int) -> None:
        """Before a bucket is filled, copy what somebody else holds of it.

        Args:
            bucket: which.
            entries, views: the gradients that live in it.
            references: to the views, if nobody else has any.
        """
        if _uses_of(self._tensors[bucket.index]) == self._uses[bucket.index]:
            if sum(map(sys.getrefcount, views)) == references:
                return
            away = [view for i, view in zip(entries, views, strict=True) if self._parameters[i].grad is not view]
            if sum(map(sys.getrefcount, away)) == (references // len(views) + 1) * len(away):
                return
        self.values[bucket.index] = {
            i: view.clone() for i, view in zip(entries, views, strict=True) if self._parameters[i].grad is not view
        }

    def note(self, entries: Sequence[int], gradients: list[torch.Tensor]) -> None:
        """Note which gradients stay `p.grad` though they are about to be moved into a bucket.

        Args:
            entries: whose.
            gradients: theirs; nothing but this list and the parameters refers to them.
        """
        if not gradients or gradients[0].is_inference():
            return
        references = list(map(sys.getrefcount, gradients))
        # Only two are asked for their versions: that of all takes as long as moving them.
        is_new = not gradients[0]._version + gradients[-1]._version
        if is_new and sum(references) == _REFERENCES_OF_GRADIENT * len(gradients):
            return
        for i, gradient, count in zip(entries, gradients, references, strict=True):
            if gradient._version and (count > _REFERENCES_OF_GRADIENT or is_shared(gradient)):
                self.staying[i] = gradient

    def note_direct(self, entry: int, gradient: torch.Tensor) -> None:
        """Note the same of a large gradient, of which a copy is reduced."""
        if gradient._version and is_shared(gradient):
            self.staying[entry] = gradient

    @torch.no_grad()
    def give_back(self, absent: dict[int, torch.Tensor]) -> None:
        """After a pass, give everyone the values that they expect.

        Args:
            absent: averages of gradients that this rank does not have; those in memory that is given back are moved.
        """
        for values in self.values.values():
            for i, value in values.items():
                view, parameter = self._views[i], self._parameters[i]
                assert view is not None
                if i in absent:
                    absent[i] = memory_like(parameter).copy_(view)
                elif parameter.grad is view:
                    parameter.grad = memory_like(parameter).copy_(view)
                view.copy_(value)
        for i, gradient in self.staying.items():
            if (average := self._parameters[i].grad) is not None:
                self._parameters[i].grad = gradient.copy_(average)
        self.values, self.staying = {}, {}


def references_of(count: int) -> int:
    """The references to so many tensors that two lists hold, as `HeldGradients` counts them."""
    return _REFERENCES_OF_VIEW * count


def _uses_of(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory, itself and a temporary reference included."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def _counted_references() -> tuple[int, int]:
    """What `map(sys.getrefcount, ...)` says of a view that two lists hold, and of a gradient that one does."""
    parameter, views = nn.Parameter(torch.empty(0)), [torch.empty(0)]
    others = views.copy()
    of_view = sum(map(sys.getrefcount, others))
    parameter.grad = torch.empty(0)
    gradients = [parameter.grad]
    return of_view, sum(map(sys.getrefcount, gradients))


_REFERENCES_OF_VIEW, _REFERENCES_OF_GRADIENT = _counted_references()
