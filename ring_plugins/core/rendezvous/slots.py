"""Which process of a host has which slot, and who waits for one, in shared memory that `ring run` makes.

A *slot* is a place in the order of ranks. At the start of a job slot 3 belongs to rank 3. When that process ends,
another one may take the slot, and is rank 3 then; its world rank is a new one, as no two processes of a job ever have
the same. Processes that start at different times can only meet in a segment that `ring run` has made. It has one row
for each slot: the state of the slot's process, its world rank, and the address of its liveness segment. `ring run`
reads there how far each process is, and how the end of one is meant.

- **One host**: `ring run` has one segment. A job that may grow (`max_ranks`) also has rows for slots that nobody has
  taken yet, behind those of the first ranks.
- **Several hosts**: each host's supervisor has a segment for the ranks of its host, with rows numbered from 0.
- A process knows its own row (`OwnSlot`). Behind the rows are two JSON values (`SharedJson`). The *join info* is what a
  new process of this host needs so that the members can connect to it, the job's secret among it. The members of this
  host write it, and do so again whenever others have joined. A host that has no member yet gets the join info of
  another host (launcher/coordinator.py). The *remote joiners* are processes that wait to join on hosts without members,
  where no member sees them; the supervisor writes these. Only processes that inherit the file can read it, and they
  could read the memory of the ranks as well.
- **Standbys** are processes that `ring run` has started before a slot is free. They wait in `init` until they get one.
  Behind the rows are two integers for each: whether it waits, and the slot that it has got.

`Slots` has more methods than other classes, nearly all of one line: no other file knows the layout of a row.
"""

from __future__ import annotations

import functools
import json
import os
import time
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, SharedMemoryError
from ring_plugins.core.base.member import Member
from ring_plugins.core.base.threads import until
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.shared_memory import Segment, publish

#: Bytes of a row, and of the integers of standbys, two for each world rank.
_ROW, _STANDBYS = 64, 16 * MOST_MEMBERS
#: The integers of a row. The address is that of the process's liveness segment.
_STATE, _WORLD_RANK, _PID, _FILE, _NBYTES, _HAD_MEMBER, _HAS_TOLD = range(7)
#: How the process of a slot said that it ends: it has told the others, or is ended by the failure of one of them; or
#: another in its place would end in the same way, instead of joining.
TOLD, FOLLOWED, HOPELESS = 1, 2, 3
#: A standby's integers: whether it waits, and 1 + its assigned slot, which may be set before it waits.
_HAS_COME, _GIVEN = range(2)
#: Bytes of a JSON value, and seconds for which one that is being written may be incomplete.
_JSON, _WRITES = 256 * 1024, 2.0


class State(IntEnum):
    """How far the process of a slot is, or was when it ended."""

    EMPTY = 0  # nobody yet, or not any more
    MEMBER = 1
    WAITING = 2  # to join
    LEFT = 3  # as it was told to
    STARTING = 4  # waits in `init` for the others
    EXCLUDED = 5  # the others go on without it, as they could not reach it
    LOST = 6  # the others found that it ended before the job did: even exit status 0 is no normal end then


#: Of a process that takes part in the job, or did.
STARTED = (State.MEMBER, State.LEFT, State.EXCLUDED, State.LOST)


def is_there(owner: Member) -> bool:
    """Whether a process still has its liveness segment."""
    pid, file, _ = owner.liveness or (0, 0, 0)
    return os.path.exists(f"/proc/{pid}/fd/{file}")


