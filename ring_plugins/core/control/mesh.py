"""The members of a job that goes on when ranks are lost: connections among all, what these show, and agreements.

**Where does everyone stand?** Nobody knows beforehand when a rank dies. On one host, all operations are sequences of
barriers (collectives/shm_barrier.py). A rank that died has arrived at some barriers and never arrives at the next. Its
memory outlives it, so whatever it announced counts: the survivors pass every barrier that it reached, and all of them
are stuck at the first that it did not reach. None of them has seen the operation end, and none has begun another. So an
operation has happened for all survivors, or for none. That holds if no survivor gives up too early. One that saw the
death first and then complained about any slow rank would leave the others one barrier behind. The rule (`Wait._check`):
look who is dead, *then* who is missing, and give up only if all the missing are dead. At that moment every living rank
stands at the same barrier, and nobody writes to memory. Between hosts one barrier does not do, so operations end with a
confirmation there (collectives/recovery.py), and whoever learns of a loss gives up wherever it stands.

**Who is left?** Another rank may die just then, so that survivors differ in whom they saw die. They agree
(consensus.py), in the same way on one host and on several; on one host nobody is ever silent, so whoever lives decides.

**Connections.** Rank 0 may be the one that is lost. So each rank has a connection to each other one, from the start, on
the port or socket where it listens, and its channel (channel.py) moves messages over them. Whoever is lost, all others
notice by themselves, and nobody has to be found first: the agreement on who is left (consensus.py), failures and
rejections (failure_detector.py) travel from rank to rank.

**Death or silence.** A connection that ends does not say why. A rank of the same host is dead once the lock on its
memory is free (liveness.py); who sees that tells all others. The kernel ends a connection whose data or probes nobody
has acknowledged for RING_NETWORK_TIMEOUT: that is silence. Otherwise the process at the other end is usually dead. But
a reset proves nothing, since kernels also send one for a connection that they have given up. So this rank connects to
its port once more (listen_probe.py). Silence of one rank is that of its host, whose ranks share memory: they stay in
the job or are left out together. A rank that is once silent stays so, even if the network comes back: by then the other
side may have decided, too.

Considered and rejected: on one host, decisions in shared memory, a second algorithm for what messages do in two
milliseconds; connections between hosts only by one rank of each, for it may be the one that dies, and their
number matters little: 64 ranks have 63 each. UDP with heartbeats (SWIM, Das et al. 2002) scales further, but takes a
rank that computes without releasing the GIL for a dead one.

This file is a few lines longer than others, and `Mesh` has 27 methods: half of them are the short answers that waits
and admissions ask for.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import MembersLost, PeerFailed, name_ranks
from ring_plugins.core.base.facts import IN_FLIGHT
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.consensus import Consensus, Decision
from ring_plugins.core.control.listen_probe import NETWORK_LOST, ListenProbe
from ring_plugins.core.control.liveness import LocalPeers, death
from ring_plugins.core.control.rounds import Rounds
from ring_plugins.core.net.auth import Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.sockets import end_when_silent

#: Names these connections beside those of communicators, whose tags are not negative.
MESH_TAG = -1
#: Ranks of a job that have connections to each other.
MOST_RANKS = 256
#: Seconds between two looks at ranks of which it is not known yet why their connection has ended, and otherwise.
_LOOK, _IDLE = 0.01, 1.0


class Waiting(Protocol):
    """The part of `Wait` that an agreement needs."""

    def until(self, ready: Callable[[], bool], missing: Callable[[], list[int]], what: Callable[[], str]) -> None: ...


class Mesh:
    """This rank's connections to all others, what their ends show, and its part in agreements.

    It watches the channel, which calls `note_end` and `look` with its lock held.

    Args:
        members: of the job; an agreement changes who they are.
        channel: moves the messages; has no connections yet.
        local_peers: the ranks of this host, where they share memory.
        min_ranks: with how many ranks the job goes on.
        committed: from which to count on, in a process that joins.
        confirms: whether operations end with a confirmation, since some ranks share no memory.
        admits: whether other processes may join.
        on_left_out: called when this rank finds that the others go on without it.

    Attributes:
        confirms, members: as given.
        rank: world rank of this process.
        consensus: this rank's part in the agreements.
        committed: how many operations are confirmed; the communicators count it.
        pending: lost ranks that are dropped in the next operation only, because the others have finished this one; None
            if there are none.
        joined: members of the latest agreed view that were not in the view before it.
        is_excluded: whether the others go on without this rank, if they go on at all.
        rounds: what ranks have told in the admission of a process.
    """

    def __init__(
        self,
        members: Members,
        channel: Channel,
        local_peers: LocalPeers | None,
        min_ranks: int,
        committed: int = 0,
        confirms: bool = True,
        admits: bool = True,
        on_left_out: Callable[[], object] = lambda: None,
    ) -> None:
        self.confirms, self._admits = confirms, admits
        self.rank, self.members, self._channel = members.own, members, channel
        self._local_peers, self._min_ranks = local_peers, min_ranks
        self.committed, self._agreed = committed, members.view
        self.pending: list[int] | None = None
        self.joined: tuple[int, ...] = ()
        self.is_excluded = False
        self._on_left_out = on_left_out
        self._lock = channel.peers.lock
        ranks = sorted(members.ranks)
        self.consensus = Consensus(members.own, ranks, members.facts, channel.tell, self.hang_up, members.view)
        self._is_agreeing = self._is_admitting = False
        self.rounds = Rounds()
        self._dying: dict[int, float] = {}  # ranks of this host whose lock is not free yet, with the time to give up
        self._probes: dict[int, ListenProbe] = {}
        channel.watch(self)
        for kind, handler in (
            ("dead", self._receive_dead),
            ("leaves", self._receive_leaves),
            ("agree", self.consensus.receive),
            ("admission", self.rounds.note),
        ):
            channel.on(kind, handler, at_once=True)

    def connect(self, listener: Listener, wait: Waiting) -> None:
        """Connect to all other ranks, which call this too, and begin to watch them."""
        missing = [rank for rank in self.members.ranks if rank != self.rank]
        end = time.monotonic() + config.START_TIMEOUT.get()

        def are_connected() -> bool:
            for rank in list(missing):
                if (connected := listener.connection(rank, MESH_TAG)) is not None:
                    self._channel.add(rank, mesh_frames(connected))
                    missing.remove(rank)
            if missing and time.monotonic() > end:
                listener.raise_missing(missing)
            return not missing

        wait.until(are_connected, lambda: missing, lambda: "connecting to all ranks")
        self._channel.start()

    def go_on_from(self, backlog: Sequence[tuple[int, bytes]], decision: Decision) -> None:
        """Start monitoring the members that this rank has joined; the channel is connected to those that are alive.

        Args:
            backlog: messages that have arrived already, each with its sender.
            decision: that this rank joins, which others may not know yet.
        """
        with self._lock:
            self.consensus.take_over(decision)
            for rank in self._channel.peers:
                if rank not in decision.members:
                    self.hang_up(rank)
            for rank in self.members.ranks:
                if rank != self.rank and rank not in self._channel.peers:
                    self.note_end(rank, Disconnected("it closed the connection"))
            for rank, data in backlog:
                if rank in self._channel.peers:
                    self._channel.receive(rank, data)
        self._channel.start()

    # What the ends of connections show ------------------------------------------------------------

    def note_end(self, rank: int, how: Disconnected) -> None:
        """The connection to a rank has ended; why, is still to be seen."""
        if rank in self.members.facts.left or rank not in self.consensus.members:  # one that was to join is not missed
            return
        peer, patience = self.members.known[rank], config.NETWORK_TIMEOUT.get()
        if how.is_invalid:
            logger.error(
                f"rank {self.rank} has closed its connection to rank {rank} (process {peer.pid} on "
                f"{peer.host}): {how}. Memory or network are faulty, or this is a bug of ring_plugins.",
                exc_info=how.__cause__,
            )
        if how.code in NETWORK_LOST:
            self._note_silent(rank)
        elif self._local_peers is not None and rank in self._local_peers.others:
            self._dying[rank] = time.monotonic() + patience
        else:
            self._probes[rank] = ListenProbe(peer.address, peer.port, patience)

    def look(self) -> float:
        """Find out why connections have ended; returns in how many seconds to look again."""
        for rank, end in list(self._dying.items()):
            if rank not in self._dying:  # the death before it has begun a ballot, which hangs up on all that are dead
                continue
            local = self._local_peers.others.get(rank) if self._local_peers is not None else None
            if local is None or local.has_died():
                del self._dying[rank]
                if local is not None and local.is_lost():
                    self._note_dead(rank)
            elif time.monotonic() > end:
                self._note_silent(rank)
        for rank, probe in list(self._probes.items()):
            if self._probes.get(rank) is probe and (found := probe.advance()):
                del self._probes[rank]
                (self.consensus.note_dead if found == "dead" else self._note_silent)(rank)
        return _LOOK if self._probes or self._dying else _IDLE

    def note_unreachable(self, rank: int) -> None:
        """The network to the host of a rank is lost; any thread may call it."""
        with self._lock:
            self._note_silent(rank)
        self._channel.peers.wake()

    def _note_silent(self, rank: int) -> None:
        """A rank of another host cannot be reached any more: all of that host count as silent, at once.

        If only this one was left out, it might learn of it late, and write to memory that those share who go on.
        """
        known, silent = self.members.known, [rank]
        if not self.members.is_near(rank):
            silent = [other for other, peer in known.items() if peer.domain == known[rank].domain]
        for other in silent:
            self.hang_up(other)
        self.consensus.note_silent(*silent)

    def _look_at_locks(self) -> None:
        """Find dead ranks of this host by their locks: their connections may not have ended yet."""
        for rank in self._local_peers.lost() if self._local_peers is not None else ():
            self._note_dead(rank)

    def _note_dead(self, rank: int) -> None:
        """The lock of a rank of this host is free, which no other host sees."""
        if rank not in self.members.facts.dead and rank not in self.members.facts.left:
            self._channel.tell(EVERYONE, "dead", {"rank": rank})
            self.consensus.note_dead(rank)

    def _receive_dead(self, sender: int, body: dict[str, Any]) -> None:
        if type(rank := body["rank"]) is not int or rank not in self.members.known:
            raise ValueError(f"{body!r} names no rank")
        self.consensus.note_dead(rank)

    def _receive_leaves(self, sender: int, body: dict[str, Any]) -> None:
        self.consensus.note_left(sender, int(body["committed"]))
        self.members.facts.depart(sender, IN_FLIGHT)

    def hang_up(self, rank: int) -> None:
        """Close a connection, now: nothing more of that rank may count."""
        with self._lock:
            self._channel.hang_up(rank)
            self._dying.pop(rank, None)
            if (probe := self._probes.pop(rank, None)) is not None:
                probe.close()

    # What the rest of the process asks ------------------------------------------------------------

    def dead(self) -> frozenset[int]:
        """Members that are dead, as far as this rank knows; none while it agrees or lets a process join."""
        if self._is_agreeing or self._is_admitting:
            return frozenset()
        with self._lock:
            self._look_at_locks()
            return frozenset(self.members.facts.dead.intersection(self.consensus.members))

    def interrupts(
        self, dead: Collection[int] = (), absent: Collection[int] = (), is_within_host: bool = False
    ) -> bool:
        """Whether this rank must abort the operation under way, to agree on who is left.

        Args:
            dead: what `dead` returned before `absent` was determined.
            absent: ranks that have not arrived in the operation.
            is_within_host: whether it is one of this host's ranks alone, where others join or are lost in another.
        """
        if self.confirms and not is_within_host:
            return self.must_agree()
        if self._is_agreeing or self._is_admitting:
            return False
        if absent and set(dead).issuperset(absent):
            return True
        if is_within_host:
            return False
        # Others of the same host may have hung up on this rank, whose lock was lost.
        consensus = self.consensus
        return consensus.view > self._agreed or not self.members.facts.silent.isdisjoint(consensus.members)

    def must_agree(self) -> bool:
        """As `interrupts`, where some ranks share no memory; so cheap that it can be asked before each operation."""
        if self._is_agreeing or self._is_admitting:
            return False
        return self.consensus.must_agree() or self.consensus.view > self._agreed  # decided without this rank

    def members_lost(self, lost: Sequence[int] = ()) -> MembersLost:
        """The error of an operation that this rank gives up; by default it names all ranks that are lost now."""
        known = self.members.known
        with self._lock:
            if not (lost := lost or self.consensus.lost()):
                return MembersLost("another rank has lost a rank.", self.members.ranks[0])
            is_silent = (rank := lost[0]) in self.members.facts.silent - self.members.facts.dead
        host, pid, here = known[rank].host, known[rank].pid, known[self.rank].host
        where = f" on {host}" if self.members.are_on_several_hosts() else ""
        dead = death(rank, pid, where)
        silent = (
            f"rank {self.rank} on {here} cannot reach rank {rank} (process {pid} on {host}) any more: the network "
            f"between {here} and {host} is lost, or {host} is down."
        )
        return MembersLost(silent if is_silent else dead, rank)

    def agree(self, wait: Waiting, leaving: Sequence[int] = (), joining: Sequence[int] = ()) -> list[int] | None:
        """Agree with all that can be reached on the next view; each calls this when it has raised `MembersLost`.

        Takes over what was agreed on before, if that is pending.

        Args:
            wait: waits for the others.
            leaving: ranks that are to leave, as the last operation has told all. They call this, too.
            joining: a process for which this rank is prepared; `joined` says whether it has joined.

        Returns:
            The ranks that are lost or leave; None if that is to be found in the next operation (`pending`).

        Raises:
            PeerFailed: this rank does not go on, or a rank failed by an exception.
        """
        if self.pending is not None:
            lost, self.pending = self.pending, None
        else:
            decision = self._decide(wait, leaving, joining)
            lost = [rank for rank in self.members.ranks if rank not in decision.members]
            left = [rank for rank in decision.members if rank not in self.members.facts.left]
            if lost and len(left) < self._min_ranks and self.rank not in decision.leaving:
                raise PeerFailed(
                    f"{self.members_lost(lost)} Training cannot go on with {len(left)} rank{'s' * (len(left) != 1)}: "
                    f"min_ranks={self._min_ranks}.",
                    lost[0],
                )
            if self._local_peers is not None:
                self._local_peers.forget([rank for rank in lost if rank != self.rank])
            is_behind = decision.committed > self.committed
            self._agreed, self.committed, self.joined = self._agreed + 1, decision.committed, decision.joining
            if is_behind:
                self.pending = lost
                return None
        decision = self.consensus.decisions[self._agreed]
        if self.rank in decision.members:
            self.members.follow(decision.members, self._agreed)
        return lost

    def _decide(self, wait: Waiting, leaving: Sequence[int], joining: Sequence[int]) -> Decision:
        """Arrive in the agreement on the next view, and wait for its end; arguments and errors as above."""
        consensus, view = self.consensus, self._agreed + 1
        try:
            self._is_agreeing = True
            if self._admits and not joining:  # others may be prepared already, and wait for this rank
                self.tell(EVERYONE, {"view": view, "problem": f"rank {self.rank} does not take part."})
            with self._lock:
                consensus.arrive(view, self.committed, leaving, joining)
            self._channel.peers.wake()
            wait.until(
                lambda: view in consensus.decisions or consensus.has_no_quorum,
                self._awaited,
                lambda: "the agreement on the ranks that are left",
            )
        finally:
            self._is_agreeing = False
        with self._lock:  # the thread that has adopted it may still be at it
            decision = consensus.decisions.get(view)
        if decision is None or self.rank not in (*decision.members, *decision.leaving):
            self.is_excluded = True
            self._on_left_out()
            raise self._exclusion(decision)
        return decision

    # Admission of a process (mesh_admission.py) ----------------------------------------------------

    @contextlib.contextmanager
    def admitting(self, joiner: Member) -> Iterator[None]:
        """Inside this context a loss does not interrupt this rank, which asks `trouble` instead."""
        self.rounds.forget(self._agreed)
        self.members.add([joiner])
        self._is_admitting = True
        try:
            yield
        finally:
            self._is_admitting = False

    def add(self, rank: int, connected: socket.socket) -> None:
        """Talk to a process that is to join over this connection."""
        with self._lock:
            self.hang_up(rank)
            self._channel.add(rank, mesh_frames(connected))

    def tell(self, rank: int, body: dict[str, Any]) -> None:
        """Send a message of the admission to one rank, or to `EVERYONE`."""
        self._channel.tell(rank, "admission", body)

    def trouble(self, view: int, joiner: int | None) -> str | None:
        """Why nobody can join in a view, "" if a process is lost; None while joining is possible.

        Args:
            view: its number.
            joiner: who is to join; None before this rank is connected to it.
        """
        with self._lock:
            self._look_at_locks()
            if self.consensus.lost() or (joiner is not None and joiner not in self._channel.peers):
                return ""
        return self.rounds.problems.get(view)

    def note_joined(self, rank: int) -> None:
        """A process has joined, which this rank watches now; its connection may have ended already."""
        with self._lock:
            if rank not in self._channel.peers and rank in self.consensus.members:
                self.note_end(rank, Disconnected("it closed the connection"))
        self._channel.peers.wake()

    def close(self) -> None:
        """Tell all that this rank leaves. One that is excluded says nothing, and its end will be seen."""
        if not self.is_excluded:
            self._channel.tell(EVERYONE, "leaves", {"committed": self.committed})

    def detach_after_fork(self) -> None:
        """In a forked child: close the sockets, which are the parent's."""
        for probe in self._probes.values():
            probe.close()

    def _awaited(self) -> list[int]:
        with self._lock:
            self._look_at_locks()
            return self.consensus.awaited()

    def _exclusion(self, decision: Decision | None) -> PeerFailed:
        facts, here = self.members.facts, self.members.here.host
        with self._lock:
            silent = [rank for rank in self.members.ranks if rank in facts.silent - facts.dead]
        hosts = " and ".join(dict.fromkeys(self.members.known[rank].host for rank in silent))
        whom = f"{name_ranks(silent)} on {hosts}" if silent else "the other ranks"
        rank = silent[0] if silent else self.members.ranks[0]
        if decision is not None:
            return PeerFailed(
                f"the job goes on without rank {self.rank} on {here}, which could not reach {whom} for "
                f"{config.NETWORK_TIMEOUT.get():g} s.",
                rank,
            )
        return PeerFailed(
            f"rank {self.rank} on {here} has heard nothing from {whom} for {config.NETWORK_TIMEOUT.get():g} s: the "
            "network is lost, or these hosts are down. They may go on, and this side ends: it has neither more than "
            "half of the job's ranks nor half of them with the lowest.",
            rank,
        )


def mesh_frames(connected: socket.socket) -> FrameSocket:
    """Messages on a new connection between two ranks, whose end the kernel reports if the other host is silent."""
    end_when_silent(connected)
    return FrameSocket(connected, Purpose.CONTROL)
