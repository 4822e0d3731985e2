"""The seats of a job that `ring run` has started on this host: which process has each, and who waits for one.

A seat is what a user numbers as a rank. When the process that has it ends, another may take it, under a new world
rank. Processes of one job that start at different times have nothing in common but `ring run` and its shared segment,
in which they meet. Before the start-up exchange (spawn.py) it has a row for each seat: whose it is, where other
processes find that one's liveness segment, and whether it takes part already. `ring run` reads there, too, how the end
of a process is meant.

A job that may grow (`max_ranks`) has rows for seats that nobody has taken yet, behind those of the first ranks.

In a job on several hosts, each host's supervisor has such rows for its own ranks (`OwnSeat`), without the exchange.
Behind them is a *card*, on which the host's ranks write what a new process of this host needs to be reached by the
others: the secret of the job's connections among it. They write it anew whenever others have joined. Only processes
that inherit the file can read that, as they could read the memory of the ranks. A host that has no rank yet has no such
card; its supervisor gets one of another host (launcher/several_hosts.py). On a second board a supervisor writes which
processes of such hosts, *guests*, wait for the job's ranks to let them join.

Spares are processes that `ring run` has started before a seat is free. They wait in `init` until it gives them one:
each looks at words of its own, behind the rows.
"""

from __future__ import annotations

import functools
import json
import os
import time
import zlib
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, SharedMemoryError
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.shared_memory import Address, Segment, publish

#: Bytes of a row, and of the words of spares, two for each world rank.
_ROW, _SPARES = 64, 16 * MOST_MEMBERS
#: Its words. The address is that of the process's liveness segment.
_STATE, _WORLD_RANK, _PID, _FILE, _NBYTES, _HAD_MEMBER = range(6)
#: States: nobody yet, or not any more; a member of the job; one that waits to join; a member that left as it was told;
#: one that waits in `init` for the others; a member without which the others go on, as they could not reach it; one
#: whose process has ended before the job has, as the others found.
_EMPTY, _MEMBER, _WAITING, _LEFT, _STARTING, _CUT_OFF, _LOST = range(7)
#: A spare's words: whether it has come to wait, and one more than the seat that it has got, which may happen before.
_HAS_COME, _GIVEN = range(2)
#: Bytes of a card, and seconds for which one that is being written may be incomplete.
_CARD, _WRITES = 256 * 1024, 2.0


class Occupant(NamedTuple):
    """Who has a seat: its world rank, and the address of its liveness segment."""

    seat: int
    world_rank: int
    address: Address

    def is_there(self) -> bool:
        """Whether its process still has that segment."""
        pid, file, _ = self.address
        return os.path.exists(f"/proc/{pid}/fd/{file}")


