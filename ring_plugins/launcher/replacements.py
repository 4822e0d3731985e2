"""Which process has which seat of a job that `ring run` starts itself, and a new one for a seat whose process is lost.

A new process is started only while a rank of the job lives that can give it the state of the training. How it ends does
not matter to the job until it has joined: a script that fails before that would fail again, so a seat is filled a few
times an hour at most. Where there are spares (spares.py), one of them gets the seat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous.seats import Seats
from ring_plugins.launcher.spares import Spares
from ring_plugins.launcher.supervision import Supervisor

#: How often a seat is filled again within an hour, and the seconds of an hour.
MOST, HOUR = 5, 3600.0


class Replacements:
    """Fills seats whose processes are lost.

    Args:
        supervisor: has a process for each seat.
        seats: in which the processes say whether they take part.
        size: number of seats.
        world_ranks: numbers that no process of the job has had.
        start: starts a process for a seat that joins under a world rank.
        notify: shows one line to the user; None if seats stay empty.
        spares: processes that need not be started first.

    Attributes:
        filled: how often each seat was filled again.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        seats: Seats,
        size: int,
        world_ranks: Iterator[int],
        start: Callable[[int, int], object],
        notify: Callable[[str], None] | None,
        spares: Spares,
    ) -> None:
        self._supervisor, self._seats, self._start, self._notify = supervisor, seats, start, notify
        self._world_ranks, self._spares = world_ranks, spares
        self._ranks = list(range(size))  # world rank of the process of each seat
        self._times: list[list[float]] = [[] for _ in range(size)]
        self._given_up: set[int] = set()

    @property
    def filled(self) -> dict[int, int]:
        return {seat: len(times) for seat, times in enumerate(self._times) if times}

    @property
    def late(self) -> list[int]:
        """Seats that were filled again, but whose last process had not joined when it ended."""
        return [seat for seat in self.filled if not self._has_joined(seat)]

    def is_out(self, seat: int) -> bool:
        """Whether the end of a seat's process does not matter: it has left, or it was to join and has not yet."""
        return self._seats.has_left(seat) or (self._is_new(seat) and not self._has_joined(seat))

    def _is_new(self, seat: int) -> bool:
        return self._ranks[seat] >= len(self._ranks)

    def _has_joined(self, seat: int) -> bool:
        return self._seats.has_joined(seat, self._ranks[seat])

    def tick(self) -> None:
        """Start processes for seats whose processes are lost, and end those that nobody is left to let join."""
        codes = [process.poll() for process in self._supervisor.processes]
        living = [seat for seat, code in enumerate(codes) if code is None and self._has_joined(seat)]
        if not living:
            for seat, process in enumerate(self._supervisor.processes):
                if codes[seat] is None and self._is_new(seat):
                    process.kill()
        if self._notify is None or not living or any(map(self._ends_job, range(len(codes)), codes)):
            return
        for seat, code in enumerate(codes):
            if code is not None and seat not in self._given_up and self._is_lost(seat, code):
                self._fill(seat, self._notify)
        self._spares.fill_up(self._notify)

    def _ends_job(self, seat: int, code: int | None) -> bool:
        return self._supervisor.ends_job(code) and not self.is_out(seat)

    def _is_lost(self, seat: int, code: int) -> bool:
        if self._has_joined(seat):
            return code != 0 or self._seats.has_left(seat)
        return code != 0 and self._is_new(seat)  # one that ends with 0 has found that the job is over

    def _fill(self, seat: int, notify: Callable[[str], None]) -> None:
        if not self._has_joined(seat):
            self._seats.clear(seat)  # it may have waited
        now = time.monotonic()
        lately = [since for since in self._times[seat] if now - since < HOUR]
        if len(lately) >= MOST:
            self._give_up(seat, f"rank {seat} was replaced {len(lately)} times within an hour", notify)
            return
        self._seats.clear(seat)
        if (spare := self._spares.take(seat)) is not None:
            self._ranks[seat] = spare
            notify(f"a spare process takes the place of rank {seat}.")
        elif (unused := next(self._world_ranks, None)) is not None:
            self._ranks[seat] = unused
            notify(f"starting another process in the place of rank {seat}.")
            try:
                self._start(seat, unused)
            except LaunchError as error:  # counts as one that has ended
                notify(str(error))
        else:
            self._give_up(seat, f"rank {seat} is not replaced, since the job has had too many processes", notify)
            return
        self._times[seat].append(now)

    def _give_up(self, seat: int, why: str, notify: Callable[[str], None]) -> None:
        self._given_up.add(seat)
        notify(f"{why}; the job goes on without it.")
