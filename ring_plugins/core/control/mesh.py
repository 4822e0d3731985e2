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

**Death or silence.** A connection that ends does not say why; ends.py finds that out. Silence of one rank is that of
its host, whose ranks share memory: they stay in the job or are left out together. A rank that is once silent stays so,
even if the network comes back: by then the other side may have decided, too.

Considered and rejected: on one host, decisions in shared memory, a second algorithm for what messages do in two
milliseconds; connections between hosts only by one rank of each, for it may be the one that dies, and their
number matters little: 64 ranks have 63 each. UDP with heartbeats (SWIM, Das et al. 2002) scales further, but takes a
rank that computes without releasing the GIL for a dead one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import MembersLost, PeerFailed, name_ranks
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.consensus import Decision
from ring_plugins.core.control.ends import Ends
from ring_plugins.core.control.liveness import SILENT_ENDS, LocalPeers
from ring_plugins.core.control.rounds import Rounds
from ring_plugins.core.net.auth import Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.tcp_options import end_when_silent

#: Names these connections beside those of communicators, whose tags are not negative.
MESH_TAG = -1
#: Ranks of a job that have connections to each other.
MOST_RANKS = 256


class Waiting(Protocol):
    """The part of `Wait` that an agreement needs."""

    def until(self, ready: Callable[[], bool], missing: Callable[[], list[int]], what: Callable[[], str]) -> None: ...


