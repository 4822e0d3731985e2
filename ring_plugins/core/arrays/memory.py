"""Turns a caller's numpy array, torch tensor or number into plain host memory, without a copy.

A framework's tensor is read through DLPack, the in-memory format that frameworks share (dlpack.h, version 0.8), so that
this package imports no framework. numpy's own `from_dlpack` is not enough: it knows no bfloat16.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.arrays.dtypes import STORAGE, itemsize, name_of
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array

#: Bytes of a cache line, on which parts of arrays start: cores that write to one line slow each other down.
CACHE_LINE = 64


class HostMemory(NamedTuple):
    """Contiguous host memory and its element type.

    Attributes:
        array: 1-d C-contiguous numpy array over the memory (bfloat16 is stored as uint16).
        dtype: name of the element type.
        source: for `all_reduce`, an array of the same length that holds this rank's numbers, and is only read; `array`
            then takes the result only. By default the numbers are in `array` itself.
        shape: which must be equal on all ranks; empty where only the number of elements must be. A sum of transposed
            matrices would be wrong in silence.
    """

    array: Array
    dtype: str
    source: Array | None = None
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.array.nbytes


class DeviceMemory(NamedTuple):
    """Contiguous memory of a GPU and its element type.

    Attributes:
        pointer: its address on the device.
        size: number of elements.
        dtype: name of the element type.
        device: number of the GPU in this process.
        owner: an object that keeps the memory alive, such as the tensor it belongs to.
        item_size: bytes of an element; by default those of `dtype`, which may also be a type that the core does not
            know: its bytes can be moved, but not reduced.
    """

    pointer: int
    size: int
    dtype: str
    device: int
    owner: Any = None
    item_size: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * (self.item_size or itemsize(self.dtype))


Memory = HostMemory | DeviceMemory


class OnDevice(ArgumentError):
    """Not CPU memory; the caller must dispatch to a device backend."""


def host_array(x: Any, name: str = "x") -> tuple[Array, str]:
    """Return a numpy array over the memory of `x`, with its shape and strides, and the name of the element type.

    Args:
        x: numpy array, anything with DLPack on the CPU (torch, JAX, TensorFlow), number or sequence of numbers.
        name: what to call `x` in an error.

    Raises:
        OnDevice: `x` is not on the CPU.
        ArgumentError: `x` is not an array, or its type cannot be sent.
    """
    if isinstance(x, np.ndarray):
        if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):
            raise ArgumentError(
                f"{name} is a masked array, of which a result would have no mask. Pass {name}.filled(0), and the mask "
                "by a call of its own."
            )
        dtype = name_of(x.dtype)
        return (x.view(np.uint16) if dtype == "bfloat16" else x), dtype
    if hasattr(x, "new_empty"):  # a torch tensor
        if (plain := _plain_tensor(x)) is not None:
            return plain
        try:
            array = x.numpy()
        except (TypeError, RuntimeError):
            return _from_dlpack(x, name)
        if type(x) not in _own_memory:
            _check_own_memory(x, array, name)
        return array, name_of(array.dtype)
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x, name)
    try:
        array = np.asarray(x)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{name}={type(x).__name__} is not an array, a tensor or a number.") from error
    array = array.view()
    array.flags.writeable = False  # a result would not reach `x`
    return array, name_of(array.dtype)


def array_at(owner: Any, pointer: int, shape: tuple[int, ...], typestr: str, strides: Any = None) -> Array:
    """An array over memory of `owner`, which it keeps alive; `strides` in bytes, None for contiguous memory.

    A tensor's own `numpy()` has a side effect: torch never resizes its memory again, as FSDP does on CPUs.
    """
    return np.asarray(
        _Interface(
            owner, {"data": (pointer, False), "shape": shape, "typestr": typestr, "strides": strides, "version": 3}
        )
    )


class _Interface:
    """What numpy asks an owner of memory for; see numpy's documentation of the array interface."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self._owner, self.__array_interface__ = owner, interface


def _plain_tensor(x: Any) -> tuple[Array, str] | None:
    """As `host_array` for a torch tensor in host memory of its own, of a type that numpy knows; None for others."""
    try:
        if not _is_frameworks_own(x):
            x = x.detach()  # which makes a plain tensor of a parameter, but not of what wraps other tensors
        name = str(x.dtype).rpartition(".")[2]
        dtype = STORAGE.get(name)
        if dtype is None or not x.is_cpu or x.is_conj() or x.is_neg() or not _is_frameworks_own(x):
            return None
        pointer, shape, strides = x.data_ptr(), tuple(x.shape), x.stride()
        steps = None if x.is_contiguous() else tuple(stride * dtype.itemsize for stride in strides)
    except (AttributeError, RuntimeError):  # sparse, nested, of a class of somebody else's
        return None
    if not pointer:
        return (np.empty(shape, dtype), name) if 0 in shape else None
    return array_at(x, pointer, shape, dtype.str, steps), name


def _is_frameworks_own(x: Any) -> bool:
    return hasattr(sys.modules.get(type(x).__module__), "from_numpy")


