"""One NCCL communicator of this process, from its bootstrap to its end.

NCCL blocks without a limit in several places: while it connects ranks, while it queues a group of calls, and while it
finalizes. A rank that died meanwhile would leave the others stuck inside a C function. So the communicator is
*nonblocking* (NCCL 2.14): those calls return IN_PROGRESS, a thread of NCCL's does the work, and we poll
`ncclCommGetAsyncError` with `Wait`, which watches the other ranks and the clock. Whatever goes wrong ends in
`ncclCommAbort`, the only call that makes kernels end that wait for a dead peer.

`ncclCommAbort` itself blocks, whatever the communicator: first it tells kernels to end, then it waits for the GPU, for
NCCL's own threads, and (`commDestroySync` in init.cc, 2.18 to 2.30) until no CUDA graph refers to the communicator any
more. NCCL 2.25.1 could deadlock there (pytorch#149153). So a thread of its own calls it, and nobody waits for that
thread for long. `ncclCommFinalize` waits for graphs too, forever if the script keeps one (pytorch#115388); hence a
communicator that was captured is neither finalized nor destroyed but left to the end of the process.

Before ranks connect they compare notes over the host communicator, because NCCL notices different releases and shared
GPUs but does not say on which ranks. NCCL may connect on some ranks and time out on others, so they
also exchange the outcome and agree on it.

A communicator may be used by one thread at a time, which `DeviceCommunicator` sees to.

**Considered and rejected**: communicators that block once they have connected, as c10d's do by default. Queuing a group
would need no thread of NCCL's. But a rank that dies while others are inside `ncclGroupEnd` leaves them there until
another thread calls `ncclCommAbort` beside them, which NCCL allows of nonblocking communicators only. *One NCCL group
for all buckets that are ready*: NCCL chooses algorithms by a group's total size, so ranks would have to agree which
buckets those are.

The file is a few lines longer than others: connecting, shrinking and aborting take turns on one communicator.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import (
    DeviceError,
    MembersLost,
    MismatchError,
    RingError,
    TimeoutExceeded,
    name_ranks,
)
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.collectives.api import Communicator
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
    version_text,
)
from ring_plugins.core.gpu.nccl_log import nccl_log
from ring_plugins.core.linux.process import boot_id
from ring_plugins.core.net.network_choice import wanted_interfaces

#: From this release on NCCL has a setting for several ranks on one GPU. Older ones must take the ranks for hosts.
_SHARING_SINCE = 23000
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

    Attributes:
        nccl: as given.
        ranks: world ranks of the members that it connects.

    Raises:
        MismatchError: the ranks have different releases of NCCL.
        DeviceError: two ranks have one GPU, or NCCL failed.
        TimeoutExceeded: NCCL did not connect the ranks within RING_START_TIMEOUT.
    """

    def __init__(
        self, name: str, device: int, host: Communicator, wait: Wait, nccl: Nccl, driver: Driver, stream: int
    ) -> None:
        self._name, self._device, self._stream = name, device, stream
        self._wait, self.nccl, self._driver = wait, nccl, driver
        self._host = host
        self._aborting: threading.Thread | None = None
        self._blocks = False
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
        communicator = ctypes.c_void_p()
        with on_all_or_none(host, what, is_alone=True), self._driver.device(self._device):
            status = nccl.call(
                "ncclCommInitRankConfig",
                ctypes.byref(communicator),
                host.size,
                UniqueId.received(unique_id),
                host.rank,
                ctypes.byref(Config.nonblocking()),
            )
        self._blocks = status != IN_PROGRESS  # as NCCL_COMM_BLOCKING=1 wants it
        try:
            self._wait_until_connected(lambda: nccl.state(communicator) == SUCCESS, is_lost)
        except BaseException as error:
            self._start_abort(communicator)
            self.wait_for_abort()
            if is_lost is None and isinstance(error, DeviceError):
                host.interrupt(what, error)
            raise
        finally:
            if log is not None:
                log.restore_environment()
        self._communicator, self.ranks = communicator, host.ranks

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
                nonblocking = ctypes.byref(Config.nonblocking())
                self.call_own("ncclCommShrink", excluded, len(gone), ctypes.byref(smaller), nonblocking, SHRINK_ABORT)

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
        self.call_own("ncclCommWindowRegister", pointer, nbytes, ctypes.byref(handle), COLLECTIVE_WINDOW)
        limit = config.START_TIMEOUT.get()
        end = time.monotonic() + limit

        def over() -> bool:  # a thread of NCCL's writes the handle until then
            self._host.check()  # another rank gave up
            return self.nccl.state(communicator) == SUCCESS or time.monotonic() > end

        try:
            self._wait.until(over, self._peers, lambda: f"{self._name}: registering memory with NCCL")
        except BaseException:
            _abandoned.append(handle)
            raise
        if self.nccl.state(communicator) != SUCCESS:
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
        if self.nccl.end_group(self._communicator, is_short=not self._blocks) != SUCCESS:
            self._wait_until_queued(what)

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
        """End kernels that wait for peers, whose results are useless; returns at once."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._start_abort(communicator)

    def _start_abort(self, communicator: ctypes.c_void_p) -> None:
        def run() -> None:
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
            return
        end = time.monotonic() + FINALIZE_TIMEOUT

        def over() -> bool:
            return self.nccl.state(communicator) == SUCCESS or time.monotonic() > end

        with contextlib.suppress(RingError), self._driver.device(self._device):
            self.nccl.call("ncclCommFinalize", communicator, communicator=communicator)
            self._wait.until(over, list, lambda: f"{self._name}: finalizing NCCL")
            if self.nccl.state(communicator) == SUCCESS:
                self.nccl.call("ncclCommDestroy", communicator)
                return
        self._start_abort(communicator)

    def drop(self) -> None:
        """Forget the communicator without calling NCCL: it is a forked parent's, or CUDA graphs refer to it."""
        self._communicator = None


