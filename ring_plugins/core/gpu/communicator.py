"""Collectives on the memory of GPUs, by NCCL.

Nothing here waits on the host for the GPU, unless its docstring says so. Operations are queued on the stream on which
this process communicates (`queued`); events order them after what the caller's stream was given before, and before what
it is given next (`stream_queue`).

Operations of a GPU in order with the framework's, and what becomes of them when something fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ring_plugins.core.arrays.codec import HalfCodec
from ring_plugins.core.arrays.dtypes import Op, check_reducible
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Communicator, FailureState, QueuedWork, Statistics, Work
from ring_plugins.core.collectives.executor import Activity
from ring_plugins.core.control.wait import LongWait, Wait
from ring_plugins.core.gpu.connection import NcclConnection, others
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.nccl import BYTES, Nccl
from ring_plugins.core.gpu.stream import Overdue, Queued, StreamQueue, Streams
from ring_plugins.core.linux.shared_memory import SharedBuffer

T = TypeVar("T")


class QueuedOperations:
    """What the device communicator inherits to keep its calls in order, and to remember that it has failed.

    After an error that leaves members out of step every further call raises it again. Arguments and errors are those
    of `DeviceCommunicator`.
    """

    def __init__(
        self,
        name: str,
        device: int,
        host: Communicator,
        streams: Streams,
        wait: Wait,
        nccl: Nccl,
        driver: Driver,
        own_stream: bool = False,
    ) -> None:
        self.name, self.device = name, device
        self.rank, self.size, self.ranks = host.rank, host.size, host.ranks
        self.statistics = Statistics()
        self._host, self._wait, self._driver = host, wait, driver
        self._lock = threading.RLock()  # a communicator may be used by one thread at a time
        self._failure = FailureState(name)
        self._depth = 0
        self._operation = ""
        self._overdue = Overdue(name, self.ranks[self.rank])
        self._own_stream = driver.new_stream(device) if own_stream else 0
        stream = self._own_stream or driver.stream(device)
        self._nccl = NcclConnection(name, device, host, wait, nccl, driver, stream)
        self._queue = StreamQueue(name, stream, streams, driver)

    @property
    def stream(self) -> int:
        """Handle of the stream on which it communicates."""
        return self._queue.stream

    # Order ----------------------------------------------------------------------------------------

    def group(self) -> contextlib.AbstractContextManager[None]:
        return self._launch("group")

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        """Queue what `function` does, copies of the framework's included, while the caller's stream goes on.

        `function` itself runs at once, in the calling thread, and its error is raised here.
        """
        with self._lock, self._failing(description), self._driver.current(self.device):
            caller = self._queue.follow_caller(description)
            with self._queue.using():
                result = function()
            queued = self._remember(description, caller)
        return QueuedWork(description, result, lambda: self._has_happened(queued), lambda: self._join(queued))

    @contextlib.contextmanager
    def _launch(self, what: str, *memories: DeviceMemory) -> Iterator[None]:
        """Queue the calls made inside as one: they run together, after the caller's work and before its next."""
        for memory in memories:
            self._check(memory)
        with self._lock, self._failing(what):
            self._operation = what
            self._queue.keep(memory.owner for memory in memories)
            self.statistics.nbytes += memories[0].nbytes if memories else 0
            if self._depth:
                yield
                return
            with self._driver.current(self.device):
                caller = self._queue.follow_caller(what)
                with self._nccl.together(what):
                    self._depth += 1
                    try:
                        yield
                    finally:
                        self._depth -= 1
                self.statistics.operations += 1
                if caller != self.stream:  # else whoever made it current asks for the end of it
                    self._remember("", caller)
                    self._queue.lead_caller(caller)

    def _check(self, memory: DeviceMemory) -> None:
        if not isinstance(memory, DeviceMemory):
            raise ArgumentError(
                f"{self.name} reduces memory of GPU {self.device} and was given memory of the CPU; move the tensor to "
                f"cuda:{self.device} first."
            )
        if memory.device != self.device:
            raise ArgumentError(
                f"{self.name} belongs to GPU {self.device} and was given memory of GPU {memory.device}; each rank uses "
                "one GPU. Call torch.cuda.set_device(ring_plugins.local_rank()) before anything is put on a GPU."
            )

    def _remember(self, description: str, caller: int) -> Queued:
        return self._queue.remember(description, self._operation, self.statistics.operations, caller)

    def _has_happened(self, queued: Queued) -> bool:
        """Whether the GPU is done with something; asks, never waits."""
        with self._lock:
            return self._queue.has_happened(queued)

    def _join(self, queued: Queued) -> None:
        """Let what the caller's stream is given next come after `queued`."""
        with self._lock, self._failing(queued.description), self._driver.current(self.device):
            self._queue.join(queued)

    def synchronize(self) -> None:
        """Return when the GPU has done all that it was given here; waits on the host, and notices peers that died."""

        def idle() -> bool:
            with self._lock, self._failing("synchronize"), self._driver.current(self.device):
                self._queue.forget_finished()
                return not self._queue.unfinished

        self._wait.until(idle, lambda: others(self._host), lambda: f"{self.name}: work of the GPU")

    # Failure --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """After an error that leaves the members out of step every further call raises it again."""
        self._failure.check()
        try:
            yield
        except ArgumentError:
            raise
        except RingError as error:
            self._give_up(error)
            raise
        except Exception:
            raise  # the framework's, from a function given to `start`
        except BaseException as error:
            self._failure.interrupt(what, error)
            self._nccl.abort()
            raise

    def _give_up(self, error: BaseException) -> None:
        """Let kernels that wait for peers end. Their results are of no use."""
        self._failure.fail(error)
        self._nccl.abort()

    def check(self) -> None:
        """Raise what went wrong, if anything did: what the GPU computed since is of no use.

        A GPU that waited for a dead peer goes on only after this would raise.
        """
        self._failure.check()

    def watch(self, gone: Sequence[int]) -> None:
        """Look for failure while nobody calls: what the GPU does too long, and what NCCL noticed meanwhile.

        Called now and then by another thread; does nothing while a call is under way.

        Args:
            gone: members (world ranks) whose processes have ended in order, so that nothing more will come from them.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._nccl.is_open:
                return
            with self._failing("its watch"), self._driver.current(self.device):
                self._queue.look()
                self._nccl.check()
                self._overdue.check(self._queue.oldest, gone)
        except RingError:
            pass  # the next call raises it
        finally:
            self._lock.release()

    @property
    def oldest(self) -> Queued | None:
        """The first that was not done when somebody looked; asked by another thread, as the two below."""
        return self._queue.oldest

    def wait_of_gpu(self) -> LongWait | None:
        """What the GPU of this rank waits for in NCCL, if it has come to anything that is not done."""
        return self._queue.wait(others(self._host))

    def activity(self) -> Activity | None:
        """What this rank's GPU did last with this communicator, or does now."""
        return self._queue.activity()

    def abort(self, error: BaseException) -> None:
        """A member is gone: let every kernel that waits for it end, and every further call raise `error`.

        Called by another thread than the one that computes, which NCCL keeps waiting perhaps.
        """

        def give_up() -> None:
            if self._lock.acquire(timeout=1.0):  # else a call is inside NCCL, and may not lose what it works on
                try:
                    self._give_up(error)
                finally:
                    self._lock.release()

        thread = threading.Thread(target=give_up, name=f"ring:abort {self.name}", daemon=True)
        thread.start()
        thread.join(2.0)  # aborting waits for the GPU

    # Life -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the communicator, after the peers' part in what is under way."""
        with self._lock:
            self._nccl.part()
            self._failure.close()
            self._queue.clear()
            own, self._own_stream = self._own_stream, 0
            if own:
                self._driver.destroy_stream(own)
        self._host.close()

    def detach_after_fork(self) -> None:
        """In a forked child: let every call raise; CUDA does not survive a fork."""
        self._lock = threading.RLock()
        self._nccl.forget()
        self._failure.leave_to_parent()


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
        MismatchError, DeviceError, TimeoutExceeded: the ranks cannot be connected; see `core.gpu.connection`.
    """

    def all_reduce(self, memory: DeviceMemory, op: Op, codec: HalfCodec | None = None) -> None:
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
