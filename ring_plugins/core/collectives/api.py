"""What a communicator promises, said once for all implementations.

How bytes move among the ranks of a communicator.

Operations that run while the caller goes on.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ring_plugins.core.arrays.codec import HalfCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import RingError
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.control.wait import nap_precisely
from ring_plugins.core.linux.shared_memory import SharedBuffer
from ring_plugins.core.trace.recorder import recorder


class ByteCollectives(Protocol):
    """Moves bytes; knows nothing of element types. All arrays are 1-d uint8 and may be empty.

    Every member calls the same method in the same order with an equal signature.
    """

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        """Fill `parts[i]` with member i's `mine`; sizes may differ and are known to all."""

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], fingerprint: Fingerprint) -> None:
        """Fill `incoming[i]` with what member i has for this one in its `outgoing`."""

    def broadcast(self, data: Bytes, root: int, fingerprint: Fingerprint) -> None:
        """Fill `data` with the root's."""

    def barrier(self, fingerprint: Fingerprint) -> None:
        """Return when all members have called."""


T = TypeVar("T")


class Work(Generic[T]):
    """An operation under way.

    Attributes:
        description: what it is, for texts.
    """

    def __init__(self, description: str, function: Callable[[], T], on_wait: Callable[[float], None]) -> None:
        self.description = description
        self._function: Callable[[], T] | None = function
        self._on_wait = on_wait
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._finished.is_set()

    def wait(self) -> T:
        """Wait for the operation and return its result.

        Raises:
            Exception: whatever the operation raised, with its own traceback.
        """
        if not self._finished.is_set():
            started = time.monotonic()
            self._on_wait(started)
            try:
                self._finished.wait()
            finally:
                self._on_wait(-started)
                if recorder.on:
                    recorder.record("wait", self.description, int(started * 1e9), time.monotonic_ns())
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def run(self) -> None:
        """Do it; called once, by the thread that serves the queue."""
        function, self._function = self._function, None
        assert function is not None
        try:
            self._result = function()
        except BaseException as error:  # crosses to the caller whole, in `wait`
            self._error = error
        finally:
            self._finished.set()


class QueuedWork(Work[T]):
    """An operation under way on a GPU.

    Args:
        description: as `Work`.
        result: what `wait` returns, to be used on the stream that was made to wait.
        is_done: whether the GPU has finished it; asks, never waits.
        join: lets the calling thread's stream wait for it.
    """

    def __init__(self, description: str, result: T, is_done: Callable[[], bool], join: Callable[[], None]) -> None:
        super().__init__(description, lambda: result, lambda _: None)
        self._result, self._is_done, self._join = result, is_done, join

    def done(self) -> bool:
        """Whether the GPU has finished it; asks, never waits."""
        return self._is_done()

    def wait(self) -> T:
        """Let the calling thread's stream wait for it, not the thread itself, and return the result."""
        self._join()
        result: T = self._result
        return result


class CommunicationThread:
    """Runs works one after the other, in the order in which they were given."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Work[Any] | None] = queue.SimpleQueue()
        self._unfinished = 0
        #: What is being run, for texts.
        self.current: Work[Any] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"ring:{name}", daemon=True)
        self._thread.start()

    def give(self, work: Work[Any]) -> None:
        with self._lock:
            self._unfinished += 1
        self._queue.put(work)

    def is_idle(self) -> bool:
        return self._unfinished == 0

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def end(self) -> None:
        """Let the thread end after the works it has."""
        self._queue.put(None)

    def close(self) -> None:
        """End the thread after the works it has, and wait for that a while."""
        self.end()
        if not self.is_current():
            with contextlib.suppress(RuntimeError):
                self._thread.join(timeout=5.0)

    def _serve(self) -> None:
        nap_precisely()
        while (work := self._queue.get()) is not None:
            self.current = work
            work.run()
            self.current = None
            del work  # and not keep its result until there is another
            with self._lock:
                self._unfinished -= 1


class FailureState:
    """Remembers why a communicator can no longer be used.

    Ranks match operations by their order alone. After an error that leaves this rank out of step with the others, every
    further call must raise that error again; the remedy is a new communicator.

    Args:
        name: name of the communicator, for error texts.

    Attributes:
        error: the first such error, None while the communicator works.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """Let every further call raise `error`, unless an earlier error is already recorded."""
        self.error = self.error or error

    def interrupt(self, operation: str, cause: BaseException) -> None:
        """Record that something that is not our own error, such as KeyboardInterrupt, ended an operation halfway."""
        self.fail(
            RingError(
                f"{self._name} was interrupted in {operation} by {type(cause).__name__} and is out of step with the "
                "other ranks; call ring_plugins.shutdown() and init() on all ranks to go on."
            )
        )

    def close(self) -> None:
        """Record that the communicator has been closed."""
        self.fail(RingError(f"{self._name} has been closed."))

    def leave_to_parent(self) -> None:
        """In a forked child: let every call raise, since it would disturb the parent and its peers."""
        self.error = RingError(
            f"{self._name} belongs to process {os.getppid()}, which forked this one (a data loader's worker?). "
            "Collectives are for the ranks themselves."
        )


