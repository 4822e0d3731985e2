"""Collectives on the memory of GPUs, by NCCL.

Nothing here waits on the host for the GPU, unless its docstring says so. Operations are queued on the stream on which
this process communicates (`queued`); events order them after what the caller's stream was given before, and before what
it is given next (`stream_queue`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ring_plugins.core.collectives.queued import QueuedOperations
from ring_plugins.core.compression import HalfWire
from ring_plugins.core.dtypes import check_reducible
from ring_plugins.core.errors import ArgumentError
from ring_plugins.core.memory import DeviceMemory
from ring_plugins.core.nccl.calls import BYTES
from ring_plugins.core.operations import Op
from ring_plugins.core.shared_memory import SharedBuffer


class DeviceCommunicator(QueuedOperations):
    """A `Communicator` for the memory of one GPU a rank.

    Args:
        name: for texts, equal on all members.
        device: this rank's GPU, as the process numbers them.
        host: a communicator among the same ranks, for meeting and for objects; closed with this one.
        streams: the framework's.
        wait: how to wait on the host.
        nccl, driver: of this process.
        own_stream: whether it has a stream for itself, for messages between two ranks, which others must not wait
            behind.

    Raises:
        MismatchError, DeviceError, TimeoutExceeded: the ranks cannot be connected; see `core.nccl.meeting`.
    """

    def all_reduce(self, memory: DeviceMemory, op: Op, wire: HalfWire | None = None) -> None:
        check_reducible(memory.dtype, op)
        kind, operation, width = self._nccl.reduction(memory.dtype, op)
        with self._launch("all_reduce", memory):
            if memory.size:
                self._nccl.call("ncclAllReduce", memory.pointer, memory.pointer, memory.size * width, kind, operation)

    def broadcast(self, memory: DeviceMemory, root: int) -> None:
        self._member(root, "root")
        with self._launch("broadcast", memory):
            if memory.size:
                self._nccl.call("ncclBroadcast", memory.pointer, memory.pointer, memory.nbytes, BYTES, root)

    def all_gather(self, mine: DeviceMemory, out: DeviceMemory, counts: Sequence[int]) -> None:
        places = _places(out, counts, "counts")
        with self._launch("all_gather", mine, out):
            if len(set(counts)) == 1:
                self._nccl.call("ncclAllGather", mine.pointer, out.pointer, mine.nbytes, BYTES)
                return
            for root, (pointer, count) in enumerate(places):
                if count:
                    nbytes = count * _width(out)
                    self._nccl.call("ncclBroadcast", mine.pointer, pointer, nbytes, BYTES, root)

    def reduce_scatter(self, full: DeviceMemory, out: DeviceMemory, counts: Sequence[int], op: Op) -> None:
        check_reducible(full.dtype, op)
        places = _places(full, counts, "counts")
        kind, operation, width = self._nccl.reduction(full.dtype, op)
        with self._launch("reduce_scatter", full, out):
            if len(set(counts)) == 1:
                self._nccl.call("ncclReduceScatter", full.pointer, out.pointer, counts[0] * width, kind, operation)
                return
            for root, (pointer, count) in enumerate(places):
                if count:
                    self._nccl.call("ncclReduce", pointer, out.pointer, count * width, kind, operation, root)

    def all_to_all(
        self, send: DeviceMemory, send_counts: Sequence[int], out: DeviceMemory, out_counts: Sequence[int]
    ) -> None:
        leaving, arriving = _places(send, send_counts, "send_counts"), _places(out, out_counts, "out_counts")
        with self._launch("all_to_all", send, out):
            for peer, ((source, sent), (target, received)) in enumerate(zip(leaving, arriving, strict=True)):
                if sent:
                    self._nccl.call("ncclSend", source, sent * _width(send), BYTES, peer)
                if received:
                    self._nccl.call("ncclRecv", target, received * _width(out), BYTES, peer)

    def send(self, memory: DeviceMemory, receiver: int) -> None:
        """Send to one member, which must call `receive` for as many bytes."""
        peer = self._member(receiver, "receiver")
        with self._launch("send", memory):
            if memory.size:
                self._nccl.call("ncclSend", memory.pointer, memory.nbytes, BYTES, peer)

    def receive(self, memory: DeviceMemory, sender: int) -> None:
        """Overwrite the memory with what one member sends."""
        peer = self._member(sender, "sender")
        with self._launch("receive", memory):
            if memory.size:
                self._nccl.call("ncclRecv", memory.pointer, memory.nbytes, BYTES, peer)

    def barrier(self) -> None:
        """Return when all ranks have called and the GPU has done what it was given here; waits on the host."""
        self.synchronize()
        self._host.barrier()

    def _member(self, rank: int, name: str) -> int:
        if not 0 <= rank < self.size:
            raise ArgumentError(f"{name}={rank} is not a rank of {self.name}, which has {self.size}.")
        return rank

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        return self._host.broadcast_object(item, root)

    def all_gather_object(self, item: Any) -> list[Any]:
        return self._host.all_gather_object(item)

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Not offered: the memory of a GPU is the framework's to allocate.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(f"allocate({nbytes}) of {self.name}: allocate memory of the GPU with your framework.")

    def release(self, buffer: SharedBuffer) -> None:
        pass


def _width(memory: DeviceMemory) -> int:
    return memory.nbytes // memory.size if memory.size else 0


def _places(memory: DeviceMemory, counts: Sequence[int], name: str) -> list[tuple[int, int]]:
    """Pointer and elements of consecutive parts."""
    if sum(counts) != memory.size or any(count < 0 for count in counts):
        raise ArgumentError(f"{name}={list(counts)} do not add up to the {memory.size} elements given.")
    places, pointer = [], memory.pointer
    for count in counts:
        places.append((pointer, count))
        pointer += count * _width(memory)
    return places
