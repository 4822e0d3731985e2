"""Started alone and growing: the script starts itself again, once for every further rank.

The children are ordinary subprocesses on this host. They meet over a shared segment whose file they
inherit, they get the parent's terminal, and the kernel ends them when the parent ends. This needs no MPI:
measured against MPI's spawn and merge it starts in a tenth of the time, leaves no daemon, and gives the
parent each child's exit status.

Where processes that were started on one host meet: a shared segment whose file they inherit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.linux.process import end_with_parent
from ring_plugins.core.linux.shared_memory import Segment, publish
from ring_plugins.core.rendezvous.record import Connection, LaunchRecord

_SLOT = 8192


def child_environment(segment: Segment, rank: int, size: int, parent: int) -> dict[str, str]:
    """The environment of a process that is to be `rank`, and inherits the segment's file.

    Args:
        segment: of `Meeting.nbytes(size)` bytes.
        rank, size: of the process and of the job.
        parent: process id of the parent that the rank must have, or 0 where the first of its descendants counts.
    """
    # LOCAL_RANK is what Lightning's rank_zero_only reads at import.
    return {config.SPAWNED.name: f"{segment.fd}:{rank}:{size}:{parent}", "LOCAL_RANK": str(rank)}


class SharedMemoryRendezvous:
    """A segment with a slot a rank and parity, where ranks leave payloads for each other."""

    def __init__(self, segment: Segment, rank: int, size: int, children: list[subprocess.Popen[bytes]]) -> None:
        self.segment, self.rank, self.size, self.children = segment, rank, size, children
        self._round = 0

    @staticmethod
    def nbytes(size: int) -> int:
        return 2 * size * _SLOT

    def gather(self, payload: Any) -> list[Any]:
        """Everyone's payload (JSON) in rank order.

        Raises:
            LaunchError: a rank ended before it came here, or did not come within RING_START_TIMEOUT seconds.
        """
        self._round += 1
        data = json.dumps(payload).encode()
        if len(data) > _SLOT - 16:
            raise LaunchError(f"start-up record of rank {self.rank} is {len(data)} bytes, more than {_SLOT - 16}.")
        words, text = self._slot(self.rank)
        text[: len(data)] = np.frombuffer(data, np.uint8)
        words[1] = len(data)
        publish()
        words[0] = self._round
        end = time.monotonic() + config.START_TIMEOUT.get()
        while missing := [r for r in range(self.size) if self._slot(r)[0][0] < self._round]:
            self._check_children(missing)
            if time.monotonic() > end:
                raise LaunchError(
                    f"rank {self.rank} waited for ranks {missing} to reach init() until RING_START_TIMEOUT."
                )
            time.sleep(0.001)
        return [json.loads(bytes(text[: words[1]])) for words, text in map(self._slot, range(self.size))]

    def has_arrived(self, rank: int) -> bool:
        """Whether a rank has ever come here."""
        words = self.segment.array[2 * rank * _SLOT : (2 * rank + 2) * _SLOT : _SLOT]
        return bool(words.any())

    def _slot(self, rank: int) -> tuple[Any, Any]:
        start = (2 * rank + self._round % 2) * _SLOT
        slot = self.segment.array[start : start + _SLOT]
        return slot[:16].view(np.int64), slot[16:]

    def _check_children(self, missing: list[int]) -> None:
        for rank, child in enumerate(self.children, start=1):
            if rank in missing and child.poll() is not None:
                raise LaunchError(
                    f"rank {rank} ended ({ending(child.returncode)}) before it reached ring_plugins.init(); "
                    "its own output says why. All ranks run the same script from its start."
                )


def ending(code: int) -> str:
    """How a process ended, from the `returncode` of its Popen."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


_START_DIRECTORY = os.getcwd()


def detect() -> LaunchRecord | None:
    """A child of a script that grew, or of `ring run` where it starts ranks by itself."""
    said = config.SPAWNED.get()
    if not said:
        return None
    try:
        _, rank, size, _ = map(int, said.split(":"))
    except ValueError:
        raise LaunchError(f"{config.SPAWNED.name}={said!r} is not what a growing script sets; unset it.") from None
    return LaunchRecord("grown", "a script that started itself", rank, size, rank, size)


_meeting: SharedMemoryRendezvous | None = None


def connect(record: LaunchRecord, ranks: int) -> Connection:
    """Become a job of `ranks` processes (parent), or join the one that started this process (child)."""
    global _meeting
    if _meeting is None:
        _meeting = _join(record) if record.kind == "grown" else _start(ranks)
    return Connection(_meeting.rank, _meeting.size, _meeting.gather, None)


def spawned_size() -> int:
    """Ranks of the job that this process has grown to, or 0."""
    return _meeting.size if _meeting is not None else 0


def _join(record: LaunchRecord) -> SharedMemoryRendezvous:
    fd, _, _, parent = map(int, config.SPAWNED.get().split(":"))
    assert record.rank is not None
    assert record.size is not None
    end_with_parent()
    meeting = SharedMemoryRendezvous(
        Segment(fd, SharedMemoryRendezvous.nbytes(record.size)), record.rank, record.size, []
    )
    # A command that was started as a rank may start Python by way of a shell; then it is whoever comes first.
    if (os.getppid() != parent) if parent else meeting.has_arrived(record.rank):
        raise LaunchError(
            f"this process inherited {config.SPAWNED.name} from rank {record.rank} but is not that rank "
            "(a data loader's worker, "
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


def _start(ranks: int) -> SharedMemoryRendezvous:
    again = command()
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("a script grows from its main thread only: children end with the thread that made them.")
    segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
    children: list[subprocess.Popen[bytes]] = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(1, ranks):
        environment = os.environ | child_environment(segment, rank, ranks, os.getpid())
        children.append(
            subprocess.Popen(
                again, env=environment, cwd=_START_DIRECTORY, pass_fds=[segment.fd], stdin=subprocess.DEVNULL
            )
        )
    return SharedMemoryRendezvous(segment, 0, ranks, children)


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
        logger.error(f"rank {rank} ended with {ending(code)}.")
    return next((code if code > 0 else 128 - code for _, code in bad), 0)