if TYPE_CHECKING:
    import typing_extensions

    #: The memory it works on. `Communicator` alone means host memory, `Communicator[DeviceMemory]` that of a GPU.
    M_contra = typing_extensions.TypeVar("M_contra", contravariant=True, default=HostMemory)
else:
    M_contra = TypeVar("M_contra", contravariant=True)


@dataclass
class Statistics:
    """What a communicator has done so far.

    Attributes:
        operations: collectives finished.
        nbytes: bytes given to them.
        waited: seconds in which callers waited for them.
        working: seconds in which the communication thread, or a blocked caller, ran them.
    """

    operations: int = 0
    nbytes: int = 0
    waited: float = 0.0
    working: float = 0.0


class Communicator(Protocol[M_contra]):
    """A group of ranks that make the same calls in the same order.

    Calls block the calling thread, but work given to `start` before comes first. On a GPU they block the calling
    thread's stream instead: what it is given next comes after them. After an error that
    leaves members out of step every further call raises it again; build a new communicator to go on.

    Attributes:
        name: for texts.
        rank, size: within the group.
        ranks: the members' world ranks.
        statistics: what was done so far.

    All methods raise `PeerFailed` if a member is gone, `MismatchError` if members call different things,
    `DeadlockError` and `TimeoutExceeded` as their names say.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    statistics: Statistics

    def all_reduce(self, memory: M_contra, op: Op, codec: HalfCodec | None = None) -> None:
        """Combine everyone's memory, in place, to the same bits on all ranks.

        `wire` says how numbers travel between hosts, where they do: in full by default.
        """

    def broadcast(self, memory: M_contra, root: int) -> None:
        """Overwrite everyone's memory with the root's."""

    def all_gather(self, mine: M_contra, out: M_contra, counts: Sequence[int]) -> None:
        """Fill `out` with everyone's memory in rank order; `counts` elements each, equal on all ranks."""

    def reduce_scatter(self, full: M_contra, out: M_contra, counts: Sequence[int], op: Op) -> None:
        """Combine everyone's `full` and leave `counts[rank]` elements of it in `out`; `full` is only read."""

    def all_to_all(self, send: M_contra, send_counts: Sequence[int], out: M_contra, out_counts: Sequence[int]) -> None:
        """Send `send_counts[i]` elements to rank i, receive `out_counts[i]` from it, in rank order."""

    def barrier(self) -> None:
        """Return when all ranks have called."""

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        """The root's object (pickled) on every rank."""

    def all_gather_object(self, item: Any) -> list[Any]:
        """Everyone's object (pickled) in rank order."""

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        """Run `function`, which calls the methods above, after all started before, while the caller goes on."""

    def group(self) -> AbstractContextManager[None]:
        """The operations called inside may travel together; their results are there when it ends."""

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Memory in which `all_reduce` is fastest; all ranks call with the same size."""

    def release(self, buffer: SharedBuffer) -> None:
        """Give back memory from `allocate`; views of it stay valid."""

    def close(self) -> None:
        """End the communication thread and forget the memory."""
