"""Which network, which paths between GPUs, and which shortcuts NCCL has chosen, in one line read from its log.

NCCL says this only in its log, some hundred lines a process with NCCL_DEBUG=INFO. It connects most paths in the first
collective, so the log is read when that is done. NCCL reads its variables once, at its first call in a process. They
are set just before, and taken back afterwards, so that processes started later do not log, too. The log is written to
an anonymous file in memory, unless the user names one.

The patterns below fit the texts in the library of release 2.32, and logs of 2.18 to 2.28 that users have published.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from typing import NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger

#: Levels of NCCL_DEBUG at which NCCL says what it has chosen.
_TALKATIVE = ("INFO", "TRACE")
#: More than any process of a large job writes while it connects.
_MOST_BYTES = 1 << 24

_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_NETWORK = re.compile(r"(?:Using network|Initialized NET plugin) (\S[^\n]*?)\s*$", re.MULTILINE)
_CARDS = re.compile(r"NET/\w+ ?: Using ((?:\[\d+\]\S+ ?)+)")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[\w+\])? via (\S+)")
_CHANNELS = re.compile(
    r"(\d+) coll channels, (?:(\d+) collnet channels, )?(?:(\d+) nvls channels, )?(\d+) p2p channels"
)
_NVLS = re.compile(r"NVLS multicast support is (not )?available on dev \d+(?:, transport (\w+))?")


class NcclChoices(NamedTuple):
    """What NCCL has chosen in one process.

    Attributes:
        version: its release, "" if the log does not say.
        network: between hosts, such as "IB" or "Socket"; "" if none was looked for.
        cards: of that network, such as "mlx5_0:1".
        paths: kinds of paths between GPUs, such as "P2P/CUMEM" or "NET/IB/GDRDMA", most frequent first.
        has_nvls: whether switches add (NVLink SHARP); None if the log does not say.
        channels: how many channels a collective uses; 0 if the log does not say.
    """

    version: str
    network: str
    cards: tuple[str, ...]
    paths: tuple[str, ...]
    has_nvls: bool | None
    channels: int

    @property
    def lacks_direct_rdma(self) -> bool:
        """Whether data goes from main memory to an RDMA card, which could read it from the GPU."""
        return any(path.startswith("NET/IB") and "GDRDMA" not in path for path in self.paths)

    def __str__(self) -> str:
        between = [path for path in self.paths if path.startswith(("NET", "COLLNET"))]
        inside = [path for path in self.paths if path not in between]
        parts = [f"NCCL {self.version}".strip()]
        if self.network:
            parts.append(f"network {self.network}{' (' + ', '.join(self.cards) + ')' if self.cards else ''}")
        parts.append(f"between GPUs of a host {', '.join(inside)}" if inside else "")
        parts.append(f"between hosts {', '.join(between)}" if between else "")
        if any(path.startswith("NET/IB") for path in between):
            parts.append("without GPU Direct RDMA" if self.lacks_direct_rdma else "GPU Direct RDMA")
        parts.append("" if self.has_nvls is None else "NVLink SHARP" if self.has_nvls else "no NVLink SHARP")
        parts.append(f"{self.channels} channels" if self.channels else "")
        return "; ".join(filter(None, parts))


def read_choices(log: str) -> NcclChoices | None:
    """What a process's log says; None if it says nothing of it."""
    counts: dict[str, int] = {}
    for *_, path in _CHANNEL.findall(log):
        kind = _kind(path)
        counts[kind] = counts.get(kind, 0) + 1
    version, cards = _VERSION.search(log), _CARDS.search(log)
    networks, channels, nvls = _NETWORK.findall(log), _CHANNELS.findall(log), _NVLS.findall(log)
    if not (counts or networks or channels):
        return None
    return NcclChoices(
        version[1] if version else "",
        networks[-1] if networks else "",
        tuple(re.sub(r"^\[\d+\]|/(IB|RoCE)$|<\d+>$", "", card) for card in cards[1].split()) if cards else (),
        tuple(sorted(counts, key=lambda kind: -counts[kind])),
        nvls[-1][0] == "" and nvls[-1][1] != "disabled" if nvls else None,
        max((int(found[0]) for found in channels), default=0),
    )


def _kind(path: str) -> str:
    """NET/IB/GDRDMA for NET/IB/3/GDRDMA, P2P/IPC for P2P/IPC/read: without numbers of cards and directions."""
    kept = [part.partition("(")[0] for part in path.split("/") if not part.isdigit()]
    return "/".join(part for part in kept if part not in ("read", "write", "direct", "Shared"))


class NcclLog:
    """The log of this process's NCCL, from its first call on.

    Args:
        environment: where NCCL reads its variables; `os.environ`.

    Attributes:
        is_reported: whether `report` was called.
    """

    def __init__(self, environment: os._Environ[str] | dict[str, str] = os.environ) -> None:
        self._environment = environment
        self.is_reported = False
        self._before: dict[str, str | None] = {}
        path = environment.get("NCCL_DEBUG_FILE", "")
        if not path:
            # Never closed: NCCL logs until the process ends.
            path = f"/proc/self/fd/{os.memfd_create('ring_plugins_nccl_log', os.MFD_CLOEXEC)}"
            self._set("NCCL_DEBUG_FILE", path)
        self._path = path.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
        if environment.get("NCCL_DEBUG", "").upper() not in _TALKATIVE:
            self._set("NCCL_DEBUG", "INFO")

    def _set(self, name: str, value: str) -> None:
        self._before[name] = self._environment.get(name)
        self._environment[name] = value

    def restore_environment(self) -> None:
        """Take the variables back, once NCCL has read them."""
        for name, value in self._before.items():
            if value is None:
                self._environment.pop(name, None)
            else:
                self._environment[name] = value
        self._before.clear()

    def text(self) -> str:
        """The log so far."""
        try:
            with open(self._path, "rb") as file:
                return file.read(_MOST_BYTES).decode(errors="replace")
        except OSError:  # NCCL replaces more than %h and %p, or could not open it
            return ""

    def report(self, rank: int, is_first: bool) -> None:
        """Log the line once, after the first collective.

        Args:
            rank: world rank of this process.
            is_first: whether it speaks for all ranks. Others speak only of missing GPU Direct RDMA.
        """
        if self.is_reported:
            return
        self.is_reported = True
        choices = read_choices(self.text())
        if choices is not None and choices.lacks_direct_rdma:
            logger.warning(f"rank {rank}: {choices}. `ring doctor` on its host says why.")
        elif is_first and choices is None:
            logger.warning(
                "NCCL was used before ring_plugins, so its choices are unknown; set NCCL_DEBUG=INFO to see them."
            )
        elif is_first:
            logger.info(f"rank {rank}: {choices}.")


@functools.cache
def nccl_log() -> NcclLog | None:
    """The log of this process, if RING_NCCL_REPORT asks for it; first called before NCCL is."""
    return NcclLog() if config.NCCL_REPORT.get() else None
