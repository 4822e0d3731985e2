"""How a gradient lies in memory: whether without gaps, and whether other tensors share it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import HostMemory, Memory, array_at
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.torch.device import memory_of


def are_pairs(items: Iterable[object], kind: type) -> bool:
    """Whether all items are a name and an object of a kind."""
    return all(
        isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], kind)
        for item in items
    )


def check_plain(tensor: torch.Tensor, name: str, is_written: bool = False) -> None:
    """Check that the tensor's numbers are in memory of its own.

    Args:
        tensor: which.
        name: what to call it in an error.
        is_written: whether it also has to take results.

    Raises:
        ArgumentError: they are not; the text says what to pass.
    """
    text = not_plain(tensor, name)
    if not text and is_written and (tensor.is_conj() or tensor.is_neg()):
        text = f"is conjugated or negated lazily: use {name}.resolve_conj().resolve_neg()"
    if text:
        raise ArgumentError(f"{name} {text}. ring_plugins takes dense tensors.")


def not_plain(tensor: torch.Tensor, name: str) -> str:
    """What a tensor is that has no memory of its own, and what to pass, as part of a sentence; "" if it has."""
    if tensor.is_nested:
        return f"is nested: pass torch.nested.to_padded_tensor({name}, 0)"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}: pass {name}.to_dense()"
    if tensor.is_quantized:
        return f"is quantized: pass {name}.dequantize()"
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not nn.Parameter:
        if hasattr(tensor, "to_local"):  # a DTensor, as FSDP2's parameters are
            return (
                f"is a {kind.__name__}, of which each rank may hold another part: pass {name}.to_local() for this "
                f"rank's part, or {name}.full_tensor() for the whole. If it is a parameter, what distributed the model "
                "(FSDP2, tensor parallelism) reduces its gradient, too"
            )
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            more = f", or {name}.dequantize()" if kind.dequantize is not torch.Tensor.dequantize else ""
            return f"is a {kind.__name__}, a class that wraps other tensors: pass the plain tensor that it holds{more}"
        if is_lazy(tensor):
            return "is not initialized yet: run a forward of the lazy module before"
    return f"holds zeros that have no memory: pass {name}.clone()" if tensor._is_zerotensor() else ""


def gradient_dtype(parameter: torch.Tensor, name: str = "a parameter") -> torch.dtype:
    """The element type of the parameter's gradient: its own, unless `grad_dtype` (torch 2.10) says otherwise.

    Raises:
        ArgumentError: `grad_dtype` is None, which allows any.
    """
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    if dtype is None:
        raise ArgumentError(
            f"grad_dtype of {name} is None, so its gradient may have a type that differs among ranks. Set one, such as "
            "torch.float32, before averaging is set up."
        )
    return dtype


def memory_like(parameter: nn.Parameter) -> torch.Tensor:
    """Uninitialized memory for a gradient."""
    dtype = gradient_dtype(parameter)
    if is_dense(parameter):
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device=parameter.device)
    return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)


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
        typestr = STORAGE[dtype].str
        return HostMemory(array_at(gradient, gradient.data_ptr(), (gradient.numel(),), typestr), dtype)
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


def view_of(bucket: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """The gradient's place in a bucket: no view as autograd knows them, which scripts could not `detach_()`."""
    strides = parameter.stride() if parameter.numel() and is_dense(parameter) else _contiguous_strides(parameter)
    empty = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
    return empty.set_(bucket.untyped_storage(), bucket.storage_offset() + offset, parameter.shape, strides)


def laid_out(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in the layout of all ranks and in memory that nothing shares; a copy if autograd's is neither.

    Its layout is that of its parameter, or without gaps if that has some.
    """
    strides = gradient.stride()
    has_layout = (strides == parameter.stride() and gradient.is_contiguous()) or strides == (  # the usual case first
        parameter.stride() if is_dense(parameter) else _contiguous_strides(parameter)
    )
    if not has_layout or gradient.requires_grad or gradient.is_conj() or gradient.is_neg() or is_shared(gradient):
        with torch.no_grad():
            parameter.grad = memory_like(parameter).copy_(gradient)
        return parameter.grad
    return gradient


def _contiguous_strides(parameter: nn.Parameter) -> tuple[int, ...]:
    return torch.empty(parameter.shape, device="meta").stride()
