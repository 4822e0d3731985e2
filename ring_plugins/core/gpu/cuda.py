"""Streams and events of the CUDA driver API, to order NCCL's kernels with those of a framework.

Everything happens in the primary context of a device, the one that frameworks use.

Calls about the calling thread alone keep the interpreter's lock (`library` says why). What queues work on a stream, or
asks about it, releases the lock, since it may block while a stream is full; `Driver.keeping` is for those who know that
it does not.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_float, c_int, c_uint, c_void_p
from typing import Any

from ring_plugins.core.base.errors import DeviceError
from ring_plugins.core.gpu.library import CLibrary, Declarations, open_cuda

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING: cheaper
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

#: Change what the driver keeps for the calling thread, and wait for nobody.
_OF_THREAD = frozenset({"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"})

FUNCTIONS: Declarations = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetPCIBusId": (c_void_p, c_int, c_int),
    "cuPointerGetAttribute": (c_void_p, c_int, c_void_p),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
}


@functools.lru_cache(maxsize=1)
def load_driver() -> Driver:
    """The CUDA driver of this machine, loaded at the first call.

    Raises:
        DeviceError: there is none, or it finds no GPU.
    """
    return Driver(open_cuda())


class Driver:
    """The CUDA driver.

    Args:
        library: a `ctypes.CDLL`, or a stand-in with the same functions.

    Attributes:
        keeping: the same driver, by calls that all keep the interpreter's lock.
    """

    def __init__(self, library: Any) -> None:
        self._library = CLibrary(library, FUNCTIONS, _OF_THREAD)
        self._contexts: dict[int, c_void_p] = {}
        self._streams: dict[int, int] = {}
        self._call("cuInit", 0)
        self.keeping = copy.copy(self)
        self.keeping._library = self._library.all_keeping()

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._library.call(name, *arguments)
        if status:
            raise DeviceError(f"the CUDA driver's {name} failed: {self._error_text(status)} (status {status}).")

    def _error_text(self, status: int) -> str:
        text = c_char_p()
        self._library.call("cuGetErrorString", status, ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace")

    # Devices --------------------------------------------------------------------------------------

    def count(self) -> int:
        """How many GPUs this process sees."""
        count = c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def _handle(self, index: int) -> int:
        """The CUdevice of the GPU that this process numbers `index`."""
        device, count = c_int(), self.count()
        if not 0 <= index < count:
            raise DeviceError(
                f"there is no GPU {index}: this process sees {count}. Start at most as many ranks on a host as "
                "it has GPUs, and check CUDA_VISIBLE_DEVICES."
            )
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    def bus_id(self, index: int) -> str:
        """PCI bus id of a GPU, however a process numbers its devices; all MIG slices of a GPU have the same."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._handle(index))
        return text.value.decode()

    def uuid(self, index: int) -> str:
        """UUID of a GPU, or of the MIG slice of it that this process sees; "" before CUDA 11.4."""
        found = ctypes.create_string_buffer(16)
        with contextlib.suppress(AttributeError):
            self._call("cuDeviceGetUuid_v2", found, self._handle(index))
        return found.raw.hex() if any(found.raw) else ""

    def device_of(self, pointer: int) -> int:
        """Index of the GPU whose memory a pointer is in, for frameworks that number GPUs differently."""
        found = c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(found), _ORDINAL, pointer)
        return found.value

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        """Make a device the current one of this thread, and restore the previous one on exit."""
        context = self._contexts.get(index)
        if context is None:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(index))
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def synchronize(self) -> None:
        """Wait until the current device has done all work of this process."""
        self._call("cuCtxSynchronize")

    # Streams --------------------------------------------------------------------------------------

    def stream(self, index: int) -> int:
        """Handle of this process's communication stream on a device.

        All communicators share it. If two of them ran kernels at the same time, and another rank had started them in
        another order, each could hold the multiprocessors that the other needs.
        """
        if index not in self._streams:
            self._streams[index] = self.new_stream(index)
        return self._streams[index]

    def new_stream(self, index: int) -> int:
        """A stream of the highest priority: other work waits for communication, seldom the other way round."""
        least, greatest, stream = c_int(), c_int(), c_void_p()
        with self.device(index):
            self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, greatest)
        return int(stream.value or 0)

    def destroy_stream(self, stream: int) -> None:
        """Release a stream; the work queued on it still completes."""
        self._call("cuStreamDestroy_v2", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether work queued on a stream is recorded into a CUDA graph instead of executed."""
        if stream == 0:  # the legacy default stream never captures, and may not be asked while another stream does
            return False
        status = c_int()
        self._call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    # Events, on the current device ----------------------------------------------------------------

    def record_event(self, stream: int, event: int = 0) -> int:
        """Put an event behind all work that the stream has so far; a new one unless one is given.

        What was asked to wait for a given event still waits for the point where it was before.
        """
        if not event:
            created = c_void_p()
            self._call("cuEventCreate", ctypes.byref(created), _DISABLE_TIMING)
            event = int(created.value or 0)
        self._call("cuEventRecord", event, stream)
        return event

    def record_time(self, stream: int) -> int:
        """Put a new event behind all work that the stream has so far, which notes the time when it passes."""
        created = c_void_p()
        self._call("cuEventCreate", ctypes.byref(created), 0)
        self._call("cuEventRecord", int(created.value or 0), stream)
        return int(created.value or 0)

    def seconds_between(self, begin: int, end: int) -> float:
        """Seconds of the GPU's clock between two results of `record_time`, which must both have passed."""
        milliseconds = c_float()
        with self._not_invalidating_captures():
            self._call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value * 1e-3

    @contextlib.contextmanager
    def _not_invalidating_captures(self) -> Iterator[None]:
        """Ask about events: in the default mode, that would invalidate a graph that any thread captures."""
        mode = c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def wait_event(self, stream: int, event: int) -> None:
        """Let later work on the stream start only after the event; returns at once."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def query_event(self, event: int) -> bool:
        """Whether the GPU has passed an event.

        Raises:
            DeviceError: work on the GPU failed.
        """
        with self._not_invalidating_captures():
            status = self._library.call("cuEventQuery", event)
        if status == _NOT_READY:
            return False
        if status:
            raise DeviceError(f"work on the GPU failed: {self._error_text(status)} (status {status}).")
        return True

    def destroy_event(self, event: int) -> None:
        """Release an event; streams that wait for it still do."""
        self._call("cuEventDestroy_v2", event)
