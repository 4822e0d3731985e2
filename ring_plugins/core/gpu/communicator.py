"""Collectives on the memory of GPUs, by NCCL.

Nothing here makes the host wait for the GPU unless its docstring says so: a call queues NCCL's kernels on the
communication stream (`stream`) and orders that stream with the caller's by events. `connection` holds the NCCL
communicator, and `watchdog` looks after both while nobody calls.

**Averages are sums of scaled numbers.** `ncclAvg` multiplies by 1/n too, but first rounds 1/n to the element type. That
biases every average of bfloat16 numbers by 0.2 % at 3, 6, 7 or 12 ranks, and NCCL then uses neither the switches' own
adders (NVLS) nor its symmetric kernels. So the framework scales the numbers in float32 before NCCL sums them, as DDP
does; numbers that have to stay as they are (`reduce_scatter`) are summed first. Gradient buckets come scaled already.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import FLOATS8, Op, check_reducible
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, DeviceError, RingError, TimeoutExceeded, is_rejection
from ring_plugins.core.collectives.api import Activity, BufferOwner, Communicator, FailureState, Statistics, Work
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.validation import check_counts, check_rank
from ring_plugins.core.control.wait import LongWait, PeerRejected, Wait
from ring_plugins.core.gpu.connection import FINALIZE_TIMEOUT, NcclConnection
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.nccl import BYTES, Nccl
from ring_plugins.core.gpu.nccl_log import nccl_log
from ring_plugins.core.gpu.registered import RegisteredMemory, RegisteredPool
from ring_plugins.core.gpu.stream import QueuedOperation, StreamQueue, Streams
from ring_plugins.core.linux.shared_memory import SharedBuffer

T = TypeVar("T")


F = TypeVar("F", bound=Callable[..., Any])

#: Set on an exception, the communicator whose members know of it.
_TOLD = "_ring_rejection_told_on_gpu_in"


def _tells_rejections(collective: F) -> F:
    """Let a method tell the other members if this one rejects its arguments, so that their GPUs do not wait for it."""

    @functools.wraps(collective)
    def telling(self: DeviceCommunicator, *args: Any, **options: Any) -> Any:
        try:
            return collective(self, *args, **options)
        except ArgumentError as error:
            self._tell_rejection(collective.__name__, error)
            raise

    return cast("F", telling)


class StreamWork(Generic[T]):
    """A `Work` on a GPU.

    Args:
        description: as in `Work`.
        result: returned by `wait`, to be used on the stream that was made to wait.
        is_done: whether the GPU has finished it; asks, never waits.
        join: lets the calling thread's stream wait for it.
    """

    def __init__(self, description: str, result: T, is_done: Callable[[], bool], join: Callable[[], None]) -> None:
        self.description = description
        self._result, self._is_done, self._join = result, is_done, join

    def done(self) -> bool:
        return self._is_done()

    def wait(self) -> T:
        """Let the calling thread's stream wait for it, not the thread itself, and return the result."""
        self._join()
        return self._result