class Seats:
    """The rows of all seats, behind one that tells how many are in use, and the words of spares.

    Args:
        memory: `nbytes` of it, zeros to begin with.
    """

    def __init__(self, memory: Bytes) -> None:
        self._used = memory[:_ROW].view(np.int64)
        self._rows = memory[_ROW:-_SPARES].view(np.int64).reshape(-1, _ROW // 8)
        self._spares = memory[-_SPARES:].view(np.int64).reshape(-1, 2)

    @staticmethod
    def nbytes(number: int) -> int:
        """Bytes for this many seats."""
        return (1 + number) * _ROW + _SPARES

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self._rows)

    @property
    def in_use(self) -> int:
        """How many of them, from the first, `ring run` has or had processes for, once the job has grown."""
        return int(self._used[0])

    @in_use.setter
    def in_use(self, number: int) -> None:
        self._used[0] = number

    @property
    def guests(self) -> int:
        """On one of several hosts, how many processes of others wait for whom no rank of theirs is left."""
        return int(self._used[1])

    @guests.setter
    def guests(self, number: int) -> None:
        self._used[1] = number

    @property
    def others_let_join(self) -> bool:
        """On one of several hosts, whether the ranks of others may let processes of this one join."""
        return bool(self._used[2])

    @others_let_join.setter
    def others_let_join(self, may: bool) -> None:
        self._used[2] = may

    def is_new(self, seat: int) -> bool:
        """Whether no process with this seat has ever taken part: the job would grow by it."""
        return not self._rows[seat, _HAD_MEMBER]

    def size_until_joined(self, seat: int) -> int:
        """How many ranks a process with this seat is to see until it has joined: as many as there will be with it."""
        return self.in_use if self.is_new(seat) else int(self._rows[:, _HAD_MEMBER].sum())

    def clear(self, seat: int) -> None:
        """Free a seat whose process has ended."""
        self._rows[seat, _STATE] = _EMPTY

    def take(self, occupant: Occupant, as_member: bool) -> None:
        """Say that this process has a seat, and whether it takes part already or waits for that."""
        row = self._rows[occupant.seat]
        row[_STATE] = _EMPTY
        publish()
        row[_WORLD_RANK] = occupant.world_rank
        row[_PID : _NBYTES + 1] = occupant.address
        row[_HAD_MEMBER] |= as_member
        publish()
        row[_STATE] = _MEMBER if as_member else _WAITING

    def end_all(self) -> None:
        """Say that all processes are told to end, before they get SIGTERM."""
        self._spares[0, _HAS_COME] = 1  # no spare has the world rank 0

    @property
    def is_ending(self) -> bool:
        """Whether all are told to end, rather than one to leave."""
        return bool(self._spares[0, _HAS_COME])

    def is_taken(self, seat: int) -> bool:
        """Whether a process has said that this seat is its own."""
        return bool(self._rows[seat, _STATE] != _EMPTY)

    def leave(self, seat: int) -> None:
        """Say that this process leaves the job before its end, as it was told to."""
        self._rows[seat, _STATE] = _LEFT

    def has_left(self, seat: int) -> bool:
        """Whether the process of a seat has said so."""
        return bool(self._rows[seat, _STATE] == _LEFT)

    def has_joined(self, seat: int, world_rank: int) -> bool:
        """Whether this process takes part in the job, or did."""
        row = self._rows[seat]
        return bool(row[_STATE] in (_MEMBER, _LEFT, _LOST) and row[_WORLD_RANK] == world_rank)

    def note_lost(self, world_rank: int) -> None:
        """Say that the process of a member has ended, and the others go on without it; several may say so."""
        for row in self._rows:
            if row[_STATE] == _MEMBER and row[_WORLD_RANK] == world_rank:
                row[_STATE] = _LOST

    def is_lost(self, seat: int) -> bool:
        """Whether the others go on without the process of a seat: even its exit status 0 is no normal end then."""
        return bool(self._rows[seat, _STATE] == _LOST)

    def note(self, seat: int, state: int) -> None:
        """Say how far this process is, where no other looks for its memory here."""
        self._rows[seat, _STATE] = state

    def is_starting(self, seat: int) -> bool:
        """Whether the process of a seat has called `init`, and waits there."""
        return bool(self._rows[seat, _STATE] == _STARTING)

    def has_started(self, seat: int) -> bool:
        """Whether it takes part, or did."""
        return bool(self._rows[seat, _STATE] in (_MEMBER, _LEFT, _CUT_OFF, _LOST))

    def is_cut_off(self, seat: int) -> bool:
        """Whether it ends because others go on without it."""
        return bool(self._rows[seat, _STATE] == _CUT_OFF)

    def is_waiting(self, seat: int) -> bool:
        """Whether the process of a seat waits to join, or waited when it ended."""
        return bool(self._rows[seat, _STATE] == _WAITING)

    def has_waiting(self) -> bool:
        """Whether a process waits to join; a look of a microsecond."""
        return bool((self._rows[:, _STATE] == _WAITING).any())

    def waiting(self) -> list[Occupant]:
        """Those that wait to join."""
        return self._in_state(_WAITING)

    def members(self) -> list[Occupant]:
        """Those that take part, as far as they live."""
        return self._in_state(_MEMBER)

    # Spares -----------------------------------------------------------------------------------------

    def wait_as_spare(self, world_rank: int) -> None:
        """Say that a spare waits, under the world rank that it will have."""
        self._spares[world_rank, _HAS_COME] = 1

    def has_come(self, world_rank: int) -> bool:
        """Whether a spare has said so."""
        return bool(self._spares[world_rank, _HAS_COME])

    def give(self, seat: int, world_rank: int) -> None:
        """Give a seat to a spare."""
        self._spares[world_rank, _GIVEN] = seat + 1

    def given(self, world_rank: int) -> int | None:
        """The seat that a spare has got, None for none."""
        return int(self._spares[world_rank, _GIVEN]) - 1 if self._spares[world_rank, _GIVEN] else None

    def _in_state(self, state: int) -> list[Occupant]:
        publish()
        found = []
        for seat, row in enumerate(self._rows.tolist()):
            publish()  # another process may have taken the seat since
            if row[_STATE] == state == self._rows[seat, _STATE] and 0 <= row[_WORLD_RANK] < MOST_MEMBERS:
                found.append(Occupant(seat, row[_WORLD_RANK], (row[_PID], row[_FILE], row[_NBYTES])))
        return found


class Board:
    """JSON in shared memory, written by processes that all write the same, or by one.

    Args:
        memory: zeros to begin with.
    """

    def __init__(self, memory: Bytes) -> None:
        self._head, self._text = memory[:16].view(np.int64), memory[16:]

    def write(self, value: Any) -> None:
        """Write it in the place of what was written before.

        Raises:
            LaunchError: it is too long.
        """
        text = json.dumps(value).encode()
        if len(text) > self._text.size:
            raise LaunchError(f"what processes tell each other is {len(text)} bytes, more than {self._text.size}.")
        self._text[: len(text)] = np.frombuffer(text, np.uint8)
        publish()
        self._head[:] = len(text), zlib.crc32(text)

    def read(self) -> Any:
        """What is written there, None if nothing is; waits while it is being written."""
        end = time.monotonic() + _WRITES
        while True:
            length, checksum = self._head.tolist()
            publish()
            text = bytes(self._text[:length])
            if length and zlib.crc32(text) == checksum:
                return json.loads(text)
            if not length or time.monotonic() > end:
                return None
            time.sleep(0.001)


