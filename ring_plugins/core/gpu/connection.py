"""One NCCL communicator of this process, from its bootstrap to its end.

NCCL blocks without a limit in several places: while it connects ranks, while it queues a group of calls, and while it
finalizes. A rank that died meanwhile would leave the others stuck inside a C function. There are two ways out.

**A blocking communicator**, as torch's NCCL backend makes by default, where the first lost rank ends the job. A thread
of ours connects, registers memory and finalizes (`_begin`), and the caller waits for it with `Wait`, which watches the
other ranks and the clock. If that gives up, the thread stays where it is. A group is queued by the caller itself:
`ncclGroupEnd` waits for other ranks only while it connects them for an algorithm that is used for the first time
(2.22), and for the GPU while the stream has no room. A caller that a lost rank leaves in there is like one that is
stuck in any other library: the monitor thread says who was lost, and ends the process (core/control/monitor.py). Until
then `queuing` tells the stall report.

**A nonblocking one** (2.14), where the job and the process go on. Those calls return IN_PROGRESS, a thread of NCCL's
does the work, and we poll `ncclCommGetAsyncError`. NCCL lets these be given up at any moment. But the thread, which it
starts for every group, costs 0.2 ms, and 5 ms beside another thread that computes in Python.

Whatever goes wrong ends in `ncclCommAbort`, the only call that makes kernels end that wait for a dead peer. No thread
may be inside NCCL with the communicator then, which the executor's lock sees to. It blocks, whatever the communicator:
first it tells kernels to end, then it waits for the GPU, for NCCL's own threads, and (`commDestroySync` in init.cc,
2.18 to 2.30) until no CUDA graph refers to the communicator any more. NCCL 2.25.1 could deadlock there
(pytorch#149153). So a thread of its own calls it, and nobody waits for that thread for long. `ncclCommFinalize` waits
for graphs too, forever if the script keeps one (pytorch#115388); hence a communicator that was captured is neither
finalized nor destroyed but left to the end of the process.

Before ranks connect they compare notes over the host communicator (peers.py). NCCL may connect on some ranks and time
out on others, so they also exchange the outcome and agree on it. A communicator may be used by one thread at a time,
which `DeviceCommunicator` sees to.

**Considered and rejected**: *one NCCL group for all buckets that are ready*. NCCL chooses algorithms by a group's total
size, so ranks would have to agree which buckets those are. *A blocking communicator split off a nonblocking one* could
be given up while it connects, but needs memory for two.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import (
    DeviceError,
    MembersLost,
    RingError,
    TimeoutExceeded,
    name_ranks,
)
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.background import BackgroundWork, QueueThread
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.nccl import (
    COLLECTIVE_WINDOW,
    IN_PROGRESS,
    SHRINK_ABORT,
    SUCCESS,
    Config,
    Nccl,
    UniqueId,
)
from ring_plugins.core.gpu.nccl_log import nccl_log
from ring_plugins.core.gpu.peers import RankInfo, allow_shared_gpu, check_gpus, check_versions, gpu_identity

T = TypeVar("T")
#: Seconds of spinning while a thread of NCCL's queues kernels. That takes some 30 µs, or 10 times that on a busy host;
#: a nap of `Wait` would cost autograd's thread as much again for every bucket. Meanwhile this thread keeps the
#: interpreter's lock, but offers its core to NCCL's thread.
_SPIN = 1e-3
_offer_core = ctypes.PyDLL(None).sched_yield
#: Seconds that `finalize` waits for peers to be done with the communicator too, before it aborts.
FINALIZE_TIMEOUT = 10.0
#: Seconds that closing waits for an abort: enough where NCCL is healthy, little where it hangs.
_ABORT_TIMEOUT = 2.0
#: Seconds in which a communicator shrinks, or else a new one is made.
_SHRINK_TIMEOUT = 20.0
#: Places to which a thread of NCCL's may yet write a handle.
_abandoned: list[ctypes.c_void_p] = []


class NcclConnection:
    """An NCCL communicator and the stream it is used on; its constructor is collective.

    Args:
        name: for error texts, equal on all members.
        device: this rank's GPU, as the process numbers them.
        host: a communicator among the same ranks, for the bootstrap.
        wait: how to wait on the host.
        nccl, driver: the libraries of this process.
        stream: handle of the stream.
        blocks: whether it blocks (see the top of this file). NCCL_COMM_BLOCKING overrules it.

    Attributes:
        nccl: as given.
        ranks: world ranks of the members that it connects.
        queuing: since when a thread has been queuing a group on a blocking communicator, 0.0 if none is, and what.

    Raises:
        MismatchError: the ranks have different releases of NCCL.
        DeviceError: two ranks have one GPU, or NCCL failed.
        TimeoutExceeded: NCCL did not connect the ranks within RING_START_TIMEOUT.
    """

    def __init__(
        self,
        name: str,
        device: int,
        host: Communicator,
        wait: Wait,
        nccl: Nccl,
        driver: Driver,
        stream: int,
        blocks: bool = False,
    ) -> None:
        self._name, self._device, self._stream = name, device, stream
        self._wait, self.nccl, self._driver = wait, nccl, driver
        self._host = host
        self._aborting: threading.Thread | None = None
        self._registering: BackgroundWork[None] | None = None
        self._config = Config.of(blocks)
        self._blocks = False
        self.queuing = 0.0, ""
        self._thread = QueueThread(f"{name} by NCCL")
        self._communicator: ctypes.c_void_p | None = None
        self.ranks: tuple[int, ...] = ()
        self.connect()

    @property
    def is_open(self) -> bool:
        """Whether it was neither aborted nor finalized."""
        return self._communicator is not None

    # Bootstrap ------------------------------------------------------------------------------------

    def connect(self, is_lost: Callable[[], bool] | None = None) -> None:
        """Connect all members that the host's communicator has now; collective.

        Args:
            is_lost: whether a member is lost, so that connecting is useless; None where that raises.

        Raises:
            MismatchError, DeviceError, TimeoutExceeded: see the class.
        """
        host, nccl = self._host, self.nccl
        share = config.SHARE_GPU.get()
        what = f"{self._name}: connecting by NCCL"
        with on_all_or_none(host, what, is_alone=True):
            gpu = gpu_identity(self._driver, self._device)
        infos = [
            RankInfo(*info) for info in host.all_gather_object((nccl.version, nccl.path, gpu, share), "connect NCCL")
        ]
        check_versions(infos, host.ranks)
        check_gpus(infos, host.ranks)
        if share:
            allow_shared_gpu(nccl.version, host.ranks[host.rank])
        log = nccl_log()
        # `ncclCommSplit` would save this bootstrap, but all ranks of the older communicator must call it, with nothing
        # under way there. A group is made by its members alone, while other threads reduce gradients. And where split
        # communicators share channels, aborting one may break all.
        with on_all_or_none(host, what, is_alone=True):
            own_id = nccl.unique_id() if host.rank == 0 else None
        unique_id = host.broadcast_object(own_id, root=0, purpose="connect NCCL")
        communicator, own_rank, size = ctypes.c_void_p(), host.rank, host.size
        identifier = UniqueId.received(unique_id)

        def initialize() -> int:
            config = ctypes.byref(self._config)
            return nccl.call("ncclCommInitRankConfig", ctypes.byref(communicator), size, identifier, own_rank, config)

        call = self._begin("ncclCommInitRankConfig", initialize)
        try:
            self._wait_until_connected(lambda: is_over(call) and nccl.state(communicator) == SUCCESS, is_lost)
        except BaseException as error:
            if call.done() and call.error is None:
                self._start_abort(communicator)
                self.wait_for_abort()
            if is_lost is None and isinstance(error, DeviceError):
                host.interrupt(what, error)
            raise
        finally:
            if log is not None:
                log.restore_environment()
        self._blocks = call.wait() != IN_PROGRESS
        self._communicator, self.ranks = communicator, host.ranks

    def _begin(self, what: str, function: Callable[[], T]) -> BackgroundWork[T]:
        """Let the thread call a function that may block for ever, with the device current."""

        def run() -> T:
            with self._driver.device(self._device):
                return function()

        work = BackgroundWork(what, run, lambda work: None, lambda *_: None)
        self._thread.give(work)
        return work

    def shrink(self, is_lost: Callable[[], bool]) -> bool:
        """Go on with those of its members that the host's communicator has now; collective.

        Args:
            is_lost: whether one of them is lost, too.

        Returns:
            Whether it does. If not, it is aborted, on all members.
        """
        gone = [self.ranks.index(rank) for rank in self.ranks if rank not in self._host.ranks]
        parent, smaller = self._communicator, ctypes.c_void_p()
        can = parent is not None and self.nccl.has("ncclCommShrink") and set(self._host.ranks) < set(self.ranks)
        shrinks = all(self._host.all_gather_object(can, "shrink NCCL"))
        if shrinks:
            assert parent is not None
            excluded = (ctypes.c_int * len(gone))(*gone)
            _abandoned.append(smaller)  # a thread of NCCL's writes to it, whenever that is
            with contextlib.suppress(DeviceError), self._driver.device(self._device):
                config = ctypes.byref(self._config)
                self.call_own("ncclCommShrink", excluded, len(gone), ctypes.byref(smaller), config, SHRINK_ABORT)

            def is_connected() -> bool:
                is_made = self.nccl.state(parent) == SUCCESS and bool(smaller.value)
                return is_made and self.nccl.state(smaller) == SUCCESS

            try:
                self._wait_until_connected(is_connected, is_lost, _SHRINK_TIMEOUT)
            except (DeviceError, TimeoutExceeded):
                shrinks = False
        self.abort()
        if shrinks:
            self._communicator, self.ranks = smaller, self._host.ranks
        return shrinks

    def _wait_until_connected(
        self, is_connected: Callable[[], bool], is_lost: Callable[[], bool] | None, limit: float | None = None
    ) -> None:
        host, limit = self._host, limit or config.START_TIMEOUT.get()
        end, told = time.monotonic() + limit, "late"

        def over() -> bool:
            nonlocal told
            host.check()  # another rank's NCCL failed
            try:
                told = "" if is_connected() else "late"
            except DeviceError as error:
                if is_lost is None:
                    raise
                told = str(error)  # the others hear of it, below
            return told != "late" or time.monotonic() > end or (is_lost is not None and is_lost())

        try:
            self._wait.until(
                over, self._peers if is_lost is None else list, lambda: f"{self._name}: connecting by NCCL"
            )
        except MembersLost:
            if is_lost is None:
                raise
        outcomes = host.all_gather_object(told, "wait for NCCL")
        without = [rank for rank, outcome in zip(host.ranks, outcomes, strict=True) if outcome]
        if errors := [outcome for outcome in outcomes if outcome not in ("", "late")]:
            raise DeviceError(f"{self._name}: {name_ranks(without)} could not be connected: {errors[0]}")
        if without:
            raise TimeoutExceeded(
                f"{self._name}: NCCL did not connect {name_ranks(without)} of {name_ranks(host.ranks)} within "
                f"{limit:g} s, although all of them called. NCCL_DEBUG=INFO shows what it tries; NCCL_SOCKET_IFNAME "
                "chooses the network; RING_START_TIMEOUT sets the limit."
            )

    def _peers(self) -> list[int]:
        own = self._host.ranks[self._host.rank]
        return [rank for rank in self._host.ranks if rank != own]

    # Calls ----------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> None:
        """Call an NCCL function on the stream; `arguments` are all but its last two, communicator and stream."""
        self.nccl.call(name, *arguments, self._communicator, self._stream, communicator=self._communicator)

    def call_own(self, name: str, *arguments: Any) -> None:
        """Call an NCCL function whose first argument is the communicator, and that uses no stream."""
        self.nccl.call(name, self._communicator, *arguments, communicator=self._communicator)

    def register_window(self, pointer: int, nbytes: int) -> int:
        """Register memory on all ranks as a symmetric window; collective.

        Returns:
            Its handle, 0 where these GPUs have no such windows.

        Raises:
            DeviceError, TimeoutExceeded: it failed, here or elsewhere; the communicator is of no use any more.
        """
        handle, communicator = ctypes.c_void_p(), self._communicator
        assert communicator is not None
        call = self._registering = self._begin(
            "ncclCommWindowRegister",
            lambda: self.call_own("ncclCommWindowRegister", pointer, nbytes, ctypes.byref(handle), COLLECTIVE_WINDOW),
        )
        limit = config.START_TIMEOUT.get()
        end = time.monotonic() + limit

        def is_registered() -> bool:
            return is_over(call) and self.nccl.state(communicator) == SUCCESS

        def over() -> bool:  # a thread of NCCL's writes the handle until then
            self._host.check()  # another rank gave up
            return is_registered() or time.monotonic() > end

        try:
            self._wait.until(over, self._peers, lambda: f"{self._name}: registering memory with NCCL")
        except BaseException:
            _abandoned.append(handle)
            raise
        if not is_registered():
            _abandoned.append(handle)
            raise TimeoutExceeded(
                f"{self._name}: NCCL did not register {nbytes} bytes as a window within {limit:g} s. Another rank has "
                "not done so, or its NCCL failed; RING_NCCL_REGISTER=0 does without, RING_START_TIMEOUT sets the limit."
            )
        return int(handle.value or 0)

    @contextlib.contextmanager
    def group(self, what: str) -> Iterator[None]:
        """Run the calls made inside as one; on exit their kernels are queued on the stream.

        Args:
            what: the group's purpose, for error texts.
        """
        self.nccl.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            with contextlib.suppress(DeviceError):
                self.nccl.call("ncclGroupEnd")  # NCCL counts open groups by thread
            raise
        if not self._blocks:
            if self.nccl.end_group(self._communicator, is_short=True) != SUCCESS:
                self._wait_until_queued(what)
            return
        self.queuing = time.monotonic(), what
        try:
            self.nccl.end_group(self._communicator, is_short=False)
        finally:
            self.queuing = 0.0, ""

    def _wait_until_queued(self, what: str) -> None:
        """Wait for NCCL's thread to queue the kernels: an event recorded earlier would stand before them."""
        communicator = self._communicator
        assert communicator is not None
        spin_end = time.monotonic() + _SPIN
        while time.monotonic() < spin_end:
            if self.nccl.state(communicator) == SUCCESS:
                return
            _offer_core()  # to that thread, where cores are scarce
        self._wait.until(
            lambda: self.nccl.state(communicator) == SUCCESS,
            self._peers,
            lambda: f"{self._name}: {what} by NCCL",
        )

    def check(self) -> None:
        """Raise DeviceError if NCCL has noticed a failure since the last call."""
        if self._communicator is not None:
            self.nccl.state(self._communicator)

    # End ------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End kernels that wait for peers, whose results are useless; returns at once.

        Where a thread of ours is still inside NCCL, registering memory on a blocking communicator, that is done when it
        has come out, if it ever does.
        """
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._start_abort(communicator, self._registering)

    def _start_abort(self, communicator: ctypes.c_void_p, after: BackgroundWork[None] | None = None) -> None:
        def run() -> None:
            if after is not None:
                after.finished.wait()
            with contextlib.suppress(DeviceError), self._driver.device(self._device):
                self.nccl.call("ncclCommAbort", communicator)

        thread = HelperThread(run, f"ring:abort {self._name}")
        # From Python 3.12 on no thread starts once the interpreter exits; the end of the process ends kernels, too.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._aborting = thread

    def wait_for_abort(self) -> None:
        """Let an abort that is under way end, for 2 seconds at most."""
        if self._aborting is not None:
            self._aborting.join(_ABORT_TIMEOUT)

    def finalize(self) -> None:
        """Flush what peers still need from this rank and destroy the communicator; abort it after 10 seconds."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            self._thread.end()
            return
        end = time.monotonic() + FINALIZE_TIMEOUT
        call = self._begin(
            "ncclCommFinalize", lambda: self.nccl.call("ncclCommFinalize", communicator, communicator=communicator)
        )
        self._thread.end()

        def is_final() -> bool:
            return is_over(call) and self.nccl.state(communicator) == SUCCESS

        with contextlib.suppress(RingError), self._driver.device(self._device):
            self._wait.until(
                lambda: is_final() or time.monotonic() > end, list, lambda: f"{self._name}: finalizing NCCL"
            )
            if is_final():
                self.nccl.call("ncclCommDestroy", communicator)
                return
        if call.done():
            self._start_abort(communicator)

    def drop(self) -> None:
        """Forget the communicator without calling NCCL: it is a forked parent's, or CUDA graphs refer to it."""
        self._communicator = None
        self._thread.end()


def is_over(call: BackgroundWork[Any]) -> bool:
    """Whether a call has returned; raises its error."""
    if not call.done():
        return False
    call.wait()
    return True
