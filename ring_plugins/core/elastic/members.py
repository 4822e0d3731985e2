"""The ranks of a job change while it runs: some are lost, some leave on SIGTERM, others join.

Each change ends in the same way. All members agree on the next *view*, which says who is a member: on one host in
shared memory (control/membership.py), between hosts over connections of their own (control/mesh.py). Then everything
that this process has of the job follows the view: communicators, topology, and last the script's functions, which are
told where all ranks are at the same place. The changes differ in how they begin:

- **A loss** is found in the middle of an operation, by everyone who waits in it. The communicator agrees with the
  others through `go_on_without`, and repeats the operation (collectives/recovery.py).
- **A rank that is to leave** says so in the next pass of gradients (`wants_change`), as does one that sees a process
  wait to join. After that pass, outside of operations, all call `change_members`: ranks leave, and all note who waits
  (`pending`).
- **A process that waits** joins where the script lets it (joining.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.log import logger, set_rank
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.recovery import JobRecovery
from ring_plugins.core.control import ControlClient
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector, Peer
from ring_plugins.core.control.liveness import Liveness, LocalPeers
from ring_plugins.core.control.membership import Membership
from ring_plugins.core.control.mesh import Mesh, MeshPeer
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.elastic.changes import ChangeCallbacks, MembershipChange
from ring_plugins.core.elastic.join_descriptors import joiners_here
from ring_plugins.core.elastic.policy import FailurePolicy
from ring_plugins.core.elastic.preemption_notice import TERMINATED, PreemptionNotice
from ring_plugins.core.elastic.wording import too_few_left, what_was_lost, who_left
from ring_plugins.core.net.tcp import TcpTransport
from ring_plugins.core.observe.leader_failover import Announcements, LeaderFailover
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.processes import Processes
from ring_plugins.core.rendezvous.slots import OwnSlot, SlotOwner
from ring_plugins.core.rendezvous.spawn import slots


class Job(Protocol):
    """What of a `World` changes with its ranks."""

    is_joining: bool
    communicator: Communicator
    channel: Channel | None
    failure_detector: FailureDetector | None
    observers: Observers | None

    def recovering_communicators(self) -> dict[int, HostCommunicator]: ...
    def operations(self) -> int: ...
    def exit_from_job(self, status: int) -> NoReturn: ...


class Elastic:
    """How the ranks of one job change; without `on_failure`, they do not.

    Args:
        job: of this process.
        processes: of that.
        peers: those of this host, if they share memory.
        policy: what the user chose.
        slot: the row in which this process tells its host's supervisor how far it is; None without such.

    Attributes:
        pending: slots of processes that wait to join, as all ranks have agreed; `joining.admit` lets them join.
        changes: the script's functions that are to hear of changes.
        preemption_notice: whether this process was told to end, if the job goes on without it then.
        slot: as given.
        recovery: how communicators go on without lost ranks.
    """

    def __init__(
        self, job: Job, processes: Processes, peers: LocalPeers | None, policy: FailurePolicy, slot: OwnSlot | None
    ) -> None:
        self._job, self._processes, self._peers, self._policy = job, processes, peers, policy
        self.slot = slot
        self.recovery = JobRecovery(self.go_on_without, policy.replaces)
        self.pending: frozenset[int] = frozenset()
        self.changes = ChangeCallbacks()
        #: In a process that has joined, the changes that its script was told first, and how many operations it had
        #: finished then; None in all others, and before that.
        self._first_changes: tuple[list[MembershipChange], int] | None = None
        self.preemption_notice = PreemptionNotice()
        self._membership: Membership | Mesh | None = None
        self._leader_failover: LeaderFailover | None = None
        self._slots_here: dict[int, int] = {}  # of processes of this host that wait, by world rank, on several hosts

    def begin(self, transport: TcpTransport | None, addresses: Sequence[str], joined: Mesh | None = None) -> list[Any]:
        """From now on, the loss of a rank does not end the job; collective.

        Args:
            transport: moves data between hosts, if sockets do.
            addresses: at which other hosts reach this process.
            joined: the connections of a process that has joined a job on several hosts.

        Returns:
            A service for the monitor thread, if this rank needs one.
        """
        detector, channel, observers = self._job.failure_detector, self._job.channel, self._job.observers
        assert detector is not None
        assert observers is not None
        peers = self._peers_here()
        membership: Membership | Mesh
        # `ring run -H` may have started all ranks on one other host. Processes join there as between hosts.
        has_supervisor = self.slot is not None and self._policy.replaces
        is_here = self._processes.topology.num_nodes == 1 and not has_supervisor
        if joined is None and (self._job.is_joining or is_here):
            self._membership = membership = Membership(peers)
            announcements = Announcements(
                lambda address: peers.own.announce(json.dumps(address)), lambda rank: _announced(peers, rank)
            )
            addresses = []
        else:
            mesh = self._membership = membership = joined or self._new_mesh(transport)
            if self.slot is not None:
                mesh.on_excluded = self.slot.note_excluded
            if joined is None:
                mesh.connect(Wait("ring", detector))
            detector.go_on_over(mesh)
            self.recovery.confirmations = mesh
            announcements = Announcements(mesh.announce, mesh.announced.get)
        if not isinstance(channel, ControlClient):
            return []
        self._leader_failover = LeaderFailover(
            channel, observers.stalls, observers.membership, lambda: membership.ranks, announcements, addresses
        )
        return [self._leader_failover]

    def _new_mesh(self, transport: TcpTransport | None) -> Mesh:
        assert transport is not None
        ranks = {
            rank: MeshPeer(
                one.host, one.pid, one.domain, transport.peers[rank].address, transport.peers[rank].port, rank
            )
            for rank, one in self._processes.entries.items()
        }
        return Mesh(self._processes.own, ranks, transport.listener, self._peers, self._policy.min_ranks)

    def _peers_here(self) -> LocalPeers:
        assert self._peers is not None
        return self._peers

    @property
    def view(self) -> int:
        """How often the ranks of the job have changed."""
        return self._membership.view if self._membership is not None else 0

    @property
    def mesh(self) -> Mesh | None:
        """The connections to all other ranks of a job on several hosts."""
        return self._membership if isinstance(self._membership, Mesh) else None

    # Losses ---------------------------------------------------------------------------------------

    def go_on_without(self, wait: Wait) -> None:
        """Agree with the other survivors on who is left, and let all communicators go on with them.

        Raises:
            PeerFailed: too few are left, or a rank has failed by an exception meanwhile.
        """
        began = time.monotonic()
        lost = self._agree(wait)
        if lost is None:  # this rank finds it in its next operation, as others do
            return
        self._follow(lost=lost)
        if lost:
            self._warn_of(lost, began)

    def agree_on_members(self, joining: Sequence[int] = ()) -> None:
        """Agree on the next view of a job on several hosts, outside of operations, and go on without those it lacks.

        Args:
            joining: a process for which this rank is prepared. If it joins, `extend` is next.
        """
        began = time.monotonic()
        assert self.mesh is not None
        lost = self._agree(Wait("membership", self._job.failure_detector), joining=joining)
        if lost:
            self._follow(lost=lost)
            self._warn_of(lost, began)

    def _agree(self, wait: Wait, leaving: Sequence[int] = (), joining: Sequence[int] = ()) -> list[int] | None:
        """As `Mesh.agree`, also on one host, where it knows nothing of ranks that leave."""
        assert self._membership is not None
        assert self._job.failure_detector is not None
        try:
            if isinstance(self._membership, Mesh):
                return self._membership.agree(wait, leaving, joining)
            return self._membership.agree(wait)
        except PeerFailed:
            self._job.failure_detector.aborted = True
            raise

    def _follow(self, lost: Sequence[int] = (), left: Sequence[int] = (), joined: Sequence[int] = ()) -> None:
        """Let all that this process has of the job follow its members, of which some died, left or joined."""
        membership, processes = self._membership, self._processes
        assert membership is not None
        for communicator in self._job.recovering_communicators().values():
            communicator.keep(membership.ranks, membership.view)
        if not lost and not left and not joined:
            processes.ranks = membership.ranks
            return
        before = processes.topology
        size_before = len(membership.ranks) + len(lost) + len(left) - len(joined)
        processes.follow(membership.ranks)
        after = processes.topology
        set_rank(after.rank)
        if (places := self.slot or slots()) is not None:
            for rank in lost:
                places.note_lost(rank)
        gone = tuple(lost), before.rank, size_before
        self.changes.untold.append(MembershipChange(*gone, after.rank, after.size, tuple(left), tuple(joined)))
        if self._job.channel is not None and processes.own == 0 and not joined:
            self._job.channel.tell(0, "ranks_lost", {"ranks": [*lost, *left]})

    def _warn_of(self, lost: Sequence[int], began: float) -> None:
        """Tell the user of lost ranks, and of an agreement that began then, on one rank."""
        processes = self._processes
        if processes.topology.rank == 0:
            silent = [rank for rank in lost if self.mesh is not None and self.mesh.was_silent(rank)]
            hosts = {rank: entry.host for rank, entry in processes.entries.items()} if self.mesh is not None else None
            seconds, job = time.monotonic() - began, self._job_without(lost)
            logger.warning(what_was_lost(lost, processes.pids, processes.ranks, job, seconds, silent, hosts))

    def _job_without(self, ranks: Sequence[int]) -> tuple[int, bool]:
        """How many ranks it had at the most, and whether other processes take the places of these."""
        return self._processes.shards, self._policy.replaces and self._processes.can_be_replaced(ranks)

    # Leaving on SIGTERM, and who waits to join ------------------------------------------------------

    @property
    def wants_change(self) -> bool:
        """Whether this process was told to end, or sees that others wait to join: all ranks are to know."""
        return self.preemption_notice.given or bool(self._sees_joiners())

    @property
    def is_pending(self) -> bool:
        """Whether processes wait to take the places of lost ranks."""
        return any(slot < self._processes.shards for slot in self.pending)

    @property
    def may_grow(self) -> bool:
        """Whether the job may get added ranks."""
        return self._policy.max_ranks > 0

    @property
    def is_added(self) -> bool:
        """Whether this process has yet to join, and the job grows by it: nobody has had its slot."""
        places, is_new = slots(), self._processes.is_added
        return self._job.is_joining and (is_new or (places is not None and places.is_new(self._processes.slot)))

    def _sees_joiners(self) -> set[int]:
        """Slots of processes that wait to join, and of which not all ranks know yet."""
        places = (slots() or self.slot) if self._policy.replaces and not self._job.is_joining else None
        if places is None or not places.has_waiting():
            return set()
        if isinstance(places, OwnSlot):
            waiting = {one.world_rank for one in places.waiting()}
            if not waiting <= self._slots_here.keys():  # one that waits for the next epoch is seen in each step
                self._slots_here |= {peer.rank: int(told["slot"]) for peer, _, told in joiners_here(places)}
            seen = {self._slots_here[rank] for rank in waiting & self._slots_here.keys()}
            elsewhere = {int(one["slot"]) for one in places.remote_joiners()}.difference(self._processes.taken_slots)
            return (seen | elsewhere) - self.pending
        return {one.slot for one in places.waiting()} - self.pending

    def change_members(self) -> None:
        """Let ranks leave that were told to end, and note whether others wait to join.

        All ranks call this where they are at the same place, outside of operations, if one of them `wants_change`.
        Those that stay call `tell_changes` then.

        Raises:
            SystemExit: on ranks that leave, and on all if too few would be left.
        """
        began, processes = time.monotonic(), self._processes
        own = (processes.own if self.preemption_notice.given else None, self._sees_joiners())
        asked, seen = zip(*self._job.communicator.all_gather_object(own, "change of members"), strict=True)
        self.pending = self.pending.union(*seen)
        leaving = [rank for rank in asked if rank is not None]
        left = [rank for rank in processes.ranks if rank not in leaving]
        if not leaving:  # it has died meanwhile
            return
        if len(left) < self._policy.min_ranks:
            if processes.topology.rank == 0:
                logger.warning(too_few_left(leaving, processes.pids, left, self._policy.min_ranks))
            self._job.exit_from_job(TERMINATED)
        lost = self._let_leave(leaving)
        self._follow(lost=lost, left=leaving)
        if lost:
            self._warn_of(lost, began)
        if processes.topology.rank == 0:
            logger.warning(who_left(leaving, processes.pids, processes.ranks, self._job_without(leaving)))

    def _let_leave(self, leaving: Sequence[int]) -> list[int]:
        """Leave the job, or go on without those that do; returns ranks that were lost meanwhile.

        Raises:
            SystemExit: on ranks that leave.
        """
        peers, wait = self._peers_here(), Wait("membership", self._job.failure_detector)
        lost: list[int] = []
        if isinstance(self._membership, Mesh):
            gone = self._agree(wait, leaving)
            assert gone is not None
            lost = [rank for rank in gone if rank not in leaving]
        if self._processes.own in leaving:
            peers.own.leave()
            if (places := slots()) is not None:
                places.leave(self._processes.slot)
            if self.slot is not None:
                self.slot.leave()
            self._job.exit_from_job(0)
        if isinstance(self._membership, Membership):
            # The next barriers do not wait for those that leave, which may still read what was gathered. They leave one
            # by one, and that some have left is no failure of this wait.
            wait.until(
                partial(peers.are_gone, leaving),
                lambda: leaving,
                lambda: "ranks that leave the job",
                receiving=lambda rank: True,
            )
            self._membership.drop(leaving)
        return lost

    def end_if_all_are_told(self) -> None:
        """End this process if all of the job are told to: one that takes no steps would have no other occasion.

        Raises:
            SystemExit: it ends.
        """
        if self.preemption_notice.given:
            places = self.slot or slots()
            if places is not None and places.is_ending:
                self._job.exit_from_job(TERMINATED)

    # Joining (core/elastic/joining.py) --------------------------------------------------------------------

    def extend(
        self,
        everyone: Sequence[SlotOwner],
        joined: Sequence[int],
        others: Sequence[Liveness],
        view: int,
        renew: Callable[[FailureDetector], None],
    ) -> None:
        """Go on with further members, as all have agreed; nothing of this fails.

        Args:
            everyone: all members from now on, in the order of their slots; `processes` knows them.
            joined: world ranks of those that were none before.
            others: liveness of those others that share memory with this process.
            view: number of the view, on one host.
            renew: lets all communicators go on with everyone.
        """
        peers, membership, detector = self._peers_here(), self._membership, self._job.failure_detector
        assert membership is not None
        assert detector is not None
        peers.add([peer for peer in others if peer.rank not in peers.others])
        for _, rank, _ in everyone:
            entry = self._processes.entries[rank]
            detector.add(rank, Peer(entry.host, entry.pid, entry.domain))
        if isinstance(membership, Membership):
            membership.extend([one.world_rank for one in everyone], view)
        renew(detector)
        self._follow(joined=joined)
        if isinstance(membership, Mesh) and self._processes.own not in joined:
            for rank in joined:
                membership.note_joined(rank)

    # The script's functions -------------------------------------------------------------------------

    def tell_changes(self) -> None:
        """Tell the script of ranks that were lost; called where all ranks are at the same place, outside of operations.

        An exception of its own functions is told to the other ranks.
        """
        told = list(self.changes.untold)
        self._call_back(self.changes.tell)
        if self._first_changes is None and any(self._processes.own in change.joined for change in told):
            self._first_changes = told, self._job.operations()

    def add_change_callback(self, callback: Callable[[MembershipChange], object]) -> None:
        """Call a function at each change from now on.

        In a process that has just joined also at those that it was told meanwhile: its script may add the function
        behind the place at which it joined, where the members' scripts have added it long ago.
        """
        self.changes.add(callback)
        if self._first_changes is not None and self._first_changes[1] == self._job.operations():
            missed, _ = self._first_changes
            for change in missed:
                self._call_back(partial(callback, change))
            self._first_changes = missed, self._job.operations()

    def _call_back(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self._job.communicator.interrupt("a function given to on_membership_change", error)
            raise

    def close(self) -> None:
        """Leave the job."""
        self.preemption_notice.close()
        if self.mesh is not None:
            self.mesh.close()

    def detach_after_fork(self) -> None:
        """In a forked child: disturb neither the parent nor its peers."""
        if self._leader_failover is not None:
            self._leader_failover.detach_after_fork()
        if self.mesh is not None:
            self.mesh.detach_after_fork()


def _announced(peers: LocalPeers, rank: int) -> dict[str, Any] | None:
    """Where a rank of this host listens in the place of rank 0, None if it has not said so."""
    peer = peers.own if rank == peers.own.rank else peers.others.get(rank)
    found: dict[str, Any] | None = json.loads(peer.announced) if peer is not None and peer.announced else None
    return found
