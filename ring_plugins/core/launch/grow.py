"""Started alone and growing: the script starts itself again, once for every further rank.

The children are ordinary subprocesses on this host. They meet over a shared segment whose file they
inherit, they get the parent's terminal, and the kernel ends them when the parent ends. This needs no MPI:
measured against MPI's spawn and merge it starts in a tenth of the time, leaves no daemon, and gives the
parent each child's exit status.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time

from ring_plugins.core.errors import LaunchError
from ring_plugins.core.launch.meeting import VARIABLE, Meeting, ending, invitation
from ring_plugins.core.launch.record import Connection, LaunchRecord
from ring_plugins.core.process import end_with_parent
from ring_plugins.core.shared_memory import Segment

_START_DIRECTORY = os.getcwd()


def detect() -> LaunchRecord | None:
    """A child of a script that grew, or of `ring run` where it starts ranks by itself."""
    said = os.environ.get(VARIABLE)
    if not said:
        return None
    try:
        _, rank, size, _ = map(int, said.split(":"))
    except ValueError:
        raise LaunchError(f"{VARIABLE}={said!r} is not what a growing script sets; unset it.") from None
    return LaunchRecord("grown", "a script that started itself", rank, size, rank, size)


_meeting: Meeting | None = None


def connect(record: LaunchRecord, ranks: int) -> Connection:
    """Become a job of `ranks` processes (parent), or join the one that started this process (child)."""
    global _meeting
    if _meeting is None:
        _meeting = _join(record) if record.kind == "grown" else _start(ranks)
    return Connection(_meeting.rank, _meeting.size, _meeting.gather, None)


def grown_size() -> int:
    """Ranks of the job that this process has grown to, or 0."""
    return _meeting.size if _meeting is not None else 0


def _join(record: LaunchRecord) -> Meeting:
    fd, _, _, parent = map(int, os.environ[VARIABLE].split(":"))
    assert record.rank is not None
    assert record.size is not None
    end_with_parent()
    meeting = Meeting(Segment(fd, Meeting.nbytes(record.size)), record.rank, record.size, [])
    # A command that was started as a rank may start Python by way of a shell; then it is whoever comes first.
    if (os.getppid() != parent) if parent else meeting.has_arrived(record.rank):
        raise LaunchError(
            f"this process inherited {VARIABLE} from rank {record.rank} but is not that rank (a data loader's worker, "
            "or its parent has ended); ring_plugins.init() belongs into the ranks themselves."
        )
    return meeting


def command() -> list[str]:
    """The command that started this process.

    Raises:
        LaunchError: there is none that could be repeated.
    """
    arguments = sys.orig_argv[1:]
    if hasattr(sys, "ps1") or not arguments or arguments[-1] == "-":
        raise LaunchError(
            "only a script can grow to several ranks, not an interactive session; save the code as a file and run it, "
            "or start it with mpirun or torchrun."
        )
    return [sys.executable, *arguments]


def _start(ranks: int) -> Meeting:
    again = command()
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("a script grows from its main thread only: children end with the thread that made them.")
    segment = Segment.create(Meeting.nbytes(ranks))
    children: list[subprocess.Popen[bytes]] = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(1, ranks):
        environment = os.environ | invitation(segment, rank, ranks, os.getpid())
        children.append(
            subprocess.Popen(
                again, env=environment, cwd=_START_DIRECTORY, pass_fds=[segment.fd], stdin=subprocess.DEVNULL
            )
        )
    return Meeting(segment, 0, ranks, children)


def wait_for_children(failed: bool) -> int:
    """Wait for the children to end and return the exit status that the job deserves.

    Args:
        failed: this process failed; children that do not end within 8 seconds are then killed.

    A child that ends badly is given the same time to take the others with it.
    """
    meeting = _meeting
    if meeting is None or not meeting.children:
        return 0
    end = time.monotonic() + 8.0 if failed else None
    while any(child.poll() is None for child in meeting.children):
        if end is None and any(child.returncode for child in meeting.children):
            end = time.monotonic() + 8.0
        if end is not None and time.monotonic() > end:
            for child in meeting.children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        time.sleep(0.005)
    bad = [(rank, child.returncode) for rank, child in enumerate(meeting.children, start=1) if child.returncode]
    if bad and not failed:
        rank, code = bad[0]
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):
            print(f"ring_plugins: rank {rank} ended with {ending(code)}.", file=sys.stderr, flush=True)
    return next((code if code > 0 else 128 - code for _, code in bad), 0)
