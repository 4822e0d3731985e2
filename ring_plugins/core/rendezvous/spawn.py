"""A script started on its own (`python script.py`) that spawns its other ranks, as `init(ranks=4)` asks.

The script runs again, from its first line, once for each added rank, and each copy joins when it reaches `init`. The
copies are ordinary subprocesses on this host. They inherit the file of one shared segment and meet in it, they print to
the parent's terminal, and the kernel ends them when the parent ends.

Considered and rejected: `fork` copies a process in the middle of its work, with locks that threads hold and a CUDA
context that does not survive it. `multiprocessing`'s spawn needs a function that can be pickled and a `__name__ ==
"__main__"` guard in the script. MPI_Comm_spawn needs an MPI, takes ten times as long to start, leaves a daemon behind
and does not report each child's exit status.

`ring run` starts ranks of one host in the same way, with `child_environment`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, SharedMemoryError, name_ranks
from ring_plugins.core.base.log import flush_output, logger
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.base.threads import until
from ring_plugins.core.linux import thread_count
from ring_plugins.core.linux.process import (
    as_status,
    end_with_parent,
    ending,
    first_cause,
    memory_kills,
    silent_end,
    wait_until_over,
)
from ring_plugins.core.linux.shared_memory import Segment, publish
from ring_plugins.core.rendezvous import record
from ring_plugins.core.rendezvous.claim import check_is_original_script
from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, Rendezvous
from ring_plugins.core.rendezvous.slots import OwnSlot, Slots, State

#: Bytes of a cell: two int64 words (round, length) and a payload.
_CELL = 8192
#: Seconds that children have to end once a rank has failed: they may still be reporting the failure.
_GRACE = 8.0
#: Seconds that the kernel may take to end a process whose connections it has closed.
_EXIT = 1.0
#: More ranks than this for each usable processor are more likely a slip of the hand than a test.
_CROWDED = 4
#: In place of the rank of a process that is to wait for a free slot, and the seconds between two of its looks.
_STANDBY, _LOOK = -1, 0.01
#: At the start of this process.
_MEMORY_KILLS = memory_kills()
#: Where the script was started, which may have changed directory since.
START_DIRECTORY = os.getcwd()


class _Spawned(NamedTuple):
    """What RING_SPAWNED tells a process: the segment's file, its rank, the job's size, and its parent or 0.

    Attributes:
        fd: of the segment.
        rank: of the process, `_STANDBY` for a standby.
        size: of the job, as the process is to see it before it has met the others.
        parent: process id of its parent, 0 if that may be another.
        slots: how many there are.
    """

    fd: int
    rank: int
    size: int
    parent: int
    slots: int

    @classmethod
    def read(cls) -> _Spawned:
        return cls(*map(int, config.SPAWNED.get().split(":")))

    @property
    def variables(self) -> dict[str, str]:
        # LOCAL_RANK is what Lightning's rank_zero_only reads at import. A standby does not speak for the job yet.
        return {
            config.SPAWNED.name: ":".join(map(str, self)),
            "LOCAL_RANK": str(self.size if self.rank == _STANDBY else self.rank),
        }


def child_environment(segment: Segment, rank: int | None, size: int, parent: int, slots: int = 0) -> dict[str, str]:
    """Environment of a process that becomes a rank and inherits the segment's file.

    Args:
        segment: of `SharedMemoryRendezvous.nbytes(ranks, slots)` bytes.
        rank: of the process; None for a standby, which gets the slot of a lost rank in `connect`.
        size: of the job; for a process that joins later, of the slots that are in use then.
        parent: process id that the rank's parent must have, or 0 if the first descendant to arrive is the rank.
        slots: number of them, if the job may grow beyond its size.
    """
    return _Spawned(segment.fd, _STANDBY if rank is None else rank, size, parent, max(slots, size)).variables


class SharedMemoryRendezvous:
    """Exchanges payloads among ranks of one host through a shared segment.

    Every rank has two cells, for rounds of even and odd number: a rank can be one round ahead of its slowest reader but
    not two.

    The slots lie before the cells: a process that joins later knows their number, but not that of the first ranks.

    Args:
        segment: of `nbytes(size, slots)` bytes, zeros at first.
        rank, size: of this process and of the job.
        children: the spawned processes on rank 0 of a script that spawned its ranks; otherwise empty.
        slots: number of them, if the job may grow beyond its size.
    """

    def __init__(
        self, segment: Segment, rank: int, size: int, children: list[subprocess.Popen[bytes]], slots: int = 0
    ) -> None:
        self.segment, self.rank, self.size, self.children = segment, rank, size, children
        self._first_cell = Slots.nbytes(max(slots, size))
        self.slots = Slots(segment.array[: self._first_cell])
        self._round = 0

    @staticmethod
    def nbytes(size: int, slots: int = 0) -> int:
        """Bytes of a segment for this many ranks, and slots if there are more."""
        return Slots.nbytes(max(slots, size)) + 2 * size * _CELL

    @property
    def own_slot(self) -> OwnSlot:
        """That of this process."""
        return OwnSlot(self.segment.array[: self._first_cell], self.rank, has_supervisor=False)

    def gather(self, payload: Any) -> list[Any]:
        """Every rank's payload (anything JSON can hold) in rank order.

        Raises:
            LaunchError: a rank ended before it arrived, or did not arrive within RING_START_TIMEOUT seconds.
        """
        self._round += 1
        data = json.dumps(payload).encode()
        if len(data) > _CELL - 16:
            raise LaunchError(f"start-up record of rank {self.rank} is {len(data)} bytes, more than {_CELL - 16}.")
        words, text = self._cell(self.rank)
        text[: len(data)] = np.frombuffer(data, np.uint8)
        words[1] = len(data)
        publish()
        words[0] = self._round
        end = time.monotonic() + config.START_TIMEOUT.get()
        with ProgressLine() as line:
            while missing := [r for r in range(self.size) if self._cell(r)[0][0] < self._round]:
                self._check_children(missing)
                if time.monotonic() > end:
                    raise LaunchError(
                        f"rank {self.rank} timed out waiting for {name_ranks(missing)} to reach init(). "
                        "Set RING_START_TIMEOUT to wait longer."
                    )
                if self.rank == 0:
                    came = dict.fromkeys(set(range(self.size)) - set(missing), "")
                    line.show(lambda came=came: arrivals(came, self.size, " to reach init()"))  # type: ignore[misc]
                time.sleep(0.001)
        publish()  # read the payloads only after their rounds
        found = [json.loads(bytes(text[: words[1]])) for words, text in map(self._cell, range(self.size))]
        self._cell(self.rank, 1)[1][:] = 0  # of the round before, which all have read: it may hold a secret
        return found

    def rounds(self, rank: int) -> int:
        """How often a rank has called `gather`, as any process sees it that maps the segment."""
        cells = self.segment.array[self._first_cell :][2 * rank * _CELL :][: 2 * _CELL].reshape(2, _CELL)
        return int(np.ascontiguousarray(cells[:, :8]).view(np.int64).max())

    def _cell(self, rank: int, before: int = 0) -> tuple[Any, Any]:
        """Words and payload of a rank in this round, or so many rounds before."""
        start = self._first_cell + (2 * rank + (self._round - before) % 2) * _CELL
        cell = self.segment.array[start : start + _CELL]
        return cell[:16].view(np.int64), cell[16:]

    def _check_children(self, missing: list[int]) -> None:
        for rank, child in enumerate(self.children, start=1):
            if rank in missing and child.poll() is not None:
                raise LaunchError(
                    f"rank {rank} ended ({ending(child.returncode)}) before it reached ring_plugins.init(); "
                    "its own output says why. All ranks run the same script from its start."
                )


#: This process's rendezvous, once it has one: a second `init` uses the same segment.
_rendezvous: SharedMemoryRendezvous | None = None


def find(launcher: Launcher) -> LaunchRecord | None:
    """The record of a process that a script spawned, or `ring run` where it starts ranks itself; else None."""
    text = config.SPAWNED.get()
    if not text:
        return None
    try:
        _, rank, size, _, _ = _Spawned.read()
    except (ValueError, TypeError):
        raise LaunchError(f"{config.SPAWNED.name}={text!r} was not set by ring_plugins; unset it.") from None
    if rank == _STANDBY:
        return LaunchRecord(launcher, None, size, None, size)
    # A script that starts itself is its own rank 0. The other ranks cannot tell `ring run` from one.
    name = record.caller or ("a script that started itself" if rank else launcher.name)
    return LaunchRecord(replace(launcher, name=name), rank, size, rank, size)


def connect(found: LaunchRecord, ranks: int | None, _generation: int) -> Rendezvous:
    """Spawn the other ranks of a job of `ranks` processes (parent), or join the job that spawned this one (child)."""
    global _rendezvous
    if _rendezvous is None:
        if found.launcher.is_none and (ranks or 1) == 1:
            return Rendezvous(0, 1, lambda payload: [payload], None)
        _rendezvous = _spawn(ranks or 1) if found.launcher.is_none else _join()
    own = _rendezvous
    return Rendezvous(own.rank, own.size, own.gather, None, slot=own.own_slot)


def slots() -> Slots | None:
    """The slots of the job that this process spawned or joined, None if there is none."""
    return _rendezvous.slots if _rendezvous is not None else None


def number_of_slots() -> int:
    """Of the job that has started this process for one of its ranks, 0 if there is none."""
    return _Spawned.read().slots if config.SPAWNED.is_set() else 0


def _join() -> SharedMemoryRendezvous:
    spawned = fd, rank, size, parent, number = _Spawned.read()
    end_with_parent()
    meets_first_ranks = rank != _STANDBY and not config.JOINS.is_set()
    nbytes = SharedMemoryRendezvous.nbytes(size, number) if meets_first_ranks else Slots.nbytes(number)
    try:
        segment = Segment.inherited(fd, nbytes)
    except SharedMemoryError as error:
        raise LaunchError(
            f"{config.SPAWNED.name} is set, but this process did not inherit the file that it names ({error}): the "
            f"variable was copied from {_named(rank)} of a job into another environment; unset it."
        ) from error
    found = SharedMemoryRendezvous(segment, rank, size, [], number)
    # `ring run` may start Python through a shell. The rank is then the first process that arrives.
    if rank == _STANDBY:
        has_arrived = found.slots.has_come(config.JOINS.get())
    elif config.JOINS.is_set():
        has_arrived = found.slots.state(rank) != State.EMPTY
    else:
        has_arrived = found.rounds(rank) > 0
    if (os.getppid() != parent) if parent else has_arrived:
        raise LaunchError(
            f"this process inherited {config.SPAWNED.name} from {_named(rank)} but is not that rank: it is a child "
            "of it (a data loader's worker?), or the parent has ended. Call ring_plugins.init() in the ranks "
            "themselves."
        )
    if rank == _STANDBY:
        found.rank = _wait_for_slot(found.slots, config.JOINS.get())
        found.size = max(size, found.slots.size_until_joined(found.rank))
        os.environ |= spawned._replace(rank=found.rank, size=found.size).variables
    return found


def _named(rank: int) -> str:
    return "a standby" if rank == _STANDBY else f"rank {rank}"


def _wait_for_slot(slots: Slots, world_rank: int) -> int:
    """Wait as a standby until `ring run`, which ends this process with the job, gives it the slot of a lost rank."""
    slots.wait_as_standby(world_rank)
    try:
        until(lambda: slots.given(world_rank) is not None, float("inf"), _LOOK)
    except KeyboardInterrupt:  # at which all ranks end, and say so
        sys.exit(128 + signal.SIGINT)
    slot = slots.given(world_rank)
    assert slot is not None
    return slot


#: Where a shell puts what can be read once: `python /dev/stdin < train.py`, `python <(cat train.py)`.
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def command() -> list[str]:
    """The command that started this process.

    Raises:
        LaunchError: it cannot be repeated, or does not start the script.
    """
    check_is_original_script()
    arguments = sys.orig_argv[1:]
    if hasattr(sys, "ps1"):
        raise LaunchError(
            "only a script can spawn ranks, not a notebook or an interactive session: put the training into a function "
            "and call ring_plugins.run(function, ranks=2) without init()."
        )
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    if not arguments or script == "<stdin>" or sys.argv[:1] == ["-"] or script.startswith(_STREAMS):
        # No launcher helps: mpirun passes standard input to rank 0 alone, and Open MPI 5 does not let it end.
        raise LaunchError(
            "only a script can spawn ranks, and this one came from standard input or another stream, which the other "
            "ranks cannot read again: save it as a file and run that."
        )
    return [sys.executable, *arguments]


#: Functions that return what the command of a spawned rank gets beside this process's own; the package registers them.
further_arguments: list[Callable[[int], list[str]]] = []


def _spawn(ranks: int) -> SharedMemoryRendezvous:
    again = command()
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            "only the main thread of a script can spawn ranks: the kernel ends them with the thread that started them."
        )
    if ranks > _CROWDED * (processors := len(os.sched_getaffinity(0))):
        logger.warning(
            f"starting {ranks} processes on this host, where {processors} processor{'s' * (processors > 1)} can run "
            "them: each loads the script's libraries and a model of its own. One rank for each core trains fastest."
        )
    segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
    children: list[subprocess.Popen[bytes]] = []
    flush_output()
    shared = os.environ | thread_count.variables(thread_count.threads_per_rank(ranks))
    for rank in range(1, ranks):
        environment = shared | child_environment(segment, rank, ranks, os.getpid())
        children.append(
            subprocess.Popen(
                [*again, *(word for words in further_arguments for word in words(rank))],
                env=environment,
                cwd=START_DIRECTORY,
                pass_fds=[segment.fd],
                stdin=subprocess.DEVNULL,
            )
        )
    return SharedMemoryRendezvous(segment, 0, ranks, children)


def wait_for_children(failed: bool) -> int:
    """Wait for spawned ranks to end, and return the job's exit status.

    Once a rank has failed, this one included, the others have some seconds to end before they are killed.

    Args:
        failed: whether this process failed.
    """
    children = _rendezvous.children if _rendezvous is not None else []
    ended: list[int] = []

    def running() -> list[subprocess.Popen[bytes]]:
        left = [child for child in children if child.poll() is None]
        ended.extend(rank for rank, one in enumerate(children, 1) if one.returncode is not None and rank not in ended)
        return left

    wait_until_over(running, lambda _: failed or any(child.returncode for child in children), _GRACE, 0.005)
    for child in children:
        child.kill()
        child.wait()
    codes = {rank: child.returncode for rank, child in enumerate(children, start=1) if child.returncode}
    if not codes:
        return 0
    assert _rendezvous is not None
    has_followed = _rendezvous.slots.has_followed
    rank = first_cause(codes, ended, has_followed)
    if not failed and not has_followed(rank):  # else this process is the cause, as that rank has said
        logger.error(f"rank {rank} ended with {ending(codes[rank])}.")
    return as_status(codes[rank])


def end_of_child(rank: int) -> str | None:
    """How a rank that this process has spawned ended, None if it did not start it or the rank still runs."""
    code = _code_of_child(rank)
    return None if code is None else silent_end(code, memory_kills() > _MEMORY_KILLS)


def status_of_child(rank: int) -> int:
    """The exit status of such a rank, 0 where `end_of_child` is None."""
    return as_status(_code_of_child(rank) or 0)


def _code_of_child(rank: int) -> int | None:
    children = _rendezvous.children if _rendezvous is not None else []
    if not 0 < rank <= len(children):
        return None
    until(lambda: children[rank - 1].poll() is not None, _EXIT)
    return children[rank - 1].returncode
