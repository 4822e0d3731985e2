"""DLPack, the exchange format that frameworks share: what a capsule says.

No framework is imported for it. The structures are those of dlpack.h, version 0.8.
"""

from __future__ import annotations

import ctypes
from typing import Any

#: Of dlpack.h's kinds of devices.
CPU, CUDA = 1, 2


class Tensor(ctypes.Structure):
    """dlpack.h's DLTensor."""

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
        """The element type's name, as the core has it where it knows the type."""
        return _CODES.get(self.code, f"type {self.code} with ") + ("" if self.code == _BOOL else str(self.bits))


_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_BOOL = 6

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def tensor_in(capsule: Any) -> Tensor:
    """What a capsule named "dltensor" holds; valid as long as the capsule lives."""
    return Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
