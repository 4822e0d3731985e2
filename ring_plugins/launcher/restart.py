"""The processes of a host's slots: how each ended, and which slots get another one.

**One restart policy.** A slot that needs a process gets one: a standby that waits already, else a new process. A slot
needs one when its process is lost, or, in a job that may grow, when it is one of the added slots and nobody has it yet.

- A process is started only while a rank lives that can give it the state of the training. Until it has joined, its end
  does not matter to the job. But a script that fails before it joins would fail again, so a slot gets a few processes
  an hour at most, and no more once one has found that no process can join in this script.
- Added slots are taken in order. Until a process has joined by one, all behind it wait. So if it is given up, those
  behind it are, too.
- A slot whose host the job is to do without gets none: its process leaves after its step, as on any SIGTERM.
- *Standbys* have run the script up to `init`, where they wait for a slot (core/rendezvous/spawn.py): a new process
  needs seconds until it has imported torch. They are started once the job's ranks have begun, so that they do not delay
  them, and another one as soon as one is used. Some that end unused are replaced, too.

`SlotProcesses` has 29 methods: the table and the policy read each other's state.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.process import STOPPED, ending, is_failure, memory_kills, silent_end, state
from ring_plugins.core.rendezvous.slots import Slots, State
from ring_plugins.launcher.job_hosts import FAILED, End
from ring_plugins.launcher.processes import Popen

#: How often a slot is filled again within an hour, and how many standbys may end unused; the seconds of an hour.
MOST, _HOUR = 5, 3600.0


def recent(times: Sequence[float]) -> int:
    """How many of these times (`time.monotonic`) lie within the last hour."""
    return sum(time.monotonic() - since < _HOUR for since in times)


class _Standby(NamedTuple):
    process: Popen
    world_rank: int


@dataclass
class _Slot:
    """What is known of a slot.

    Attributes:
        name: what users call its rank.
        world_rank: of its process.
        process: the last one, None if nobody has had the slot yet.
        attempt: of an added slot, `AddedSlot.attempt`.
        times: when each later process got the slot.
        joined: world ranks of the later processes that joined.
        is_given_up: whether it gets no other.
        leaves: whether its process is to leave; None once it was told.
        order: how many processes had ended before its own; None while it runs, or if it was killed with the others.
        of_memory: whether its process may have been killed for lack of memory.
    """

    name: int
    world_rank: int = -1
    process: Popen | None = None
    attempt: int = 0
    times: list[float] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    is_given_up: bool = False
    leaves: bool | None = False
    order: int | None = None
    of_memory: bool = False

    @property
    def code(self) -> int | None:
        """`returncode` of its process, None while it runs."""
        return None if self.process is None else self.process.returncode

    def put(self, process: Popen) -> None:
        """Let a process have it."""
        self.process, self.order, self.of_memory = process, None, False


class SlotProcesses:
    """The processes of a host's slots.

    Args:
        rows: in which the processes say how far they are, by the numbers of their slots.
        ranks: of this host at the job's start.
        size: number of ranks then; processes that start later have world ranks from this number on.
        start: starts a process for a slot, or, without one, a standby, under a world rank.
        notify: shows one line to the user.
        recovers: whether the others go on when a process is killed by a signal, or ends without telling them. One that
            fails by an exit status otherwise ends all.
        world_ranks: numbers that no process of the job has had; None if no slot gets another process.
        standbys: how many are wanted.
        rename: tells who relays the output of a world rank which slot it has got.

    Attributes:
        given_back: names of added slots that are given up, and of those that were left, until somebody clears this.
        were_let_go: whether any were told to leave.
        are_killed: whether those that still ran were killed, after the others had ended.
    """

    def __init__(
        self,
        rows: Slots,
        ranks: Sequence[int],
        size: int,
        start: Callable[[int | None, int], Popen],
        notify: Callable[[str], None],
        recovers: bool = True,
        world_ranks: Iterator[int] | None = None,
        standbys: int = 0,
        rename: Callable[[int, int], None] = lambda world_rank, slot: None,
    ) -> None:
        self._rows, self._size, self._start, self._notify = rows, size, start, notify
        self._recovers, self._world_ranks, self._rename = recovers, world_ranks, rename
        self._slots = [_Slot(rank) for rank in ranks]
        self._num_first = self._num_wanted = len(ranks)
        self.given_back, self.were_let_go, self.are_killed = list[int](), False, False
        self._standbys, self._num_standbys, self._unused_ends = list[_Standby](), standbys, list[float]()
        self._num_ended, self._memory_kills = 0, memory_kills()

    def start_first(self) -> None:
        """Start the ranks of the job's start."""
        for number, slot in enumerate(self._slots):
            slot.world_rank = slot.name
            slot.put(self._start(number, slot.world_rank))

    # How the processes are ---------------------------------------------------------------------------

    @property
    def names(self) -> list[int]:
        """What users call the slots that are, or are to be, in use."""
        return [slot.name for slot in self._slots]

    def codes(self) -> list[int | None]:
        """`returncode` of the process of each slot that has or had one, None while it runs."""
        codes = [slot.process.poll() for slot in self._slots if slot.process is not None]
        self._note_ends()
        return codes

    def running(self) -> list[Popen]:
        """Those that have not ended."""
        self.codes()
        return [slot.process for slot in self._slots if slot.process is not None and slot.code is None]

    def _note_ends(self) -> None:
        for slot in self._slots:
            if self.are_killed or slot.code is None or slot.order is not None:
                continue
            slot.order = self._num_ended = self._num_ended + 1
            if slot.code == -signal.SIGKILL and (kills := memory_kills()) > self._memory_kills:
                self._memory_kills, slot.of_memory = kills, True
                if self._recovers:  # else it is the last line
                    self._notify(f"rank {slot.name} {silent_end(slot.code, of_memory=True)}.")

    def hows(self) -> list[str]:
        """What the end of each slot's process means to the job, as in `End`; "" also of a member that runs.

        Processes in the state `OUT` are no members, whether they have ended or not.
        """
        return [self._how(number, slot) for number, slot in enumerate(self._slots) if slot.process is not None]

    def _how(self, number: int, slot: _Slot) -> str:
        rows, code = self._rows, slot.code
        if self._is_new(number) and not self._has_joined(number):
            return "late"
        if rows.state(number) == State.LEFT:
            return "left"
        if rows.state(number) == State.EXCLUDED:
            return "excluded"
        if code == 0 and rows.state(number) == State.LOST:  # `os._exit(0)`
            return "lost"
        if not code or (self._recovers and not is_failure(code)):
            return ""
        if rows.died_silently(number):
            return "lost"
        return "followed" if rows.has_followed(number) or slot.order is None else "failed"  # None: killed with others

    def _is_new(self, number: int) -> bool:
        return self._slots[number].world_rank >= self._size

    def _has_joined(self, number: int) -> bool:
        return self._rows.has_joined(number, self._slots[number].world_rank)

    @property
    def _num_used(self) -> int:
        """How many slots have or had a process."""
        return sum(slot.process is not None for slot in self._slots)

    def ends(self) -> list[End]:
        """Each process that has ended, in the order of their ends."""
        self.codes()
        last = len(self._slots) + self._num_ended
        order = sorted(enumerate(self._slots), key=lambda one: one[1].order or last)
        return [
            End(slot.name, slot.code, self._how(number, slot), slot.of_memory)
            for number, slot in order
            if slot.code is not None
        ]

    def silent_end(self, number: int) -> str:
        """How the process of a slot ended, in words, if it did not say so."""
        slot = self._slots[number]
        assert slot.code is not None
        return silent_end(slot.code, slot.of_memory) if slot.code < 0 else f"ended ({ending(slot.code)})"

    @property
    def replaced(self) -> dict[int, int]:
        """Names of slots, and how many later processes have joined in each, even if these died again."""
        self._note_joined()
        times = {slot.name: len(slot.joined) - (i >= self._num_first) for i, slot in enumerate(self._slots)}
        return {name: number for name, number in times.items() if number > 0}

    @property
    def added(self) -> list[int]:
        """Names of the slots beyond the first that processes have joined by."""
        return [self._slots[i].name for i in range(self._num_first, self._num_used) if not self._rows.is_new(i)]

    # Which slots get another -------------------------------------------------------------------------

    def follow(self, added: Sequence[tuple[int, int]]) -> None:
        """Set the added slots, and keep those of processes that have joined already.

        Args:
            added: in ascending order what users call each, and its `AddedSlot.attempt`.
        """
        kept = self._num_first
        while kept < len(self._slots) and (
            not self._rows.is_new(kept) or (self._slots[kept].name, self._slots[kept].attempt) in added
        ):
            kept += 1
        self._close(kept)
        del self._slots[kept:]
        attempts = dict(added)
        for slot in self._slots:
            if attempts.get(slot.name, 0) > slot.attempt:  # a process has left, and another one is wanted now
                slot.attempt, slot.is_given_up, slot.leaves = attempts[slot.name], False, False
        names = self.names
        self._slots += [_Slot(name, attempt=attempt) for name, attempt in added if name not in names]
        self._num_wanted = len(self._slots)

    def let_leave(self, names: Iterable[int]) -> None:
        """Let the processes of these slots leave, and nobody take their places until `follow` says so."""
        for slot in self._slots:
            if slot.name in names and slot.leaves is False:
                slot.leaves = self.were_let_go = True

    def _tell_to_leave(self, codes: Sequence[int | None]) -> None:
        for number, (slot, code) in enumerate(zip(self._slots, codes, strict=False)):
            if slot.leaves is False or slot.process is None:
                continue
            if code is not None:
                slot.leaves, slot.is_given_up = False, True
                self.given_back.append(slot.name)
            elif self._is_new(number) and not self._has_joined(number):
                slot.process.kill()
            elif slot.leaves and self._rows.state(number) == State.MEMBER:  # before, a signal would end the job
                slot.process.terminate()
                slot.leaves = None  # a second signal would not wait for the step

    def tick(self) -> None:
        """Start processes for slots that need one, and end those that can no longer join, or are to leave."""
        if self._world_ranks is None:
            return
        codes = self.codes()
        self._tell_to_leave(codes)
        self._note_joined()
        joined = [code for number, code in enumerate(codes) if self._has_joined(number)]
        is_hopeless = None not in joined and (0 in joined or not self._rows.others_let_join)
        if is_hopeless:
            for number, process in enumerate(slot.process for slot in self._slots):
                if process is not None and codes[number] is None and self._is_new(number):
                    process.kill()
        if is_hopeless or not {"excluded", *FAILED}.isdisjoint(self.hows()):
            return
        for number, code in enumerate(codes):
            if number < self._num_used and code is not None and self._is_lost(number, code):
                self._fill(number)
        while (number := self._num_used) < self._num_wanted and self._fill(number):
            pass
        self._fill_up_standbys()

    def _note_joined(self) -> None:
        for number, slot in enumerate(self._slots):
            if self._is_new(number) and self._has_joined(number):
                slot.joined.add(slot.world_rank)

    def _is_lost(self, number: int, code: int) -> bool:
        """Whether a process that has ended is to have a successor."""
        slot, rows = self._slots[number], self._rows
        if slot.is_given_up or slot.leaves is not False:
            return False
        if self._has_joined(number):
            return code != 0 or rows.state(number) in (State.LEFT, State.LOST)
        # One that has waited to join and ends with 0 has found that the job is over.
        if not self._is_new(number) or (code == 0 and rows.state(number) == State.WAITING):
            return False
        if code <= 0:  # else it has printed an error
            how = silent_end(code) if code else f"ended with {ending(code)}"
            goal = "become" if self._is_added(number) else "take the place of"
            self._notify(f"the process that was to {goal} rank {slot.name} {how} before it joined.")
        return True

    def _is_added(self, number: int) -> bool:
        """Whether a slot is one by which the job has yet to grow."""
        return number >= self._num_first and self._rows.is_new(number)

    def _fill(self, number: int) -> bool:
        """Give an empty slot a process; returns whether it has one now."""
        slot, is_added = self._slots[number], self._is_added(number)
        name = f"rank {slot.name}"
        if slot.process is not None and self._rows.is_hopeless(number):
            what = f"no process can {'become' if is_added else 'take the place of'} {name}"
            return self._give_up(number, f"{what}, as the error above says")
        if slot.process is not None and not self._has_joined(number):
            self._rows.clear(number)  # it may have waited
        if (lately := recent(slot.times)) >= MOST:
            how = "was started" if is_added else "was replaced"
            return self._give_up(number, f"{name} {how} {lately} times within an hour")
        self._rows.clear(number)
        if (standby := self._take_standby()) is not None:
            slot.world_rank = standby.world_rank
            slot.put(standby.process)
            self._rows.give(number, standby.world_rank)
            self._rename(standby.world_rank, number)
            self._notify(f"a standby process {'becomes' if is_added else 'takes the place of'} {name}.")
        elif (world_rank := self._unused(number)) is None:
            return self._give_up(number, f"{name} is not replaced, since the job has had too many processes")
        else:
            self._notify(f"starting another process {'as' if is_added else 'in the place of'} {name}.")
            slot.world_rank = world_rank
            try:
                slot.put(self._start(number, world_rank))
            except LaunchError as error:  # counts as one that has ended
                self._notify(str(error))
                if slot.process is None:
                    self._close(number)
                    return False
        slot.times.append(time.monotonic())
        return True

    def _unused(self, number: int) -> int | None:
        """A world rank that no process has had; that of an added slot is its own number at first."""
        slot = self._slots[number]
        is_first = number >= self._num_first and not slot.times and not slot.attempt
        return slot.name if is_first else next(self._world_ranks or iter(()), None)

    def _give_up(self, number: int, why: str) -> bool:
        """Let nobody have a slot any more; returns False."""
        self._notify(f"{why}; the job goes on without it.")
        if self._is_added(number):
            self.given_back.append(self._slots[number].name)
            self._close(number)
        else:
            self._slots[number].is_given_up = True
        return False

    def _close(self, number: int) -> None:
        """Let nobody have this slot and those behind it until added ranks are wanted again."""
        for closed, slot in enumerate(self._slots[number:], number):
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()
                self._rows.clear(closed)
            slot.process = None
        self._num_wanted = self._rows.in_use = number

    # Standbys ----------------------------------------------------------------------------------------

    def _take_standby(self) -> _Standby | None:
        """Remove a standby, one that waits already if there is one; None for none."""
        living = [one for one in self._standbys if one.process.poll() is None and state(one.process.pid) not in STOPPED]
        waiting = [one for one in living if self._rows.has_come(one.world_rank)]
        for standby in [*waiting, *living][:1]:
            self._standbys.remove(standby)
            return standby
        return None

    def _fill_up_standbys(self) -> None:
        for standby in list(self._standbys):
            if (code := standby.process.poll()) is not None:
                self._standbys.remove(standby)
                self._note_unused_end(f"a standby process {silent_end(code) if code else 'ended'} before it was needed")
        while len(self._standbys) < self._num_standbys and (world_rank := next(self._world_ranks or iter(()), None)):
            try:
                self._standbys.append(_Standby(self._start(None, world_rank), world_rank))
            except LaunchError as error:
                self._note_unused_end(f"a standby process could not be started: {error}")

    def _note_unused_end(self, what: str) -> None:
        self._unused_ends.append(time.monotonic())
        if recent(self._unused_ends) >= MOST:
            self._num_standbys = 0
            what = f"{what}, the {MOST}th within an hour; no more are started"
        self._notify(f"{what}.")
