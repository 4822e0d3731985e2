"""A tensor's memory in the core's terms, and torch's handles of a GPU: streams, events and futures."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from ring_plugins.core.arrays.memory import DeviceMemory, Memory, host_memory

if TYPE_CHECKING:
    from ring_plugins.core.base.types import Array
    from ring_plugins.core.gpu.communicator import DeviceCommunicator
    from ring_plugins.core.gpu.registered import RegisteredMemory

#: torch's name for the kind of device whose memory NCCL reduces.
KIND = "cuda"
_ONE_BYTE_TYPES = (torch.uint8, torch.int8, torch.bool)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether NCCL can reduce the tensor's memory."""
    return tensor.device.type == KIND


def is_supported(tensor: torch.Tensor) -> bool:
    """Whether one of our communicators can reduce the tensor's memory."""
    return tensor.device.type in ("cpu", KIND)


def index_of(tensor: torch.Tensor) -> int:
    """The index of the tensor's GPU in this process."""
    return tensor.device.index or 0


def own_device() -> torch.device:
    """The current GPU of this process."""
    return torch.device(KIND, torch.cuda.current_device())


def for_other_gpus(item: Any) -> Any:
    """What to pickle for other ranks instead of an object: it is unpickled as that, with tensors on the current GPU.

    By themselves they would come to the GPU that has the sender's number, which is another rank's, or none.
    """
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call, unused-ignore]
    return _ForOtherGpus(item) if is_used else item


class _ForOtherGpus:
    def __init__(self, item: Any) -> None:
        self._item = item

    def __reduce__(self) -> tuple[Any, ...]:
        torch.save(self._item, data := io.BytesIO(), pickle_protocol=pickle.HIGHEST_PROTOCOL)
        return _on_own_gpu, (data.getvalue(),)


def _on_own_gpu(data: bytes) -> Any:
    def place(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith(KIND) else storage

    return torch.load(io.BytesIO(data), place, weights_only=False)


def set_device(index: int) -> None:
    """Make a GPU the calling thread's current one."""
    torch.cuda.set_device(index)


def memory_of(flat: torch.Tensor) -> Memory:
    """The memory of a 1-d contiguous tensor."""
    if is_on_gpu(flat):
        dtype = str(flat.dtype).removeprefix("torch.")
        return DeviceMemory(flat.data_ptr(), flat.numel(), dtype, index_of(flat), flat, flat.itemsize)
    return host_memory(known_bytes(flat), writable=True)


def array_of(flat: torch.Tensor) -> Array:
    """The memory of a 1-d contiguous tensor on the CPU, as numpy stores its dtype."""
    return host_memory(known_bytes(flat), writable=True).array


def is_only_moved(dtype: torch.dtype) -> bool:
    """Whether the core does not know this one-byte type, such as an 8-bit float: it may be sent, but not reduced."""
    return dtype.itemsize == 1 and dtype not in _ONE_BYTE_TYPES


def known_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes if it is of a type that can only be moved."""
    return tensor.view(torch.uint8) if is_only_moved(tensor.dtype) else tensor


def tensor_over(memory: RegisteredMemory) -> torch.Tensor:
    """The memory's bytes as a tensor, which keeps it alive as long as any view of the tensor lives."""
    tensor = torch.as_tensor(memory, device=torch.device(KIND, memory.device))
    assert tensor.data_ptr() == memory.pointer, "torch copied memory of NCCL's; unset RING_NCCL_REGISTER"
    return tensor


class TorchStreams:
    """torch's streams of one GPU: what `core.gpu.stream.Streams` asks for, and which streams computed gradients.

    Args:
        index: the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._external: dict[int, Any] = {}
        self._noted: set[int] = set()

    def current(self) -> int:
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.external(stream))  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

    def scale(self, memory: DeviceMemory, factor: float) -> None:
        flat: torch.Tensor = memory.owner  # see `memory_of`
        with torch.no_grad():
            if flat.itemsize == 1:  # torch multiplies no 8-bit floats
                flat.copy_(flat.float().mul_(factor))
            else:
                flat.mul_(factor)  # 16-bit floats as well: torch multiplies them by a number in float32

    def external(self, handle: int) -> Any:
        """torch's object for a CUDA stream handle."""
        if handle not in self._external:
            stream: Any = torch.cuda.ExternalStream
            if handle == 0:  # `ExternalStream(0)` would be some stream of torch's pool (pytorch#182960)
                stream = torch.cuda.default_stream
                self._external[0] = stream(self._index)
            else:
                self._external[handle] = stream(handle, device=self._index)
        return self._external[handle]

    def note(self) -> None:
        """Remember that the current stream computed a gradient."""
        self._noted.add(self.current())

    def catch_up(self) -> None:
        """Make the current stream wait for every noted stream: forward may have used several."""
        now = self.current()
        others = self._noted - {now}
        if others:
            from ring_plugins.core.gpu import load_driver

            is_capturing = load_driver().keeping.is_capturing
            if is_capturing(now):  # streams of ordinary steps before are no part of the graph, and would end it
                others = set(filter(is_capturing, others))
        for handle in others:
            self.external(now).wait_stream(self.external(handle))
        self._noted = {now}


@functools.cache
def streams(index: int) -> TorchStreams:
    """torch's streams of one GPU."""
    return TorchStreams(index)


def is_capturing() -> bool:
    """Whether torch is capturing a CUDA graph on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def future_on_gpu(index: int) -> torch.futures.Future[Any]:
    """A torch future for values on a GPU."""
    return torch.futures.Future(devices=[torch.device(KIND, index)])


def complete(future: torch.futures.Future[Any], value: Any, communicator: DeviceCommunicator) -> None:
    """Set the future's value; it may be used once the communicator's stream has finished its work so far."""
    with streams(communicator.device).using(communicator.stream):
        future.set_result(value)


class Moment:
    """The point that the calling thread's current stream has reached.

    Args:
        index: the GPU.
    """

    def __init__(self, index: int) -> None:
        self._event = torch.cuda.current_stream(index).record_event()

    def precedes(self, stream: int, index: int) -> None:
        """Make all later work on `stream` wait for this point."""
        streams(index).external(stream).wait_event(self._event)
