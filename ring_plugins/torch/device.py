"""Tensors on a GPU in the core's terms, and torch's streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch

from ring_plugins.core.arrays.memory import DeviceMemory, HostMemory, Memory, host_memory
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.world import current

#: What torch calls the devices whose memory NCCL reduces.
KIND = "cuda"
_ONE_BYTE_TYPES = (torch.uint8, torch.int8, torch.bool)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in memory that NCCL reduces."""
    return tensor.device.type == KIND


def own_device() -> torch.device:
    """The GPU on which this process works now."""
    return torch.device(KIND, torch.cuda.current_device())


def is_supported(tensor: torch.Tensor) -> bool:
    """Whether any communicator of ours takes the tensor's memory."""
    return tensor.device.type in ("cpu", KIND)


def index_of(tensor: torch.Tensor) -> int:
    """Which GPU it is on, as this process numbers them."""
    return tensor.device.index or 0


def memory_of(flat: torch.Tensor) -> Memory:
    """The memory of a 1-d contiguous tensor."""
    if is_on_gpu(flat):
        dtype = str(flat.dtype).removeprefix("torch.")
        return DeviceMemory(flat.data_ptr(), flat.numel(), dtype, index_of(flat), flat)
    return host_memory_of(flat)


def host_memory_of(flat: torch.Tensor) -> HostMemory:
    """The memory of a 1-d contiguous tensor of the CPU; one-byte types that the core does not know travel as bytes."""
    if flat.dtype.itemsize == 1 and flat.dtype not in _ONE_BYTE_TYPES:
        flat = flat.view(torch.uint8)
    return host_memory(flat, writable=True)


class TorchStreams:
    """torch's streams of one GPU: what `core.gpu.communicator.Streams` asks for, and where gradients came from."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._known: dict[int, Any] = {}
        self._noted: set[int] = set()

    def current(self) -> int:
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream(stream))  # type: ignore[no-any-return, no-untyped-call, unused-ignore]

    def _stream(self, handle: int) -> Any:
        if handle not in self._known:
            external: Any = torch.cuda.ExternalStream
            self._known[handle] = external(handle, device=self._index)
        return self._known[handle]

    def note(self) -> None:
        """A gradient was computed on the current stream."""
        self._noted.add(self.current())

    def catch_up(self) -> None:
        """Let the current stream follow all streams that gradients were computed on: forward may have used several."""
        now = self.current()
        for handle in self._noted - {now}:
            self._stream(now).wait_stream(self._stream(handle))
        self._noted = {now}


@functools.cache
def streams(index: int) -> TorchStreams:
    """torch's streams of one GPU."""
    return TorchStreams(index)


def is_capturing() -> bool:
    """Whether torch records a CUDA graph instead of computing."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def future_on_gpu(index: int) -> torch.futures.Future[Any]:
    """A torch future for values on a GPU."""
    return torch.futures.Future(devices=[torch.device(KIND, index)])


def complete(future: torch.futures.Future[Any], value: Any, communicator: DeviceCommunicator) -> None:
    """Let the future's value be there when the communicator's stream is done with what it was given so far."""
    with streams(communicator.device).using(communicator.stream):
        future.set_result(value)


class Moment:
    """What the calling thread's stream of a GPU was given so far."""

    def __init__(self, index: int) -> None:
        self._event = torch.cuda.current_stream(index).record_event()

    def precedes(self, stream: int, index: int) -> None:
        """Let what that stream of the GPU is given from now on come after it."""
        streams(index)._stream(stream).wait_event(self._event)


def communicator_for(name: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Communicator[Any]:
    """A communicator of all ranks for the memory in which the tensors lie; collective.

    Raises:
        ArgumentError: they lie on several devices, or on one that is neither CPU nor CUDA.
        MismatchError: some ranks have them on the CPU, others on GPUs.
    """
    where: dict[str, str] = {}
    for tensor_name, tensor in tensors:
        if not is_supported(tensor):
            raise ArgumentError(
                f"{tensor_name} is on {tensor.device}; ring_plugins averages in the memory of CPUs and of CUDA GPUs."
            )
        where.setdefault(str(tensor.device), tensor_name)
    if len(where) > 1:
        said = ", ".join(f"{tensor_name} on {device}" for device, tensor_name in where.items())
        raise ArgumentError(f"tensors lie on several devices: {said}. Each rank uses one; move the model there first.")
    device = torch.device(next(iter(where), "cpu"))
    world = current()
    if world.topology.size == 1:
        return world.new_communicator(name)
    kinds = world.communicator.all_gather_object(device.type)
    if len(set(kinds)) > 1:
        raise MismatchError(f"{name}: the tensors of the ranks lie on {kinds}, in rank order; use one kind everywhere.")
    if device.type != KIND:
        return world.new_communicator(name)
    return world.new_device_communicator(name, device.index or 0, streams(device.index or 0))
