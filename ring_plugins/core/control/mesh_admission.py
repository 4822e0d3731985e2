"""How a process joins a job: in rounds over direct connections, and by a decision of the members.

A process may die when it has told some and not others. So the rounds only prepare, and nothing of it counts before the
members have agreed (consensus.py):

1. Each member connects to the joiner, which listens since before it says that it waits, and *calls* it: tells it
   everything that it has to know of the job. The connection authenticates itself, as all do.
2. Everyone tells all others what it has made for them (`OFFERS`).
3. Everyone tells all others that it is *ready*: it has mapped and noted all that, and needs nothing more of anybody.
4. A member that has received READY from everyone votes for a next view with the joiner; any other member votes for one
   without. The joiner is in that view only if all members voted for it. Each member that learns of the decision sends
   it to the joiner before anybody else can miss the joiner.

A member that is in trouble tells the others, so that none waits for it, and arrives without. That also interrupts
those in step 2 or 3. So after each attempt all members are in the next view, with the joiner or without. If it dies
before the decision, its connections end, and nobody joins. If it dies behind it, it is lost as any member.

Silence is permanent: a member that has lost contact with the joiner's host never counts it as reachable again
(consensus.py), even if the network comes back before the joiner has joined. The member says so, the joiner exits, and
its successor joins under a new rank.

A joiner that is stopped (SIGSTOP) would keep all members waiting at each step. After some seconds they give up, and the
members of its host kill it. They also kill one that stops after the decision, as a member (`begin_together`).

One process joins at a time: two that wait follow each other at once, and need not know of each other before.

Considered and rejected: on one host, rounds in memory that outlives its writers, of which all pass the last one or none
does, without an agreement; mending the groups that exist, where a joiner would have to learn at which barrier they
are, and members would use memory in which it may have died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, PeerFailed
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.threads import until
from ring_plugins.core.control.channel import EVERYONE
from ring_plugins.core.control.consensus import Decision, check
from ring_plugins.core.control.liveness import Liveness
from ring_plugins.core.control.mesh import MESH_TAG, Mesh, mesh_frames
from ring_plugins.core.control.rounds import CALL, READY, Rounds
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.auth import Disconnected
from ring_plugins.core.net.frames import from_json, to_json
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.peers import Peers

#: Seconds for which members wait for a joiner in a round, on other hosts perhaps longer. It takes milliseconds to map
#: the memory.
_PATIENCE = 10.0
#: What a member tells that has waited so long.
_LATE = "the process that was to join did not answer."
#: What a member tells for which the joiner is lost already.
_LOST = "the process that was to join is lost, as its host could not be reached."
_WHAT = "the admission of a new rank"
#: Seconds between two looks at one that has joined.
_LOOK = 0.0005


class NotAdmitted(Exception):
    """Nobody joins now: a process has died meanwhile, or reported a problem, which is the text."""


class MeshAdmission:
    """A member's part in one attempt to let a process join.

    Args:
        mesh: of this process; `admitting` the joiner.
        joiner: world rank of that.
        pid: of it, if it is on this host, or else 0.
        view: number of the agreement that ends the attempt.
        wait: waits for the others.
    """

    def __init__(self, mesh: Mesh, joiner: int, pid: int, view: int, wait: Wait) -> None:
        self._mesh, self._joiner, self._pid, self._view, self._wait = mesh, joiner, pid, view, wait
        self._others = [rank for rank in mesh.members.ranks if rank != mesh.rank]
        self._alone_since = 0.0  # since when only the joiner is missing, 0 if others are

    def call(self, listener: Listener, body: Mapping[str, Any]) -> None:
        """Connect to the joiner, and call it.

        Raises:
            NotAdmitted: nobody joins.
        """
        self._alone_since = time.monotonic()

        def is_connected() -> bool:
            self._check(is_connecting=True)
            try:
                connected = listener.connection(self._joiner, MESH_TAG, connects=True)
            except (LaunchError, PeerFailed) as error:
                raise NotAdmitted(str(error)) from None
            if connected is not None:
                self._mesh.add(self._joiner, connected)
            return connected is not None

        self._wait.until(is_connected, lambda: [self._joiner], lambda: _WHAT)
        self._mesh.tell(self._joiner, {"view": self._view, "round": CALL, "payload": body})
        facts = self._mesh.members.facts
        if self._joiner in facts.silent and self._joiner not in facts.dead:
            self._mesh.tell(EVERYONE, {"view": self._view, "problem": _LOST})
            raise NotAdmitted(_LOST)

    def gather(self, number: int, payload: Mapping[str, Any]) -> dict[int, Any]:
        """Exchange JSON values with all members and the joiner; returns each rank's by world rank.

        Raises:
            NotAdmitted: nobody joins.
        """
        mesh, view, awaited = self._mesh, self._view, [*self._others, self._joiner]
        mesh.tell(EVERYONE, {"view": view, "round": number, "payload": payload})
        self._alone_since = 0.0

        def missing() -> list[int]:
            told = mesh.rounds.of(view, number)
            return [rank for rank in awaited if rank not in told]

        def have_told() -> bool:
            left = missing()
            if left:
                if left != [self._joiner]:
                    self._alone_since = 0.0
                elif not self._alone_since:
                    self._alone_since = time.monotonic()
                self._check()
            return not left

        self._wait.until(have_told, missing, lambda: _WHAT)
        return {**mesh.rounds.of(view, number), mesh.rank: payload}

    def give_up(self, listener: Listener) -> None:
        """Abort the join."""
        listener.close_tag(MESH_TAG)
        self._mesh.hang_up(self._joiner)

    @property
    def _patience(self) -> float:
        """Seconds to wait for the joiner: at least RING_NETWORK_TIMEOUT if ranks of another host would kill it."""
        peers = self._mesh.members.known
        is_killed_by_others = not self._pid and any(
            peers[rank].domain == peers[self._joiner].domain for rank in self._others
        )
        return max(_PATIENCE, config.NETWORK_TIMEOUT.get() * is_killed_by_others)

    def _check(self, is_connecting: bool = False) -> None:
        trouble = self._mesh.trouble(self._view, None if is_connecting else self._joiner)
        if trouble is None and self._alone_since and time.monotonic() - self._alone_since > self._patience:
            trouble = _LATE
            self._mesh.tell(EVERYONE, {"view": self._view, "problem": _LATE})
        if trouble == _LATE and self._pid:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            logger.warning(
                f"process {self._pid}, which was to join as rank {self._joiner}, has not answered for "
                f"{self._patience:g} s (stopped?). It was killed, and the other ranks go on without it."
            )
        if trouble is not None:
            raise NotAdmitted(trouble)


class Candidate:
    """The joiner's part in all attempts until it has joined.

    Args:
        rank: its world rank.
        listener: accepts the members' connections.
        peers: takes these connections, by rank of the member; nobody else moves them yet.

    Attributes:
        backlog: messages of members behind their decision, each with its sender.
        is_lost: whether members have told that this process can never join.
    """

    def __init__(self, rank: int, listener: Listener, peers: Peers) -> None:
        self.rank, self._listener, self._peers = rank, listener, peers
        self.backlog: list[tuple[int, bytes]] = []
        self.is_lost = False
        self._rounds = Rounds()
        self._called_for: dict[int, int] = {}  # by rank, the view for which it has called over its connection
        self._decisions: dict[int, Decision] = {}

    def called(self) -> tuple[int, dict[str, Any]] | None:
        """The view for which members call this process, and the message of one of them; None if nobody calls."""
        self._look()
        view = max(self._called_for.values(), default=0)
        return (view, next(iter(self._rounds.of(view, CALL).values()))) if view else None

    def gather(self, view: int, number: int, members: Sequence[int], payload: Mapping[str, Any] | None = None) -> Any:
        """Send all members this process's payload of a round; returns theirs by world rank.

        Args:
            view: of the attempt.
            number: of the round.
            members: world ranks of all.
            payload: of this process; None if it tells nothing in this round.

        Raises:
            NotAdmitted: this process does not join now.
        """
        for rank in members if payload is not None else ():
            self._tell(rank, {"view": view, "round": number, "payload": payload})

        def missing() -> list[int]:
            told = self._rounds.of(view, number)
            return [rank for rank in members if rank not in told]

        def have_told() -> bool:
            self._look()
            left = missing()
            called = [rank for rank in self._rounds.of(view, CALL) if rank in members]
            if view not in self._decisions and number != READY and any(self._called_for.get(r) != view for r in called):
                raise NotAdmitted("")  # one that has called has hung up
            self._check(view)
            # What a member has told may be lost with the network between it and this process. But all were ready, or
            # the others would not have let this process join.
            return not left or view in self._decisions

        self._wait(have_told, missing)
        return {**self._rounds.of(view, number), self.rank: payload}

    def decision(self, view: int, members: Sequence[int]) -> Decision:
        """Wait for the members' decision that this process joins.

        Raises:
            NotAdmitted: it does not.
        """

        def is_decided() -> bool:
            self._look()
            self._check(view)
            return view in self._decisions

        self._wait(is_decided, lambda: list(members))
        return self._decisions[view]

    def withdraw(self, view: int) -> None:
        """Close the connections of an attempt that has failed, but not those that already belong to the next."""
        for rank, of in list(self._called_for.items()):
            if of <= view:
                self._close(rank)
        self.backlog = [one for one in self.backlog if one[0] in self._peers]
        self._rounds.forget(view)

    def _close(self, rank: int) -> None:
        self._peers.hang_up(rank)
        self._called_for.pop(rank, None)

    def _wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        Wait("admission", None).until(ready, missing, lambda: _WHAT)

    def _check(self, view: int) -> None:
        decision = self._decisions.get(view)
        if decision is not None:
            if self.rank not in decision.members:
                raise NotAdmitted("")
        elif view in self._rounds.problems:
            raise NotAdmitted(self._rounds.problems[view])
        elif view not in self._called_for.values() or max(self._called_for.values()) > view:
            raise NotAdmitted("")  # the members have decided without it, and may have called again

    def _tell(self, rank: int, body: Mapping[str, Any]) -> None:
        self._peers.send(rank, to_json(["admission", body]))

    def _look(self) -> None:
        """Take new connections, and read and write what can be."""
        for rank, connected in self._listener.take_accepted(MESH_TAG).items():
            self._close(rank)
            self._peers.add(rank, mesh_frames(connected))
        for rank, event in self._peers.events(self._peers.wait(0.0)):
            try:
                if isinstance(event, Disconnected):
                    raise event
                self._receive(rank, event)
            except Disconnected:
                self._close(rank)

    def _receive(self, rank: int, data: bytes) -> None:
        message = from_json(data)
        try:
            kind, body = message
            if kind == "admission":
                counts = self._rounds.note(rank, body)
                self.is_lost |= body.get("problem") == _LOST
                if counts and body.get("round") == CALL:
                    self._called_for[rank] = body["view"]
                return
            if kind == "agree" and body["kind"] == "decided":
                check(body)
                self._decisions.setdefault(int(body["view"]), Decision.told(body["body"]["decision"]))
        except Exception as error:  # what one member sends must not end this process
            raise Disconnected("it sent an invalid message", is_invalid=True) from error
        self.backlog.append((rank, data))


def begin_together(joined: Sequence[Liveness], members: Callable[[], Collection[int]]) -> None:
    """Wait until processes of this host that have joined go on as members, and kill those that do not.

    All have agreed already, so this waits for nobody else, and one that is killed is lost like any other member.

    Args:
        joined: these processes.
        members: returns the world ranks of those that say that they go on.
    """

    def late() -> list[Liveness]:
        return [peer for peer in joined if peer.rank not in members() and not peer.has_died()]

    until(lambda: not late(), _PATIENCE, _LOOK)
    for peer in late():
        with contextlib.suppress(OSError):
            os.kill(peer.pid, signal.SIGKILL)
        logger.warning(
            f"process {peer.pid}, which has joined as rank {peer.rank}, did not go on for {_PATIENCE:g} s (stopped?). "
            "It was killed."
        )
