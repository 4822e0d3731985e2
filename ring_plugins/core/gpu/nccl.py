"""The calls of NCCL that we use, as nccl.h declares them, and the error text for those that fail."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, DeviceError
from ring_plugins.core.gpu.c_functions import Call, Table

SUCCESS, IN_PROGRESS = 0, 7
#: The oldest release with nonblocking communicators, without which a start that hangs could not be given up.
OLDEST = 21400
_FLOAT8_SINCE = 22400


class UniqueId(ctypes.Structure):
    """What the ranks of a new communicator must have in common; made by one of them."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """The part of ncclConfig_t that release 2.14 had. NCCL fills in what later releases added, going by `version`."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]

    @classmethod
    def nonblocking(cls) -> Config:
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, OLDEST, 0)


_STREAM = _COMMUNICATOR = _MEMORY = c_void_p
_TYPE = _REDUCTION = _RANK = c_int

CALLS: dict[str, Call] = {
    "ncclGetVersion": Call(0, (POINTER(c_int),)),
    "ncclGetUniqueId": Call(0, (POINTER(UniqueId),)),
    "ncclGroupStart": Call(0, ()),
    "ncclGroupEnd": Call(0, ()),
    "ncclCommInitRankConfig": Call(21400, (POINTER(c_void_p), c_int, UniqueId, _RANK, POINTER(Config))),
    "ncclCommGetAsyncError": Call(20400, (_COMMUNICATOR, POINTER(c_int))),
    "ncclCommAbort": Call(20400, (_COMMUNICATOR,)),
    "ncclCommFinalize": Call(21400, (_COMMUNICATOR,)),
    "ncclCommDestroy": Call(0, (_COMMUNICATOR,)),
    "ncclAllReduce": Call(0, (_MEMORY, _MEMORY, c_size_t, _TYPE, _REDUCTION, _COMMUNICATOR, _STREAM)),
    "ncclBroadcast": Call(20200, (_MEMORY, _MEMORY, c_size_t, _TYPE, _RANK, _COMMUNICATOR, _STREAM)),
    "ncclReduce": Call(0, (_MEMORY, _MEMORY, c_size_t, _TYPE, _REDUCTION, _RANK, _COMMUNICATOR, _STREAM)),
    "ncclAllGather": Call(0, (_MEMORY, _MEMORY, c_size_t, _TYPE, _COMMUNICATOR, _STREAM)),
    "ncclReduceScatter": Call(0, (_MEMORY, _MEMORY, c_size_t, _TYPE, _REDUCTION, _COMMUNICATOR, _STREAM)),
    "ncclSend": Call(20700, (_MEMORY, c_size_t, _TYPE, _RANK, _COMMUNICATOR, _STREAM)),
    "ncclRecv": Call(20700, (_MEMORY, c_size_t, _TYPE, _RANK, _COMMUNICATOR, _STREAM)),
}

#: ncclDataType_t by our name of the element type, and numbers an element. A boolean is a byte of 0 or 1.
_TYPES = {
    "int8": (0, 1),
    "uint8": (1, 1),
    "bool": (1, 1),
    "int32": (2, 1),
    "uint32": (3, 1),
    "int64": (4, 1),
    "uint64": (5, 1),
    "float16": (6, 1),
    "float32": (7, 1),
    "float64": (8, 1),
    "bfloat16": (9, 1),
    "float8_e4m3fn": (10, 1),
    "float8_e5m2": (11, 1),
    "complex64": (7, 2),
    "complex128": (8, 2),
}
#: What moves without being combined does so as bytes.
BYTES = _TYPES["uint8"][0]

_OPERATIONS = {Op.SUM: 0, Op.PRODUCT: 1, Op.MAX: 2, Op.MIN: 3, Op.AVERAGE: 4}
#: Of bytes that are 0 or 1 the largest is "any" and the smallest is "all"; a sum could wrap around.
_ON_BOOLEANS = {Op.SUM: Op.MAX, Op.PRODUCT: Op.MIN}


class Nccl:
    """A loaded NCCL.

    Args:
        library: a `ctypes.CDLL`, or a stand-in with the same functions.
        path: where it comes from, for texts.

    Attributes:
        version: as NCCL numbers itself, 2.32.3 is 23203.

    Raises:
        DeviceError: the library is older than 2.14.
    """

    def __init__(self, library: Any, path: str) -> None:
        self.path = path
        self._table = Table(library, CALLS)
        version = c_int()
        self._table.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        if self.version < OLDEST:
            raise DeviceError(
                f"{self} is too old: ring_plugins needs 2.14 or newer. Upgrade it with "
                "`pip install -U nvidia-nccl-cu12` (or -cu13), or name another one in RING_NCCL_LIBRARY."
            )

    def __str__(self) -> str:
        return f"NCCL {version_text(self.version)} ({self.path})"

    def call(self, name: str, *arguments: Any, communicator: c_void_p | None = None) -> int:
        """Call a function.

        Args:
            name: as in `CALLS`.
            arguments: its arguments.
            communicator: which one's last error belongs into the text of a failure.

        Returns:
            SUCCESS or IN_PROGRESS.

        Raises:
            DeviceError: anything else, with NCCL's own words; or this NCCL is too old for the function.
        """
        if self.version < self._table.since(name):
            raise DeviceError(
                f"{name} came with NCCL {version_text(self._table.since(name))}, and this is {self}; upgrade it."
            )
        status = self._table.call(name, *arguments)
        if status not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(f"{name} of {self} failed: {self.error_text(status, communicator)}")
        return status

    def error_text(self, status: int, communicator: c_void_p | None = None) -> str:
        """What a status means, and what NCCL last complained about."""
        meaning = self._table.text("ncclGetErrorString", c_int, status)
        last = self._table.text("ncclGetLastError", c_void_p, communicator)
        return f"{meaning} (status {status}){': ' + last if last else ''}"

    def unique_id(self) -> bytes:
        """A new identity for a communicator, of 128 bytes, for all its ranks."""
        identity = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(identity))
        return bytes(identity)

    def state(self, communicator: c_void_p) -> int:
        """SUCCESS when all that was asked of a communicator is queued on its stream, IN_PROGRESS before.

        Raises:
            DeviceError: it has failed since.
        """
        found = c_int()
        self.call("ncclCommGetAsyncError", communicator, ctypes.byref(found), communicator=communicator)
        if found.value not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(f"{self} reports: {self.error_text(found.value, communicator)}")
        return found.value

    def reduction(self, dtype: str, op: Op) -> tuple[int, int, int]:
        """NCCL's numbers for a type and an operation, and how many NCCL elements one element is.

        Raises:
            ArgumentError: NCCL, or this release of it, cannot combine such elements.
        """
        found = _TYPES.get(dtype)
        if found is None or (dtype in ("complex64", "complex128") and op not in (Op.SUM, Op.AVERAGE)):
            raise ArgumentError(
                f"op={op.name} of dtype={dtype} is nothing that NCCL offers; convert first, for instance to float32 "
                "or int32."
            )
        if dtype.startswith("float8") and self.version < _FLOAT8_SINCE:
            raise ArgumentError(
                f"dtype={dtype} came with NCCL {version_text(_FLOAT8_SINCE)}, and this is {self}; upgrade it or "
                "convert to bfloat16 first."
            )
        if dtype == "bool":
            op = _ON_BOOLEANS.get(op, op)
        return found[0], _OPERATIONS[op], found[1]


def version_text(version: int) -> str:
    """2.32.3 for 23203."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