class SharedJson:
    """A JSON value in shared memory; one process writes it, or several write the same.

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


class Slots:
    """The table of one host's slots: rows, behind one of counts; integers of standbys; JSON values.

    Args:
        memory: `nbytes` of it, zeros to begin with.

    Attributes:
        memory: as given.
        join_info: a JSON value. The members of the host write it, and do so again when others have joined.
    """

    def __init__(self, memory: Bytes) -> None:
        self.memory, (rows, values) = memory, (memory[: -2 * _JSON], memory[-2 * _JSON :])
        self._used = rows[:_ROW].view(np.int64)
        self._rows = rows[_ROW:-_STANDBYS].view(np.int64).reshape(-1, _ROW // 8)
        self._standbys = rows[-_STANDBYS:].view(np.int64).reshape(-1, 2)
        self.join_info, self._remote_joiners = SharedJson(values[:_JSON]), SharedJson(values[_JSON:])

    @staticmethod
    def nbytes(number: int) -> int:
        """Bytes for this many slots."""
        return (1 + number) * _ROW + _STANDBYS + 2 * _JSON

    @staticmethod
    def environment(segment: Segment, number: int, slot: int) -> dict[str, str]:
        """Environment of a process that has a slot and inherits the file of so many rows."""
        return {config.SLOT.name: f"{segment.fd}:{number}:{slot}"}

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

    def tell_of_remote_joiners(self, joiners: Sequence[Any]) -> None:
        """On one of several hosts, tell of processes that wait on hosts that have no members."""
        self._remote_joiners.write(joiners)
        self._used[1] = len(joiners)

    def remote_joiners(self) -> list[Member]:
        """Those processes."""
        found = self._remote_joiners.read() if self._used[1] else None
        return [Member.read(one) for one in found or ()]

    @property
    def others_let_join(self) -> bool:
        """On one of several hosts, whether the ranks of others may let processes of this one join."""
        return bool(self._used[2])

    @others_let_join.setter
    def others_let_join(self, may: bool) -> None:
        self._used[2] = may

    def is_new(self, slot: int) -> bool:
        """Whether no process with this slot has ever taken part: the job would grow by it."""
        return not self._rows[slot, _HAD_MEMBER]

    def size_until_joined(self, slot: int) -> int:
        """How many ranks a process with this slot is to see until it has joined: as many as there will be with it."""
        return self.in_use if self.is_new(slot) else int(self._rows[:, _HAD_MEMBER].sum())

    def clear(self, slot: int) -> None:
        """Free a slot whose process has ended."""
        self._rows[slot, _STATE] = State.EMPTY
        self._rows[slot, _HAS_TOLD] = 0

    def take(self, owner: Member, as_member: bool) -> None:
        """Say that this process has a slot, and whether it takes part already or waits for that."""
        row = self._rows[owner.slot]
        row[_STATE] = State.EMPTY
        publish()
        row[_WORLD_RANK] = owner.rank
        row[_PID : _NBYTES + 1] = owner.liveness or (0, 0, 0)
        row[_HAD_MEMBER] |= as_member
        row[_HAS_TOLD] = 0
        publish()
        row[_STATE] = State.MEMBER if as_member else State.WAITING

    def end_all(self) -> None:
        """Say that all processes are told to end, before they get SIGTERM."""
        self._standbys[0, _HAS_COME] = 1  # no standby has the world rank 0

    @property
    def is_ending(self) -> bool:
        """Whether all are told to end, rather than one to leave."""
        return bool(self._standbys[0, _HAS_COME])

    def state(self, slot: int) -> int:
        """How far the process of a slot is: a `State`, unless something else has written there."""
        return int(self._rows[slot, _STATE])

    def has_joined(self, slot: int, world_rank: int) -> bool:
        """Whether this process takes part in the job, or did."""
        row = self._rows[slot]
        return bool(row[_STATE] in (State.MEMBER, State.LEFT, State.LOST) and row[_WORLD_RANK] == world_rank)

    def note_lost(self, world_rank: int) -> None:
        """Say that the process of a member has ended, and the others go on without it; several may say so."""
        for row in self._rows:
            if row[_STATE] == State.MEMBER and row[_WORLD_RANK] == world_rank:
                row[_STATE] = State.LOST

    def has_followed(self, slot: int) -> bool:
        """Whether the process of a slot said that another's failure ended it."""
        return bool(self._rows[slot, _HAS_TOLD] == FOLLOWED)

    def is_hopeless(self, slot: int) -> bool:
        """Whether the process of a slot, which has ended, said that others would not join either."""
        return bool(self._rows[slot, _HAS_TOLD] == HOPELESS)

    def died_silently(self, slot: int) -> bool:
        """Whether the process of a slot, which has ended, was a member and did not tell the others that it ends."""
        return bool(self._rows[slot, _STATE] in (State.MEMBER, State.LOST) and not self._rows[slot, _HAS_TOLD])

    def has_waiting(self) -> bool:
        """Whether a process waits to join, here or on a host without members. Cheap (1 µs)."""
        return bool((self._rows[:, _STATE] == State.WAITING).any() or self._used[1])

    def waiting(self) -> list[Member]:
        """Pending joiners of this host; their slots are numbers of rows."""
        return self._in_state(State.WAITING)

    def members(self) -> list[Member]:
        """Members of this host that are alive; their slots are numbers of rows."""
        return self._in_state(State.MEMBER)

    # Standbys -----------------------------------------------------------------------------------------

    def wait_as_standby(self, world_rank: int) -> None:
        """Say that a standby waits, under the world rank that it will have."""
        self._standbys[world_rank, _HAS_COME] = 1

    def has_come(self, world_rank: int) -> bool:
        """Whether a standby has said so."""
        return bool(self._standbys[world_rank, _HAS_COME])

    def give(self, slot: int, world_rank: int) -> None:
        """Give a slot to a standby."""
        self._standbys[world_rank, _GIVEN] = slot + 1

    def given(self, world_rank: int) -> int | None:
        """The slot that a standby has got, None for none."""
        return int(self._standbys[world_rank, _GIVEN]) - 1 if self._standbys[world_rank, _GIVEN] else None

    def _in_state(self, state: int) -> list[Member]:
        publish()
        found = []
        for slot, row in enumerate(self._rows.tolist()):
            publish()  # another process may have taken the slot since
            if row[_STATE] == state == self._rows[slot, _STATE] and 0 <= row[_WORLD_RANK] < MOST_MEMBERS:
                found.append(Member(row[_WORLD_RANK], slot, liveness=(row[_PID], row[_FILE], row[_NBYTES])))
        return [one for one in found if is_there(one)]