#: Classes whose tensors have been found to have memory of their own.
_own_memory: set[type] = set()


def _check_own_memory(x: Any, array: Array, name: str) -> None:
    """Check that `array` lies where the tensor says that its numbers are.

    Some classes only wrap other tensors, a part of a distributed one or quantized numbers. They have a shape and no
    memory, so what is read as theirs is anything.

    Raises:
        ArgumentError: it does not.
    """
    try:
        is_own = bool(x.data_ptr() == array.__array_interface__["data"][0])
    except Exception:  # whatever the class raises
        is_own = False
    if not is_own and array.size:
        raise ArgumentError(f"{name} is a {type(x).__name__}, {_no_memory(x, name)}")
    if array.size:
        _own_memory.add(type(x))


def _no_memory(x: Any, name: str) -> str:
    """The end of a sentence on a tensor without memory of its own: why, and what to pass."""
    if hasattr(x, "to_local"):
        return (
            f"which has no memory of its own: pass {name}.to_local() for this rank's part, or {name}.full_tensor() for "
            "the whole."
        )
    return "which has no memory of its own: pass the plain tensor that it holds, or a dense copy of its numbers."


def host_memory(x: Any, name: str = "x", *, writable: bool = False) -> HostMemory:
    """Return the memory of `x`, which must be contiguous; nothing is copied.

    Args:
        x, name: as in `host_array`.
        writable: whether a result will be written to it.

    Raises:
        ArgumentError: as in `host_array`, or the memory is not contiguous, or read-only although `writable`.
    """
    array, dtype = host_array(x, name)
    if not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name} of shape {array.shape} is not contiguous; "
            f"pass {name}.contiguous() or numpy.ascontiguousarray({name})."
        )
    if writable and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only memory and cannot take the result; pass a writable copy.")
    return HostMemory(array if array.ndim == 1 else array.reshape(-1), dtype)


@lru_cache(maxsize=1024)
def slices(count: int, parts: int, itemsize: int) -> tuple[slice, ...]:
    """Cut `count` elements into `parts` ranges that start on cache lines; the last ones may be empty."""
    line = max(1, CACHE_LINE // itemsize)
    each = -(-count // parts // line) * line if count else 0
    each = max(each, line) if each * parts < count else each
    return tuple(slice(min(i * each, count), min((i + 1) * each, count)) for i in range(parts))


#: dlpack.h's DLDeviceType.
CPU, CUDA = 1, 2


class DLTensor(ctypes.Structure):
    """dlpack.h's DLTensor: a header that describes a tensor's memory."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        return int(self.data or 0) + int(self.byte_offset)

    @property
    def dtype(self) -> str:
        """Name of the element type; not a key of `STORAGE` if the core does not know the type."""
        return _CODES.get(self.code, f"type {self.code} with ") + ("" if self.code == _BOOL else str(self.bits))


_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_BOOL = 6

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def tensor_in(capsule: Any) -> DLTensor:
    """The header in a capsule named "dltensor"; valid as long as the capsule lives."""
    return DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))


def _from_dlpack(x: Any, name: str) -> tuple[Array, str]:
    if getattr(x, "requires_grad", False):
        x = x.detach()
    resolve = getattr(x, "resolve_conj", None)  # torch's lazily conjugated views have no DLPack form
    copied = False
    if resolve is not None:
        plain = resolve().resolve_neg()
        copied = plain is not x and plain.data_ptr() != x.data_ptr()
        x = plain
    try:
        device = x.__dlpack_device__()
        capsule = x.__dlpack__() if int(device[0]) == CPU else None
    except Exception as error:
        layout = str(getattr(x, "layout", "")).rpartition(".")[2]
        remedy = f" Pass {name}.to_dense()." if layout not in ("", "strided") and hasattr(x, "to_dense") else ""
        raise ArgumentError(f"{name} ({type(x).__name__}) cannot be read as memory: {error}.{remedy}") from error
    if capsule is None:
        raise OnDevice(f"{name} is on device {getattr(x, 'device', device)}; this operation takes CPU memory.")
    tensor = tensor_in(capsule)
    dtype = tensor.dtype
    if dtype not in STORAGE or tensor.lanes != 1:
        raise ArgumentError(f"{name} has dtype={dtype}, which cannot be sent; use one of {', '.join(sorted(STORAGE))}.")
    storage = STORAGE[dtype]
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if 0 in shape:
        return np.empty(shape, storage), dtype
    if not tensor.pointer:
        raise ArgumentError(f"{name} is a {type(x).__name__}, {_no_memory(x, name)}")
    strides = tuple(tensor.strides[i] * storage.itemsize for i in range(tensor.ndim)) if tensor.strides else None
    array = array_at((x, capsule), tensor.pointer, shape, storage.str, strides)
    # A result written to a copy would be lost; and frameworks whose arrays never change let them share memory.
    array.flags.writeable = not copied and hasattr(x, "new_empty")
    return array, dtype
