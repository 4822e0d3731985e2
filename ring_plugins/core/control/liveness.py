"""Who of this host's ranks is alive, and what became of the others.

Every process keeps one small segment that its neighbours map: its state, and the cause if it failed. It holds a POSIX
record lock on that segment as long as it lives. The kernel drops the lock when the process ends, however it ends, so a
neighbour that can take the lock knows that the holder is gone. Unlike process ids the lock cannot be confused by reuse,
zombies or forked children.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

import numpy as np

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.linux.shared_memory import Address, Segment, publish

RUNNING, LEFT, FAILED = 1, 2, 3

_STATE, _PID, _ROOT_CAUSE_RANK, _CAUSE_LENGTH = range(4)
_CAUSE, _NBYTES = 1024, 8192


class Liveness:
    """One process's segment, seen by itself (writing) or by a neighbour (reading)."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self.rank = rank
        self._segment = segment
        self._words = memoryview(segment.array[:1024]).cast("B").cast("q")

    @classmethod
    def create(cls, rank: int) -> Liveness:
        own = cls(Segment.create(_NBYTES), rank)
        own._words[_PID] = os.getpid()
        own._words[_STATE] = RUNNING
        fcntl.lockf(own._segment.fd, fcntl.LOCK_EX)
        return own

    @classmethod
    def open(cls, address: Address, rank: int) -> Liveness:
        return cls(Segment.open(address, rank), rank)

    @property
    def address(self) -> Address:
        return self._segment.address

    @property
    def pid(self) -> int:
        return self._words[_PID]

    @property
    def state(self) -> int:
        return self._words[_STATE]

    def has_died(self) -> bool:
        """Whether the process of this neighbour no longer exists."""
        try:
            fcntl.lockf(self._segment.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(self._segment.fd, fcntl.LOCK_UN)
        return True

    # The owner writes ------------------------------------------------------------------------------

    def leave(self) -> None:
        if self.state == RUNNING:
            self._words[_STATE] = LEFT

    def fail(self, root_rank: int, text: str) -> None:
        """Say that this process failed, because of `root_rank`; the first sentence stays."""
        if self.state == RUNNING:
            self._write(_CAUSE, _CAUSE_LENGTH, text, _NBYTES - _CAUSE)
            self._words[_ROOT_CAUSE_RANK] = root_rank
            publish()
            self._words[_STATE] = FAILED

    def _write(self, offset: int, length_word: int, text: str, room: int) -> None:
        data = np.frombuffer(text.encode()[:room], dtype=np.uint8)
        self._words[length_word] = 0
        self._segment.array[offset : offset + data.size] = data
        self._words[length_word] = data.size

    # Neighbours read -------------------------------------------------------------------------------

    @property
    def root_cause(self) -> tuple[int, str]:
        """The rank that failed first, and a sentence on how."""
        return self._words[_ROOT_CAUSE_RANK], self._read(_CAUSE, _CAUSE_LENGTH)

    def _read(self, offset: int, length_word: int) -> str:
        return bytes(self._segment.array[offset : offset + self._words[length_word]]).decode(errors="replace")


class LocalPeers:
    """This process and the other ranks of its host.

    Args:
        own, others: their presences.
        host: its name, for texts; "" where the job has no other.
    """

    def __init__(self, own: Liveness, others: Sequence[Liveness], host: str = "") -> None:
        self.own = own
        self._where = f" on {host}" if host else ""
        self.others = {presence.rank: presence for presence in others}

    def failure(self) -> PeerFailed | None:
        """The failure of any neighbour, if there is one."""
        for rank, other in self.others.items():
            if other.state == FAILED:
                root, text = other.root_cause
                return PeerFailed(text, root)
            if other.state == RUNNING and other.has_died():
                if other.state != RUNNING:  # it spoke its last word between the two looks
                    return self.failure()
                return PeerFailed(
                    f"rank {rank} (process {other.pid}{self._where}) died without a word; it was killed by a signal "
                    "(out of memory? `kill -9`?) or crashed in native code.",
                    rank,
                )
        return None

    def has_lost_a_process(self) -> bool:
        """Whether a neighbour's process is gone, without having left."""
        return any(other.state != LEFT and other.has_died() for other in self.others.values())

    def has_left(self, rank: int) -> bool:
        """Whether a neighbour ended its part normally."""
        other = self.others.get(rank)
        return other is not None and other.state == LEFT

    def has_ended(self, rank: int) -> bool:
        """Whether a neighbour left in order, and its process is gone too."""
        return self.has_left(rank) and self.others[rank].has_died()
