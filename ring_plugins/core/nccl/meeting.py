"""How ranks become an NCCL communicator: compared over the host plane first, then connected, with a way out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.errors import DeviceError, MismatchError, TimeoutExceeded
from ring_plugins.core.nccl.calls import SUCCESS, Config, Nccl, UniqueId, version_text
from ring_plugins.core.nccl.driver import Driver
from ring_plugins.core.waiting import Wait, seconds_from_environment

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
    shares = os.environ.get("RING_SHARE_GPU", "0") == "1"
    card = f"{_machine()} {driver.bus_id(device)}"
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
    limit = seconds_from_environment("RING_START_TIMEOUT", 300.0)
    end = time.monotonic() + limit

    def over() -> bool:
        return nccl.state(communicator) == SUCCESS or time.monotonic() > end

    wait.until(over, lambda: others(host), lambda: f"{name}: connecting by NCCL")
    connected = host.all_gather_object(nccl.state(communicator) == SUCCESS)
    missing = [rank for rank, there in zip(host.ranks, connected, strict=True) if not there]
    if missing:
        raise TimeoutExceeded(
            f"{name}: NCCL did not connect {naming(missing)} of {naming(host.ranks)} within {limit:g} s, though all of "
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
            f"{naming(those)}: {version_text(version)} ({path[those[0]]})" for version, those in by_version.items()
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
                f"{naming(those)} would share the GPU {card.split()[-1]}. Give each rank its own: no more ranks on a "
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


def _machine() -> str:
    """Which machine this is, in whatever container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def others(host: Communicator) -> list[int]:
    """World ranks of the other members."""
    return [rank for rank in host.ranks if rank != host.ranks[host.rank]]


def naming(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 0, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
