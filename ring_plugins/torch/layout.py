"""How gradients lie in memory: the same on all ranks, without gaps, and as autograd likes it."""

from __future__ import annotations

import torch
from torch import nn

from ring_plugins.core.arrays.memory import Memory
from ring_plugins.torch.device import memory_of


def view_of(whole: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """The gradient's place in the bucket, with the parameter's strides where they leave no gaps.

    Autograd accumulates fastest into a gradient laid out like its parameter (channels_last, say).
    """
    flat = whole[offset : offset + parameter.numel()]
    if parameter.numel() and _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def memory_like(parameter: nn.Parameter) -> torch.Tensor:
    """Memory for a gradient, laid out as on every other rank."""
    if _is_dense(parameter):
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def laid_out(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the layout that all ranks use and in memory of its own, copied if autograd made it otherwise."""
    expected = parameter.stride() if _is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
    lazy = gradient.is_conj() or gradient.is_neg()
    if gradient.stride() != expected or gradient.requires_grad or lazy or _is_shared(gradient):
        with torch.no_grad():
            parameter.grad = memory_like(parameter).copy_(gradient)
        return parameter.grad
    return gradient


def dense_memory(tensor: torch.Tensor) -> Memory:
    """The memory of a dense tensor, in the order in which it lies there."""
    return memory_of(tensor.detach().as_strided((tensor.numel(),), (1,)))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_shared(gradient: torch.Tensor) -> bool:
    """Whether other tensors lie in the gradient's memory and would see it change.

    For `p.view(-1) + f(x)` autograd hands `p` a view of the gradient that the backward of `f` is yet to read.
    """
    storage = gradient.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses > 2  # the gradient itself, and `storage`
