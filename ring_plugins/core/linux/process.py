"""This process and its relatives: CPU limits, freed memory, the process tree, signals, and how a process ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: States of a process that does nothing until it is continued, not even end.
STOPPED = ("T", "t")
_CGROUP = Path("/sys/fs/cgroup")


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, so that nothing outlives it."""
    _prctl(_PR_SET_PDEATHSIG, number)


def outlive_parent() -> None:
    """Undo `end_with_parent`; in the same thread, for the kernel keeps the signal with the thread that asked for it."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans(adopt: bool) -> None:
    """Let descendants whose parent ends become children of this process, which can then still find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children() -> dict[int, list[int]]:
    """Process ids of the children of every process on this host that has any."""
    import psutil  # takes 15 ms, and only launchers need it

    found: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        found.setdefault(process.info["ppid"], []).append(process.pid)
    return found


def state(pid: int) -> str:
    """The letter of a process's state in proc(5), such as "T" for stopped; "" if there is no such process."""
    return _status(pid)[0]


def parent(pid: int) -> int:
    """The parent of a process, 0 if there is no such process, or the parent is outside of this container."""
    return int(_status(pid)[1])


def _status(pid: int) -> tuple[str, str]:
    """State and parent of a process in proc(5), ("", "0") if there is no such process."""
    try:
        # The name, in parentheses, may contain anything.
        found = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", "0"
    return (found[0], found[1]) if len(found) > 1 else ("", "0")


def descendants(pid: int, family: dict[int, list[int]]) -> list[int]:
    """Children of a process, their children, and so on.

    Args:
        pid: of the process.
        family: from `children`.
    """
    found = list(family.get(pid, []))
    for descendant in found:
        found += family.get(descendant, [])
    return found


def cores(group: Path = _CGROUP) -> int:
    """How many cores this process may keep busy: its affinity, or less where its container has a quota.

    Args:
        group: directory of the container's control group, version 2 or 1.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(group)
    return allowed if quota is None else min(allowed, max(1, int(quota)))


def cpu_quota(group: Path = _CGROUP) -> float | None:
    """Cores that a container, a SLURM step or a systemd unit may keep busy, None without a limit.

    Args:
        group: as for `cores`.
    """
    limits = [limit for directory in _own_groups(group) if (limit := _quota_of(directory)) is not None]
    return min(limits, default=None)


def _own_groups(group: Path) -> list[Path]:
    """The directories that may hold a quota of this process: of its control group and of those around it."""
    found = [group, group / "cpu"]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            own = (group / "cpu" if controllers else group) / path.strip("/")
            found += [own, *(parent for parent in own.parents if group in parent.parents)]
    return list(dict.fromkeys(found))


def _quota_of(directory: Path) -> float | None:
    """The quota in a control group's own files, of version 2 or 1."""
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        limit = float(quota) / float(period)  # ValueError for "max", which means no limit, as -1 does in version 1
    except (OSError, ValueError):
        return None
    return limit if limit > 0 else None


def memory_kills() -> int:
    """How many processes of this host the kernel has killed since memory ran out: a control group's, or all of it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    return 0


def raise_open_file_limit(wanted: int = 65536) -> None:
    """Raise the soft limit of open files: each connection is one, and the usual 1,024 is too few for a large job.

    Args:
        wanted: how many files to allow; the hard limit caps it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loaded_libraries() -> list[str]:
    """The paths of the shared libraries that this process has loaded, in alphabetical order."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # no /proc
        return []
    return sorted({"/" + line.partition("/")[2] for line in lines if ".so" in line})


def boot_id() -> str:
    """Identifies the running kernel, also from inside a container; the host's name if it has no boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def wait_until_over(
    running: Callable[[], Sequence[Any]], look: Callable[[Sequence[Any]], bool], grace: float, tick: float
) -> None:
    """Wait for processes to end. Once their job is over, they get some seconds more.

    Stopped ones (Ctrl-Z, SIGSTOP) cannot use these seconds: if no other runs, nobody is waited for.

    Args:
        running: returns those that have not ended.
        look: called regularly with these; returns whether the job is over.
        grace: seconds that they get then.
        tick: seconds between two looks.
    """
    over: float | None = None
    while left := running():
        if look(left) and over is None:
            over = time.monotonic()
        if over is not None and (
            time.monotonic() - over > grace or all(state(process.pid) in STOPPED for process in left)
        ):
            return
        time.sleep(tick)


def first_cause(codes: Mapping[int, int], ended: Sequence[int], has_followed: Callable[[int], bool]) -> int:
    """Of processes that failed, the one because of which the others did.

    One that did not end by itself was killed since others had ended. One that says so ended because of another. Python
    ends by 1 then, too, so any other status is the likelier cause; and of two alike the earlier.

    Args:
        codes: process -> `returncode` of its Popen.
        ended: those that ended by themselves, in the order in which that was seen.
        has_followed: whether a process said that another's failure ended it.
    """
    return min(
        codes,
        key=lambda one: (
            one not in ended,
            has_followed(one),
            codes[one] == 1,
            ended.index(one) if one in ended else one,
        ),
    )


def as_status(code: int) -> int:
    """The exit status that a shell has for the `returncode` of a Popen."""
    return code if code >= 0 else 128 - code


def silent_end(code: int, of_memory: bool = False) -> str:
    """How a process ended that reported no error, in words.

    Args:
        code: `returncode` of its Popen.
        of_memory: whether the kernel has killed a process meanwhile since memory ran out.
    """
    if code == -signal.SIGKILL and of_memory:
        return (
            "was killed by SIGKILL, and may have been since memory ran out, of the host or of a control group: the "
            "kernel has killed a process of this host for that"
        )
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory? `kill -9`?)"
    if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        return f"crashed in native code ({signal.Signals(-code).name})"
    if code < 0:
        return f"was ended by {ending(code)}"
    return f"ended with {ending(code)} without an exception (os._exit, or a library that ends the process)"


def is_failure(code: int | None) -> bool:
    """Whether a process ended with a status that it chose, rather than by a signal.

    Args:
        code: its status, or the `returncode` of its Popen. A shell whose command was killed adds 128 to the signal.
    """
    return code is not None and code > 0 and code - 128 not in signal.valid_signals()


def ending(code: int) -> str:
    """How a process ended, from the `returncode` of its Popen."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


#: Parameters of mallopt(3), part of glibc's interface.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Free bytes at the end of the heap that stay in the process: the most that mallopt's int can say.
_KEPT = 2**31 - 1
#: Larger blocks, which training rarely allocates anew in each step, go back as soon as they are freed.
_LARGEST = 256 * 1024 * 1024
#: Variables by which a user sets these parameters for glibc; GLIBC_TUNABLES may, too.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep what is freed for the next step, unless the environment sets its thresholds.

    A training step frees its gradients and the next one allocates as many. malloc gives freed memory at the end of its
    heap back to the kernel, which then clears it again, page by page, when the next gradients are written. With 67 MB
    of gradients, a step on two ranks took 66 ms so, and 49 ms with kept memory (docs/performance.md).

    glibc has two thresholds. It maps and unmaps larger blocks than one of them by themselves, and gives free memory at
    the end of its heap back once it is more than the other. So at most `_KEPT` free bytes stay there, and holes between
    blocks that are still in use.

    Returns:
        Whether it does; False without glibc.
    """
    is_set = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _VARIABLES)
    if is_set or sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _KEPT))
