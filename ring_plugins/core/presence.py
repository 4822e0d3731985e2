"""Who of this host's ranks is alive, and what became of the others.

Every process keeps one small segment that its neighbours map: its state, the cause if it failed, and what
its main thread has been waiting for since when. It holds a POSIX record lock on that segment as long as it
lives. The kernel drops the lock when the process ends, however it ends, so a neighbour that can take the
lock knows that the holder is gone. Unlike process ids the lock cannot be confused by reuse, zombies or
forked children.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ring_plugins.core.errors import PeerFailed, PeerLeft
from ring_plugins.core.shared_memory import Address, Segment, publish

RUNNING, LEFT, FAILED = 1, 2, 3

_STATE, _PID, _ROOT_CAUSE_RANK, _CAUSE_LENGTH, _BLOCKED_LENGTH, _BLOCKED_VERSION = range(6)
_CAUSE, _BLOCKED, _NBYTES = 1024, 8192, 16384


class Presence:
    """One process's segment, seen by itself (writing) or by a neighbour (reading)."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self.rank = rank
        self._segment = segment
        self._words = memoryview(segment.array[:1024]).cast("B").cast("q")

    @classmethod
    def create(cls, rank: int) -> Presence:
        own = cls(Segment.create(_NBYTES), rank)
        own._words[_PID] = os.getpid()
        own._words[_STATE] = RUNNING
        fcntl.lockf(own._segment.fd, fcntl.LOCK_EX)
        return own

    @classmethod
    def open(cls, address: Address, rank: int) -> Presence:
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

    def fail(self, root_rank: int, cause: str) -> None:
        """Say that this process failed; the first cause stays."""
        if self.state == RUNNING:
            self._write(_CAUSE, _CAUSE_LENGTH, cause, _BLOCKED - _CAUSE)
            self._words[_ROOT_CAUSE_RANK] = root_rank
            publish()
            self._words[_STATE] = FAILED

    def block(self, communicator: str, what: str, missing: Sequence[int], since: float) -> None:
        """Say what the main thread waits for: `missing` world ranks, since a time of `time.monotonic`."""
        record = {"communicator": communicator, "what": what[:2000], "missing": list(missing), "since": since}
        self._words[_BLOCKED_VERSION] += 1
        self._write(_BLOCKED, _BLOCKED_LENGTH, json.dumps(record), _NBYTES - _BLOCKED)
        self._words[_BLOCKED_VERSION] += 1

    def unblock(self) -> None:
        self._words[_BLOCKED_LENGTH] = 0

    def _write(self, offset: int, length_word: int, text: str, room: int) -> None:
        data = np.frombuffer(text.encode()[:room], dtype=np.uint8)
        self._words[length_word] = 0
        self._segment.array[offset : offset + data.size] = data
        self._words[length_word] = data.size

    # Neighbours read -------------------------------------------------------------------------------

    @property
    def root_cause(self) -> tuple[int, str]:
        """The rank that failed first, and its error."""
        return self._words[_ROOT_CAUSE_RANK], self._read(_CAUSE, _CAUSE_LENGTH)

    @property
    def blocked(self) -> dict[str, Any] | None:
        """What `block` said last, or None."""
        version = self._words[_BLOCKED_VERSION]
        text = self._read(_BLOCKED, _BLOCKED_LENGTH)
        if not text or version % 2 or self._words[_BLOCKED_VERSION] != version:
            return None
        with contextlib.suppress(ValueError):  # torn by a concurrent write: as good as nothing said
            record: dict[str, Any] = json.loads(text)
            return record
        return None

    def _read(self, offset: int, length_word: int) -> str:
        return bytes(self._segment.array[offset : offset + self._words[length_word]]).decode(errors="replace")


class Neighbourhood:
    """This process and the other ranks of its host."""

    def __init__(self, own: Presence, others: Sequence[Presence]) -> None:
        self.own = own
        self.others = {presence.rank: presence for presence in others}
        #: The main thread has been told that a peer failed; it is its turn to end the process.
        self.told = False

    def failure(self) -> PeerFailed | None:
        """The failure of any neighbour, if there is one."""
        for rank, other in self.others.items():
            if other.state == FAILED:
                root, cause = other.root_cause
                return PeerFailed(f"rank {root} failed: {cause}", root)
            if other.state == RUNNING and other.has_died():
                if other.state != RUNNING:  # it spoke its last word between the two looks
                    return self.failure()
                return PeerFailed(
                    f"rank {rank} (process {other.pid}) died without a word; it was killed by a signal "
                    "(out of memory? `kill -9`?) or crashed in native code.",
                    rank,
                )
        return None

    def has_lost_a_process(self) -> bool:
        """Whether a neighbour's process is gone, without having left."""
        return any(other.state != LEFT and other.has_died() for other in self.others.values())

    def check(self, missing: Sequence[int], what: str) -> None:
        """Raise if what this rank waits for cannot happen any more.

        Args:
            missing: world ranks that have not arrived.
            what: the operation that waits, for the error's text.

        Raises:
            PeerFailed: any rank of this host failed or died.
            PeerLeft: one of `missing` ended normally.
        """
        failure = self.failure()
        if failure is not None:
            self.told = True
            raise failure
        for rank in missing:
            other = self.others.get(rank)
            if other is not None and other.state == LEFT:
                self.told = True
                raise PeerLeft(
                    f"rank {rank} has ended its part of the job, and rank {self.own.rank} waits for it in {what}. "
                    "Usually the ranks took different numbers of steps: give every rank the same number of batches.",
                    rank,
                )

    def deadlock(
        self, communicator: str, what: str, missing: Sequence[int], since: float, patience: float
    ) -> str | None:
        """A text about two main threads that wait for each other in different operations, or None."""
        now = time.monotonic()
        if now - since < patience:
            return None
        for rank in missing:
            other = self.others.get(rank)
            blocked = other.blocked if other is not None else None
            if blocked is None or blocked["communicator"] == communicator or self.own.rank not in blocked["missing"]:
                continue
            if now - blocked["since"] >= patience:
                return (
                    f"rank {self.own.rank} waits for rank {rank} in {what}, while rank {rank} waits for rank "
                    f"{self.own.rank} in {blocked['what']}. The ranks took different paths through the program: "
                    "different numbers of steps, or a condition that is true on some ranks only."
                )
        return None
