"""One NCCL communicator of this process, from the meeting of its members to their parting.

How ranks become an NCCL communicator: compared over the host plane first, then connected, with a way out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import DeviceError, MismatchError, RingError, TimeoutExceeded, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.nccl import SUCCESS, Config, Nccl, UniqueId, version_text
from ring_plugins.core.linux.process import boot_id

#: From this release on NCCL has a setting for several ranks on one GPU; before, it must believe in several hosts.
_SHARING_SINCE = 23000


class Introduction(NamedTuple):
    """What a rank tells the others of itself.

    Attributes:
        version, path: of its NCCL.
        card: machine and bus address of its GPU.
        shares: whether it may share the GPU with others.
    """

    version: int
    path: str
    card: str
    shares: bool


def connect(name: str, device: int, host: Communicator, nccl: Nccl, driver: Driver, wait: Wait) -> ctypes.c_void_p:
    """An NCCL communicator of the members of `host`; called by all of them.

    Args:
        name: for texts.
        device: this rank's GPU.
        host: how the members talk until they are connected.
        nccl, driver: of this process.
        wait: notices that a peer died meanwhile.

    Raises:
        MismatchError: the ranks have different releases of NCCL.
        DeviceError: two ranks have one GPU, or NCCL failed.
        TimeoutExceeded: NCCL did not connect them within RING_START_TIMEOUT.
    """
    shares = config.SHARE_GPU.get()
    card = f"{boot_id()} {driver.bus_id(device)}"
    everyones = [Introduction(*said) for said in host.all_gather_object((nccl.version, nccl.path, card, shares))]
    check_versions(everyones, host.ranks)
    check_cards(everyones, host.ranks)
    if shares:
        _prepare_to_share(nccl.version, host.ranks[host.rank])
    identity = host.broadcast_object(nccl.unique_id() if host.rank == 0 else None, root=0)
    communicator = ctypes.c_void_p()
    with driver.current(device):
        nccl.call(
            "ncclCommInitRankConfig",
            ctypes.byref(communicator),
            host.size,
            UniqueId.from_buffer_copy(identity),
            host.rank,
            ctypes.byref(Config.nonblocking()),
        )
    try:
        _wait_for_connection(name, communicator, host, nccl, wait)
    except BaseException:
        with contextlib.suppress(DeviceError):
            nccl.call("ncclCommAbort", communicator)
        raise
    return communicator


def _wait_for_connection(name: str, communicator: ctypes.c_void_p, host: Communicator, nccl: Nccl, wait: Wait) -> None:
    """Return when all members are connected. A rank whose time is up asks the others how they fared."""
    limit = config.START_TIMEOUT.get()
    end = time.monotonic() + limit

    def over() -> bool:
        return nccl.state(communicator) == SUCCESS or time.monotonic() > end

    wait.until(over, lambda: others(host), lambda: f"{name}: connecting by NCCL")
    connected = host.all_gather_object(nccl.state(communicator) == SUCCESS)
    missing = [rank for rank, there in zip(host.ranks, connected, strict=True) if not there]
    if missing:
        raise TimeoutExceeded(
            f"{name}: NCCL did not connect {name_ranks(missing)} of {name_ranks(host.ranks)} within {limit:g} s, "
            "though all of "
            "them called. NCCL_DEBUG=INFO shows what it tries; NCCL_SOCKET_IFNAME chooses the network; "
            "RING_START_TIMEOUT sets the limit."
        )


def check_versions(everyones: Sequence[Introduction], ranks: Sequence[int]) -> None:
    """Refuse ranks with different releases, which NCCL would notice by itself, but not say where they are.

    Raises:
        MismatchError: naming the ranks.
    """
    by_version: dict[int, list[int]] = {}
    for rank, one in zip(ranks, everyones, strict=True):
        by_version.setdefault(one.version, []).append(rank)
    if len(by_version) > 1:
        path = {rank: one.path for rank, one in zip(ranks, everyones, strict=True)}
        said = "; ".join(
            f"{name_ranks(those)}: {version_text(version)} ({path[those[0]]})" for version, those in by_version.items()
        )
        raise MismatchError(
            f"the ranks have different releases of NCCL: {said}. Install one release everywhere, or name it in "
            "RING_NCCL_LIBRARY."
        )


def check_cards(everyones: Sequence[Introduction], ranks: Sequence[int]) -> None:
    """Refuse several ranks on one GPU, unless all of them want it.

    Raises:
        DeviceError: naming the ranks.
    """
    by_card: dict[str, list[int]] = {}
    for rank, one in zip(ranks, everyones, strict=True):
        by_card.setdefault(one.card, []).append(rank)
    shares = {rank: one.shares for rank, one in zip(ranks, everyones, strict=True)}
    for card, those in by_card.items():
        if len(those) > 1 and not all(shares[rank] for rank in those):
            raise DeviceError(
                f"{name_ranks(those)} would share the GPU {card.split()[-1]}. Give each rank its own: no more ranks on "
                "a "
                "host than GPUs, torch.cuda.set_device(ring_plugins.local_rank()) in a plain script, and one card each "
                "where CUDA_VISIBLE_DEVICES is set by rank. To share it on purpose, which is slow and good for tests "
                "only, set RING_SHARE_GPU=1 on all ranks."
            )


def _prepare_to_share(version: int, rank: int) -> None:
    """Let NCCL accept several ranks on one GPU. Read by NCCL at its first call in a process."""
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


def others(host: Communicator) -> list[int]:
    """World ranks of the other members."""
    return [rank for rank in host.ranks if rank != host.ranks[host.rank]]


#: Seconds that a communicator which is no longer needed waits for the peers to be done with it too.
_FAREWELL = 10.0


class NcclConnection:
    """What calls of NCCL need: its communicator, the stream, and what to do when NCCL is not through at once.

    It may be used by one thread at a time.

    Args:
        name: for texts, equal on all members.
        device: this rank's GPU, as the process numbers them.
        host: a communicator among the same ranks, for meeting.
        wait: how to wait on the host.
        nccl, driver: of this process.
        stream: what it is used on.

    Raises:
        MismatchError, DeviceError, TimeoutExceeded: the ranks cannot be connected; see `core.gpu.connection`.
    """

    def __init__(
        self, name: str, device: int, host: Communicator, wait: Wait, nccl: Nccl, driver: Driver, stream: int
    ) -> None:
        self._name, self._device, self._host = name, device, host
        self._wait, self._nccl, self._driver = wait, nccl, driver
        self._communicator: ctypes.c_void_p | None = connect(name, device, host, nccl, driver, wait)
        self._stream = stream

    @property
    def is_open(self) -> bool:
        """Whether it was neither aborted nor closed."""
        return self._communicator is not None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of NCCL's on the stream, with all but its last two arguments."""
        self._nccl.call(name, *arguments, self._communicator, self._stream, communicator=self._communicator)

    def reduction(self, dtype: str, op: Op) -> tuple[int, int, int]:
        """See `Nccl.reduction`."""
        return self._nccl.reduction(dtype, op)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Let the calls made inside run as one; they are on the stream when this ends.

        Args:
            what: they are, for texts.
        """
        self._nccl.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            with contextlib.suppress(DeviceError):
                self._nccl.call("ncclGroupEnd")  # NCCL counts them by thread
            raise
        self._nccl.call("ncclGroupEnd", communicator=self._communicator)
        self._settle(what)

    def _settle(self, what: str) -> None:
        """NCCL's thread queues the kernels; until it has, there is nothing that an event could stand behind."""
        communicator = self._communicator
        assert communicator is not None
        self._wait.until(
            lambda: self._nccl.state(communicator) == SUCCESS,
            lambda: others(self._host),
            lambda: f"{self._name}: {what} by NCCL",
        )

    def check(self) -> None:
        """Raise DeviceError if NCCL noticed a failure while nobody called it."""
        if self._communicator is not None:
            self._nccl.state(self._communicator)

    def abort(self) -> None:
        """Let kernels that wait for peers end. Their results are of no use."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with contextlib.suppress(DeviceError), self._driver.current(self._device):
                self._nccl.call("ncclCommAbort", communicator)

    def part(self) -> None:
        """Everyone flushes what is still to be sent, then lets go; not for longer than a farewell should take."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        end = time.monotonic() + _FAREWELL

        def flushed() -> bool:
            return self._nccl.state(communicator) == SUCCESS or time.monotonic() > end

        with contextlib.suppress(RingError), self._driver.current(self._device):
            try:
                self._nccl.call("ncclCommFinalize", communicator, communicator=communicator)
                self._wait.until(flushed, list, lambda: f"{self._name}: parting")
                late = time.monotonic() > end
                self._nccl.call("ncclCommAbort" if late else "ncclCommDestroy", communicator)
            except RingError:
                self._nccl.call("ncclCommAbort", communicator)

    def forget(self) -> None:
        """Drop it without a word to NCCL, in a process that was forked from its owner."""
        self._communicator = None
