"""What a process asks of Linux about its relatives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends: nothing outlives a driver."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans(adopt: bool) -> None:
    """Let descendants whose parent ends become children of this process, so that none is lost sight of."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def cores(group: Path = Path("/sys/fs/cgroup")) -> int:
    """How many cores this process may keep busy: those it may run on, or less where its container has a quota.

    Args:
        group: where the container's control group is seen, version 2 or 1.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = _quota(group)
        allowed = min(allowed, max(1, int(quota / period)))
    return allowed


def _quota(group: Path) -> tuple[float, float]:
    """Microseconds of all cores together that may be used in a period of so many; ValueError without a limit."""
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota, period = ((group / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    if float(quota) <= 0:  # "max", which is no number, or -1
        raise ValueError("no limit")
    return float(quota), float(period)


def children() -> dict[int, list[int]]:
    """The process ids of every process of this host that has children, and theirs."""
    found: dict[int, list[int]] = {}
    for pid, parent in _parents():
        found.setdefault(parent, []).append(pid)
    return found


def descendants(pid: int, family: dict[int, list[int]]) -> list[int]:
    """Children of a process, their children, and so on, according to `children`."""
    found = list(family.get(pid, []))
    for descendant in found:
        found += family.get(descendant, [])
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                # The name of the program, in brackets, may hold spaces and brackets itself.
                yield int(directory.name), int((directory / "stat").read_text().rpartition(")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
