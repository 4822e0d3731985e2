"""Spares of a job that `ring run` starts itself: processes that are ready to become a rank at once.

A new process needs seconds until it has imported torch. A spare has done that: it has run the script up to `init`,
where it waits (core/rendezvous/spawn.py) until it is given a slot. Spares are started once the job's ranks have begun,
so that they do not delay them, and another one as soon as one is used.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.process import STOPPED, state
from ring_plugins.core.rendezvous.slots import Slots
from ring_plugins.core.rendezvous.spawn import silent_end
from ring_plugins.launcher.supervision import Supervisor

#: How many spares may end within an hour before they are used, and the seconds of an hour.
_MOST, _HOUR = 5, 3600.0


class _Spare(NamedTuple):
    process: subprocess.Popen[bytes]
    world_rank: int


class Spares:
    """Keeps as many spares as are wanted.

    Args:
        supervisor: ends them with the job.
        slots: in which they say that they wait, and find the slot that they get.
        wanted: how many.
        world_ranks: numbers that no process of the job has had.
        start: starts one that will join under a world rank.
        rename: tells who relays the output of a world rank which slot it has got.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        slots: Slots,
        wanted: int,
        world_ranks: Iterator[int],
        start: Callable[[int], subprocess.Popen[bytes]],
        rename: Callable[[int, int], None],
    ) -> None:
        self._supervisor, self._slots, self._wanted = supervisor, slots, wanted
        self._world_ranks, self._start, self._rename = world_ranks, start, rename
        self._spares: list[_Spare] = []
        self._ends: list[float] = []

    def take(self, slot: int) -> int | None:
        """Give a slot to a spare, one that waits already if there is one; returns its world rank, None for none."""
        living = [one for one in self._spares if one.process.poll() is None and state(one.process.pid) not in STOPPED]
        if not living:
            return None
        spare = next((one for one in living if self._slots.has_come(one.world_rank)), living[0])
        self._spares.remove(spare)
        self._slots.give(slot, spare.world_rank)
        self._supervisor.slot_spare(spare.process, slot)
        self._rename(spare.world_rank, slot)
        return spare.world_rank

    def fill_up(self, notify: Callable[[str], None]) -> None:
        """Start spares until there are as many as wanted; some that end unused are replaced, too.

        Args:
            notify: shows one line to the user.
        """
        for spare in list(self._spares):
            if (code := spare.process.poll()) is not None:
                self._spares.remove(spare)
                self._supervisor.spares.remove(spare.process)
                self._note_end(f"a spare process {silent_end(code) if code else 'ended'} before it was needed", notify)
        while len(self._spares) < self._wanted and (world_rank := next(self._world_ranks, None)) is not None:
            try:
                self._spares.append(_Spare(self._start(world_rank), world_rank))
            except LaunchError as error:
                self._note_end(f"a spare process could not be started: {error}", notify)

    def _note_end(self, what: str, notify: Callable[[str], None]) -> None:
        now = time.monotonic()
        self._ends = [*(since for since in self._ends if now - since < _HOUR), now]
        if len(self._ends) >= _MOST:
            self._wanted = 0
            what = f"{what}, the {_MOST}th within an hour; no more are started"
        notify(f"{what}.")
