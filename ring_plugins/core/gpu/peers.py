"""What ranks compare before they connect: NCCL notices different releases and shared GPUs, but not on which ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from ring_plugins.core.base.errors import DeviceError, MismatchError, name_ranks
from ring_plugins.core.gpu.cuda import Driver
from ring_plugins.core.gpu.nccl import version_text
from ring_plugins.core.linux.process import boot_id
from ring_plugins.core.net.network_choice import wanted_interfaces

#: From this release on NCCL has a setting for several ranks on one GPU. Older ones must take the ranks for hosts.
_SHARING_SINCE = 23000


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
