"""Which process has which slot of a job that `ring run` starts itself, and new processes for slots that need one.

A new process is started only while a rank lives that can give it the state of the training. Until it has joined, its
end does not matter to the job. But a script that fails before it joins would fail again, so a slot is filled a few
times an hour at most, and no more once one has found that no process can join in this script. Where there are standbys
(standbys.py), one of them gets the slot.

A job that may grow has slots that nobody has taken yet. `follow` lets processes take them, in order. Until a process
has joined by such a slot, all behind it wait. So if the slot is given up, those behind it are, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous.slots import Slots
from ring_plugins.core.rendezvous.spawn import ending, silent_end
from ring_plugins.launcher.standbys import Standbys
from ring_plugins.launcher.supervision import Supervisor

#: How often a slot is filled again within an hour, and the seconds of an hour.
MOST, HOUR = 5, 3600.0


class Replacements:
    """Fills slots whose processes are lost.

    Args:
        supervisor: has a process for each slot in use.
        slots: in which the processes say whether they take part.
        ranks: of this host's slots at the job's start.
        first_new: from which number on world ranks are those of processes that were not there then.
        world_ranks: numbers that no process of the job has had.
        start: starts a process for a slot that joins under a world rank.
        notify: shows one line to the user.
        standbys: processes that need not be started first; None if there are none.

    Attributes:
        filled: how often another process has joined in the place of that of a slot, also if it has died again.
        names: what users call the slots that are, or are to be, in use.
        given_back: those of added slots that are given up, until somebody clears this.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        slots: Slots,
        ranks: Sequence[int],
        first_new: int,
        world_ranks: Iterator[int],
        start: Callable[[int, int], object],
        notify: Callable[[str], None],
        standbys: Standbys | None = None,
    ) -> None:
        self._supervisor, self._slots, self._start, self._notify = supervisor, slots, start, notify
        self._world_ranks, self._standbys = world_ranks, standbys
        self._size, self._first_new = len(ranks), first_new
        self.names, self.given_back = list(ranks), list[int]()
        self._ranks = list(ranks)  # world rank of the process of each slot
        self._times: list[list[float]] = [[] for _ in range(slots.number)]
        self._joined: list[set[int]] = [set() for _ in range(slots.number)]  # world ranks of those that were new
        self._given_up: set[int] = set()
        #: How many slots are to be in use.
        self._wanted = len(ranks)
        self._attempts: dict[int, int] = {}  # of added slots

    @property
    def filled(self) -> dict[int, int]:
        self._note_joined()
        again = {slot: len(self._joined[slot]) - (slot >= self._size) for slot in range(len(self._ranks))}
        return {slot: times for slot, times in again.items() if times > 0}

    @property
    def added(self) -> list[int]:
        """Slots beyond the first that processes have joined by."""
        return [slot for slot in range(self._size, len(self._ranks)) if not self._slots.is_new(slot)]

    @property
    def late(self) -> list[int]:
        """Slots whose last process, which was not there from the start, had not joined when it ended."""
        return [slot for slot in range(len(self._ranks)) if self._is_new(slot) and not self._has_joined(slot)]

    def follow(self, added: Sequence[tuple[int, int]]) -> None:
        """Have these slots behind the first ones, and those others by which processes joined.

        Args:
            added: in ascending order what users call each, and its `AddedSlot.attempt`.
        """
        kept = self._size
        while kept < len(self.names) and (
            not self._slots.is_new(kept) or (self.names[kept], self._attempts[kept]) in added
        ):
            kept += 1
        self._close(kept)
        del self.names[kept:]
        for name, attempt in added:
            if name not in self.names:
                self._attempts[len(self.names)], self._times[len(self.names)] = attempt, []
                self._joined[len(self.names)] = set()
                self.names.append(name)
        self._wanted = len(self.names)

    def is_out(self, slot: int) -> bool:
        """Whether the end of a slot's process does not matter.

        It has left, or was to join and has not yet, or was lost, although it ended with status 0 (`os._exit(0)`).
        """
        was_to_join = self._is_new(slot) and not self._has_joined(slot)
        return self._slots.has_left(slot) or was_to_join or has_vanished(self._supervisor, self._slots, slot)

    def _is_new(self, slot: int) -> bool:
        return self._ranks[slot] >= self._first_new

    def _has_joined(self, slot: int) -> bool:
        return self._slots.has_joined(slot, self._ranks[slot])

    def tick(self) -> None:
        """Start processes for slots whose processes are lost, and end those that nobody is left to let join."""
        codes = [process.poll() for process in self._supervisor.processes]
        self._note_joined()
        living = [slot for slot, code in enumerate(codes) if code is None and self._has_joined(slot)]
        have_ended = any(code == 0 and self._has_joined(slot) for slot, code in enumerate(codes))
        is_hopeless = not living and (have_ended or not self._slots.others_let_join)
        if is_hopeless:
            for slot, process in enumerate(self._supervisor.processes):
                if codes[slot] is None and self._is_new(slot):
                    process.kill()
        if is_hopeless or any(map(self._ends_job, range(len(codes)), codes)):
            return
        for slot, code in enumerate(codes):
            is_open = slot < len(self._ranks) and slot not in self._given_up
            if code is not None and is_open and self._is_lost(slot, code):
                self._tell_of_silent_end(slot, code)
                self._fill(slot)
        while len(self._ranks) < self._wanted and self._fill(len(self._ranks)):
            pass
        if self._standbys is not None:
            self._standbys.fill_up(self._notify)

    def _note_joined(self) -> None:
        for slot, rank in enumerate(self._ranks):
            if self._is_new(slot) and self._has_joined(slot):
                self._joined[slot].add(rank)

    def _ends_job(self, slot: int, code: int | None) -> bool:
        return self._supervisor.ends_job(slot, code) and not self.is_out(slot)

    def _is_lost(self, slot: int, code: int) -> bool:
        if self._has_joined(slot):
            return code != 0 or self._slots.has_left(slot) or self._slots.is_lost(slot)
        # One that has waited to join and ends with 0 has found that the job is over.
        return self._is_new(slot) and (code != 0 or not self._slots.is_waiting(slot))

    def _tell_of_silent_end(self, slot: int, code: int) -> None:
        """Say how a process ended that has not joined, unless it printed an error itself."""
        if self._has_joined(slot) or code > 0:
            return
        how = silent_end(code) if code < 0 else f"ended with {ending(code)}"
        goal = "become" if self._is_added(slot) else "take the place of"
        self._notify(f"the process that was to {goal} rank {self.names[slot]} {how} before it joined.")

    def _fill(self, slot: int) -> bool:
        """Let a process take a slot that nobody has any more, or yet; returns whether one is to."""
        is_added, unused = self._is_added(slot), None
        if slot < len(self._ranks) and self._slots.is_hopeless(slot):
            what = f"no process can {'become' if is_added else 'take the place of'} rank {self.names[slot]}"
            self._give_up(slot, f"{what}, as the error above says")
            return False
        if slot < len(self._ranks) and not self._has_joined(slot):
            self._slots.clear(slot)  # it may have waited
        now, name = time.monotonic(), f"rank {self.names[slot]}"
        lately = [since for since in self._times[slot] if now - since < HOUR]
        if len(lately) >= MOST:
            how = "was started" if is_added else "was replaced"
            self._give_up(slot, f"{name} {how} {len(lately)} times within an hour")
            return False
        self._slots.clear(slot)
        if self._standbys is not None and (standby := self._standbys.take(slot)) is not None:
            world_rank = standby
            self._notify(f"a standby process {'becomes' if is_added else 'takes the place of'} {name}.")
        elif (unused := self._unused(slot)) is not None:
            world_rank = unused
            self._notify(f"starting another process {'as' if is_added else 'in the place of'} {name}.")
        else:
            self._give_up(slot, f"{name} is not replaced, since the job has had too many processes")
            return False
        self._ranks[slot : slot + 1] = [world_rank]
        self._times[slot].append(now)
        if unused is not None:
            try:
                self._start(slot, unused)
            except LaunchError as error:  # counts as one that has ended
                self._notify(str(error))
                if slot == len(self._supervisor.processes):
                    self._close(slot)
                    return False
        return True

    def _is_added(self, slot: int) -> bool:
        """Whether it is one by which the job has yet to grow."""
        return slot >= self._size and self._slots.is_new(slot)

    def _unused(self, slot: int) -> int | None:
        """A world rank that no process has had; that of an added slot is its own number at first."""
        is_first = slot >= self._size and not self._times[slot] and not self._attempts.get(slot)
        return self.names[slot] if is_first else next(self._world_ranks, None)

    def _give_up(self, slot: int, why: str) -> None:
        self._notify(f"{why}; the job goes on without it.")
        if self._is_added(slot):
            self.given_back.append(self.names[slot])
            self._close(slot)
        else:
            self._given_up.add(slot)

    def _close(self, slot: int) -> None:
        """Let nobody take this slot and those behind it until added ranks are wanted again."""
        for process in self._supervisor.processes[slot:]:
            process.kill()
            process.wait()
        for closed in range(slot, len(self._ranks)):
            self._slots.clear(closed)
        del self._supervisor.processes[slot:], self._ranks[slot:]
        self._wanted = self._slots.in_use = slot


def has_vanished(supervisor: Supervisor, slots: Slots, slot: int) -> bool:
    """Whether the process of a slot has ended with status 0 before the job's end, and the others went on without it."""
    return slots.is_lost(slot) and supervisor.processes[slot].returncode == 0


def how_often(replaced: Mapping[int, int]) -> str:
    """Ranks in words, with how often each was replaced."""
    return ", ".join(f"rank {rank}{f' ({times} times)' * (times > 1)}" for rank, times in replaced.items())