class OwnSeat:
    """The row by which a process tells the supervisor of its host how far it is.

    Args:
        text: value of RING_SEAT: the file of the rows, which this process has inherited, their number, and its own row.

    Raises:
        LaunchError: the process has not inherited that file.
    """

    def __init__(self, text: str) -> None:
        try:
            fd, number, self._seat = map(int, text.split(":"))
            self._segment = Segment.inherited(fd, self.nbytes(number))
        except (ValueError, SharedMemoryError) as error:
            raise LaunchError(
                f"{config.SEAT.name}={text!r} is set, but this process did not inherit the file that it names "
                f"({error}): the variable was copied from a rank of a job into another environment; unset it."
            ) from error
        self._seats, self._boards = self.parts(self._segment.array)

    @staticmethod
    def nbytes(number: int) -> int:
        """Bytes of a file with this many rows."""
        return Seats.nbytes(number) + 2 * _CARD

    @staticmethod
    def parts(memory: Bytes) -> tuple[Seats, tuple[Board, Board]]:
        """The rows in such a file; the card, and the board for guests, which the supervisor writes."""
        return Seats(memory[: -2 * _CARD]), (Board(memory[-2 * _CARD : -_CARD]), Board(memory[-_CARD:]))

    @staticmethod
    def environment(segment: Segment, number: int, seat: int) -> dict[str, str]:
        """Environment of a process that has a seat and inherits the file of the rows."""
        return {config.SEAT.name: f"{segment.fd}:{number}:{seat}"}

    def start(self) -> None:
        """Say that this process waits in `init` for the others."""
        self._seats.note(self._seat, _STARTING)

    def take_part(self, world_rank: int, address: Address) -> None:
        """Say that it is a member of the job; arguments as in `Occupant`."""
        self._seats.take(Occupant(self._seat, world_rank, address), as_member=True)

    def wait_to_join(self, world_rank: int, address: Address) -> None:
        """Say that it waits to become one; arguments as in `Occupant`."""
        self._seats.take(Occupant(self._seat, world_rank, address), as_member=False)

    def has_waiting(self) -> bool:
        """Whether another process of this host or a guest waits to join; a look of a microsecond."""
        return self._seats.has_waiting() or self._seats.guests > 0

    def waiting(self) -> list[Occupant]:
        """Those that do; their seats are numbers of rows."""
        return [one for one in self._seats.waiting() if one.is_there()]

    def members(self) -> list[Occupant]:
        """The members on this host, as far as they live; their seats are numbers of rows."""
        return [one for one in self._seats.members() if one.is_there()]

    def write_card(self, card: dict[str, Any]) -> None:
        """Write the card; all ranks of the host write the same, and do so again when others have joined.

        Raises:
            LaunchError: it is too long.
        """
        self._boards[0].write(card)

    def read_card(self) -> dict[str, Any]:
        """The card; waits while it is being written.

        Raises:
            LaunchError: none is written.
        """
        card: dict[str, Any] | None = self._boards[0].read()
        if card is None:
            raise LaunchError(f"{config.JOINS.name} is set, but no rank of this host has been a member of the job.")
        return card

    def guests(self) -> list[dict[str, Any]]:
        """Processes that wait on hosts where no rank is left, as their supervisors tell of them."""
        return list(self._boards[1].read() or ()) if self._seats.guests else []

    @property
    def others_let_join(self) -> bool:
        """Whether the ranks of other hosts may let processes of this one join."""
        return self._seats.others_let_join

    def leave(self) -> None:
        """Say that it leaves the job before its end, as it was told to."""
        self._seats.leave(self._seat)

    def note_lost(self, world_rank: int) -> None:
        """As `Seats.note_lost`, of a process of this host."""
        self._seats.note_lost(world_rank)

    @property
    def is_ending(self) -> bool:
        """As `Seats.is_ending`."""
        return self._seats.is_ending

    def note_cut_off(self) -> None:
        """Say that it ends because others go on without it."""
        self._seats.note(self._seat, _CUT_OFF)


@functools.cache
def own_seat() -> OwnSeat | None:
    """The seat that the supervisor of this host has given to this process, None if there is none.

    Raises:
        LaunchError: as for `OwnSeat`.
    """
    is_another_job = config.LAUNCHER.get() != "rendezvous"  # that of a child of a rank
    return None if is_another_job or not config.SEAT.is_set() else OwnSeat(config.SEAT.get())
