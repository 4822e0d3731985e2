"""Which of this host's ranks are alive, and how the others ended: known within milliseconds, whatever they do.

The problem: a rank can be killed at any moment, also while it holds the GIL in a long computation or is stopped
in a debugger. Heartbeats would declare it dead there; its process id may already belong to another process, or to a
zombie; and it is not our child, so we cannot wait for it.

The idea: every process creates a small shared segment, which its peers map, and holds a POSIX record lock (fcntl(2)) on
it as long as it lives. The kernel drops the lock when the process ends, however it ends. So a peer that can take the
lock knows that the owner is gone, and that nothing it wrote to shared memory is still to come. Record locks belong to
the process, not to the open file, so forked children do not inherit them. In the segment the owner writes how it ends:
it left, or it failed, and which rank failed first and why. Peers can read it as long as they map it, also when the
owner is gone. A process that waits to join a job also says there how members reach it.

Considered and rejected: robust mutexes (set_robust_list(2)) give the same information, but depend on the layout of
libpthread's structures. A pidfd (pidfd_open(2)) does so too, but needs Linux 5.3, and the segment is needed anyway for
the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ring_plugins.core.base.arguments import read_as, read_each
from ring_plugins.core.base.errors import PeerFailed, SharedMemoryError
from ring_plugins.core.base.facts import Facts
from ring_plugins.core.base.member import Members
from ring_plugins.core.linux.shared_memory import Address, Segment, publish

RUNNING, LEFT, FAILED = 1, 2, 3

#: Words (int64) at the start of a segment; the text of a cause begins at byte _CAUSE.
_STATE, _ROOT_CAUSE_RANK, _CAUSE_LENGTH, _EXIT_STATUS, _ADDRESS_LENGTH, _ADMITS = range(6)
_CAUSE, _ADDRESS, _NBYTES = 128, 8192, 16384
#: Seconds after which what a rank has told over the channel before it left has arrived: that it rejected an operation,
#: and why. Shared memory shows at once that it has left.
_IN_FLIGHT = 0.3
#: Processes that a job may have on one host, the lost ones included.
MOST_MEMBERS = 896
#: How a process can end that says nothing, where nobody who knows its exit status can be asked.
SILENT_ENDS = "it was killed by a signal (out of memory? `kill -9`?), crashed in native code, or called os._exit"


def death(rank: int, pid: int, where: str) -> str:
    """The text of a death without a word, whoever finds it; core/exit_hooks.py looks for it."""
    return f"rank {rank} (process {pid}{where}) died without reporting an error; {SILENT_ENDS}."


class Liveness:
    """The segment of one process: its owner writes it, peers read it.

    Args:
        segment: the segment.
        rank: of the process.
        pid: the process in which the kernel has found the segment, whatever the segment says: it may have to be killed.
    """

    def __init__(self, segment: Segment, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self._is_gone = False
        self._segment = segment
        self._words = memoryview(segment.array[:_CAUSE]).cast("B").cast("q")

    @classmethod
    def create(cls, rank: int) -> Liveness:
        """Create this process's segment, and hold its lock from now on."""
        own = cls(Segment.create(_NBYTES), rank, os.getpid())
        own._words[_STATE] = RUNNING
        fcntl.lockf(own._segment.fd, fcntl.LOCK_EX)
        return own

    @classmethod
    def open(cls, address: Address, rank: int) -> Liveness:
        """Map the segment of another rank of this host.

        Raises:
            SharedMemoryError: there is none at this address.
        """
        if address[2] != _NBYTES:
            raise SharedMemoryError(f"the memory of rank {rank} at {address} does not have {_NBYTES} bytes.")
        return cls(Segment.open(address, rank), rank, address[0])

    @property
    def address(self) -> Address:
        return self._segment.address

    @property
    def state(self) -> int:
        return self._words[_STATE]

    @property
    def root_cause(self) -> tuple[int, str]:
        """The rank that failed first, and a sentence on how; to be read after `state`."""
        publish()
        text = self._segment.array[_CAUSE : _CAUSE + self._words[_CAUSE_LENGTH]]
        return self._words[_ROOT_CAUSE_RANK], bytes(text).decode(errors="replace")

    def has_died(self) -> bool:
        """Whether this peer's process no longer exists; once true, it stays so."""
        if not self._is_gone:
            try:
                fcntl.lockf(self._segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # the owner has it, or another peer that is looking
                return False
            fcntl.lockf(self._segment.fd, fcntl.LOCK_UN)
            self._is_gone = True
        return True

    def is_lost(self) -> bool:
        """Whether this peer's process is gone without having said why."""
        # It may write how it ends between the first look and the second.
        return self.state == RUNNING and self.has_died() and self.state == RUNNING

    @contextlib.contextmanager
    def ready_to_admit(self) -> Iterator[None]:
        """Let processes that wait to join see that this one has come to where it lets them."""
        self._words[_ADMITS] = 1
        try:
            yield
        finally:
            self._words[_ADMITS] = 0

    @property
    def is_ready_to_admit(self) -> bool:
        """Whether this peer is there."""
        return bool(self._words[_ADMITS])

    def announce(self, address: str) -> None:
        """Tell peers where this process listens."""
        data = np.frombuffer(address.encode(), dtype=np.uint8)
        self._segment.array[_ADDRESS : _ADDRESS + data.size] = data
        publish()
        self._words[_ADDRESS_LENGTH] = data.size

    @property
    def announced(self) -> str:
        """Where this peer listens, "" if it has not said so."""
        length = self._words[_ADDRESS_LENGTH]
        publish()
        return bytes(self._segment.array[_ADDRESS : _ADDRESS + length]).decode()

    @property
    def exit_status(self) -> int:
        """What this process passed to `sys.exit`; to be read after `state`."""
        publish()
        return self._words[_EXIT_STATUS]

    def note_exit(self, status: int) -> None:
        """Tell peers the exit status; before `leave`."""
        self._words[_EXIT_STATUS] = status
        publish()

    def leave(self) -> None:
        """Tell peers that this process leaves the job normally."""
        if self.state == RUNNING:
            self._words[_STATE] = LEFT

    def fail(self, root_rank: int, text: str) -> None:
        """Tell peers that this process failed because of `root_rank`; only the first call counts."""
        if self.state == RUNNING:
            data = np.frombuffer(text.encode()[: _ADDRESS - _CAUSE], dtype=np.uint8)
            self._segment.array[_CAUSE : _CAUSE + data.size] = data
            self._words[_CAUSE_LENGTH] = data.size
            self._words[_ROOT_CAUSE_RANK] = root_rank
            publish()
            self._words[_STATE] = FAILED


class LocalPeers:
    """This process and the other ranks of its host.

    Args:
        own, others: their liveness.
        host: its name, for messages; "" if the job has only this host.

    Attributes:
        own: of this process.
        others: of the other ranks, by rank.
        may_be_lost: whether the job goes on without one that dies.
    """

    def __init__(self, own: Liveness, others: Sequence[Liveness], host: str = "") -> None:
        self.own, self.may_be_lost = own, False
        self.others = {peer.rank: peer for peer in others}
        self._where = f" on {host}" if host else ""

    @classmethod
    def map(cls, own: Liveness | None, members: Members, gather: Callable[[Any], Sequence[Any]]) -> LocalPeers | None:
        """Map the segments of this host's members; collective, unless no member has one.

        Args:
            own: of this process, None if it has none.
            members: of the job.
            gather: exchanges what JSON can hold.

        Raises:
            SharedMemoryError: on all ranks, if one cannot.
            LaunchError: a rank has ended, which is why its segment could not be mapped.
        """
        here, others, problem = members.here, list[Liveness](), ""
        if not any(one.liveness for one in members.known.values()):
            return None
        try:
            near = [one for one in members.known.values() if one is not here and one.domain == here.domain]
            others += [Liveness.open(one.liveness, one.rank) for one in near if one.liveness]
        except SharedMemoryError as error:
            problem = f"rank {here.rank} on {here.host} {error}"
        # No rank leaves before all have mapped its segment, and a rank that did leave is noticed here.
        problems = [text for text in read_each(gather(problem), partial(read_as, str)) if text]
        if problems:
            raise SharedMemoryError(problem or problems[0])
        return cls(own, others, here.host if members.are_on_several_hosts() else "") if own is not None else None

    def look(self, facts: Facts) -> None:
        """Note how ranks of this host have ended: failed, left, or died in a job that does not go on then."""
        for rank, other in self.others.items():  # replaced by `forget`, in another thread
            state = other.state
            if status := other.exit_status:
                facts.exit_statuses[rank] = status
            if state == LEFT:
                facts.depart(rank, _IN_FLIGHT)
            elif facts.failure is None and state == FAILED:
                root, text = other.root_cause
                facts.failure = PeerFailed(text, root)
            elif facts.failure is None and not self.may_be_lost and other.is_lost():
                facts.failure = PeerFailed(death(rank, other.pid, self._where), rank)

    def lost(self) -> frozenset[int]:
        """Ranks that are gone without a word."""
        return frozenset(rank for rank, other in self.others.items() if other.is_lost())

    def add(self, joiners: Sequence[Liveness]) -> None:
        """Look at processes that have joined, too."""
        self.others = {**self.others, **{peer.rank: peer for peer in joiners}}

    def forget(self, lost: Collection[int]) -> None:
        """Look no more at ranks without which the job goes on."""
        self.others = {rank: other for rank, other in self.others.items() if rank not in lost}

    def has_lost_a_process(self) -> bool:
        """Whether a local peer's process is gone without having left."""
        return any(other.state != LEFT and other.has_died() for other in self.others.values())
