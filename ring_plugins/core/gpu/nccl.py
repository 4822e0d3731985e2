"""The NCCL functions that we use, as nccl.h declares them, with NCCL's own words in every error.

**Which calls keep the interpreter's lock** (`library` says why some do), read in NCCL 2.18 to 2.30. Inside a group, a
collective only notes its arguments in the group; `ncclGroupStart` counts. `ncclCommGetAsyncError` reads a number, and
joins the thread that has set it as its last act. What may wait is `ncclGroupEnd`: it connects peers at the first use of
an algorithm (2.22), exchanges handles of registered memory, waits for NCCL's network thread if that has too much to do,
and launches the kernels, for which the stream may have no room. On a nonblocking communicator it gives all of that to a
thread of NCCL's and returns, so it may keep the lock; on a blocking one it must not. That costs nothing beside a thread
that computes: it would need longer to wake up than the call takes. Neither may what connects, registers memory or ends
a communicator.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, DeviceError
from ring_plugins.core.gpu.library import CLibrary, Declarations, open_nccl

SUCCESS, IN_PROGRESS = 0, 7
#: The first release with nonblocking communicators. With an older one, a start that hangs could not be given up.
OLDEST = 21400
_FLOAT8_SINCE = 22400
#: NCCL_SHRINK_ABORT: end what is under way first.
SHRINK_ABORT = 1
#: NCCL_WIN_COLL_SYMMETRIC: all ranks use the memory at equal offsets.
COLLECTIVE_WINDOW = 1


class UniqueId(ctypes.Structure):
    """ncclUniqueId: one rank of a new communicator makes it, and all its ranks pass it to NCCL."""

    _fields_ = [("internal", ctypes.c_byte * 128)]

    @classmethod
    def received(cls, item: Any) -> UniqueId:
        """The identifier that another rank has made.

        Raises:
            DeviceError: it is none.
        """
        if not isinstance(item, bytes) or len(item) != ctypes.sizeof(cls):
            raise DeviceError(f"rank 0 of a communicator sent {item!r:.40} in place of NCCL's identifier.")
        return cls.from_buffer_copy(item)


class Config(ctypes.Structure):
    """The part of ncclConfig_t that release 2.14 had; NCCL goes by `version` and fills in newer fields itself."""

    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int)]

    @classmethod
    def of(cls, blocking: bool) -> Config:
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, OLDEST, blocking)


_STREAM = _COMMUNICATOR = _MEMORY = c_void_p
_TYPE = _REDUCTION = _RANK = c_int

FUNCTIONS: Declarations = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, _RANK, POINTER(Config)),
    "ncclCommGetAsyncError": (_COMMUNICATOR, POINTER(c_int)),
    "ncclCommShrink": (_COMMUNICATOR, POINTER(c_int), c_int, POINTER(c_void_p), POINTER(Config), c_int),
    "ncclCommAbort": (_COMMUNICATOR,),
    "ncclCommFinalize": (_COMMUNICATOR,),
    "ncclCommDestroy": (_COMMUNICATOR,),
    "ncclAllReduce": (_MEMORY, _MEMORY, c_size_t, _TYPE, _REDUCTION, _COMMUNICATOR, _STREAM),
    "ncclBroadcast": (_MEMORY, _MEMORY, c_size_t, _TYPE, _RANK, _COMMUNICATOR, _STREAM),
    "ncclReduce": (_MEMORY, _MEMORY, c_size_t, _TYPE, _REDUCTION, _RANK, _COMMUNICATOR, _STREAM),
    "ncclAllGather": (_MEMORY, _MEMORY, c_size_t, _TYPE, _COMMUNICATOR, _STREAM),
    "ncclReduceScatter": (_MEMORY, _MEMORY, c_size_t, _TYPE, _REDUCTION, _COMMUNICATOR, _STREAM),
    "ncclSend": (_MEMORY, c_size_t, _TYPE, _RANK, _COMMUNICATOR, _STREAM),
    "ncclRecv": (_MEMORY, c_size_t, _TYPE, _RANK, _COMMUNICATOR, _STREAM),
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (_MEMORY,),
    "ncclCommRegister": (_COMMUNICATOR, _MEMORY, c_size_t, POINTER(c_void_p)),
    "ncclCommDeregister": (_COMMUNICATOR, c_void_p),
    "ncclCommWindowRegister": (_COMMUNICATOR, _MEMORY, c_size_t, POINTER(c_void_p), c_int),
    "ncclCommWindowDeregister": (_COMMUNICATOR, c_void_p),
}

#: Note or read something and return: see the top of this file.
_SHORT = frozenset(
    (
        "ncclGroupStart",
        "ncclCommGetAsyncError",
        "ncclAllReduce",
        "ncclBroadcast",
        "ncclReduce",
        "ncclAllGather",
        "ncclReduceScatter",
        "ncclSend",
        "ncclRecv",
    )
)

#: The first release that has a function, where it came after `OLDEST`.
_SINCE = {
    **dict.fromkeys(("ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister"), 21900),
    **dict.fromkeys(("ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclCommShrink"), 22700),
}

#: Our name of an element type -> ncclDataType_t and numbers per element. A boolean is a byte of 0 or 1.
TYPES = {
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
#: The type for data that NCCL moves without combining it.
BYTES = TYPES["uint8"][0]

REDUCTIONS = {Op.SUM: 0, Op.PRODUCT: 1, Op.MAX: 2, Op.MIN: 3, Op.AVERAGE: 4}
#: On bytes of 0 or 1, MAX is "any" and MIN is "all"; a sum could wrap around.
_ON_BOOLEANS = {Op.SUM: Op.MAX, Op.PRODUCT: Op.MIN}


@functools.lru_cache(maxsize=1)
def load_nccl() -> Nccl:
    """The NCCL of this process, loaded at the first call.

    Raises:
        MissingDependency, DeviceError: see `open_nccl`; or the library is too old.
    """
    return Nccl(*open_nccl())


class Nccl:
    """A loaded NCCL.

    Args:
        library: a `ctypes.CDLL`, or a stand-in with the same functions.
        path: where it was loaded from, for error texts.

    Attributes:
        version: as NCCL numbers itself; 2.32.3 is 23203.

    Raises:
        DeviceError: the library is older than 2.14.
    """

    def __init__(self, library: Any, path: str) -> None:
        self.path = path
        self._library = CLibrary(library, FUNCTIONS, _SHORT)
        self._keeping = self._library.all_keeping()
        version = c_int()
        self._library.call("ncclGetVersion", ctypes.byref(version))
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
            name: a key of `FUNCTIONS`, which this release has.
            arguments: its arguments.
            communicator: whose last error an error text quotes.

        Returns:
            SUCCESS or IN_PROGRESS.

        Raises:
            DeviceError: NCCL returned another status.
        """
        status = self._library.call(name, *arguments)
        if status not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(f"{name} of {self} failed: {self.error_text(status, communicator)}")
        return status

    def has(self, name: str) -> bool:
        """Whether this release has a function."""
        return self.version >= _SINCE.get(name, OLDEST) and self._library.has(name)

    def error_text(self, status: int, communicator: c_void_p | None = None) -> str:
        """The meaning of a status, and the last error that NCCL logged."""
        meaning = self._library.text("ncclGetErrorString", c_int, status)
        last = self._library.text("ncclGetLastError", c_void_p, communicator)
        return f"{meaning} (status {status}){': ' + last if last else ''}"

    def unique_id(self) -> bytes:
        """The 128 bytes of a new `UniqueId`."""
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def end_group(self, communicator: c_void_p | None, is_short: bool) -> int:
        """As `call` of `ncclGroupEnd`; keeps the interpreter's lock if it `is_short`, as the top of this file says."""
        status = (self._keeping if is_short else self._library).call("ncclGroupEnd")
        if status not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(f"ncclGroupEnd of {self} failed: {self.error_text(status, communicator)}")
        return status

    def state(self, communicator: c_void_p) -> int:
        """SUCCESS once everything asked of a communicator is queued on its stream, IN_PROGRESS before.

        Raises:
            DeviceError: the communicator has failed.
        """
        found = c_int()
        self.call("ncclCommGetAsyncError", communicator, ctypes.byref(found), communicator=communicator)
        if found.value not in (SUCCESS, IN_PROGRESS):
            raise DeviceError(f"{self} reports: {self.error_text(found.value, communicator)}")
        return found.value

    def reduction(self, dtype: str, op: Op) -> tuple[int, int, int]:
        """NCCL's numbers of a type and of an operation, and how many NCCL elements make one element.

        Raises:
            ArgumentError: NCCL, or this release of it, cannot combine such elements.
        """
        found = TYPES.get(dtype)
        if found is None or (dtype in ("complex64", "complex128") and op not in (Op.SUM, Op.AVERAGE)):
            raise ArgumentError(
                f"NCCL does not support op={op.name} for dtype={dtype}; convert to another type first, such as float32 "
                "or int32."
            )
        if dtype.startswith("float8") and self.version < _FLOAT8_SINCE:
            raise ArgumentError(
                f"dtype={dtype} needs NCCL {version_text(_FLOAT8_SINCE)}, and this is {self}; upgrade it or convert to "
                "bfloat16 first."
            )
        if dtype == "bool":
            op = _ON_BOOLEANS.get(op, op)
        return found[0], REDUCTIONS[op], found[1]


def version_text(version: int) -> str:
    """2.32.3 for 23203."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