class Mesh:
    """What this rank knows of all others by its connections to them, and its part in agreements.

    Args:
        members: of the job; an agreement changes who they are.
        channel: moves the messages; has no connections yet.
        local_peers: the ranks of this host, where they share memory.
        min_ranks: with how many ranks the job goes on.
        committed: from which to count on, in a process that joins.
        confirms: whether operations end with a confirmation, since some ranks share no memory.
        on_left_out: called when this rank finds that the others go on without it.

    Attributes:
        confirms: as given.
        members: as given.
        rank: world rank of this process.
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
        on_left_out: Callable[[], object] = lambda: None,
    ) -> None:
        self.confirms = confirms
        self.rank, self.members, self._channel = members.own, members, channel
        self._local_peers, self._min_ranks = local_peers, min_ranks
        self.committed, self._agreed = committed, members.view
        self.pending: list[int] | None = None
        self.joined: tuple[int, ...] = ()
        self.is_excluded = False
        self._on_left_out = on_left_out
        self._lock = channel.peers.lock
        self._ends = Ends(members, channel, local_peers)
        self._consensus = consensus = self._ends.consensus
        self._is_agreeing = self._is_admitting = False
        self.rounds = Rounds()
        channel.watch(self._ends)
        for kind, handler in (
            ("dead", lambda sender, body: consensus.note_dead(_rank_in(body, members))),
            ("leaves", lambda sender, body: consensus.note_left(sender, int(body["committed"]))),
            ("agree", consensus.receive),
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
            self._consensus.take_over(decision)
            for rank in self._channel.peers:
                if rank not in decision.members:
                    self._ends.hang_up(rank)
            for rank in self.members.ranks:
                if rank != self.rank and rank not in self._channel.peers:
                    self._ends.note_end(rank, Disconnected("it closed the connection"))
            for rank, data in backlog:
                if rank in self._channel.peers:
                    self._channel.receive(rank, data)
        self._channel.start()

    # What the rest of the process asks ------------------------------------------------------------

    def is_member(self, rank: int) -> bool:
        """Whether what a rank says counts: not if it has been left out, or has yet to join."""
        return rank in self._consensus.members

    def dead(self) -> frozenset[int]:
        """Members that are dead, as far as this rank knows; none while it agrees or lets a process join."""
        if self._is_agreeing or self._is_admitting:
            return frozenset()
        with self._lock:
            self._ends.look_at_locks()
            return frozenset(self._consensus.dead.intersection(self._consensus.members))

    def interrupts(self, dead: Collection[int] = (), absent: Collection[int] = ()) -> bool:
        """Whether this rank must abort the operation under way, to agree on who is left.

        Args:
            dead: what `dead` returned before `absent` was determined.
            absent: ranks that have not arrived in the operation.
        """
        if self.confirms:
            return self.must_agree()
        has_stopped = bool(absent) and set(dead).issuperset(absent)
        return not self._is_agreeing and not self._is_admitting and (has_stopped or self._is_left_out())

    def must_agree(self) -> bool:
        """As `interrupts`, where some ranks share no memory; so cheap that it can be asked before each operation."""
        if self._is_agreeing or self._is_admitting:
            return False
        return self._consensus.must_agree() or self._consensus.view > self._agreed  # decided without this rank

    def _is_left_out(self) -> bool:
        """Whether others of the same host have hung up on this rank, whose lock was lost."""
        consensus = self._consensus
        return consensus.view > self._agreed or not consensus.silent.isdisjoint(consensus.members)

    def members_lost(self) -> MembersLost:
        """The error of an operation that this rank gives up."""
        with self._lock:
            lost = self._consensus.lost()
            if not lost:
                return MembersLost("another rank has lost a rank.", self.members.ranks[0])
            return MembersLost(self._how_lost(lost[0]), lost[0])

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left normally."""
        return rank in self._consensus.left

    def note_unreachable(self, rank: int) -> None:
        """The network to the host of a rank is lost; any thread may call it."""
        with self._lock:
            self._ends.note_silent(rank)
        self._channel.peers.wake()

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
        consensus, view = self._consensus, self._agreed + 1
        if self.pending is not None:
            lost, self.pending = self.pending, None
            return self._take_over(lost)
        try:
            self._is_agreeing = True
            if not joining:  # others may be prepared already, and wait for this rank
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
        with self._lock:  # the thread that has adopted it may still pass it on
            decision = consensus.decisions.get(view)
        if decision is None or self.rank not in (*decision.members, *decision.leaving):
            self.is_excluded = True
            self._on_left_out()
            raise self._exclusion(decision)
        lost = [rank for rank in self.members.ranks if rank not in decision.members]
        left = [rank for rank in decision.members if not self.has_left(rank)]
        if lost and len(left) < self._min_ranks and self.rank not in decision.leaving:
            raise PeerFailed(
                f"{self._how_lost(lost[0])} Training cannot go on with {len(left)} rank{'s' * (len(left) != 1)}: "
                f"min_ranks={self._min_ranks}.",
                lost[0],
            )
        if self._local_peers is not None:
            self._local_peers.forget([rank for rank in lost if rank != self.rank])
        is_behind = decision.committed > self.committed
        self._agreed, self.committed, self.joined = view, decision.committed, decision.joining
        self.rounds.forget(view)
        if is_behind:
            self.pending = lost
            return None
        return self._take_over(lost)

    def _take_over(self, lost: list[int]) -> list[int]:
        decision = self._consensus.decisions[self._agreed]
        if self.rank in decision.members:
            self.members.follow(self.members.in_order(decision.members), self._agreed)
        return lost

    # Admission of a process (mesh_admission.py) ----------------------------------------------------

    @contextlib.contextmanager
    def admitting(self, joiner: Member) -> Iterator[None]:
        """While this lasts, a loss does not interrupt this rank, which looks for it in `trouble`."""
        self.members.add([joiner])
        self._is_admitting = True
        try:
            yield
        finally:
            self._is_admitting = False

    def add(self, rank: int, connected: socket.socket) -> None:
        """Talk to a process that is to join over this connection."""
        with self._lock:
            self._ends.hang_up(rank)
            self._channel.add(rank, mesh_frames(connected))

    def tell(self, rank: int, body: dict[str, Any]) -> None:
        """Send a message of the admission to one rank, or to `EVERYONE`."""
        self._channel.tell(rank, "admission", body)

    def trouble(self, view: int, joiner: int | None) -> str | None:
        """Why nobody can join in a view, "" if a process is lost; None as long as it can.

        Args:
            view: its number.
            joiner: who is to join; None before this rank is connected to it.
        """
        with self._lock:
            self._ends.look_at_locks()
            if self._consensus.lost() or (joiner is not None and joiner not in self._channel.peers):
                return ""
        return self.rounds.problems.get(view)

    def dismiss(self, rank: int) -> None:
        """Close the connection to a process that has not joined."""
        with self._lock:
            self._ends.hang_up(rank)

    def note_joined(self, rank: int) -> None:
        """A process has joined, which this rank watches now; its connection may have ended already."""
        with self._lock:
            if rank not in self._channel.peers and self.is_member(rank):
                self._ends.note_end(rank, Disconnected("it closed the connection"))
        self._channel.peers.wake()

    def was_silent(self, rank: int) -> bool:
        """Whether a rank was lost because it could not be reached, rather than by its death."""
        return rank in self._consensus.silent and rank not in self._consensus.dead

    def close(self) -> None:
        """Tell all that this rank leaves. One that is excluded says nothing, and its end will be seen."""
        if not self.is_excluded:
            self._channel.tell(EVERYONE, "leaves", {"committed": self.committed})

    def detach_after_fork(self) -> None:
        """In a forked child: close the sockets, which are the parent's."""
        self._ends.close()

    def _awaited(self) -> list[int]:
        with self._lock:
            self._ends.look_at_locks()
            return self._consensus.awaited()

    def _how_lost(self, rank: int) -> str:
        host, pid, here = self.members.known[rank].host, self.members.known[rank].pid, self.members.here.host
        where = f" on {host}" if self.members.are_on_several_hosts() else ""
        if self.was_silent(rank):
            return (
                f"rank {self.rank} on {here} cannot reach rank {rank} (process {pid} on {host}) any more: the network "
                f"between {here} and {host} is lost, or {host} is down."
            )
        return f"rank {rank} (process {pid}{where}) died without reporting an error; {SILENT_ENDS}."

    def _exclusion(self, decision: Decision | None) -> PeerFailed:
        with self._lock:
            silent = [rank for rank in self.members.ranks if self.was_silent(rank)]
        hosts = " and ".join(dict.fromkeys(self.members.known[rank].host for rank in silent))
        whom = f"{name_ranks(silent)} on {hosts}" if silent else "the other ranks"
        rank = silent[0] if silent else self.members.ranks[0]
        if decision is not None:
            return PeerFailed(
                f"the job goes on without rank {self.rank} on {self.members.here.host}, which could not reach "
                f"{whom} for {config.NETWORK_TIMEOUT.get():g} s.",
                rank,
            )
        return PeerFailed(
            f"rank {self.rank} on {self.members.here.host} has heard nothing from {whom} "
            f"for {config.NETWORK_TIMEOUT.get():g} s: the network is lost, or these hosts are down. They may go on, "
            "and this side ends: it has neither more than half of the job's ranks nor half of them with the lowest.",
            rank,
        )


def _rank_in(body: dict[str, Any], members: Members) -> int:
    rank = body["rank"]
    if type(rank) is not int or rank not in members.known:
        raise ValueError(f"{body!r} names no rank")
    return rank


def mesh_frames(connected: socket.socket) -> FrameSocket:
    """Messages on a new connection between two ranks, whose end the kernel reports if the other host is silent."""
    end_when_silent(connected)
    return FrameSocket(connected, Purpose.CONTROL)
