"""What a process is doing: by its own account, or, where it does not answer, as far as the kernel tells."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from ring_plugins.core.collectives.ordered import Activity
from ring_plugins.core.observe.steps import steps

_FRAMES = 24
_STATES = {
    "R": "running",
    "S": "sleeping in the kernel",
    "D": "waiting for a disk, a network file system or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, and its parent has not noticed",
    "X": "dead",
}


def own_account(activities: Iterable[Activity]) -> dict[str, Any]:
    """What the calling process is doing, as JSON can hold it.

    Args:
        activities: what it did last with each of its communicators.

    Returns:
        host, pid; "step", how many have ended; "activities", the latest first: communicator, operation, part_of,
        number of operations finished, and how many seconds ago the last ended (None: it is under way); "stack", the
        innermost frames of the main thread, outermost first: file, line, function, source.
    """
    now = time.monotonic()
    latest = sorted(activities, key=lambda activity: activity.ended or now, reverse=True)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": steps.count,
        "activities": [
            {
                "communicator": activity.communicator,
                "operation": activity.operation,
                "part_of": activity.part_of,
                "number": activity.number,
                "ended": now - activity.ended if activity.ended else None,
            }
            for activity in latest[:3]
        ],
        "stack": [[entry.filename, entry.lineno, entry.name, entry.line or ""] for entry in stack],
    }


def kernel_account(pid: int) -> dict[str, Any]:
    """What the kernel says of another process of this host.

    Returns:
        "state", its letter in proc(5), "" where there is no such process; "said", the same in words with where in the
        kernel it waits, as far as this user may know.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return {"state": "", "said": "there is no such process any more"}
    said = _STATES.get(state, f"in state {state}")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        function = file.read().strip("\0\n ")
        if function not in ("", "0"):
            said += f" (in {function})"
    return {"state": state, "said": said}
