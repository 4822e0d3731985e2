"""Standbys of a job that `ring run` starts itself: processes that are ready to become a rank at once.

A new process needs seconds until it has imported torch. A standby has done that: it has run the script up to `init`,
where it waits (core/rendezvous/spawn.py) until it is given a slot. Standbys are started once the job's ranks have
begun, so that they do not delay them, and another one as soon as one is used.
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

#: How many standbys may end within an hour before they are used, and the seconds of an hour.
_MOST, _HOUR = 5, 3600.0


class _Standby(NamedTuple):
    process: subprocess.Popen[bytes]
    world_rank: int


class Standbys:
    """Keeps as many standbys as are wanted.

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
        self._standbys: list[_Standby] = []
        self._ends: list[float] = []

    def take(self, slot: int) -> int | None:
        """Give a slot to a standby, one that waits already if there is one; returns its world rank, None for none."""
        living = [one for one in self._standbys if one.process.poll() is None and state(one.process.pid) not in STOPPED]
        if not living:
            return None
        standby = next((one for one in living if self._slots.has_come(one.world_rank)), living[0])
        self._standbys.remove(standby)
        self._slots.give(slot, standby.world_rank)
        self._supervisor.slot_standby(standby.process, slot)
        self._rename(standby.world_rank, slot)
        return standby.world_rank

    def fill_up(self, notify: Callable[[str], None]) -> None:
        """Start standbys until there are as many as wanted; some that end unused are replaced, too.

        Args:
            notify: shows one line to the user.
        """
        for standby in list(self._standbys):
            if (code := standby.process.poll()) is not None:
                self._standbys.remove(standby)
                self._supervisor.standbys.remove(standby.process)
                self._note_end(
                    f"a standby process {silent_end(code) if code else 'ended'} before it was needed", notify
                )
        while len(self._standbys) < self._wanted and (world_rank := next(self._world_ranks, None)) is not None:
            try:
                self._standbys.append(_Standby(self._start(world_rank), world_rank))
            except LaunchError as error:
                self._note_end(f"a standby process could not be started: {error}", notify)

    def _note_end(self, what: str, notify: Callable[[str], None]) -> None:
        now = time.monotonic()
        self._ends = [*(since for since in self._ends if now - since < _HOUR), now]
        if len(self._ends) >= _MOST:
            self._wanted = 0
            what = f"{what}, the {_MOST}th within an hour; no more are started"
        notify(f"{what}.")