class RankInfo(NamedTuple):
    """What a rank tells the others before they connect.

    Attributes:
        version, path: of its NCCL.
        gpu: see `gpu_identity`.
        share: whether it may share the GPU with other ranks.
    """

    version: int
    path: str
    gpu: str
    share: bool


def gpu_identity(driver: Driver, index: int) -> str:
    """Identify a GPU, or a MIG slice of one, among all hosts: boot id of its host, UUID, and PCI bus id."""
    return f"{boot_id()} {driver.uuid(index)} {driver.bus_id(index)}"


def check_versions(infos: Sequence[RankInfo], ranks: Sequence[int]) -> None:
    """Check that all ranks have one release of NCCL.

    Raises:
        MismatchError: they do not; the text says which rank has which.
    """
    by_version: dict[int, list[int]] = {}
    for rank, info in zip(ranks, infos, strict=True):
        by_version.setdefault(info.version, []).append(rank)
    if len(by_version) > 1:
        path = {rank: info.path for rank, info in zip(ranks, infos, strict=True)}
        found = "; ".join(
            f"{name_ranks(group)}: {version_text(version)} ({path[group[0]]})" for version, group in by_version.items()
        )
        raise MismatchError(
            f"the ranks have different releases of NCCL: {found}. Install one release everywhere, or name it in "
            "RING_NCCL_LIBRARY."
        )


def check_gpus(infos: Sequence[RankInfo], ranks: Sequence[int]) -> None:
    """Check that each rank has a GPU of its own, or that all ranks of a GPU agree to share it.

    Raises:
        DeviceError: they do not; the text names ranks and GPU.
    """
    by_gpu: dict[str, list[int]] = {}
    for rank, info in zip(ranks, infos, strict=True):
        by_gpu.setdefault(info.gpu, []).append(rank)
    share = {rank: info.share for rank, info in zip(ranks, infos, strict=True)}
    for gpu, group in by_gpu.items():
        if len(group) > 1 and not all(share[rank] for rank in group):
            raise DeviceError(
                f"{name_ranks(group)} would share the GPU {gpu.split()[-1]}. Give each rank its own: at most as many "
                "ranks on a host as it has GPUs, torch.cuda.set_device(ring_plugins.local_rank()) in a plain script, "
                "and a different GPU per rank where CUDA_VISIBLE_DEVICES is set by rank. To share it on purpose, which "
                "is slow and useful for tests only, set RING_SHARE_GPU=1 on all ranks."
            )


def choose_interface() -> None:
    """Let NCCL connect over the networks that RING_INTERFACE names, unless NCCL_SOCKET_IFNAME names others.

    NCCL opens a port for its bootstrap and more for its helper threads. They ask for nothing but a random number of 64
    bits, which travels unencrypted, and no setting replaces them by connections of ours. It reads the variable once in
    a process, for all its communicators. So it is not set to the loopback address where the ranks are on one host: a
    process group of the script's own that reaches other hosts by the same NCCL could not connect any more.
    """
    names = wanted_interfaces()
    if names:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=" + ",".join(names))  # "=": not every name that begins so


def allow_shared_gpu(version: int, rank: int) -> None:
    """Make NCCL accept several ranks on one GPU. It reads these variables at its first call in a process."""
    if version >= _SHARING_SINCE:
        settings = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        settings = {
            "NCCL_HOSTID": f"ring-{rank}",
            "NCCL_MNNVL_ENABLE": "0",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        }
    for variable, value in settings.items():
        os.environ.setdefault(variable, value)