class DeviceCommunicator:
    """A `Communicator` for the memory of one GPU per rank; its constructor is collective.

    After an error that leaves members out of step every further call raises it again.

    Args:
        name: for error texts, equal on all members.
        device: this rank's GPU, as the process numbers them.
        host: a communicator among the same ranks, for the bootstrap and for objects; closed with this one.
        streams: the framework's streams.
        wait: how to wait on the host.
        nccl, driver: the libraries of this process.
        own_stream: whether it gets a stream of its own, for messages between two ranks behind which other
            communicators must not wait.

    Raises:
        MismatchError, DeviceError, TimeoutExceeded: see `NcclConnection`.
    """

    recovers = False

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
        while _discarded:
            _discarded.popleft().release_discarded()
        self.name, self.device = name, device
        self.rank, self.size, self.ranks = host.rank, host.size, host.ranks
        self.statistics = Statistics()
        self._host, self._streams, self._wait, self._driver = host, streams, wait, driver
        self._lock = threading.RLock()  # NCCL wants one thread at a time in a communicator
        self._failure = FailureState(name)
        #: By number of operations, how many calls this member rejected then.
        self._rejected: dict[int, int] = {}
        self._group_depth = 0
        self._operation = ""
        self._scaled_after: list[tuple[DeviceMemory, float]] = []  # once the group that is open has been queued
        self._own_stream = driver.new_stream(device) if own_stream else 0
        stream = self._own_stream or driver.stream(device)
        self._connection = NcclConnection(name, device, host, wait, nccl, driver, stream)
        self._queue = StreamQueue(name, host.ranks[host.rank], stream, streams, driver)
        self._peers = [rank for rank in host.ranks if rank != host.ranks[host.rank]]
        self._registered = RegisteredPool(name, device, host, self._connection, nccl, driver)

    @property
    def stream(self) -> int:
        """Handle of the stream on which it communicates."""
        return self._queue.stream

    # Collectives ----------------------------------------------------------------------------------

    @_tells_rejections
    def all_reduce(self, memory: DeviceMemory, op: Op, codec: Codec | None = None) -> None:
        check_reducible(memory.dtype, op)
        kind, operation, width = self._connection.reduction(memory.dtype, Op.SUM if op is Op.AVERAGE else op)
        with self._launch("all_reduce", memory):
            if op is Op.AVERAGE:
                self._scale(memory, 1 / self.size)
            if memory.size:
                self._connection.call(
                    "ncclAllReduce", memory.pointer, memory.pointer, memory.size * width, kind, operation
                )

    def all_reduce_coalesced(
        self, memories: Sequence[DeviceMemory], op: Op, codecs: Sequence[Codec | None] | None = None
    ) -> None:
        with self.group():
            for memory in memories:
                self.all_reduce(memory, op)

    @_tells_rejections
    def broadcast(self, memory: DeviceMemory, root: int) -> None:
        check_rank(root, self, "root")
        with self._launch("broadcast", memory):
            if memory.size:
                self._connection.call("ncclBroadcast", memory.pointer, memory.pointer, memory.nbytes, BYTES, root)

    @_tells_rejections
    def all_gather(self, mine: DeviceMemory, out: DeviceMemory, counts: Sequence[int]) -> None:
        parts = _parts(out, counts, "counts")
        with self._launch("all_gather", mine, out):
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
        if op is Op.AVERAGE:
            op, factor = _sum_and_factor(full.dtype, self.size)
        kind, operation, width = self._connection.reduction(full.dtype, op)
        with self._launch("reduce_scatter", full, out):
            if factor != 1.0:
                self._scaled_after.append((out, factor))
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
        with self._launch("all_to_all", send, out):
            for peer, ((source, sent), (target, received)) in enumerate(zip(outgoing, incoming, strict=True)):
                if sent:
                    self._connection.call("ncclSend", source, sent * _item_size(send), BYTES, peer)
                if received:
                    self._connection.call("ncclRecv", target, received * _item_size(out), BYTES, peer)

    @_tells_rejections
    def send(self, memory: DeviceMemory, receiver: int) -> None:
        """Send to one member, which must call `receive` for as many bytes."""
        check_rank(receiver, self, "receiver")
        with self._launch("send", memory):
            if memory.size:
                self._connection.call("ncclSend", memory.pointer, memory.nbytes, BYTES, receiver)

    @_tells_rejections
    def receive(self, memory: DeviceMemory, sender: int) -> None:
        """Overwrite the memory with what one member sends."""
        check_rank(sender, self, "sender")
        with self._launch("receive", memory):
            if memory.size:
                self._connection.call("ncclRecv", memory.pointer, memory.nbytes, BYTES, sender)

    def barrier(self) -> None:
        """Return when all ranks have called and this rank's GPU is done with its operations; waits on the host."""
        self.synchronize()
        self._host.barrier()

    def broadcast_object(self, item: Any, root: int = 0, operation: str = "") -> Any:
        return self._host.broadcast_object(item, root, operation)

    def all_gather_object(self, item: Any, operation: str = "") -> list[Any]:
        return self._host.all_gather_object(item, operation)

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Not offered: the memory of a GPU is the framework's to allocate.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"{self.name} cannot allocate {nbytes} bytes on the GPU; allocate them with your framework."
        )

    def buffers_belong_to(self, owner: BufferOwner) -> None:
        pass

    def release(self, buffer: SharedBuffer) -> None:
        pass

    def allocate_registered(self, nbytes: int) -> RegisteredMemory | None:
        """Memory of NCCL's that all ranks have registered alike, None if a rank cannot have any; collective.

        Waits on the host.

        Raises:
            MismatchError: the sizes differ.
            DeviceError, TimeoutExceeded: NCCL failed, here or on another rank.
        """
        what = "registering memory"
        with self._lock, self._breaking_on_error(what), self._driver.device(self.device):
            try:
                return self._registered.allocate(nbytes)
            except (DeviceError, TimeoutExceeded) as error:
                self._host.interrupt(f"{self.name}: {what}", error)  # or the others wait in NCCL for this rank
                raise

    # Order ----------------------------------------------------------------------------------------

    def group(self) -> contextlib.AbstractContextManager[None]:
        return self._launch("group")

    def start(self, description: str, function: Callable[[], T], repeats: bool = False) -> Work[T]:
        """Queue what `function` does, the framework's copies included, while the caller's stream goes on.

        `function` itself runs at once, in the calling thread, and its error is raised here.
        """
        with self._lock, self._breaking_on_error(description), self._driver.device(self.device):
            caller = self._queue.follow_caller(description)
            with self._queue.using():
                result = function()
            # It refers to all that it works on, also to tensors into which the framework copies a result at its end.
            self._queue.keep_alive([function])
            queued = self._push(description, caller)
        return StreamWork(description, result, lambda: self._is_done(queued), lambda: self._join(queued))

    def wait_for(self, works: Sequence[Work[Any]]) -> None:
        for work in works:
            work.wait()

    def run_synchronously(self, description: str, function: Callable[[], T]) -> T:
        """As `start` and `wait`: a GPU has streams, and the host never waits for them."""
        return self.start(description, function).wait()

    @contextlib.contextmanager
    def _launch(self, what: str, *memories: DeviceMemory) -> Iterator[None]:
        """Queue the NCCL calls made inside as one, after the caller's work so far and before its next."""
        for memory in memories:
            self._check_memory(memory)
        with self._lock, self._breaking_on_error(what):
            self._operation = what
            self._queue.keep_alive(memory.owner for memory in memories)
            if self._group_depth:
                yield
                return
            with self._driver.device(self.device):
                caller = self._queue.follow_caller(what)
                self._scaled_after.clear()
                with self._connection.group(what):
                    self._group_depth += 1
                    try:
                        yield
                    finally:
                        self._group_depth -= 1
                for memory, factor in self._scaled_after:
                    self._scale(memory, factor)
                self.statistics.operations += 1
                if caller != self.stream:  # otherwise `start` made this stream current, and pushes at its end
                    self._queue.make_follow(caller, self._push("", caller))

    def _scale(self, memory: DeviceMemory, factor: float) -> None:
        """Multiply memory on the communication stream."""
        if memory.size and factor != 1.0:
            with self._queue.using():
                self._streams.scale(memory, factor)

    def _check_memory(self, memory: DeviceMemory) -> None:
        if not isinstance(memory, DeviceMemory):
            raise ArgumentError(
                f"{self.name} reduces memory of GPU {self.device} and was given memory of the CPU; move the tensor to "
                f"cuda:{self.device} first."
            )
        if memory.device != self.device:
            raise ArgumentError(
                f"{self.name} belongs to GPU {self.device} and was given memory of GPU {memory.device}; each rank uses "
                "one GPU. Call torch.cuda.set_device(ring_plugins.local_rank()) before putting anything on a GPU."
            )

    def _push(self, description: str, caller: int) -> QueuedOperation:
        return self._queue.push(description, self._operation, self.statistics.operations, caller)

    def _is_done(self, queued: QueuedOperation) -> bool:
        with self._lock:
            return self._queue.is_done(queued)

    def _join(self, queued: QueuedOperation) -> None:
        with self._lock, self._breaking_on_error(queued.description), self._driver.device(self.device):
            self._queue.join(queued)

    def synchronize(self) -> None:
        """Wait on the host until the GPU has completed all operations of this communicator; notices dead peers."""

        def is_idle() -> bool:
            with self._lock, self._breaking_on_error("synchronize"), self._driver.device(self.device):
                self._queue.drop_finished()
                return not self._queue.unfinished

        self._wait.until(is_idle, lambda: self._peers, lambda: f"{self.name}: work of the GPU")

    # Failure --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _breaking_on_error(self, what: str) -> Iterator[None]:
        """Raise the error that broke the communicator; break it with an error that leaves members out of step."""
        self._failure.check()
        try:
            yield
        except ArgumentError:
            raise
        except RingError as error:
            self._break(error)
            raise
        except Exception:
            raise  # the framework's, from a function given to `start`
        except BaseException as error:
            self.interrupt(what, error)
            raise

    def interrupt(self, operation: str, cause: BaseException) -> None:
        with self._lock:
            self._failure.interrupt(operation, cause)
            self._connection.abort()
        self._host.interrupt(f"{self.name}: {operation}", cause)  # whose failure the other members look for (`poll`)

    def _break(self, error: BaseException) -> None:
        """Let every further call raise `error`, and end kernels that wait for peers; returns at once."""
        self._failure.fail(error)
        self._connection.abort()

    def check(self) -> None:
        """Raise the error that broke the communicator, if any: what the GPU computed since then is useless.

        A GPU that waited for a dead peer goes on only after this would raise.
        """
        self._failure.check()

    # For the watchdog, on its thread

    def poll(self, departed: Sequence[int]) -> None:
        """Notice what the GPU does for too long, and failures that NCCL reports; does nothing during a call.

        Args:
            departed: members (world ranks) whose processes have ended normally.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._connection.is_open:
                return
            with self._breaking_on_error("its watchdog"), self._driver.device(self.device):
                self._host.check()  # broken by a member that was interrupted
                self._queue.poll()
                self._connection.check()
                self._check_rejections()
                self._queue.check_progress(departed)
            self._report_choices()
        except RingError:
            pass  # the next call raises it
        finally:
            self._lock.release()

    def _report_choices(self) -> None:
        log = nccl_log()
        if log is not None and self._peers and self._queue.has_completed:
            log.report(self.ranks[self.rank], self.rank == 0)

    def abort(self, error: BaseException) -> None:
        """A member is gone: end kernels that wait for it, and let every further call raise `error`; waits for a second.

        A call that is inside NCCL needs the communicator and keeps the lock. It polls the failure detector itself, and
        raises soon.
        """
        if self._connection.is_open and self._lock.acquire(timeout=1.0):
            try:
                self._break(error)
            finally:
                self._lock.release()

    @property
    def oldest(self) -> QueuedOperation | None:
        """The first operation that was not done at the last look."""
        return self._queue.oldest

    def long_wait(self) -> LongWait | None:
        """The operation in which this rank's GPU waits, None if it has not come to any."""
        return self._queue.long_wait(self._peers)

    def reject(self, operation: str, error: BaseException) -> None:
        self._host.reject(operation, error)
        if is_rejection(error):
            self._tell_rejection(operation, error)

    def _tell_rejection(self, operation: str, error: BaseException) -> None:
        """Tell the members' watchdogs; once for an error that passes through several layers."""
        if vars(error).get(_TOLD) == self.name or not isinstance(self._host, HostCommunicator):
            return
        vars(error)[_TOLD] = self.name
        with self._lock:
            number = self.statistics.operations
            before = self._rejected.get(number, 0)
            self._rejected = {
                number: before + 1,
                **{n: m for n, m in self._rejected.items() if n >= self._queue.finished},
            }
        self._host.reject_on_gpu(number, before, operation, error)

    def _check_rejections(self) -> None:
        """Raise if a member has rejected an operation that this one's GPU waits in."""
        oldest = self._queue.oldest
        if oldest is None or not isinstance(self._host, HostCommunicator):
            return
        for number in range(self._queue.finished, oldest.number):
            if rejection := self._host.rejection_on_gpu(number, self._rejected.get(number, 0)):
                own = self.ranks[self.rank]
                error = PeerRejected(f"{rejection} The GPU of rank {own} waits for it in {self.name}: {oldest.text}.")
                self._host.interrupt(f"{self.name}: {oldest.text}", error)  # that member may not know
                raise error

    def activity(self) -> Activity | None:
        """The operation that this rank's GPU is working on, or worked on last."""
        return self._queue.activity()

    # Life -----------------------------------------------------------------------------------------

    def release_discarded(self) -> None:
        """Close it without the peers, which may not have discarded theirs yet."""
        with self._lock:
            if self._queue.captured:
                self._connection.drop()
            else:
                self._connection.abort()
        self.close()

    def close(self) -> None:
        """Release the communicator once peers no longer need this rank, after 12 seconds at the latest.

        What it registered is deregistered if the GPU is done with it, and is otherwise NCCL's until the process ends.

        If a CUDA graph captured one of its operations, NCCL keeps its communicator until the process ends: nobody can
        tell whether the graph still lives, and NCCL waits until it does not.
        """
        with self._lock:
            if self._queue.captured:
                self._connection.drop()
            else:
                self._deregister()
                self._connection.finalize()
            self._failure.close()
            self._queue.clear()
            own_stream, self._own_stream = self._own_stream, 0
            if own_stream:
                self._driver.destroy_stream(own_stream)
        self._connection.wait_for_abort()
        self._registered.close()
        self._host.close()

    def _deregister(self) -> None:
        """Undo registrations, which NCCL cannot do any more once it finalizes; waits up to 10 s for the GPU."""
        if not (self._registered.has_memory and self._connection.is_open):
            return
        end = time.monotonic() + FINALIZE_TIMEOUT

        def over() -> bool:
            self._queue.drop_finished()
            return not self._queue.unfinished or time.monotonic() > end

        with contextlib.suppress(RingError), self._driver.device(self.device):
            self._wait.until(over, list, lambda: f"{self.name}: deregistering memory")
            if not self._queue.unfinished:
                self._registered.deregister()

    def discard(self) -> None:
        """Leave it to the next communicator to close this one: neither NCCL nor a lock may be waited for here."""
        _discarded.append(self)

    def detach_after_fork(self) -> None:
        """In a forked child: let every call raise, since CUDA does not survive a fork."""
        self._lock = threading.RLock()
        self._connection.drop()
        self._registered.detach_after_fork()
        self._failure.detach_after_fork()


#: Communicators whose last user has gone.
_discarded: deque[DeviceCommunicator] = deque()


def _sum_and_factor(dtype: str, size: int) -> tuple[Op, float]:
    """How to average numbers that may not be scaled before: the reduction, and what to multiply its result by.

    A sum of float16 or 8-bit numbers may overflow where their average does not, so these stay NCCL's to average. The
    bias is below half a unit in the last place in float16, and no multiplication of the result could undo it.
    """
    return (Op.AVERAGE, 1.0) if dtype in ("float16", *FLOATS8) else (Op.SUM, 1 / size)


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
