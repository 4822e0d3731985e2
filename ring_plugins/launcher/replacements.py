"""Which process has which seat of a job that `ring run` starts itself, and new processes for seats that need one.

A new process is started only while a rank lives that can give it the state of the training. Until it has joined, its
end does not matter to the job. But a script that fails before it joins would fail again, so a seat is filled a few
times an hour at most, and no more once one has found that no process can join in this script. Where there are spares
(spares.py), one of them gets the seat.

A job that may grow has seats that nobody has taken yet. `add` lets processes take them, in order. Until a process has
joined by such a seat, all behind it wait. So if the seat is given up, those behind it are, too.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ring_plugins.core.base.errors import LaunchError, name_ranks
from ring_plugins.core.rendezvous.seats import Seats
from ring_plugins.core.rendezvous.spawn import ending, silent_end
from ring_plugins.launcher.growth import refusal
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.spares import Spares
from ring_plugins.launcher.supervision import Supervisor

#: How often a seat is filled again within an hour, and the seconds of an hour.
MOST, HOUR = 5, 3600.0


class Replacements:
    """Fills seats whose processes are lost.

    Args:
        supervisor: has a process for each seat in use.
        seats: in which the processes say whether they take part.
        size: number of seats that are in use from the start.
        world_ranks: numbers that no process of the job has had.
        start: starts a process for a seat that joins under a world rank.
        notify: shows one line to the user; None if seats stay empty.
        spares: processes that need not be started first; None if there are none.
        ranks: on one of several hosts, the ranks of this host's seats at the job's start, and from which number on
            world ranks are new.

    Attributes:
        filled: how often another process has joined in the place of that of a seat, also if it has died again.
        names: what users call the seats that are, or are to be, in use.
        given_back: those of further seats that are given up, until somebody clears this.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        seats: Seats,
        size: int,
        world_ranks: Iterator[int],
        start: Callable[[int, int], object],
        notify: Callable[[str], None] | None,
        spares: Spares | None,
        ranks: tuple[Sequence[int], int] | None = None,
    ) -> None:
        self._supervisor, self._seats, self._start, self._notify = supervisor, seats, start, notify
        self._world_ranks, self._spares = world_ranks, spares
        self._size = size
        # What users call the seats, and from which world rank on processes are new.
        names, self._first_new = ranks or (range(seats.number), size)
        self.names, self.given_back = list(names), list[int]()
        self._ranks = self.names[:size]  # world rank of the process of each seat
        self._times: list[list[float]] = [[] for _ in range(seats.number)]
        self._joined: list[set[int]] = [set() for _ in range(seats.number)]  # world ranks of those that were new
        self._given_up: set[int] = set()
        #: How many seats are to be in use.
        self._wanted = size
        self._generations: dict[int, int] = {}  # of further seats, on one of several hosts

    @property
    def filled(self) -> dict[int, int]:
        self._note_joined()
        again = {seat: len(self._joined[seat]) - (seat >= self._size) for seat in range(len(self._ranks))}
        return {seat: times for seat, times in again.items() if times > 0}

    @property
    def added(self) -> list[int]:
        """Seats beyond the first that processes have joined by."""
        return [seat for seat in range(self._size, len(self._ranks)) if not self._seats.is_new(seat)]

    @property
    def late(self) -> list[int]:
        """Seats whose last process, which was not there from the start, had not joined when it ended."""
        return [seat for seat in range(len(self._ranks)) if self._is_new(seat) and not self._has_joined(seat)]

    def add(self, number: int, host: str | None = None) -> str:
        """Let so many further processes join, if there are seats for all of them; returns an answer for the user.

        Args:
            number: how many.
            host: on which they are to run, if the user has named one.
        """
        if host is not None and not is_this_host(host):
            return f"no: --host {host} is none of the job's hosts: it runs on {socket.gethostname()} alone"
        most = self._seats.number
        free = most - self._wanted
        if no := refusal(number, free, most, self._notify is not None and most > self._size):
            return no
        first = self._wanted
        self._wanted = self._seats.in_use = first + number
        return f"ok: {name_ranks(list(range(first, self._wanted)))} will join where an epoch begins"

    def follow(self, further: Sequence[tuple[int, int]]) -> None:
        """On one of several hosts, have these seats behind the first ones, and those others by which processes joined.

        Args:
            further: in ascending order what users call each, and its `FurtherSeat.generation`.
        """
        kept = self._size
        while kept < len(self.names) and (
            not self._seats.is_new(kept) or (self.names[kept], self._generations[kept]) in further
        ):
            kept += 1
        self._close(kept)
        del self.names[kept:]
        for name, generation in further:
            if name not in self.names:
                self._generations[len(self.names)], self._times[len(self.names)] = generation, []
                self._joined[len(self.names)] = set()
                self.names.append(name)
        self._wanted = len(self.names)

    def is_out(self, seat: int) -> bool:
        """Whether the end of a seat's process does not matter.

        It has left, or was to join and has not yet, or was lost, although it ended with status 0 (`os._exit(0)`).
        """
        was_to_join = self._is_new(seat) and not self._has_joined(seat)
        return self._seats.has_left(seat) or was_to_join or has_vanished(self._supervisor, self._seats, seat)

    def _is_new(self, seat: int) -> bool:
        return self._ranks[seat] >= self._first_new

    def _has_joined(self, seat: int) -> bool:
        return self._seats.has_joined(seat, self._ranks[seat])

    def tick(self) -> None:
        """Start processes for seats whose processes are lost, and end those that nobody is left to let join."""
        codes = [process.poll() for process in self._supervisor.processes]
        self._note_joined()
        living = [seat for seat, code in enumerate(codes) if code is None and self._has_joined(seat)]
        have_ended = any(code == 0 and self._has_joined(seat) for seat, code in enumerate(codes))
        is_hopeless = not living and (have_ended or not self._seats.others_let_join)
        if is_hopeless:
            for seat, process in enumerate(self._supervisor.processes):
                if codes[seat] is None and self._is_new(seat):
                    process.kill()
        if self._notify is None or is_hopeless or any(map(self._ends_job, range(len(codes)), codes)):
            return
        for seat, code in enumerate(codes):
            is_open = seat < len(self._ranks) and seat not in self._given_up
            if code is not None and is_open and self._is_lost(seat, code):
                self._tell_of_silent_end(seat, code, self._notify)
                self._fill(seat, self._notify)
        while len(self._ranks) < self._wanted and self._fill(len(self._ranks), self._notify):
            pass
        if self._spares is not None:
            self._spares.fill_up(self._notify)

    def _note_joined(self) -> None:
        for seat, rank in enumerate(self._ranks):
            if self._is_new(seat) and self._has_joined(seat):
                self._joined[seat].add(rank)

    def _ends_job(self, seat: int, code: int | None) -> bool:
        return self._supervisor.ends_job(seat, code) and not self.is_out(seat)

    def _is_lost(self, seat: int, code: int) -> bool:
        if self._has_joined(seat):
            return code != 0 or self._seats.has_left(seat) or self._seats.is_lost(seat)
        # One that has waited to join and ends with 0 has found that the job is over.
        return self._is_new(seat) and (code != 0 or not self._seats.is_waiting(seat))

    def _tell_of_silent_end(self, seat: int, code: int, notify: Callable[[str], None]) -> None:
        """Say how a process ended that has not joined, unless it printed an error itself."""
        if self._has_joined(seat) or code > 0:
            return
        how = silent_end(code) if code < 0 else f"ended with {ending(code)}"
        goal = "become" if self._is_further(seat) else "take the place of"
        notify(f"the process that was to {goal} rank {self.names[seat]} {how} before it joined.")

    def _fill(self, seat: int, notify: Callable[[str], None]) -> bool:
        """Let a process take a seat that nobody has any more, or yet; returns whether one is to."""
        is_further, unused = self._is_further(seat), None
        if seat < len(self._ranks) and self._seats.is_hopeless(seat):
            what = f"no process can {'become' if is_further else 'take the place of'} rank {self.names[seat]}"
            self._give_up(seat, f"{what}, as the error above says", notify)
            return False
        if seat < len(self._ranks) and not self._has_joined(seat):
            self._seats.clear(seat)  # it may have waited
        now, name = time.monotonic(), f"rank {self.names[seat]}"
        lately = [since for since in self._times[seat] if now - since < HOUR]
        if len(lately) >= MOST:
            how = "was started" if is_further else "was replaced"
            self._give_up(seat, f"{name} {how} {len(lately)} times within an hour", notify)
            return False
        self._seats.clear(seat)
        if self._spares is not None and (spare := self._spares.take(seat)) is not None:
            world_rank = spare
            notify(f"a spare process {'becomes' if is_further else 'takes the place of'} {name}.")
        elif (unused := self._unused(seat)) is not None:
            world_rank = unused
            notify(f"starting another process {'as' if is_further else 'in the place of'} {name}.")
        else:
            self._give_up(seat, f"{name} is not replaced, since the job has had too many processes", notify)
            return False
        self._ranks[seat : seat + 1] = [world_rank]
        self._times[seat].append(now)
        if unused is not None:
            try:
                self._start(seat, unused)
            except LaunchError as error:  # counts as one that has ended
                notify(str(error))
                if seat == len(self._supervisor.processes):
                    self._close(seat)
                    return False
        return True

    def _is_further(self, seat: int) -> bool:
        """Whether it is one by which the job has yet to grow."""
        return seat >= self._size and self._seats.is_new(seat)

    def _unused(self, seat: int) -> int | None:
        """A world rank that no process has had; that of a further seat is its own number at first."""
        is_first = seat >= self._size and not self._times[seat] and not self._generations.get(seat)
        return self.names[seat] if is_first else next(self._world_ranks, None)

    def _give_up(self, seat: int, why: str, notify: Callable[[str], None]) -> None:
        notify(f"{why}; the job goes on without it.")
        if self._is_further(seat):
            self.given_back.append(self.names[seat])
            self._close(seat)
        else:
            self._given_up.add(seat)

    def _close(self, seat: int) -> None:
        """Let nobody take this seat and those behind it until further ranks are wanted again."""
        for process in self._supervisor.processes[seat:]:
            process.kill()
            process.wait()
        for closed in range(seat, len(self._ranks)):
            self._seats.clear(closed)
        del self._supervisor.processes[seat:], self._ranks[seat:]
        self._wanted = self._seats.in_use = seat


def has_vanished(supervisor: Supervisor, seats: Seats, seat: int) -> bool:
    """Whether the process of a seat has ended with status 0 before the job's end, and the others went on without it."""
    return seats.is_lost(seat) and supervisor.processes[seat].returncode == 0


def how_often(replaced: Mapping[int, int]) -> str:
    """Ranks in words, with how often each was replaced."""
    return ", ".join(f"rank {rank}{f' ({times} times)' * (times > 1)}" for rank, times in replaced.items())
