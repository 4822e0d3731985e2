"""Collectives on the memory of GPUs, by NCCL.

A call queues NCCL's kernels on the communication stream (`executor`, `stream`) and orders that stream with the caller's
by events. `connection` holds the NCCL communicator, and `watchdog` looks after both while nobody calls.

**Averages are sums of scaled numbers.** `ncclAvg` multiplies by 1/n too, but first rounds 1/n to the element type. That
biases every average of bfloat16 numbers by 0.2 % at 3, 6, 7 or 12 ranks, and NCCL then uses neither the switches' own
adders (NVLS) nor its symmetric kernels. So the framework scales the numbers in float32 before NCCL sums them, as DDP
does; numbers that have to stay as they are (`reduce_scatter`) are summed first. Gradient buckets come scaled already.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import FLOATS8, Op, check_reducible
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, DeviceError, TimeoutExceeded, is_rejection
from ring_plugins.core.collectives.api import Activity, Communicator, Work
from ring_plugins.core.collectives.validation import check_counts, check_rank
from ring_plugins.core.gpu.executor import DeviceExecutor
from ring_plugins.core.gpu.nccl import BYTES
from ring_plugins.core.gpu.recovery import GpuRecovery
from ring_plugins.core.gpu.registered import RegisteredMemory
from ring_plugins.core.linux.shared_memory import SharedBuffer

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _tells_rejections(collective: F) -> F:
    """Let a method tell the other members if this one rejects its arguments, so that their GPUs do not wait for it.

    Where members may be lost, a call outside of others is a whole (recovery.py).
    """

    @functools.wraps(collective)
    def telling(self: DeviceCommunicator, *args: Any, **options: Any) -> Any:
        try:
            recovery = self._recovery
            if recovery is not None and recovery.is_outside:
                return recovery.run(collective.__name__, functools.partial(collective, self, *args, **options))
            return collective(self, *args, **options)
        except ArgumentError as error:
            self.executor.tell_rejection(collective.__name__, error)
            raise

    return cast("F", telling)


class DeviceCommunicator(Communicator[DeviceMemory]):
    """A `Communicator` for the memory of one GPU per rank.

    After an error that leaves members out of step every further call raises it again.

    Args:
        executor: runs its operations.
        recovery: how it goes on when members are lost; None where that ends the job.

    Attributes:
        executor: as given.
        stream: handle of the stream on which it communicates.
    """

    def __init__(self, executor: DeviceExecutor, recovery: GpuRecovery | None = None) -> None:
        self._recovery, self.recovers = recovery, recovery is not None
        self.executor, self._host, self._connection = executor, executor.host, executor.connection
        self.name, self.device = executor.name, executor.device
        self.statistics, self.stream = executor.statistics, executor.queue.stream
        if recovery is not None:
            recovery.follow = self._follow
        self._follow()

    def _follow(self) -> None:
        """Have the members of the host's communicator, which may have changed."""
        self.rank, self.size, self.ranks = self._host.rank, self._host.size, self._host.ranks

    # Collectives ----------------------------------------------------------------------------------

    @_tells_rejections
    def all_reduce(self, memory: DeviceMemory, op: Op, codec: Codec | None = None) -> None:
        check_reducible(memory.dtype, op)
        kind, operation, width = self._connection.nccl.reduction(memory.dtype, Op.SUM if op is Op.AVERAGE else op)
        with self.executor.launch("all_reduce", memory):
            if op is Op.AVERAGE:
                self.executor.scale(memory, 1 / self.size)
            if memory.size:
                self._connection.call(
                    "ncclAllReduce", memory.pointer, memory.pointer, memory.size * width, kind, operation
                )

    @_tells_rejections
    def broadcast(self, memory: DeviceMemory, root: int) -> None:
        check_rank(root, self, "root")
        with self.executor.launch("broadcast", memory):
            if memory.size:
                self._connection.call("ncclBroadcast", memory.pointer, memory.pointer, memory.nbytes, BYTES, root)

    @_tells_rejections
    def all_gather(self, mine: DeviceMemory, out: DeviceMemory, counts: Sequence[int]) -> None:
        parts = _parts(out, counts, "counts")
        with self.executor.launch("all_gather", mine, out):
            if len(set(counts)) == 1:
                self._connection.call("ncclAllGather", mine.pointer, out.pointer, mine.nbytes, BYTES)
                return
            for root, (pointer, count) in enumerate(parts):
                if count:
                    nbytes = count * _item_size(out)
                    self._connection.call("ncclBroadcast", mine.pointer, pointer, nbytes, BYTES, root)

    @_tells_rejections
    def reduce_scatter(self, full: DeviceMemory, out: DeviceMemory, counts: Sequence[int], op: Op) -> None:
        check_reducible(full.dtype, op)
        parts = _parts(full, counts, "counts")
        factor = 1.0
        # A sum of float16 or 8-bit numbers may overflow where their average does not, so these stay NCCL's to average.
        # The bias is below half a unit in the last place in float16, and no multiplication of the result could undo it.
        if op is Op.AVERAGE and full.dtype not in ("float16", *FLOATS8):
            op, factor = Op.SUM, 1 / self.size
        kind, operation, width = self._connection.nccl.reduction(full.dtype, op)
        with self.executor.launch("reduce_scatter", full, out):
            if factor != 1.0:
                self.executor.scale_after(out, factor)
            if len(set(counts)) == 1:
                count = counts[0] * width
                self._connection.call("ncclReduceScatter", full.pointer, out.pointer, count, kind, operation)
                return
            for root, (pointer, count) in enumerate(parts):
                if count:
                    self._connection.call("ncclReduce", pointer, out.pointer, count * width, kind, operation, root)

    @_tells_rejections
    def all_to_all(
        self, send: DeviceMemory, send_counts: Sequence[int], out: DeviceMemory, out_counts: Sequence[int]
    ) -> None:
        outgoing, incoming = _parts(send, send_counts, "send_counts"), _parts(out, out_counts, "out_counts")
        with self.executor.launch("all_to_all", send, out):
            for peer, ((source, sent), (target, received)) in enumerate(zip(outgoing, incoming, strict=True)):
                if sent:
                    self._connection.call("ncclSend", source, sent * _item_size(send), BYTES, peer)
                if received:
                    self._connection.call("ncclRecv", target, received * _item_size(out), BYTES, peer)

    @_tells_rejections
    def send(self, memory: DeviceMemory, receiver: int) -> None:
        """Send to one member, which must call `receive` for as many bytes."""
        check_rank(receiver, self, "receiver")
        with self.executor.launch("send", memory):
            if memory.size:
                self._connection.call("ncclSend", memory.pointer, memory.nbytes, BYTES, receiver)

    @_tells_rejections
    def receive(self, memory: DeviceMemory, sender: int) -> None:
        """Overwrite the memory with what one member sends."""
        check_rank(sender, self, "sender")
        with self.executor.launch("receive", memory):
            if memory.size:
                self._connection.call("ncclRecv", memory.pointer, memory.nbytes, BYTES, sender)

    def barrier(self) -> None:
        """Return when all ranks have called and this rank's GPU is done with its operations; waits on the host."""
        self.synchronize()
        self._host.barrier()

    def broadcast_object(self, item: Any, root: int = 0, purpose: str = "") -> Any:
        return self._host.broadcast_object(item, root, purpose)

    def all_gather_object(self, item: Any, purpose: str = "") -> list[Any]:
        return self._host.all_gather_object(item, purpose)

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Not offered: the memory of a GPU is the framework's to allocate.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"{self.name} cannot allocate {nbytes} bytes on the GPU; allocate them with your framework."
        )

    def allocate_registered(self, nbytes: int) -> RegisteredMemory | None:
        """Memory of NCCL's that all ranks have registered alike, None if a rank cannot have any; collective.

        Waits on the host.

        Raises:
            MismatchError: the sizes differ.
            DeviceError, TimeoutExceeded: NCCL failed, here or on another rank.
        """
        what = "registering memory"
        with self.executor.exclusively(what):
            try:
                return self.executor.registered.allocate(nbytes)
            except (DeviceError, TimeoutExceeded) as error:
                self._host.interrupt(f"{self.name}: {what}", error)  # or the others wait in NCCL for this rank
                raise

    # Order ----------------------------------------------------------------------------------------

    def group(self) -> contextlib.AbstractContextManager[None]:
        if self._recovery is not None and self._recovery.is_outside:
            return contextlib.nullcontext()  # each call is a whole
        return self.executor.launch("group")

    def start(self, description: str, function: Callable[[], T], repeats: bool = False) -> Work[T]:
        """Queue what `function` does, the framework's copies included, while the caller's stream goes on.

        `function` itself runs at once, in the calling thread, and its error is raised here.
        """
        if (recovery := self._recovery) is not None:
            return recovery.start(description, function) if repeats else recovery.start_whole(description, function)
        return self.executor.start(description, function)

    def wait_for(self, works: Sequence[Work[Any]]) -> None:
        if self._recovery is not None:
            self._recovery.wait_for(works)
        else:
            works[-1].wait()  # all are on one stream

    def synchronize(self) -> None:
        """Wait on the host until the GPU has completed all operations of this communicator; notices dead peers."""
        self.executor.synchronize()

    # Failure and end ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that broke the communicator, if any: what the GPU computed since then is useless.

        A GPU that waited for a dead peer goes on only after this would raise.
        """
        self.executor.failure.check()

    def interrupt(self, operation: str, cause: BaseException) -> None:
        self.executor.interrupt(operation, cause)

    def reject(self, operation: str, error: BaseException) -> None:
        self._host.reject(operation, error)
        if is_rejection(error):
            self.executor.tell_rejection(operation, error)

    def activity(self) -> Activity | None:
        """The operation that this rank's GPU is working on, or worked on last."""
        return self.executor.queue.activity()

    def close(self) -> None:
        self.executor.close()

    def discard(self) -> None:
        self.executor.discard()

    def detach_after_fork(self) -> None:
        self.executor.detach_after_fork()


def _item_size(memory: DeviceMemory) -> int:
    return memory.nbytes // memory.size if memory.size else 0


def _parts(memory: DeviceMemory, counts: Sequence[int], name: str) -> list[tuple[int, int]]:
    """Pointer and number of elements of consecutive parts."""
    check_counts(counts, memory.size, name)
    parts, pointer = [], memory.pointer
    for count in counts:
        parts.append((pointer, count))
        pointer += count * _item_size(memory)
    return parts
