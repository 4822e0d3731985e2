"""Collectives on the memory of GPUs, by NCCL.

Nothing here waits on the host for the GPU, unless its docstring says so. Operations are queued on the stream on which
this process communicates; events order them after what the caller's stream was given before, and before what it is
given next.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from ring_plugins.core.collectives.protocol import Communicator, Statistics
from ring_plugins.core.collectives.work import Work
from ring_plugins.core.compression import HalfWire
from ring_plugins.core.dtypes import check_reducible
from ring_plugins.core.errors import ArgumentError, DeviceError, PeerLeft, RingError, TimeoutExceeded
from ring_plugins.core.memory import DeviceMemory
from ring_plugins.core.nccl.calls import BYTES, SUCCESS, Nccl
from ring_plugins.core.nccl.driver import Driver
from ring_plugins.core.nccl.meeting import connect, others
from ring_plugins.core.operations import Op
from ring_plugins.core.shared_memory import SharedBuffer
from ring_plugins.core.waiting import Wait, seconds_from_environment

T = TypeVar("T")

#: Seconds that a communicator which is no longer needed waits for the peers to be done with it too.
_FAREWELL = 10.0
#: Seconds in which the GPU may still finish what a rank that has ended in order had sent before.
_LAST_WORDS = 2.0


class Streams(Protocol):
    """The framework's streams, which only it knows."""

    def current(self) -> int:
        """Handle of the stream on which the calling thread's work goes now."""

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Let the calling thread's work go to that stream."""


class _Queued:
    """Something on the communication stream.

    Attributes:
        description: for texts.
        event: happens when it is done; 0 once that is known.
        since: when it was queued, a time of `time.monotonic`.
        kept: what must stay alive until then.
        captured: it belongs to a CUDA graph; nobody can tell when that is replayed.
    """

    def __init__(self, description: str, event: int, kept: list[Any], captured: bool) -> None:
        self.description, self.event, self.kept, self.captured = description, event, kept, captured
        self.since = time.monotonic()


