"""How a gradient lies in memory: whether without gaps, and whether other tensors share it."""

from __future__ import annotations

import torch
from torch import nn

from ring_plugins.core.arrays.memory import HostMemory, Memory
from ring_plugins.torch.device import memory_of


def memory_like(parameter: nn.Parameter) -> torch.Tensor:
    """Uninitialized memory for a gradient."""
    if is_dense(parameter):
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def dense_memory(tensor: torch.Tensor) -> Memory:
    """The memory of a dense tensor, in the order in which its elements lie there."""
    return memory_of(tensor.detach().as_strided((tensor.numel(),), (1,)))


def host_memory_of(gradient: torch.Tensor, dtype: str) -> Memory:
    """As `dense_memory`, faster for what most gradients in host memory are.

    Args:
        gradient: a dense tensor that requires no gradient.
        dtype: name of its element type, which numpy knows too.
    """
    if gradient.is_contiguous():
        return HostMemory(gradient.numpy().reshape(-1), dtype)
    return dense_memory(gradient)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_shared(gradient: torch.Tensor) -> bool:
    """Whether other tensors lie in the gradient's memory and would see it change.

    For `p.view(-1) + f(x)` autograd hands `p` a view of the gradient that the backward of `f` has yet to read.
    """
    storage = gradient.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses > 2  # the gradient itself, and `storage`
