"""Streams and events of the CUDA driver, for memory that a framework allocated.

Everything happens in the primary context of a device, which is the one that frameworks use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from typing import Any

from ring_plugins.core.base.errors import DeviceError
from ring_plugins.core.gpu.c_functions import Call, Table

SONAME = "libcuda.so.1"

_NOT_READY = 600
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING: cheaper
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

CALLS: dict[str, Call] = {
    "cuInit": Call(0, (c_uint,)),
    "cuGetErrorString": Call(0, (c_int, POINTER(c_char_p))),
    "cuDeviceGet": Call(0, (POINTER(c_int), c_int)),
    "cuDeviceGetCount": Call(0, (POINTER(c_int),)),
    "cuDeviceGetPCIBusId": Call(0, (c_void_p, c_int, c_int)),
    "cuPointerGetAttribute": Call(0, (c_void_p, c_int, c_void_p)),
    "cuDevicePrimaryCtxRetain": Call(0, (POINTER(c_void_p), c_int)),
    "cuCtxPushCurrent_v2": Call(0, (c_void_p,)),
    "cuCtxPopCurrent_v2": Call(0, (POINTER(c_void_p),)),
    "cuCtxGetStreamPriorityRange": Call(0, (POINTER(c_int), POINTER(c_int))),
    "cuStreamCreateWithPriority": Call(0, (POINTER(c_void_p), c_uint, c_int)),
    "cuStreamDestroy_v2": Call(0, (c_void_p,)),
    "cuStreamWaitEvent": Call(0, (c_void_p, c_void_p, c_uint)),
    "cuStreamIsCapturing": Call(0, (c_void_p, POINTER(c_int))),
    "cuThreadExchangeStreamCaptureMode": Call(0, (POINTER(c_int),)),
    "cuEventCreate": Call(0, (POINTER(c_void_p), c_uint)),
    "cuEventRecord": Call(0, (c_void_p, c_void_p)),
    "cuEventQuery": Call(0, (c_void_p,)),
    "cuEventDestroy_v2": Call(0, (c_void_p,)),
}


@functools.lru_cache(maxsize=1)
def load_driver() -> Driver:
    """The CUDA driver of this machine.

    Raises:
        DeviceError: there is none, or it finds no GPU.
    """
    try:
        library = ctypes.CDLL(SONAME)
    except OSError as error:
        raise DeviceError(
            f"the CUDA driver ({SONAME}) cannot be loaded: {error}. It comes with NVIDIA's driver for the card, not "
            "with pip; in a container it is there with `--gpus all`. Without a GPU, train on the CPU."
        ) from error
    return Driver(library)


class Driver:
    """The calls of libcuda that ordering needs.

    Args:
        library: a `ctypes.CDLL`, or a stand-in with the same functions.
    """

    def __init__(self, library: Any) -> None:
        self._table = Table(library, CALLS)
        self._contexts: dict[int, c_void_p] = {}
        self._streams: dict[int, int] = {}
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._table.call(name, *arguments)
        if status:
            raise DeviceError(f"the CUDA driver's {name} failed: {self._error_text(status)} (status {status}).")

    def _error_text(self, status: int) -> str:
        text = c_char_p()
        self._table.call("cuGetErrorString", status, ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace")

    def _device(self, index: int) -> int:
        device, count = c_int(), c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= index < count.value:
            raise DeviceError(
                f"there is no GPU {index}: this process sees {count.value}. Start no more ranks on a host than it has "
                "GPUs, and look at CUDA_VISIBLE_DEVICES."
            )
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    def bus_id(self, index: int) -> str:
        """Which card it is, however the process numbers its devices."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device(index))
        return text.value.decode()

    def device_of(self, pointer: int) -> int:
        """Which GPU's memory a pointer is in, for frameworks that number them in another way."""
        found = c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(found), _ORDINAL, pointer)
        return found.value

    @contextlib.contextmanager
    def current(self, index: int) -> Iterator[None]:
        """Let calls in this thread be about that device; afterwards about the same as before."""
        context = self._contexts.get(index)
        if context is None:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def stream(self, index: int) -> int:
        """The stream on which this process communicates on that device.

        All communicators share it: kernels of two of them at once, which started in another order on another rank,
        could each hold the processors that the other needs.
        """
        if index not in self._streams:
            self._streams[index] = self.new_stream(index)
        return self._streams[index]

    def new_stream(self, index: int) -> int:
        """A stream to communicate on. It has the highest priority: what it does is waited for, what computes is not."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        with self.current(index):
            self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, greatest)
        return int(stream.value or 0)

    def destroy_stream(self, stream: int) -> None:
        """Let it go; what it was given still happens."""
        self._call("cuStreamDestroy_v2", stream)

    # On the current device ------------------------------------------------------------------------

    def is_capturing(self, stream: int) -> bool:
        """Whether what is queued there is being recorded into a CUDA graph instead of done."""
        if stream == 0:  # the legacy default stream cannot be, and may not even be asked while others are
            return False
        status = c_int()
        self._call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def record(self, stream: int) -> int:
        """An event that happens when all is done that the stream was given so far."""
        event = c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        self._call("cuEventRecord", event, stream)
        return int(event.value or 0)

    def wait(self, stream: int, event: int) -> None:
        """Let the stream go on only after the event; returns at once."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def happened(self, event: int) -> bool:
        """Whether an event is past.

        Raises:
            DeviceError: what was to happen before it failed.
        """
        mode = c_int(_RELAXED)  # or asking would spoil a graph that any thread is recording
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        status = self._table.call("cuEventQuery", event)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        if status == _NOT_READY:
            return False
        if status:
            raise DeviceError(f"work on the GPU failed: {self._error_text(status)} (status {status}).")
        return True

    def destroy_event(self, event: int) -> None:
        """Let it go; streams that wait for it still do."""
        self._call("cuEventDestroy_v2", event)
