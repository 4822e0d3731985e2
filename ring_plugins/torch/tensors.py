"""torch tensors as the plain memory that the core works on, with copies only where torch's layout forces them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch.device import is_supported, memory_of


def flat_source(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A 1-d contiguous tensor with the values of `tensor`: a view of it, or a copy where there can be no view.

    Raises:
        ArgumentError: not a dense tensor in memory of ours.
    """
    check_dense(tensor, name)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


class Target:
    """Where a result goes: the tensor's own memory, or memory of ours that is copied into it at the end.

    Args:
        tensor: receives the result.
        name: for errors.
        keep: whether the tensor's present values take part (in place) or are only overwritten.
    """

    def __init__(self, tensor: torch.Tensor, name: str, keep: bool = False) -> None:
        self._tensor = tensor.detach()
        self.flat = flat_source(tensor, name)
        self._staged = tensor.numel() > 0 and self.flat.data_ptr() != tensor.data_ptr()
        if self._staged and not keep:
            self.flat = torch.empty_like(self.flat)

    @property
    def memory(self) -> Memory:
        """What the core writes to."""
        return memory_of(self.flat)

    def store(self) -> None:
        """Bring the result into the tensor, if it is not there already."""
        if self._staged:
            self._tensor.copy_(self.flat.view(self._tensor.shape))


class Targets:
    """One flat piece of memory for the results of several tensors, in order.

    Tensors that already lie one behind the other in memory (the chunks of one big tensor) need no copy.

    Args:
        tensors: receive the results; all of one type.
        name: for errors.
        keep: whether the tensors' present values take part (in place) or are only overwritten.
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
            self.flat = torch.cat([flat_source(tensor, name) for tensor in tensors])
        else:
            self.flat = torch.empty(sum(self.counts), dtype=tensors[0].dtype, device=tensors[0].device)

    @property
    def memory(self) -> Memory:
        """What the core writes to."""
        return memory_of(self.flat)

    def store(self) -> None:
        """Bring the results into the tensors, if they are not there already."""
        if self._staged:
            for tensor, part in zip(self._tensors, torch.split(self.flat, self.counts), strict=True):
                tensor.copy_(part.view(tensor.shape))


class EqualParts(Target):
    """One tensor as the target of a collective that fills it in equal parts, one a rank."""

    def __init__(self, tensor: torch.Tensor, parts: int, name: str) -> None:
        super().__init__(tensor, name)
        if tensor.numel() % parts:
            raise ArgumentError(f"{name} has {tensor.numel()} elements, which do not divide among {parts} ranks.")
        self.counts = [tensor.numel() // parts] * parts


def flat_sources(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """The values of several tensors of one type, one behind the other."""
    check_same_type(tensors, name)
    parts = [flat_source(tensor, name) for tensor in tensors]
    joined = _joined(parts)
    return torch.cat(parts) if joined is None else joined


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Refuse what is not a dense tensor in the memory of a CPU or a CUDA GPU.

    Raises:
        ArgumentError: naming the device or the layout.
    """
    if not is_supported(tensor):
        raise ArgumentError(
            f"{name} is on device {tensor.device}; the 'ring' backend takes tensors of CPUs and of CUDA GPUs. "
            f"Pass {name}.cpu()."
        )
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"{name} has layout {tensor.layout}; the 'ring' backend takes dense tensors. Pass {name}.to_dense()."
        )


def check_same_type(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Refuse a list of tensors that is empty or has several types.

    Raises:
        ArgumentError: naming the types.
    """
    for tensor in tensors:
        check_dense(tensor, name)
    types = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors))
    if len(types) != 1:
        raise ArgumentError(f"{name} has tensors of types {types}; there must be exactly one type.")


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one flat view, if they are contiguous and lie one behind the other in one storage."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return None
        if tensor.storage_offset() != end or tensor.dtype != first.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
