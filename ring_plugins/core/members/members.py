"""The ranks of a job change while it runs: some are lost, some leave on SIGTERM, others join.

Each change ends in the same way. Over connections of their own (control/mesh.py), all members agree on the next *view*,
which says who is a member. Then each process updates what it has of the job: communicators, topology, and last the
script's functions, which are called where all ranks are at the same place. The changes differ in how they begin:

- **A loss** is found in the middle of an operation, by everyone who waits in it. The communicator agrees with the
  others through `agree`, and repeats the operation (collectives/recovery.py).
- **A rank that is to leave** says so in the next pass of gradients (`wants_change`). So does a rank that sees a joiner
  wait. After that pass, outside of operations, all call `change_members`: ranks leave, and all note who waits
  (`pending`).
- **A process that waits** joins where the script lets it (core/joining/join.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.log import logger, set_rank
from ring_plugins.core.base.member import Members
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.recovery import JobRecovery
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.liveness import LocalPeers
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.members.changes import (
    ChangeCallbacks,
    MembershipChange,
    too_few_left,
    who_is_gone,
)
from ring_plugins.core.members.join_descriptors import joiners_here
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.members.preemption_notice import TERMINATED, PreemptionNotice
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.observe.leader_failover import LeaderFailover
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.rendezvous.slots import OwnSlot, State


class Job(Protocol):
    """The parts of a `World` that change with its ranks."""

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
        members: of that.
        peers: those of this host, if they share memory.
        policy: what the user chose.
        slot: this process's row in the slot table, which the supervisor of its host reads; None if there is no table.

    Attributes:
        pending: slots of processes that wait to join, as all ranks have agreed; `joining.admit` lets them join.
        changes: the script's callbacks for changes of the ranks.
        preemption_notice: whether this process was told to end, if the job goes on without it then.
        slot: as given.
        recovery: how communicators go on without lost ranks.
        averages: whether the script has made what averages gradients, whose passes carry `wants_change` to all ranks.
        passes: how many passes have carried it.
        widest: among how many ranks at most the script averages gradients. Passes among fewer, in groups, carry
            nothing: some ranks would know in this step, and the others in the next one.
        exchanges: how many exchanges of weights the script has made that carry `wants_change` in place of passes, and
            come seldom (core/gradients/local_updates.py).
        is_ending: whether all ranks know, since the same place, that the job is to end as a whole.
        mesh: who the members are, and the connections to them; None in a job that does not go on after losses.
    """

    def __init__(
        self, job: Job, members: Members, peers: LocalPeers | None, policy: FailurePolicy, slot: OwnSlot | None
    ) -> None:
        self._job, self._members, self._peers, self._policy = job, members, peers, policy
        self.slot = slot
        self.recovery = JobRecovery(self.agree, policy.replaces)
        self.pending: frozenset[int] = frozenset()
        self.changes = ChangeCallbacks()
        self.averages = False
        self.passes, self._passes_asked, self.widest, self.exchanges = 0, -1, 0, 0
        self.is_ending = False
        self._followed = members.topology  # by all that this process has of the job
        #: In a process that has joined, the changes that its script was told first, and how many operations it had
        #: finished then; None in all others, and before that.
        self._first_changes: tuple[list[MembershipChange], int] | None = None
        self.preemption_notice = PreemptionNotice()
        self.mesh: Mesh | None = None
        self._slots_here: dict[int, int] = {}  # of processes of this host that wait, by world rank

    def begin(self, listener: Listener, joined: Mesh | None = None) -> list[Any]:
        """From now on, the loss of a rank does not end the job; collective.

        Args:
            listener: connects the ranks.
            joined: the connections of a process that has joined the job.

        Returns:
            A service for the monitor thread, if this rank needs one.
        """
        detector, channel, observers = self._job.failure_detector, self._job.channel, self._job.observers
        assert detector is not None
        assert channel is not None
        assert observers is not None
        mesh = self.mesh = joined or self.new_mesh()
        if joined is None:
            mesh.connect(listener, Wait("ring", detector))
        detector.go_on_with(mesh)
        self.recovery.confirmations = mesh if mesh.confirms else None
        if channel.rank == 0:
            return []
        return [LeaderFailover(channel, observers.stalls, observers.members)]

    def new_mesh(self, committed: int = 0) -> Mesh:
        """This rank's connections to the members; arguments as of `Mesh`."""
        # `ring run -H` may have started all ranks on one other host, and others may join on further ones.
        has_supervisor = self._policy.replaces and self.slot is not None and self.slot.has_supervisor
        confirms = self._members.topology.num_nodes > 1 or has_supervisor
        on_left_out = partial(self.slot.note, State.EXCLUDED) if self.slot is not None else lambda: None
        least = self._policy.min_ranks
        assert self._job.channel is not None
        admits = self._policy.replaces
        return Mesh(self._members, self._job.channel, self._peers, least, committed, confirms, admits, on_left_out)

    @property
    def view(self) -> int:
        """How often the ranks of the job have changed."""
        return self._members.view

    # Each change --------------------------------------------------------------------------------------

    def agree(self, wait: Wait | None = None, leaving: Sequence[int] = (), joining: Sequence[int] = ()) -> None:
        """Agree with the others on the members; all communicators go on with these.

        Args:
            wait: of the communicator that has found a loss; None outside of operations.
            leaving: ranks that are to leave, as all know.
            joining: a process for which this rank is prepared. If it joins, `follow_joined` is next.

        Raises:
            PeerFailed: too few are left, or a rank has failed by an exception meanwhile.
            SystemExit: this rank leaves.
        """
        began, detector = time.monotonic(), self._job.failure_detector
        assert self.mesh is not None
        assert detector is not None
        try:
            gone = self.mesh.agree(wait or Wait("membership", detector), leaving, joining)
        except PeerFailed:
            detector.aborted = True
            raise
        if self._members.own in leaving:
            if self._peers is not None:
                self._peers.own.leave()
            if self.slot is not None:
                self.slot.note(State.LEFT)
            self._job.exit_from_job(0)
        if gone is None or not (gone or wait):  # None: this rank finds it in its next operation, as others do
            return
        self._follow(began, [rank for rank in gone if rank not in leaving], leaving)

    def _follow(
        self, began: float, lost: Sequence[int] = (), left: Sequence[int] = (), joined: Sequence[int] = ()
    ) -> None:
        """Update what this process has of the job after members died, left or joined; rank 0 logs losses.

        Args:
            began: when the agreement on that did.
            lost, left, joined: world ranks.
        """
        members = self._members
        for communicator in self._job.recovering_communicators().values():
            communicator.keep(members.ranks, members.view)
        if not lost and not left and not joined:
            return
        before, self._followed = self._followed, members.topology
        after = members.topology
        size_before = after.size + len(lost) + len(left) - len(joined)
        set_rank(after.rank)
        if self.slot is not None:
            for rank in lost:
                self.slot.note_lost(rank)
        gone = tuple(lost), before.rank, size_before
        self.changes.untold.append(MembershipChange(*gone, after.rank, after.size, tuple(left), tuple(joined)))
        if after.rank == 0 and (lost or left):
            seconds, shows_hosts = time.monotonic() - began, self.mesh is not None and self.mesh.confirms
            logger.warning(who_is_gone(members, lost, left, self._policy.replaces, seconds, shows_hosts))

    # Leaving on SIGTERM, and who waits to join ------------------------------------------------------

    @property
    def wants_change(self) -> bool:
        """Whether this process was told to end, or sees that others wait to join: all ranks are to know."""
        notice = self.preemption_notice
        return ((notice.given or notice.of_job) and not self.is_ending) or bool(self._sees_joiners())

    @property
    def is_pending(self) -> bool:
        """Whether processes wait to take the places of lost ranks."""
        return any(slot < self._members.shards for slot in self.pending)

    @property
    def may_grow(self) -> bool:
        """Whether the job may get added ranks."""
        return self._policy.max_ranks > 0

    @property
    def is_added(self) -> bool:
        """Whether this process has yet to join, in a slot that nobody has had: the job grows by it."""
        return self._job.is_joining and self._members.is_added

    def _sees_joiners(self) -> set[int]:
        """Slots of pending joiners that this rank has seen but not yet announced to the others."""
        places = self.slot if self._policy.replaces and not self._job.is_joining else None
        if places is None or not places.has_waiting():
            return set()
        waiting = {one.rank for one in places.waiting()}
        if not waiting <= self._slots_here.keys():  # one that waits for the next epoch is seen in each step
            self._slots_here |= {one.rank: one.slot for one in joiners_here(places)}
        seen = {self._slots_here[rank] for rank in waiting & self._slots_here.keys()}
        elsewhere = {one.slot for one in places.remote_joiners()}.difference(self._members.taken_slots)
        return (seen | elsewhere) - self.pending

    def change_members(self) -> None:
        """Let ranks leave that were told to end, and note whether others wait to join.

        All ranks call this where they are at the same place, outside of operations, if one of them `wants_change`.
        Those that stay call `tell_changes` then.

        Raises:
            SystemExit: on ranks that leave, and on all if too few would be left and nobody asks for `is_ending`.
        """
        if self.mesh is None:  # the job does not go on without a rank
            self.is_ending = True
            return
        members, notice = self._members, self.preemption_notice
        own = (members.own if notice.given and not self.is_ending else None, self._sees_joiners(), notice.of_job)
        asked, seen, of_job = zip(*self._job.communicator.all_gather_object(own, "change of members"), strict=True)
        self.pending = self.pending.union(*seen)
        leaving = [rank for rank in asked if rank is not None]
        left = [rank for rank in members.ranks if rank not in leaving]
        if any(of_job):
            self.is_ending = True
        if not leaving or self.is_ending:  # not leaving: it has died meanwhile
            return
        if len(left) < self._policy.min_ranks:
            if members.topology.rank == 0:
                logger.warning(too_few_left(leaving, left, members, self._policy.min_ranks))
            if not notice.is_asked:
                self._job.exit_from_job(TERMINATED)
            self.is_ending = True
            return
        self.agree(leaving=leaving)

    def is_preempted(self) -> bool:
        """Whether the job is to end as a whole, so that the script saves and leaves; the same answer on all ranks.

        Passes of gradients since the last call have told it. If there was none, this is collective. Where only groups
        average gradients, each group has an answer of its own. Where hosts exchange weights, exchanges tell it.

        Raises:
            SystemExit: this rank leaves, and the others go on.
        """
        self.preemption_notice.ask()
        if self.exchanges:
            return self.is_ending
        if self.mesh is None and self.widest == 1:  # this rank is a group, in which nothing is averaged
            self.is_ending |= self.wants_change
        elif self.passes == self._passes_asked and not self.is_ending:
            wants_change = np.array([self.wants_change], np.int64)
            with purpose("preempted"):
                self._job.communicator.all_reduce(HostMemory(wants_change, "int64"), Op.MAX)
            if wants_change[0]:
                self.change_members()
                self.tell_changes()
        self._passes_asked = self.passes
        return self.is_ending

    def end_if_all_are_told(self) -> None:
        """End this process if all ranks were told to end: one that takes no steps would have no other occasion.

        Raises:
            SystemExit: it ends.
        """
        notice = self.preemption_notice
        if notice.given and not notice.is_asked and self.slot is not None and self.slot.is_ending:
            self._job.exit_from_job(TERMINATED)

    # Joining (core/joining/join.py) --------------------------------------------------------------------

    def follow_joined(self, joined: Sequence[int]) -> None:
        """Go on with the ranks that have joined, as all have agreed; this cannot fail.

        Args:
            joined: world ranks of the new members.
        """
        self._follow(time.monotonic(), joined=joined)
        assert self.mesh is not None
        for rank in joined if self._members.own not in joined else ():
            self.mesh.note_joined(rank)

    # The script's functions -------------------------------------------------------------------------

    def tell_changes(self) -> None:
        """Tell the script of ranks that were lost; called where all ranks are at the same place, outside of operations.

        An exception of its own functions is told to the other ranks.
        """
        told = list(self.changes.untold)
        self._call_back(self.changes.tell)
        if self._first_changes is None and any(self._members.own in change.joined for change in told):
            self._first_changes = told, self._job.operations()

    def add_change_callback(self, callback: Callable[[MembershipChange], object]) -> None:
        """Call a function at each change from now on.

        A process that has just joined calls it for the changes since its join as well: its script may add the function
        after the place at which it joined, while the members' scripts added theirs long ago.
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
        if self.mesh is not None:
            self.mesh.detach_after_fork()
