"""Which of this host's ranks are alive, and how the others ended: known within milliseconds, whatever they do.

The problem: a rank can be killed at any moment, also while it holds the GIL in a long computation or is stopped
in a debugger. Heartbeats would declare it dead there; its process id may already belong to another process, or to a
zombie; and it is not our child, so we cannot wait for it.

The idea: every process creates a small shared segment, which its peers map, and holds a POSIX record lock (fcntl(2)) on
it as long as it lives. The kernel drops the lock when the process ends, however it ends. So a peer that can take the
lock knows that the owner is gone, and that nothing it wrote to shared memory is still to come. Record locks belong to
the process, not to the open file, so forked children do not inherit them. In the segment the owner writes how it ends:
it left, or it failed, and which rank failed first and why. Peers can read it as long as they map it, also when the
owner is gone; agreement on a loss relies on that (membership.py). In a job that goes on after losses it also has what
would otherwise pass through rank 0, which may be lost: the operations that the owner rejected, and the address of the
control channel if the owner takes over from rank 0.

Considered and rejected: robust mutexes (set_robust_list(2)) give the same information, but depend on the layout of
libpthread's structures. A pidfd (pidfd_open(2)) does so too, but needs Linux 5.3, and the segment is needed anyway for
the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from ring_plugins.core.base.errors import PeerFailed, RingError, SharedMemoryError
from ring_plugins.core.linux.shared_memory import Address, Segment, publish

RUNNING, LEFT, FAILED = 1, 2, 3

#: Words (int64) at the start of a segment; the text of a cause begins at byte _CAUSE.
_STATE, _ROOT_CAUSE_RANK, _CAUSE_LENGTH, _EXIT_STATUS, _VIEW, _ADDRESS_LENGTH, _ADMITS = range(7)
#: Between them one byte for each rank: whether it is a member of the view that the owner has decided on.
_MEMBERS, _CAUSE, _ADDRESS, _REJECTIONS = 128, 1024, 8192, 9216
#: Rejections that peers can still read, and bytes of each: its number from 1, the operation (three words), the length
#: of the text, and the text.
_SLOTS, _SLOT = 16, 1024
#: Two slots, for rounds of even and odd number, in which the owner tells peers something: the round, the length, and
#: the data. Memory that is never written takes no room.
_ROUNDS, _ROUND = _REJECTIONS + _SLOTS * _SLOT, 128 * 1024
_NBYTES = _ROUNDS + 2 * _ROUND
#: Ranks of a job that can decide on a view.
MOST_MEMBERS = _CAUSE - _MEMBERS
#: How a process can end that says nothing, where nobody who knows its exit status can be asked.
SILENT_ENDS = "it was killed by a signal (out of memory? `kill -9`?), crashed in native code, or called os._exit"


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
        self._slots = segment.array[_REJECTIONS:_ROUNDS].reshape(_SLOTS, _SLOT)
        self._rounds = segment.array[_ROUNDS:_NBYTES].reshape(2, _ROUND)
        self._rejected, self._lock = 0, threading.Lock()

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

    def decide(self, view: int, members: Sequence[int]) -> None:
        """Publish the members of a view of the job."""
        flags = self._segment.array[_MEMBERS:_CAUSE]
        flags[:] = 0
        flags[list(members)] = 1
        publish()
        self._words[_VIEW] = view

    def decision(self, view: int) -> tuple[int, ...] | None:
        """The members of a view, if this process has decided on that one last."""
        if self._words[_VIEW] != view:
            return None
        publish()
        return tuple(np.flatnonzero(self._segment.array[_MEMBERS:_CAUSE]).tolist())

    def reject(self, operation: tuple[int, int, int], text: str) -> None:
        """Tell peers that this process takes no part in an operation.

        Args:
            operation: three numbers that mean the same operation on all ranks.
            text: why; cut off if it is longer than about a thousand characters.
        """
        data = np.frombuffer(text.encode()[: _SLOT - 5 * 8], dtype=np.uint8)
        with self._lock:
            slot = self._slots[self._rejected % _SLOTS]
            self._rejected += 1
            words = slot[: 5 * 8].view(np.int64)
            words[0] = 0
            publish()
            words[1:5] = *operation, data.size
            slot[5 * 8 : 5 * 8 + data.size] = data
            publish()
            words[0] = self._rejected

    def rejection(self, operation: tuple[int, int, int]) -> str:
        """Why this peer rejected an operation, "" if it did not."""
        for slot in self._slots:
            words = slot[: 5 * 8].view(np.int64)
            number = int(words[0])
            publish()
            if number and tuple(words[1:4].tolist()) == operation:
                text = bytes(slot[5 * 8 : 5 * 8 + int(words[4])]).decode(errors="replace")
                publish()
                if words[0] == number:
                    return text
        return ""

    def tell(self, number: int, data: bytes) -> None:
        """Tell peers something in a round; peers still see the round before.

        Raises:
            RingError: the data are too long.
        """
        if len(data) > _ROUND - 16:
            raise RingError(f"rank {self.rank} has {len(data)} bytes to tell, more than {_ROUND - 16}.")
        slot = self._rounds[number % 2]
        words = slot[:16].view(np.int64)
        words[0] = 0
        publish()
        words[1] = len(data)
        slot[16 : 16 + len(data)] = np.frombuffer(data, np.uint8)
        publish()
        words[0] = number

    def told(self, number: int) -> bytes | None:
        """What this peer told in a round, None if it has not come to that one."""
        slot = self._rounds[number % 2]
        words = slot[:16].view(np.int64)
        if words[0] != number:
            return None
        publish()
        data = bytes(slot[16 : 16 + int(words[1])])
        publish()
        return data if words[0] == number else None

    @property
    def last_round(self) -> int:
        """The number of the last round in which this process told something."""
        return max(int(slot[:16].view(np.int64)[0]) for slot in self._rounds)

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
        min_ranks: with how many of these ranks the job goes on when others are lost; 0 if every loss is a failure.

    Attributes:
        own: of this process.
        others: of the other ranks, by rank.
        min_ranks: as given.
    """

    def __init__(self, own: Liveness, others: Sequence[Liveness], host: str = "", min_ranks: int = 0) -> None:
        self.own, self.min_ranks = own, min_ranks
        self.others = {peer.rank: peer for peer in others}
        self._where = f" on {host}" if host else ""

    def failure(self) -> PeerFailed | None:
        """The failure of a local peer, if one has failed, or so many are lost that the job cannot go on."""
        lost: list[int] = []
        others = self.others  # replaced by `forget`, in another thread
        for rank, other in others.items():
            if other.state == RUNNING and other.has_died() and other.state == RUNNING:  # it may write in between
                lost.append(rank)
                if not self.min_ranks:
                    return self._death(lost, others)
            if other.state == FAILED:
                root, text = other.root_cause
                return PeerFailed(text, root)
        return self._death(lost, others) if lost and self._are_too_few(lost, others) else None

    def lost(self) -> frozenset[int]:
        """Ranks that are gone without a word; none if every loss is a failure."""
        if not self.min_ranks:
            return frozenset()
        return frozenset(rank for rank, other in self.others.items() if other.is_lost())

    def death(self, lost: Sequence[int]) -> PeerFailed:
        """The failure of ranks that are lost; its text names the first."""
        return self._death(lost, self.others)

    def are_too_few(self, lost: Sequence[int]) -> bool:
        """Whether the job cannot go on without these ranks."""
        return self._are_too_few(lost, self.others)

    def _are_too_few(self, lost: Sequence[int], others: Mapping[int, Liveness]) -> bool:
        return 1 + len(others) - len(lost) < self.min_ranks

    def _death(self, lost: Sequence[int], others: Mapping[int, Liveness]) -> PeerFailed:
        rank = lost[0]
        text = f"rank {rank} (process {others[rank].pid}{self._where}) died without reporting an error; {SILENT_ENDS}."
        if self.min_ranks and self._are_too_few(lost, others):
            left = 1 + len(others) - len(lost)
            text += f" Training cannot go on with {left} rank{'s' * (left != 1)}: min_ranks={self.min_ranks}."
        return PeerFailed(text, rank)

    def add(self, joiners: Sequence[Liveness]) -> None:
        """Look at processes that have joined, too."""
        self.others = {**self.others, **{peer.rank: peer for peer in joiners}}

    def are_gone(self, ranks: Collection[int]) -> bool:
        """Whether these ranks have all left, failed or died."""
        return all(self.others[rank].state != RUNNING or self.others[rank].has_died() for rank in ranks)

    def forget(self, lost: Collection[int]) -> None:
        """Look no more at ranks without which the job goes on."""
        self.others = {rank: other for rank, other in self.others.items() if rank not in lost}

    def has_lost_a_process(self) -> bool:
        """Whether a local peer's process is gone without having left."""
        return any(other.state != LEFT and other.has_died() for other in self.others.values())

    def has_left(self, rank: int) -> bool:
        """Whether a local peer left normally."""
        other = self.others.get(rank)
        return other is not None and other.state == LEFT

    def exit_status(self, rank: int) -> int:
        """The exit status with which a local peer left; 0 for ranks of other hosts."""
        other = self.others.get(rank)
        return other.exit_status if other is not None else 0

    def rejection(self, rank: int, operation: tuple[int, int, int]) -> str:
        """Why a local peer rejected an operation, "" if it did not."""
        other = self.others.get(rank)
        return other.rejection(operation) if other is not None else ""

    def has_ended(self, rank: int) -> bool:
        """Whether a local peer left normally and its process is gone too."""
        return self.has_left(rank) and self.others[rank].has_died()
