"""Sleep until another process changes a word of shared memory: Linux's futex(2), called through libc's syscall().

Python offers no futex, and its locks live in one process. Where the system call's number is unknown, sleeping is a
short nap and waking does nothing: callers look at the word again in any case.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

#: Number of the system call by machine, part of Linux's stable interface.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}
_WAIT, _WAKE, _EVERYONE = 0, 1, 2**31 - 1
_NAP = 50e-6

_number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8 else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if _number is not None:
    _syscall = ctypes.CDLL(None).syscall  # releases the GIL while it sleeps
    _call, _wait, _wake, _all = (
        ctypes.c_long(_number),
        ctypes.c_int(_WAIT),
        ctypes.c_int(_WAKE),
        ctypes.c_int(_EVERYONE),
    )

    def sleep_while(address: int, value: int, seconds: float) -> None:
        """Sleep until `wake` is called for the address, unless the word there has another value.

        Args:
            address: of the word, aligned to 4 bytes; the low 32 bits of a little-endian 64-bit number will do.
            value: what the caller has seen there; only its low 32 bits are compared.
            seconds: longest sleep. Signals end it early, and so do spurious wake-ups.
        """
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _syscall(_call, ctypes.c_void_p(address), _wait, ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit))

    def wake(address: int) -> None:
        """Wake all processes and threads that sleep on this word."""
        _syscall(_call, ctypes.c_void_p(address), _wake, _all)

else:  # pragma: no cover

    def sleep_while(address: int, value: int, seconds: float) -> None:
        """Sleep briefly: there is no futex."""
        time.sleep(min(seconds, _NAP))

    def wake(address: int) -> None:
        """Do nothing: sleepers soon look again."""
