"""How processes that join a job and those that are in it agree that they do: all at one point, or none.

A process that takes the place of a lost one has nothing in common with the others but that all can map each other's
liveness segment (liveness.py). So these carry the exchange: each process writes what it has to tell into its own, with
the number of the round, and reads what all others have written for the same round. A round is a barrier that carries
data, and the rule of all barriers holds (membership.py): a process gives up only if all that have not arrived are gone.
It looks first who is gone and then who has not arrived. So either all that are left pass a round, or none does.

A join takes three rounds:

1. Everyone has mapped everyone's liveness segment.
2. Everyone tells what it has made for the others to map: fresh control pages and staging buffers for every
   communicator, and the parts of shared buffers that it already has.
3. Everyone has mapped all that.

Who passes the last round, in which nobody reports a problem, takes the new memory into use. Nothing can fail after
that. Until then the old memory is as it was. So if anyone dies or reports a problem, the members go on as if nobody had
wanted to join. A joiner that is left over waits for the next chance.

Members stand still meanwhile, so they do not wait long for a joiner that is stopped or hangs. They may not just go
on: it could write what it has to tell at the last moment, and one member would see it and another would not. So they
kill it, and then the rule above applies. It is no part of the job yet, and another process takes its place. One that
stops behind the last round has joined. Members of its host wait until it says that it goes on, or kill it, and then it
is lost like any other (`begin_together`).

Considered and rejected: mending the groups that exist. A joiner would have to learn at which barrier they are, and
members would use memory in which it may have died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.base.log import logger
from ring_plugins.core.control.liveness import RUNNING, Liveness
from ring_plugins.core.control.wait import Wait

#: Seconds for which members wait for a joiner in a round. It takes milliseconds to map the memory.
_PATIENCE = 10.0
#: Seconds between two looks at one that has joined.
_LOOK = 0.0005


class NotAdmitted(Exception):
    """Nobody joins now: a process has died meanwhile, or reported a problem, which is the text."""


def told_by(peer: Liveness, number: int) -> dict[str, Any]:
    """What a process told in a round; empty if it has not come to that one.

    Raises:
        NotAdmitted: nobody can read it.
    """
    try:
        found = json.loads(peer.told(number) or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NotAdmitted(f"rank {peer.rank} (process {peer.pid}) has told what cannot be read.")
    return found


class Admission:
    """One attempt to let processes join.

    Args:
        own: of this process.
        others: of all others that take part.
        start: number of the round before the first; higher than that of any round before.
        joiners: world ranks of those that are to join.
    """

    def __init__(self, own: Liveness, others: Sequence[Liveness], start: int, joiners: Collection[int] = ()) -> None:
        self._own, self._others = own, list(others)
        self._round, self._began = start, 0.0
        self._members = {peer.rank for peer in (own, *others)}.difference(joiners)
        self._killed = set[int]()

    def gather(self, payload: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Exchange what JSON can hold; returns everyone's by world rank.

        Args:
            payload: of this process. The text of a "problem" in it keeps everyone from going on.

        Raises:
            NotAdmitted: only processes are missing that are gone, or one reports a problem or tells what is no JSON.
        """
        self._round, self._began = self._round + 1, time.monotonic()
        try:
            self._own.tell(self._round, json.dumps(payload).encode())
        except RingError as error:  # it is too long
            self._own.tell(self._round, json.dumps({"problem": str(error)}).encode())
        Wait("admission", None).until(self._all_have_told, self._missing, lambda: "the admission of new ranks")
        everyone = sorted([self._own, *self._others], key=lambda peer: peer.rank)
        found = {peer.rank: told_by(peer, self._round) for peer in everyone}
        problem = next(filter(None, (str(told.get("problem", "")) for told in found.values())), "")
        if problem:
            raise NotAdmitted(problem)
        return found

    def _missing(self) -> list[int]:
        return [peer.rank for peer in self._others if peer.told(self._round) is None]

    def _all_have_told(self) -> bool:
        gone = [peer.rank for peer in self._others if peer.state != RUNNING or peer.has_died()]
        missing = self._missing()
        if missing and set(gone).issuperset(missing):
            raise NotAdmitted("")
        if missing and self._own.rank in self._members and time.monotonic() - self._began > _PATIENCE:
            self._kill_joiners([peer for peer in self._others if peer.rank in missing and peer.rank not in gone])
        return not missing

    def _kill_joiners(self, missing: Sequence[Liveness]) -> None:
        """Kill those that live and are missing, if no member is: a joiner that works could wait for that one."""
        if not self._members.isdisjoint(peer.rank for peer in missing):
            return
        for peer in missing:
            if peer.rank not in self._killed and not peer.has_died():
                self._killed.add(peer.rank)
                with contextlib.suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
                if self._own.rank == min(self._members):
                    logger.warning(
                        f"process {peer.pid}, which was to join as rank {peer.rank}, has not answered for "
                        f"{_PATIENCE:g} s (stopped?). It was killed, and the other ranks go on without it."
                    )


def begin_together(joined: Sequence[Liveness], members: Callable[[], Collection[int]]) -> None:
    """Wait until processes of this host that have joined go on as members, and kill those that do not.

    All have agreed already, so this waits for nobody else, and one that is killed is lost like any other member.

    Args:
        joined: these processes.
        members: returns the world ranks of those that say that they go on.
    """
    deadline = time.monotonic() + _PATIENCE
    while late := [peer for peer in joined if peer.rank not in members() and not peer.has_died()]:
        if time.monotonic() > deadline:
            for peer in late:
                with contextlib.suppress(OSError):
                    os.kill(peer.pid, signal.SIGKILL)
                logger.warning(
                    f"process {peer.pid}, which has joined as rank {peer.rank}, did not go on for {_PATIENCE:g} s "
                    "(stopped?). It was killed."
                )
            return
        time.sleep(_LOOK)
