"""Runs the operations of one communicator on a GPU, and looks after them while nobody calls.

NCCL wants one thread at a time in a communicator. So everything happens under one lock: calls of the script, works that
join its stream, and the looks of the monitor thread, by which `GpuWatchdog` sees to it that no GPU waits for a rank
that is gone. Nothing here makes the host wait for the GPU unless its docstring says so. `connection` holds the NCCL
communicator, and `stream` what is queued.

The file is a few lines longer than others, since that lock guards all of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, DeviceError, RingError, is_first_report
from ring_plugins.core.collectives.api import Communicator, FailureState, Statistics
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.host_groups import VIEW_SHIFT
from ring_plugins.core.control.wait import PeerRejected, Wait
from ring_plugins.core.gpu.connection import FINALIZE_TIMEOUT, NcclConnection
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.nccl import Nccl
from ring_plugins.core.gpu.nccl_log import nccl_log
from ring_plugins.core.gpu.registered import RegisteredPool
from ring_plugins.core.gpu.stream import StreamQueue, Streams

T = TypeVar("T")
#: Added to the numbers of operations, which are counted apart from those of the host's communicator.
_ON_GPU = 1 << 60


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


class Recovery(Protocol):
    """What follows when members are lost (recovery.py).

    Attributes:
        trouble: an error of NCCL or CUDA, "" if there was none; the end of the operation tells the other members.
    """

    trouble: str

    @property
    def is_stale(self) -> bool:
        """Whether members that NCCL has connected are gone, or others have joined."""

    def look(self) -> None:
        """End kernels that have waited for a dead member for some time; for the monitor thread."""

    def reject_capture(self, operation: str) -> None:
        """Reject to capture a CUDA graph.

        Raises:
            ArgumentError: always.
        """


class DeviceExecutor:
    """The executor of one communicator; its constructor is collective.

    Args:
        name: for error texts, equal on all members.
        device: this rank's GPU, as the process numbers them.
        host: a communicator among the same ranks, for the bootstrap and for objects; closed with this one.
        streams: the framework's streams.
        wait: how to wait on the host.
        nccl, driver: the libraries of this process.
        own_stream: whether it gets a stream of its own, for messages between two ranks behind which other
            communicators must not wait.
        blocks: see `NcclConnection`.

    Attributes:
        name, device, host: as given.
        connection: the NCCL communicator.
        registered: the memory that is registered with it.
        queue: what is queued on the stream.
        failure: the error, if any, after which nothing is executed any more.
        statistics: what was executed so far.
        peers: world ranks of the other members.

    Raises:
        MismatchError, DeviceError, TimeoutExceeded: see `NcclConnection`.
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
        blocks: bool = False,
    ) -> None:
        while _discarded:
            _discarded.popleft().release_discarded()
        self.name, self.device, self.host = name, device, host
        self._streams, self.wait, self._driver = streams, wait, driver
        #: How it goes on when members are lost; None where that ends the job. Set by whoever makes it.
        self.recovery: Recovery | None = None
        self.statistics, self.failure = Statistics(), FailureState(name)
        self._own = host.ranks[host.rank]
        self.peers = [rank for rank in host.ranks if rank != self._own]
        self._lock = threading.RLock()
        #: By number of operations, how many calls this member rejected then.
        self._rejected: dict[int, int] = {}
        self._told_from = _ON_GPU  # added to numbers of operations that others are told of
        self._group_depth = 0
        self._operation = ""
        self._scaled_after: list[tuple[DeviceMemory, float]] = []  # once the group that is open has been queued
        self._own_stream = driver.new_stream(device) if own_stream else 0
        stream = self._own_stream or driver.stream(device)
        self.connection = NcclConnection(name, device, host, wait, nccl, driver, stream, blocks)
        self.queue = StreamQueue(name, self._own, stream, streams, driver)
        self.registered = RegisteredPool(name, device, host, self.connection, nccl, driver)

    # Order ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exclusively(self, what: str) -> Iterator[None]:
        """Keep other threads out, with the device current, and break the communicator with an error inside."""
        with self._lock, self._breaking_on_error(what), self._driver.device(self.device):
            yield

    def start(self, description: str, function: Callable[[], T]) -> StreamWork[T]:
        """See `DeviceCommunicator.start`."""
        with self.exclusively(description):
            self._reject_capture(description)
            caller = self.queue.follow_caller(description)
            with self._streams.using(self.queue.stream):
                result = function()
            # It refers to all that it works on, also to tensors into which the framework copies a result at its end.
            self.queue.keep_alive([function])
            queued = self.queue.push(description, self._operation, self.statistics.operations, caller)

        def is_done() -> bool:
            with self._lock:
                return self.queue.is_done(queued)

        def join() -> None:
            with self.exclusively(description):
                self.queue.make_follow(self._streams.current(), queued)

        return StreamWork(description, result, is_done, join)

    @contextlib.contextmanager
    def launch(self, what: str, *memories: DeviceMemory) -> Iterator[None]:
        """Queue the NCCL calls made inside as one, after the caller's work so far and before its next."""
        for memory in memories:
            self._check_memory(memory)
        with self._lock, self._breaking_on_error(what):
            self._operation = what
            self.queue.keep_alive(memory.owner for memory in memories)
            if self._group_depth:
                yield
                return
            with self._driver.device(self.device):
                self._reject_capture(what)
                caller = self.queue.follow_caller(what)
                self._scaled_after.clear()
                with self.connection.group(what):
                    self._group_depth += 1
                    try:
                        yield
                    finally:
                        self._group_depth -= 1
                for memory, factor in self._scaled_after:
                    self.scale(memory, factor)
                self.statistics.operations += 1
                if caller != self.queue.stream:  # otherwise `start` made this stream current, and pushes at its end
                    queued = self.queue.push("", self._operation, self.statistics.operations, caller)
                    self.queue.make_follow(caller, queued)

    def _reject_capture(self, what: str) -> None:
        if self.recovery is not None and self._driver.is_capturing(self._streams.current()):
            self.recovery.reject_capture(what)

    def scale(self, memory: DeviceMemory, factor: float) -> None:
        """Multiply memory on the communication stream."""
        if memory.size and factor != 1.0:
            with self._streams.using(self.queue.stream):
                self._streams.scale(memory, factor)

    def scale_after(self, memory: DeviceMemory, factor: float) -> None:
        """Multiply memory once the group that is open has been queued."""
        self._scaled_after.append((memory, factor))

    def _check_memory(self, memory: DeviceMemory) -> None:
        if not isinstance(memory, DeviceMemory):
            raise ArgumentError(
                f"{self.name} reduces memory of GPU {self.device} and was given memory of the CPU; move the tensor "
                f"to cuda:{self.device} first."
            )
        if memory.device != self.device:
            raise ArgumentError(
                f"{self.name} belongs to GPU {self.device} and was given memory of GPU {memory.device}; each rank "
                "uses one GPU. Call torch.cuda.set_device(ring_plugins.local_rank()) before putting anything on a GPU."
            )

    def synchronize(self) -> None:
        """Wait on the host until the GPU has completed all operations of this communicator; notices dead peers."""

        def is_idle() -> bool:
            with self.exclusively("synchronize"):
                self.queue.drop_finished()
                return not self.queue.unfinished

        missing = list if self.recovery is not None else lambda: self.peers
        self.wait.until(is_idle, missing, lambda: f"{self.name}: work of the GPU")

    def has_unfinished(self, checks: bool = True) -> bool:
        """Whether operations are not known to be done; asks the GPU, and NCCL for errors if it `checks`."""
        with self._lock, self._driver.device(self.device):
            self.queue.drop_finished()
            if checks:
                self.connection.check()
            return bool(self.queue.unfinished)

    def failed(self) -> RingError | None:
        """The error that has broken it, or that NCCL or CUDA reports now; None if there is none."""
        try:
            self.failure.check()
            self.has_unfinished()
        except RingError as error:
            return error
        return None

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Keep other threads out while the ranks connect anew, with the device current."""
        with self._lock, self._driver.device(self.device):
            yield

    # Failure --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _breaking_on_error(self, what: str) -> Iterator[None]:
        """Raise the error that broke the communicator; break it with an error that leaves members out of step."""
        self.failure.check()
        try:
            yield
        except ArgumentError:
            raise
        except RingError as error:
            if self.recovery is None or not isinstance(error, DeviceError):
                self._break(error)
            else:  # which the end of the whole tells the other ranks
                self.recovery.trouble = self.recovery.trouble or str(error)
            raise
        except Exception:
            raise  # the framework's, from a function given to `start`
        except BaseException as error:
            self.interrupt(what, error)
            raise

    def interrupt(self, operation: str, cause: BaseException) -> None:
        with self._lock:
            self.failure.interrupt(operation, cause)
            self.connection.abort()
        self.host.interrupt(f"{self.name}: {operation}", cause)  # whose failure the other members look for (`poll`)

    def break_down(self, error: BaseException) -> None:
        """As an error that leaves members out of step does, which all of them raise."""
        with self._lock:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """Let every further call raise `error`, and end kernels that wait for peers; returns at once."""
        self.failure.fail(error)
        self.connection.abort()
        if isinstance(error, DeviceError):  # of this rank's GPU, which the others' would wait for
            self.host.interrupt(f"{self.name}: {self._operation or 'its first operation'}", error)

    def tell_rejection(self, operation: str, error: BaseException) -> None:
        """Tell the members' watchdogs; once for an error that passes through several layers."""
        if not isinstance(self.host, HostCommunicator) or not is_first_report(error, f"{self.name} on GPUs"):
            return
        with self._lock:
            number = self.statistics.operations
            before = self._rejected.get(number, 0)
            self._rejected = {n: m for n, m in self._rejected.items() if n >= self.queue.finished}
            self._rejected[number] = before + 1
            told = self._told_from + number
        self.host.groups.reject(told, before, operation, error)

    def count_anew(self, view: int) -> None:
        """Let rejections of all members count from here, where some have run more operations than others.

        Args:
            view: how often the ranks of the job have changed.
        """
        with self._lock:
            self._told_from, self._rejected = _ON_GPU + (view << VIEW_SHIFT) - self.statistics.operations, {}

    # For the watchdog, on its thread

    def poll(self, departed: Sequence[int]) -> None:
        """Notice what the GPU does for too long, and failures that NCCL reports; does nothing during a call.

        Args:
            departed: members (world ranks) whose processes have ended normally.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self.connection.is_open:
                return
            if self.recovery is not None:
                self.recovery.look()
            with self._breaking_on_error("its watchdog"), self._driver.device(self.device):
                self.host.check()  # broken by a member that was interrupted
                self.queue.poll()
                self.connection.check()
                self._check_rejections()
                self.queue.check_progress(departed)
            log = nccl_log()
            if log is not None and self.peers and self.queue.has_completed:
                log.report(self._own, self.host.rank == 0)
        except RingError:
            pass  # the next call raises it
        finally:
            self._lock.release()

    def abort(self, error: BaseException) -> None:
        """A member is gone: end kernels that wait for it, and let every further call raise `error`; waits for a second.

        A call that is inside NCCL needs the communicator and keeps the lock. It polls the failure detector itself, and
        raises soon.
        """
        if self.connection.is_open and self._lock.acquire(timeout=1.0):
            try:
                self._break(error)
            finally:
                self._lock.release()

    def _check_rejections(self) -> None:
        """Raise if a member has rejected an operation that this one's GPU waits in."""
        oldest = self.queue.oldest
        if oldest is None or not isinstance(self.host, HostCommunicator):
            return
        for number in range(self.queue.finished, oldest.number):
            if rejection := self.host.groups.rejection(self._told_from + number, self._rejected.get(number, 0)):
                where = f"{self.name}: {oldest.text}"
                error = PeerRejected(f"{rejection} The GPU of rank {self._own} waits for it in {where}.")
                self.host.interrupt(where, error)  # that member may not know
                raise error

    # Life -----------------------------------------------------------------------------------------

    def release_discarded(self) -> None:
        """Close it without the peers, which may not have discarded theirs yet."""
        with self._lock:
            if self.queue.captured:
                self.connection.drop()
            else:
                self.connection.abort()
        self.close()

    def close(self) -> None:
        """Release the communicator once peers no longer need this rank, after 12 seconds at the latest.

        What it registered is deregistered if the GPU is done with it, and is otherwise NCCL's until the process ends.

        If a CUDA graph captured one of its operations, NCCL keeps its communicator until the process ends: nobody can
        tell whether the graph still lives, and NCCL waits until it does not.
        """
        with self._lock:
            if self.queue.captured:
                self.connection.drop()
            else:
                if self.recovery is not None and self.recovery.is_stale:
                    self.connection.abort()  # finalizing waits for all members
                self._deregister()
                self.connection.finalize()
            self.failure.close()
            self.queue.clear()
            own_stream, self._own_stream = self._own_stream, 0
            if own_stream:
                self._driver.destroy_stream(own_stream)
        self.connection.wait_for_abort()
        self.registered.close()
        self.host.close()

    def _deregister(self) -> None:
        """Undo registrations, which NCCL cannot do any more once it finalizes; waits up to 10 s for the GPU."""
        if not (self.registered.blocks and self.connection.is_open):
            return
        end = time.monotonic() + FINALIZE_TIMEOUT

        def over() -> bool:
            self.queue.drop_finished()
            return not self.queue.unfinished or time.monotonic() > end

        with contextlib.suppress(RingError), self._driver.device(self.device):
            self.wait.until(over, list, lambda: f"{self.name}: deregistering memory")
            if not self.queue.unfinished:
                self.registered.deregister()

    def discard(self) -> None:
        """Leave it to the next communicator to close this one: neither NCCL nor a lock may be waited for here."""
        _discarded.append(self)

    def detach_after_fork(self) -> None:
        """In a forked child: let every call raise, since CUDA does not survive a fork."""
        self._lock = threading.RLock()
        self.connection.drop()
        self.registered.detach_after_fork()
        self.failure.detach_after_fork()


#: Executors of communicators whose last user has gone.
_discarded: deque[DeviceExecutor] = deque()