class DeviceCommunicator:
    """A `Communicator` for the memory of one GPU a rank.

    Args:
        name: for texts, equal on all members.
        device: this rank's GPU, as the process numbers them.
        host: a communicator among the same ranks, for meeting and for objects; closed with this one.
        streams: the framework's.
        wait: how to wait on the host.
        nccl, driver: of this process.

    Raises:
        MismatchError, DeviceError, TimeoutExceeded: the ranks cannot be connected; see `core.nccl.meeting`.
    """

    def __init__(
        self, name: str, device: int, host: Communicator, streams: Streams, wait: Wait, nccl: Nccl, driver: Driver
    ) -> None:
        self.name, self.device = name, device
        self.rank, self.size, self.ranks = host.rank, host.size, host.ranks
        self.statistics = Statistics()
        self._host, self._streams, self._wait, self._nccl, self._driver = host, streams, wait, nccl, driver
        self._timeout = seconds_from_environment("RING_TIMEOUT", 1800.0)
        self._lock = threading.RLock()  # a communicator may be used by one thread at a time
        self._broken: BaseException | None = None
        self._depth = 0
        self._kept: list[Any] = []
        self._queued: deque[_Queued] = deque()
        self._captured: list[_Queued] = []
        self._has_run = False
        self._waits_for_gone_since = 0.0
        self._communicator: ctypes.c_void_p | None = connect(name, device, host, nccl, driver, wait)
        self._stream = driver.stream(device)

    @property
    def stream(self) -> int:
        """Handle of the stream on which it communicates."""
        return self._stream

    # Collectives ----------------------------------------------------------------------------------

    def all_reduce(self, memory: DeviceMemory, op: Op, wire: HalfWire | None = None) -> None:
        check_reducible(memory.dtype, op)
        kind, operation, width = self._nccl.reduction(memory.dtype, op)
        with self._launch("all_reduce", memory):
            if memory.size:
                self._call("ncclAllReduce", memory.pointer, memory.pointer, memory.size * width, kind, operation)

    def broadcast(self, memory: DeviceMemory, root: int) -> None:
        if not 0 <= root < self.size:
            raise ArgumentError(f"root={root} is not a rank of {self.name}, which has {self.size}.")
        with self._launch("broadcast", memory):
            if memory.size:
                self._call("ncclBroadcast", memory.pointer, memory.pointer, memory.nbytes, BYTES, root)

    def all_gather(self, mine: DeviceMemory, out: DeviceMemory, counts: Sequence[int]) -> None:
        places = _places(out, counts, "counts")
        with self._launch("all_gather", mine, out):
            if len(set(counts)) == 1:
                self._call("ncclAllGather", mine.pointer, out.pointer, mine.nbytes, BYTES)
                return
            for root, (pointer, count) in enumerate(places):
                if count:
                    nbytes = count * _width(out)
                    self._call("ncclBroadcast", mine.pointer, pointer, nbytes, BYTES, root)

    def reduce_scatter(self, full: DeviceMemory, out: DeviceMemory, counts: Sequence[int], op: Op) -> None:
        check_reducible(full.dtype, op)
        places = _places(full, counts, "counts")
        kind, operation, width = self._nccl.reduction(full.dtype, op)
        with self._launch("reduce_scatter", full, out):
            if len(set(counts)) == 1:
                self._call("ncclReduceScatter", full.pointer, out.pointer, counts[0] * width, kind, operation)
                return
            for root, (pointer, count) in enumerate(places):
                if count:
                    self._call("ncclReduce", pointer, out.pointer, count * width, kind, operation, root)

    def all_to_all(
        self, send: DeviceMemory, send_counts: Sequence[int], out: DeviceMemory, out_counts: Sequence[int]
    ) -> None:
        leaving, arriving = _places(send, send_counts, "send_counts"), _places(out, out_counts, "out_counts")
        with self._launch("all_to_all", send, out):
            for peer, ((source, sent), (target, received)) in enumerate(zip(leaving, arriving, strict=True)):
                if sent:
                    self._call("ncclSend", source, sent * _width(send), BYTES, peer)
                if received:
                    self._call("ncclRecv", target, received * _width(out), BYTES, peer)

    def barrier(self) -> None:
        """Return when all ranks have called and the GPU has done what it was given here; waits on the host."""
        self.synchronize()
        self._host.barrier()

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        return self._host.broadcast_object(item, root)

    def all_gather_object(self, item: Any) -> list[Any]:
        return self._host.all_gather_object(item)

    # Order ----------------------------------------------------------------------------------------

    def group(self) -> contextlib.AbstractContextManager[None]:
        return self._launch("group")

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        """Queue what `function` does, copies of the framework's included, while the caller's stream goes on.

        `function` itself runs at once, in the calling thread, and its error is raised here.
        """
        with self._lock, self._failing(description), self._driver.current(self.device):
            caller = self._streams.current()
            self._check_capture(description, caller)
            self._let_follow(self._stream, caller)
            with self._streams.using(self._stream):
                result = function()
            return DeviceWork(self, self._remember(description, caller), result)

    @contextlib.contextmanager
    def _launch(self, what: str, *memories: DeviceMemory) -> Iterator[None]:
        """Queue the calls made inside as one: they run together, after the caller's work and before its next."""
        for memory in memories:
            self._check(memory)
        with self._lock, self._failing(what):
            self._kept += [memory.owner for memory in memories]
            self.statistics.nbytes += memories[0].nbytes if memories else 0
            if self._depth:
                yield
                return
            with self._driver.current(self.device):
                caller = self._streams.current()
                self._check_capture(what, caller)
                self._let_follow(self._stream, caller)
                self._nccl.call("ncclGroupStart")
                self._depth += 1
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(DeviceError):
                        self._nccl.call("ncclGroupEnd")  # NCCL counts them by thread
                    raise
                finally:
                    self._depth -= 1
                self._nccl.call("ncclGroupEnd", communicator=self._communicator)
                self._settle(what)
                self.statistics.operations += 1
                if caller != self._stream:  # else whoever made it current asks for the end of it
                    self._remember(what, caller)
                    self._let_follow(caller, self._stream)

    def _call(self, name: str, *arguments: Any) -> None:
        self._nccl.call(name, *arguments, self._communicator, self._stream, communicator=self._communicator)

    def _settle(self, what: str) -> None:
        """NCCL's thread queues the kernels; until it has, there is nothing that an event could stand behind."""
        communicator = self._communicator
        assert communicator is not None
        self._wait.until(
            lambda: self._nccl.state(communicator) == SUCCESS,
            lambda: others(self._host),
            lambda: f"{self.name}: {what} by NCCL",
        )

    def _let_follow(self, later: int, earlier: int) -> None:
        """What a stream is given from now on comes after all that another was given so far."""
        if later != earlier:
            event = self._driver.record(earlier)
            self._driver.wait(later, event)
            self._driver.destroy_event(event)

    def _remember(self, description: str, caller: int) -> _Queued:
        """Note what was queued, to keep its memory and to notice that it takes too long."""
        captured = self._driver.is_capturing(caller)
        queued = _Queued(description, self._driver.record(self._stream), self._kept, captured)
        self._kept = []
        if captured:
            self._captured.append(queued)  # each replay uses this memory
        else:
            self._forget_finished()
            self._has_run = True
            self._queued.append(queued)
        return queued

    def _check_capture(self, description: str, caller: int) -> None:
        if not self._has_run and self._driver.is_capturing(caller):
            raise ArgumentError(
                f"{self.name}: {description} is the first thing to be sent, and a CUDA graph is being captured. Run a "
                "few ordinary steps before the capture, so that NCCL connects the GPUs outside of it."
            )

    def _forget_finished(self) -> None:
        while self._queued and self._has_happened(self._queued[0]):
            self._queued.popleft()

    def _has_happened(self, queued: _Queued) -> bool:
        with self._lock:
            if queued.event and not queued.captured and self._driver.happened(queued.event):
                self._driver.destroy_event(queued.event)
                queued.event, queued.kept = 0, []
            return not queued.event

    def _join(self, queued: _Queued) -> None:
        """Let what the caller's stream is given next come after `queued`."""
        with self._lock, self._failing(queued.description), self._driver.current(self.device):
            caller = self._streams.current()
            if queued.event and caller != self._stream:
                self._driver.wait(caller, queued.event)

    def synchronize(self) -> None:
        """Return when the GPU has done all that it was given here; waits on the host, and notices peers that died."""

        def idle() -> bool:
            with self._lock, self._failing("synchronize"), self._driver.current(self.device):
                self._forget_finished()
                return not self._queued

        self._wait.until(idle, lambda: others(self._host), lambda: f"{self.name}: work of the GPU")

    # Failure --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """After an error that leaves the members out of step every further call raises it again."""
        if self._broken is not None:
            raise self._broken
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
            self._give_up(
                RingError(
                    f"{self.name} was interrupted in {what} by {type(error).__name__} and is out of step with the "
                    "other ranks; call ring_plugins.shutdown() and init() on all ranks to go on."
                )
            )
            raise

    def _give_up(self, error: BaseException) -> None:
        """Let kernels that wait for peers end. Their results are of no use."""
        self._broken = self._broken or error
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with contextlib.suppress(DeviceError), self._driver.current(self.device):
                self._nccl.call("ncclCommAbort", communicator)

    def check(self) -> None:
        """Raise what went wrong, if anything did: what the GPU computed since is of no use.

        A GPU that waited for a dead peer goes on only after this would raise.
        """
        if self._broken is not None:
            raise self._broken

    def watch(self, gone: Sequence[int]) -> None:
        """Look for failure while nobody calls: what the GPU does too long, and what NCCL noticed meanwhile.

        Called now and then by another thread; does nothing while a call is under way.

        Args:
            gone: members (world ranks) whose processes have ended in order, so that nothing more will come from them.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._communicator is None:
                return
            with self._failing("its watch"), self._driver.current(self.device):
                self._forget_finished()
                self._nccl.state(self._communicator)
                self._check_gone(gone)
                if self._queued and time.monotonic() - self._queued[0].since > self._timeout:
                    raise TimeoutExceeded(
                        f"{self.name}: the GPU has not finished {self._queued[0].description} for {self._timeout:g} s. "
                        "A rank did not call it, or computes for that long; set RING_TIMEOUT to wait longer."
                    )
        except RingError:
            pass  # the next call raises it
        finally:
            self._lock.release()

    def _check_gone(self, gone: Sequence[int]) -> None:
        if not gone or not self._queued:
            self._waits_for_gone_since = 0.0
        elif not self._waits_for_gone_since:
            self._waits_for_gone_since = time.monotonic()
        elif time.monotonic() - self._waits_for_gone_since > _LAST_WORDS:
            raise PeerLeft(
                f"rank {gone[0]} has ended its part of the job, and the GPU of rank {self.ranks[self.rank]} waits for "
                f"it in {self.name}: {self._queued[0].description}. Usually the ranks took different numbers of steps: "
                "give every rank the same number of batches.",
                gone[0],
            )

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

    # Memory ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Not offered: the memory of a GPU is the framework's to allocate.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(f"allocate({nbytes}) of {self.name}: allocate memory of the GPU with your framework.")

    def release(self, buffer: SharedBuffer) -> None:
        pass

    def close(self) -> None:
        """Let go of the communicator, after the peers' part in what is under way."""
        with self._lock:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                self._part_with(communicator)
            self._broken = self._broken or RingError(f"{self.name} has been closed.")
            self._queued.clear()
            self._captured.clear()
        self._host.close()

    def leave_to_parent(self) -> None:
        """In a forked child: let every call raise; CUDA does not survive a fork."""
        self._lock, self._communicator = threading.RLock(), None
        self._broken = RingError(
            f"{self.name} belongs to process {os.getppid()}, which forked this one (a data loader's worker?). "
            "Collectives are for the ranks themselves."
        )

    def _part_with(self, communicator: ctypes.c_void_p) -> None:
        """Everyone flushes what is still to be sent, then lets go; not for longer than a farewell should take."""
        end = time.monotonic() + _FAREWELL

        def flushed() -> bool:
            return self._nccl.state(communicator) == SUCCESS or time.monotonic() > end

        with contextlib.suppress(RingError), self._driver.current(self.device):
            try:
                self._nccl.call("ncclCommFinalize", communicator, communicator=communicator)
                self._wait.until(flushed, list, lambda: f"{self.name}: parting")
                late = time.monotonic() > end
                self._nccl.call("ncclCommAbort" if late else "ncclCommDestroy", communicator)
            except RingError:
                self._nccl.call("ncclCommAbort", communicator)

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


class DeviceWork(Work[T]):
    """What `DeviceCommunicator.start` queued."""

    def __init__(self, communicator: DeviceCommunicator, queued: _Queued, result: T) -> None:
        super().__init__(queued.description, lambda: result, lambda _: None)
        self._communicator, self._queued = communicator, queued
        self._result = result

    def done(self) -> bool:
        """Whether the GPU has finished it; asks, never waits."""
        return self._communicator._has_happened(self._queued)

    def wait(self) -> T:
        """Let the calling thread's stream wait for it, not the thread itself, and return the function's result."""
        self._communicator._join(self._queued)
        result: T = self._result
        return result


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


__all__ = ["DeviceCommunicator", "DeviceWork", "Streams"]
