"""A control group of one process with little memory, so that the kernel kills it as it kills a job out of memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_BYTES = 16 << 20


def parent() -> Path | None:
    """The directory of this process's own group of the memory controller, None if there is none (v1 and v2)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
        own = Path("/sys/fs/cgroup" + path)
        with contextlib.suppress(OSError):
            if not controllers and "memory" in (own / "cgroup.subtree_control").read_text().split():
                return own
    return None


def can_be_made() -> bool:
    try:
        with memory_cgroup("probe"):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def memory_cgroup(name: str) -> Iterator[Path]:
    """A group in which a process may use 16 MiB of new memory; removed once its processes have ended.

    Raises:
        OSError: this user may not make one, or there is no memory controller.
    """
    above = parent()
    if above is None:
        raise FileNotFoundError("no memory controller")
    group = above / f"ring-campaign-{os.getpid()}-{name}"
    group.mkdir()
    try:
        limit = next(file for file in ("memory.max", "memory.limit_in_bytes") if (group / file).exists())
        (group / limit).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):  # a host without swap, or a kernel that does not count it
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        remove(group)


def remove(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:  # a process that was killed is still on its way out
            time.sleep(0.1)
    group.rmdir()