class OwnSlot(Slots):
    """The table as a process has it that has a slot there, and tells how far it is.

    Args:
        memory: as in `Slots`.
        slot: number of its own row.
        has_supervisor: whether the memory is that of one of several hosts.
    """

    def __init__(self, memory: Bytes, slot: int, has_supervisor: bool = True) -> None:
        super().__init__(memory)
        self._slot, self._own, self.has_supervisor = slot, self._rows[slot], has_supervisor

    @classmethod
    def inherited(cls, text: str) -> OwnSlot:
        """That of a process on one of several hosts.

        Args:
            text: value of RING_SLOT: the file of the rows, which this process has inherited, their number, and its own.

        Raises:
            LaunchError: the process has not inherited that file.
        """
        try:
            fd, number, slot = map(int, text.split(":"))
            return cls(Segment.inherited(fd, cls.nbytes(number)).array, slot)
        except (ValueError, IndexError, SharedMemoryError) as error:
            raise LaunchError(
                f"{config.SLOT.name}={text!r} is set, but this process did not inherit the file that it names "
                f"({error}): the variable was copied from a rank of a job into another environment; unset it."
            ) from error

    def note(self, state: State) -> None:
        """Say how far it is, if that is not `take_part` or `wait_to_join`."""
        self._own[_STATE] = state

    def take_part(self, own: Member) -> None:
        """Say that it is a member of the job."""
        self.take(own._replace(slot=self._slot), as_member=True)

    def wait_to_join(self, own: Member) -> None:
        """Say that it waits to become one."""
        self.take(own._replace(slot=self._slot), as_member=False)

    def note_end(self, how: int = TOLD) -> None:
        """Say how this process ends, `TOLD`, `FOLLOWED` or `HOPELESS`; the first that is more than `TOLD` counts."""
        self._own[_HAS_TOLD] = max(how, self._own[_HAS_TOLD])

    def read_join_info(self) -> dict[str, Any]:
        """What a new process needs to join; waits until members have written it.

        Raises:
            LaunchError: none is written.
        """
        seconds = 0.0 if self.has_supervisor else config.START_TIMEOUT.get()
        found: dict[str, Any] | None = until(self.join_info.read, seconds)
        if found is None:
            raise LaunchError(f"{config.JOINS.name} is set, but no rank of this host has been a member of the job.")
        return found


@functools.cache
def own_slot() -> OwnSlot | None:
    """The slot that the supervisor of this host has given to this process, None if there is none.

    Raises:
        LaunchError: as for `OwnSlot`.
    """
    is_another_job = config.LAUNCHER.get() != "rendezvous"  # that of a child of a rank
    return None if is_another_job or not config.SLOT.is_set() else OwnSlot.inherited(config.SLOT.get())
