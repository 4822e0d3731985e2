"""The job that this process belongs to: joining it, communicating in it, leaving it.

`init` finds the other processes (core/rendezvous) and makes the `World`. In the world's first exchange every rank says
where it is and how to detect its failure. From that follow which ranks share memory, the control channel to rank 0,
the failure detector, and the monitor thread with its services. The first communicator, of all ranks, comes last.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ring_plugins.core import exit_hooks
from ring_plugins.core.arrays.result_memory import kept_results
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import (
    ArgumentError,
    LaunchError,
    NotInitialized,
    PeerFailed,
    SharedMemoryError,
)
from ring_plugins.core.base.log import logger, set_rank
from ring_plugins.core.collectives.api import Activity, Communicator
from ring_plugins.core.collectives.healing import HealingCommunicator
from ring_plugins.core.collectives.host import Gather, HostCommunicator
from ring_plugins.core.collectives.messages import Messenger
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.control import ControlClient, ControlServer
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector, Peer
from ring_plugins.core.control.liveness import MOST_MEMBERS, Liveness, LocalPeers
from ring_plugins.core.control.membership import Membership
from ring_plugins.core.control.mesh import Mesh, MeshPeer
from ring_plugins.core.control.monitor import MonitorThread
from ring_plugins.core.control.tcp_liveness import TcpLiveness
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu import load_driver, load_nccl
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gpu.connection import choose_interface
from ring_plugins.core.gpu.stream import Streams
from ring_plugins.core.gpu.watchdog import GpuWatchdog
from ring_plugins.core.healing import (
    ChangeCallbacks,
    FailurePolicy,
    MembershipChange,
    check_policies,
    prepare_to_continue,
    too_few_left,
    what_was_lost,
    who_left,
)
from ring_plugins.core.join_offers import newcomers_here
from ring_plugins.core.leaving import TERMINATED, Notice
from ring_plugins.core.linux import thread_count
from ring_plugins.core.linux.interfaces import own_addresses
from ring_plugins.core.linux.malloc import keep_freed_memory
from ring_plugins.core.linux.shared_memory import is_available, shared_memory_domain
from ring_plugins.core.net.tcp import TcpTransport
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.observe.succession import Announcements, Succession
from ring_plugins.core.observe.timeline import FILE_NAME
from ring_plugins.core.rendezvous import Rendezvous, connect, detect, leave
from ring_plugins.core.rendezvous.claim import RankMarker, check_ancestors
from ring_plugins.core.rendezvous.seats import Occupant, OwnSeat, own_seat
from ring_plugins.core.rendezvous.spawn import seats
from ring_plugins.core.rendezvous.topology import find_topology, virtual_nodes

_NOTHING = contextlib.nullcontext()


def _announced(peers: LocalPeers, rank: int) -> dict[str, Any] | None:
    """Where a rank of this host listens in the place of rank 0, None if it has not said so."""
    peer = peers.own if rank == peers.own.rank else peers.others.get(rank)
    found: dict[str, Any] | None = json.loads(peer.announced) if peer is not None and peer.announced else None
    return found


class _Member(NamedTuple):
    """A rank's entry in the first exchange of the job, which may travel as JSON.

    Attributes:
        domain: its shared-memory domain.
        host, pid: name of its host, and process id there.
        liveness: address of its liveness segment; None where memory cannot be shared.
        server: address of the control server, with its secret, from rank 0; None from the others.
        addresses: of its host; empty if all ranks are on one host.
        records: whether rank 0 writes a timeline of the whole job.
        kernel, container, cores, quota: as in `thread_count.Cores`.
        policy: its `FailurePolicy`.
    """

    domain: str
    host: str
    pid: int
    liveness: list[int] | None
    server: dict[str, Any] | None
    addresses: list[str]
    records: bool
    kernel: str
    container: str
    cores: str
    quota: float | None
    policy: list[Any]


class World:
    """A connected job. `init` makes it; a process has one at a time.

    Attributes:
        topology: rank, host and counts of this process; new when ranks are lost.
        world_rank: the rank with which this process started.
        world_ranks: of all ranks that are left, those with which they started.
        heals: whether the job goes on when ranks are lost.
        replaces: whether other processes take the places of those.
        is_joining: whether this process is to take such a place, and has not yet.
        awaited: seats of processes that wait to join, as all ranks have agreed; `joining.admit` lets them join.
        shares, past_shares: into how many shares data is divided, one for each seat that has ever had a member, and all
            such numbers that this process has seen.
        changes: the script's functions that are to hear of that.
        notice: whether this process was told to end, if the job goes on without it then.
        has_left: whether it has left the job before its end, as others had agreed.
        communicator: of all ranks, for the public functions.
        launcher: "mpi", "rendezvous", "spawned" or "single".
        failure_detector, channel, observers: the failure detector, the control channel, and the observing services;
            None in a job of one rank.
    """

    def __init__(self, rendezvous: Rendezvous, launcher: str, policy: FailurePolicy) -> None:
        self._rendezvous, self._policy = rendezvous, policy
        self._pid = os.getpid()
        self.is_joining = policy.replaces and config.JOINS.is_set()
        self.world_rank = config.JOINS.get() if self.is_joining else rendezvous.rank
        self.world_ranks = (self.world_rank,) if self.is_joining else tuple(range(rendezvous.size))
        self.heals = policy.continues and rendezvous.size > 1
        self.replaces = policy.replaces and self.heals
        self.has_left = False
        self.awaited: frozenset[int] = frozenset()
        self.shares, self.past_shares = rendezvous.size, {rendezvous.size}
        self.changes = ChangeCallbacks()
        #: In a process that has joined, the changes that its script was told first, and how many operations it had
        #: finished then; None in all others, and before that.
        self._first_changes: tuple[list[MembershipChange], int] | None = None
        self._membership: Membership | Mesh | None = None
        self._succession: Succession | None = None
        self._in_collective = threading.RLock()
        self.notice = Notice()
        self.launcher = launcher
        record = detect()
        self._started_by = "this script" if record.kind == "single" else record.by
        self._closed = False
        self.failure_detector: FailureDetector | None = None
        self.channel: Channel | None = None
        self.observers: Observers | None = None
        self._monitor: MonitorThread | None = None
        #: Communicators still in use, by creation order, which is the same on all ranks.
        self._communicators: weakref.WeakValueDictionary[int, Communicator[Any]] = weakref.WeakValueDictionary()
        self._made = 0
        self._of_devices: dict[int, DeviceCommunicator] = {}
        self._messenger: Messenger | None = None
        self._seat = own_seat() if rendezvous.size > 1 else None
        try:
            self._connect_alone() if self.is_joining else self._connect()
        except BaseException as error:
            self._give_up(error)
            raise

    def _connect(self) -> None:
        rendezvous = self._rendezvous
        rank, size = rendezvous.rank, rendezvous.size
        own = Liveness.create(rank) if size > 1 and is_available() else None
        most = MOST_MEMBERS if self._policy.replaces else 0
        server = ControlServer(size, rendezvous.addresses, most) if size > 1 and rank == 0 else None
        members = self._introduce(own, server)
        self._server: dict[str, Any] = members[0].server or {}
        self._secret = str(self._server.get("secret", "")).encode()
        domains = [member.domain for member in members]
        nodes = virtual_nodes(domains, config.VIRTUAL_NODES.get())
        if len(set(nodes)) > 1 and rendezvous.transport is None:
            raise LaunchError(
                "RING_VIRTUAL_NODES needs a launcher that connects hosts: start the job with mpirun or torchrun."
            )
        hosts = [member.host for member in members]
        self.topology = find_topology(rank, nodes, hosts)
        self._node_of_seat = nodes
        if any(member.policy[0] for member in members):
            shares_memory = len(set(nodes)) == 1 and all(member.liveness for member in members)
            uses_sockets = isinstance(rendezvous.transport, TcpTransport) and all(one.liveness for one in members)
            policies = [member.policy for member in members]
            check_policies(
                policies, shares_memory or size == 1, uses_sockets, self.topology.summary, self._seat is not None
            )
        self._cores = [thread_count.Cores(one.kernel, one.container, one.cores, one.quota) for one in members]
        self._local_peers = self._watch_local_peers(own, members) if any(one.liveness for one in members) else None
        self._tags = itertools.count(rank, max(size, most))  # no two ranks ever offer the same
        #: By world rank, those that are lost among them.
        self._members, self._nodes = dict(enumerate(members)), dict(enumerate(nodes))
        self._seats = {one: one for one in range(size)}
        if size > 1:
            self._monitor = self._make_monitor(server, members)
            # Before the last exchange, so that no rank's script goes on while another rank is not yet watched.
            self._monitor.start()
        if self.heals:
            self._follow_losses()
        self.communicator = self.new_communicator("ring", gather=rendezvous.gather)
        self._rank_marker = RankMarker(rank) if size > 1 else None
        if self.heals:
            self.notice.install()
        if self._seat is not None:
            self._write_card(hosts)
            self._seat.take_part(rank, own.address if own is not None else (0, 0, 0))
        if self.replaces and own is not None and (places := seats()) is not None:
            places.take(Occupant(rank, rank, own.address), as_member=True)

    def _write_card(self, hosts: Sequence[str]) -> None:
        """Write down what a process that takes the place of a rank of this host needs until it has joined."""
        if self.replaces and self._seat is not None and self.transport is not None:
            names = list(dict.fromkeys(self._node_of_seat))
            nodes = [names.index(node) for node in self._node_of_seat]
            where = {"secret": self.transport.listener.secret, "address": self.transport.address}
            self._seat.write_card({**where, "nodes": nodes, "hosts": list(hosts), "cores": self._cores})

    def _connect_alone(self) -> None:
        """Be a job of one that looks like one of all seats, until it joins: the others do not wait for this process."""
        seat, size = self._rendezvous.rank, self._rendezvous.size
        own = Liveness.create(self.world_rank)
        where = socket.gethostname() if self._seat is not None else ""
        self._local_peers = LocalPeers(own, [], where, self._policy.min_ranks)
        self._secret = b""
        self._tags = itertools.count(self.world_rank, MOST_MEMBERS)
        member = self._entry(own, None)
        node = member.domain
        rank = self.world_rank
        nodes, hosts = [node] * size, [member.host] * size
        self._cores = [thread_count.Cores(member.kernel, member.container, member.cores, member.quota)] * size
        if self._seat is not None:
            card = self._seat.read_card()
            nodes, hosts = [f"{node}/{number}" for number in card["nodes"]], card["hosts"]
            self._cores = [thread_count.Cores(*one) for one in card["cores"]]
        self._members, self._nodes, self._seats = {rank: member}, {rank: nodes[seat]}, {rank: seat}
        self._node_of_seat = nodes
        self.topology = find_topology(seat, nodes, hosts)
        self.communicator = self.new_communicator("ring", gather=lambda item: [item])
        self._rank_marker = RankMarker(self.world_rank)

    def _follow_losses(self, joined: Mesh | None = None) -> None:
        """From now on, the loss of a rank does not end the job; collective.

        Args:
            joined: the connections of a process that has joined a job on several hosts.
        """
        peers, detector = self._local_peers, self.failure_detector
        assert peers is not None
        assert detector is not None
        assert self._monitor is not None
        assert self.observers is not None
        membership: Membership | Mesh
        has_supervisor = self._seat is not None and self.replaces  # of the only host, which is another one
        if joined is None and (self.is_joining or (self.topology.num_nodes == 1 and not has_supervisor)):
            self._membership = membership = Membership(peers)
            announcements = Announcements(
                lambda address: peers.own.announce(json.dumps(address)), lambda rank: _announced(peers, rank)
            )
        else:
            mesh = self._membership = joined or self._new_mesh(peers)
            if self._seat is not None:
                mesh.on_cut_off = self._seat.note_cut_off
            if joined is None:
                mesh.connect(Wait("ring", detector))
            detector.go_on_over(mesh)
            membership = mesh
            announcements = Announcements(mesh.announce, mesh.announced.get)
        if isinstance(self.channel, ControlClient):
            stalls, everyone = self.observers.stalls, self.observers.membership
            own = self.addresses() if isinstance(membership, Mesh) else []
            self._succession = Succession(self.channel, stalls, everyone, lambda: membership.ranks, announcements, own)
            self._monitor.add(self._succession)

    def _new_mesh(self, peers: LocalPeers) -> Mesh:
        transport = self.transport
        assert transport is not None
        ranks = {
            rank: MeshPeer(
                one.host, one.pid, one.domain, transport.peers[rank].address, transport.peers[rank].port, rank
            )
            for rank, one in self._members.items()
        }
        return Mesh(self.world_rank, ranks, transport.listener, peers, self._policy.min_ranks)

    def _give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not join, because of an exception, and close what is open."""
        self._closed = True
        if self.failure_detector is not None:
            self.failure_detector.fail(error)
        if self._monitor is not None:
            self._monitor.close()
        self._rendezvous.close()

    def _introduce(self, own: Liveness | None, server: ControlServer | None) -> list[_Member]:
        """Exchange all ranks' entries; returns them in rank order."""
        return [_Member(*item) for item in self._rendezvous.gather(self._entry(own, server))]

    def _entry(self, own: Liveness | None, server: ControlServer | None) -> _Member:
        return _Member(
            shared_memory_domain(),
            socket.gethostname(),
            os.getpid(),
            list(own.address) if own else None,
            server.address if server else None,
            own_addresses() if self._rendezvous.transport is not None else [],
            config.TIMELINE.is_set(),
            *thread_count.own_cores(),
            list(self._policy),
        )

    def _watch_local_peers(self, own: Liveness | None, members: Sequence[_Member]) -> LocalPeers | None:
        """Map the liveness segments of this host's ranks; collective.

        Raises:
            SharedMemoryError: on all ranks, if one cannot.
            LaunchError: a rank has ended, which is why its segment could not be mapped.
        """
        rank = self._rendezvous.rank
        domain, host = members[rank].domain, members[rank].host
        others, problem = [], ""
        try:
            for other, member in enumerate(members):
                if other != rank and member.domain == domain and member.liveness:
                    pid, fd, nbytes = member.liveness
                    others.append(Liveness.open((pid, fd, nbytes), other))
        except SharedMemoryError as error:
            problem = f"rank {rank} on {host} {error}"
        # No rank leaves before all have mapped its segment, and a rank that did leave is noticed here.
        problems = [text for text in self._rendezvous.gather(problem) if text]
        if problems:
            raise SharedMemoryError(problem or problems[0])
        if own is None:
            return None
        where = host if any(member.domain != domain for member in members) else ""
        return LocalPeers(own, others, where, self._policy.min_ranks)

    def _make_monitor(self, server: ControlServer | None, members: Sequence[_Member]) -> MonitorThread:
        """Set up what runs beside the job: control channel, failure detector, and the monitor thread's services."""
        rank, size = self._rendezvous.rank, self._rendezvous.size
        domains = [member.domain for member in members]
        if server is not None and len(set(domains)) == 1:
            server.only_this_host()
        address = members[0].server
        assert address is not None
        self.channel = server or ControlClient(rank, size, address, domains[0] == domains[rank])
        membership = [Peer(member.host, member.pid, member.domain) for member in members]
        self.failure_detector = FailureDetector(rank, membership, self._local_peers, self.channel)
        self.observers = Observers(self.channel, self.failure_detector, self.activities, members[0].records)
        launched = self.launcher in ("mpi", "spawned") or "TORCHELASTIC_RUN_ID" in os.environ or self._seat is not None
        monitor = MonitorThread(self.failure_detector, self.channel, launched, self.abort)
        monitor.add(GpuWatchdog(self.failure_detector, self.device_communicators), vital=True)
        monitor.add(TcpLiveness(self.failure_detector, [member.addresses for member in members]), vital=True)
        for service in self.observers.services:
            monitor.add(service)
        return monitor

    def new_communicator(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        gather: Gather | None = None,
        check_gather: Callable[[], object] = lambda: None,
    ) -> Communicator:
        """A new communicator, whose operations have an order of their own; all members call this.

        Args:
            name: for messages.
            ranks: world ranks of the members, all by default.
            gather: returns every member's payload; by default over `communicator`, which needs all ranks.
            check_gather: raises if a member has been interrupted in `gather`, and does not come.

        Raises:
            ArgumentError: `ranks` are not distinct ranks of this job.
        """
        size = len(self.world_ranks)
        members = self.world_ranks if ranks is None else tuple(ranks)
        if len(set(members)) != len(members) or not set(members) <= set(self.world_ranks):
            raise ArgumentError(f"ranks={list(members)} are not distinct ranks of a job of {size}.")
        if len(members) != size:
            self.refuse_to_heal(f"{name}, a group of some ranks,")
        if gather is None and len(members) != size:
            raise ArgumentError(
                f"ranks={list(members)} are only some of the job's {size}; pass gather, which exchanges "
                "payloads among them."
            )
        if len(members) == 1 and not self.replaces:
            communicator: Communicator = SingleCommunicator(name, members[0])
        else:
            with on_all_or_none(self.communicator, f"the construction of {name}") if gather is None else _NOTHING:
                communicator = (HealingCommunicator if self.heals else HostCommunicator)(
                    name,
                    self.world_rank,
                    self._nodes[self.world_rank],
                    2 * next(self._tags),
                    gather or self.communicator.all_gather_object,
                    self.failure_detector,
                    self._rendezvous.transport,
                    check_gather if gather else self.communicator.check,
                )
            if isinstance(communicator, HealingCommunicator):
                confirmations = self._membership if isinstance(self._membership, Mesh) else None
                communicator.go_on_after(self._go_on_without, self._in_collective, self.replaces, confirmations)
        self._keep(communicator)
        return communicator

    def _keep(self, communicator: Communicator[Any]) -> None:
        self._communicators[self._made] = communicator
        self._made += 1

    # Going on without ranks that were lost --------------------------------------------------------

    def refuse_to_heal(self, what: str) -> None:
        """Refuse what would not survive the loss of a rank, in a job that is to go on after one.

        Args:
            what: begins the error's text, "Keras" for example.

        Raises:
            ArgumentError: on_failure is "continue".
        """
        if self.heals:
            raise ArgumentError(
                f'{what} does not support on_failure="{self._policy.on_failure}" yet: leave it out, and unset '
                f"{config.ON_FAILURE.name}. The first rank that fails then ends the job."
            )

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many shares of the data is this rank's: that of its seat, if lost ranks are replaced."""
        if self.replaces:
            return self._rendezvous.rank, self.shares
        return self.topology.rank, self.topology.size

    @property
    def view(self) -> int:
        """How often the ranks of the job have changed."""
        return self._membership.view if self._membership is not None else 0

    def _go_on_without(self, wait: Wait) -> None:
        """Agree with the other survivors on who is left, and let all communicators go on with them.

        Raises:
            PeerFailed: too few are left, or a rank has failed by an exception meanwhile.
        """
        began = time.monotonic()
        lost = self._agree(wait)
        if lost is None:  # this rank finds it in its next operation, as others do
            return
        self._follow_members(lost=lost)
        if lost:
            self._warn_of(lost, began)

    def _agree(self, wait: Wait, leaving: Sequence[int] = (), joining: Sequence[int] = ()) -> list[int] | None:
        """As `Mesh.agree`, also on one host, where it knows nothing of ranks that leave."""
        assert self._membership is not None
        assert self.failure_detector is not None
        try:
            if isinstance(self._membership, Mesh):
                return self._membership.agree(wait, leaving, joining)
            return self._membership.agree(wait)
        except PeerFailed:
            self.failure_detector.aborted = True
            raise

    def _warn_of(self, lost: Sequence[int], began: float) -> None:
        """Tell the user of lost ranks, and of an agreement that began then, on one rank."""
        if self.topology.rank == 0:
            silent = [rank for rank in lost if isinstance(self._membership, Mesh) and self._membership.was_silent(rank)]
            names = {rank: member.host for rank, member in self._members.items()}
            hosts = names if isinstance(self._membership, Mesh) else None
            seconds = time.monotonic() - began
            logger.warning(
                what_was_lost(lost, self.pids, self.world_ranks, self._job_without(lost), seconds, silent, hosts)
            )

    def _follow_members(self, lost: Sequence[int] = (), left: Sequence[int] = (), joined: Sequence[int] = ()) -> None:
        """Let all that this process has of the job follow its members, of which some died, left or joined."""
        assert self._membership is not None
        self.world_ranks = self._membership.ranks
        for communicator in self._in_use():
            if isinstance(communicator, HealingCommunicator):
                communicator.keep(self.world_ranks, self._membership.view)
        if not lost and not left and not joined:
            return
        before, size_before = self.topology, len(self.world_ranks) + len(lost) + len(left) - len(joined)
        hosts = [self._members[rank].host for rank in self.world_ranks]
        nodes = [self._nodes[rank] for rank in self.world_ranks]
        self.topology = find_topology(self.world_ranks.index(self.world_rank), nodes, hosts)
        set_rank(self.topology.rank)
        after = self.topology
        gone = tuple(lost), before.rank, size_before
        change = MembershipChange(*gone, after.rank, after.size, tuple(left), tuple(joined))
        self.changes.untold.append(change)
        if self.channel is not None and self.world_rank == 0 and not joined:
            self.channel.tell(0, "ranks_lost", {"ranks": [*lost, *left]})

    def _job_without(self, ranks: Sequence[int]) -> tuple[int, bool]:
        """How many ranks it had at the most, and whether other processes take the places of these."""
        left = {self._nodes[rank] for rank in self.world_ranks}
        return self.shares, self.replaces and all(self._nodes[rank] in left for rank in ranks)

    @property
    def pids(self) -> dict[int, int]:
        """Of all processes, by world rank."""
        return {rank: member.pid for rank, member in self._members.items()}

    @property
    def wants_change(self) -> bool:
        """Whether this process was told to end, or sees that others wait to join: all ranks are to know."""
        return self.notice.given or bool(self._sees_newcomers())

    @property
    def is_awaited(self) -> bool:
        """Whether processes wait to take the places of lost ranks."""
        return any(seat < self.shares for seat in self.awaited)

    @property
    def may_grow(self) -> bool:
        """Whether the job may get further ranks."""
        return self._policy.max_ranks > 0

    @property
    def is_further(self) -> bool:
        """Whether this process has yet to join, and the job grows by it: nobody has had its seat."""
        places = seats()
        return self.is_joining and places is not None and places.is_new(self._rendezvous.rank)

    def _sees_newcomers(self) -> set[int]:
        """Seats of those that wait to join, and that not all ranks know of."""
        places = (seats() or self._seat) if self.replaces and not self.is_joining else None
        if places is None or not places.has_waiting():
            return set()
        if isinstance(places, OwnSeat):
            return {int(told["seat"]) for _, _, told in newcomers_here(places)} - self.awaited
        return {one.seat for one in places.waiting()} - self.awaited

    def change_members(self) -> None:
        """Let ranks leave that were told to end, and note whether others wait to join.

        All ranks call this where they are at the same place, outside of operations, if one of them `wants_change`.
        Those that stay call `tell_changes` then.

        Raises:
            SystemExit: on ranks that leave, and on all if too few would be left.
        """
        began = time.monotonic()
        own = (self.world_rank if self.notice.given else None, self._sees_newcomers())
        asked, seen = zip(*self.communicator.all_gather_object(own), strict=True)
        self.awaited = self.awaited.union(*seen)
        leaving = [rank for rank in asked if rank is not None]
        left = [rank for rank in self.world_ranks if rank not in leaving]
        if not leaving:  # it has died meanwhile
            return
        if len(left) < self._policy.min_ranks:
            if self.topology.rank == 0:
                logger.warning(too_few_left(leaving, self.pids, left, self._policy.min_ranks))
            self.exit_from_job(TERMINATED)
        lost = self._let_leave(leaving)
        self._follow_members(lost=lost, left=leaving)
        if lost:
            self._warn_of(lost, began)
        if self.topology.rank == 0:
            logger.warning(who_left(leaving, self.pids, self.world_ranks, self._job_without(leaving)))

    def _let_leave(self, leaving: Sequence[int]) -> list[int]:
        """Leave the job, or go on without those that do; returns ranks that were lost meanwhile.

        Raises:
            SystemExit: on ranks that leave.
        """
        membership, peers, wait = self._membership, self._local_peers, Wait("membership", self.failure_detector)
        assert peers is not None
        lost: list[int] = []
        if isinstance(membership, Mesh):
            gone = self._agree(wait, leaving)
            assert gone is not None
            lost = [rank for rank in gone if rank not in leaving]
        if self.world_rank in leaving:
            peers.own.leave()
            if (places := seats()) is not None:
                places.leave(self._rendezvous.rank)
            if self._seat is not None:
                self._seat.leave()
            self.exit_from_job(0)
        if isinstance(membership, Membership):
            # The next barriers do not wait for those that leave, which may still read what was gathered.
            wait.until(partial(peers.are_gone, leaving), lambda: leaving, lambda: "ranks that leave the job")
            membership.drop(leaving)
        return lost

    # Joining (core/joining.py) --------------------------------------------------------------------

    @property
    def local_peers(self) -> LocalPeers:
        """The liveness of all members; before this process has joined, only its own."""
        assert self._local_peers is not None
        return self._local_peers

    def occupants(self) -> list[Occupant]:
        """Who has which seat, this process first."""
        everyone = [self.local_peers.own, *self.local_peers.others.values()]
        return [Occupant(self._seats[one.rank], one.rank, one.address) for one in everyone]

    @property
    def mesh(self) -> Mesh | None:
        """The connections to all other ranks of a job on several hosts that goes on after losses."""
        return self._membership if isinstance(self._membership, Mesh) else None

    @property
    def mesh_peers(self) -> Mapping[int, MeshPeer]:
        """Where all ranks of such a job are, also those that are lost."""
        assert self.mesh is not None
        return self.mesh.peers

    @property
    def transport(self) -> TcpTransport | None:
        """What moves data between hosts, if sockets do."""
        transport = self._rendezvous.transport
        return transport if isinstance(transport, TcpTransport) else None

    @property
    def own_seat(self) -> OwnSeat | None:
        """The row in which this process tells the supervisor of its host how far it is; None on one host."""
        return self._seat

    @property
    def min_ranks(self) -> int:
        """With how many ranks the job goes on."""
        return self._policy.min_ranks

    @property
    def taken_seats(self) -> list[int]:
        """Those of the members."""
        return [self._seats[rank] for rank in self.world_ranks]

    def node_of_seat(self, seat: int) -> str:
        """Key of the real or virtual host to which a seat belongs."""
        return self._node_of_seat[seat]

    def liveness_of(self, rank: int) -> Sequence[int]:
        """The address of a member's liveness segment on its host."""
        return self._members[rank].liveness or ()

    def agree_on_members(self, joining: Sequence[int] = ()) -> None:
        """Agree on the next view of a job on several hosts, outside of operations, and go on without those it lacks.

        Args:
            joining: a process for which this rank is prepared. If it joins, `extend` is next.
        """
        began = time.monotonic()
        assert self.mesh is not None
        lost = self._agree(Wait("membership", self.failure_detector), joining=joining)
        if lost:
            self._follow_members(lost=lost)
            self._warn_of(lost, began)

    def healing_communicators(self) -> dict[int, HealingCommunicator]:
        """Those in use, by creation order."""
        found = sorted(self._communicators.items())
        return {key: one for key, one in found if isinstance(one, HealingCommunicator) and one.is_open}

    def introduction(self) -> dict[str, Any]:
        """What this process tells when it joins, or when others join: JSON can hold it."""
        entry = {"member": list(self._members[self.world_rank])}
        if self.is_joining:
            return entry
        return {
            **entry, "view": self.view, "made": self._made, "server": self._server, "secret": self._secret.decode(),
            "shares": self.shares, "awaited": sorted(self.awaited),
        }  # fmt: skip

    def extend(
        self,
        everyone: Sequence[Occupant],
        told: Mapping[int, Mapping[str, Any]],
        others: Sequence[Liveness],
        renew: Callable[[FailureDetector], None],
        nodes: Mapping[int, str] | None = None,
        mesh: Mesh | None = None,
        take_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on with further members, as all have agreed; nothing of this fails.

        Args:
            everyone: all members from now on, in the order of their seats.
            told: the `introduction` of each by world rank.
            others: liveness of those others that share memory with this process.
            renew: lets all communicators go on with everyone.
            nodes: by world rank, the keys of hosts; None if there is one host.
            mesh: in a process that joins a job on several hosts, its connections.
            take_over: begins to watch those.
        """
        of_members = next(introduction for introduction in told.values() if "view" in introduction)
        is_new = self.is_joining
        joined = [rank for _, rank, _ in everyone if "view" not in told[rank]]
        for seat, rank, _ in everyone:
            self._members[rank] = _Member(*told[rank]["member"])
            self._nodes[rank] = nodes[rank] if nodes is not None else self._nodes[self.world_rank]
            self._seats[rank] = seat
            if nodes is not None:
                self._node_of_seat[seat] = nodes[rank]
        if is_new:
            self._set_up_member(of_members, others, mesh)
        peers, membership, detector = self._local_peers, self._membership, self.failure_detector
        assert peers is not None
        assert membership is not None
        assert detector is not None
        peers.add([peer for peer in others if peer.rank not in peers.others])
        for _, rank, _ in everyone:
            member = self._members[rank]
            detector.add(rank, Peer(member.host, member.pid, member.domain))
        self.shares = max(of_members["shares"], 1 + everyone[-1].seat)
        self.past_shares.add(self.shares)
        if isinstance(membership, Membership):
            membership.extend([one.world_rank for one in everyone], of_members["view"] + 1)
        renew(detector)
        take_over()
        self._follow_members(joined=joined)
        if self.mesh is not None and not is_new:
            for rank in joined:
                self.mesh.note_joined(rank)
        if is_new:
            assert self._monitor is not None
            self._monitor.start()
            self.notice.install()

    def _set_up_member(self, told: Mapping[str, Any], others: Sequence[Liveness], mesh: Mesh | None) -> None:
        """Make what a member has beside its communicators.

        Args:
            told: the `introduction` of a member.
            others: liveness of all other ranks that share memory with this one.
            mesh: as in `extend`.
        """
        peers = self._local_peers
        assert peers is not None
        peers.add(others)
        self._secret, self._server, self._made = told["secret"].encode(), told["server"], told["made"]
        self.awaited = frozenset(told["awaited"])  # who may join later, as all members have agreed
        own = self._members[self.world_rank]
        self.channel = ControlClient(self.world_rank, self._rendezvous.size, self._server, True)
        here = [Peer(own.host, own.pid, own.domain)] * (self.world_rank + 1)
        self.failure_detector = FailureDetector(self.world_rank, here, peers, self.channel)
        self.observers = Observers(self.channel, self.failure_detector, self.activities)
        self._monitor = MonitorThread(self.failure_detector, self.channel, True, self.abort)
        self._monitor.add(self.observers.stalls)
        self._follow_losses(mesh)
        if mesh is not None:
            known = range(max(self._members) + 1)
            addresses = [self._members[rank].addresses if rank in self._members else [] for rank in known]
            self._monitor.add(TcpLiveness(self.failure_detector, addresses), vital=True)
            for communicator in self.healing_communicators().values():
                communicator.go_on_after(self._go_on_without, self._in_collective, self.replaces, mesh)
        self.is_joining = False

    def exit_from_job(self, status: int) -> NoReturn:
        """Leave the job now: what the script still does on its way out is not part of it."""
        self.has_left = True
        self.close()
        sys.exit(status)

    def end_if_all_are_told(self) -> None:
        """End this process if all of the job are told to: one that takes no steps would have no other occasion.

        Raises:
            SystemExit: it ends.
        """
        if self.notice.given:
            places = self._seat or seats()
            if places is not None and places.is_ending:
                self.exit_from_job(TERMINATED)

    def tell_changes(self) -> None:
        """Tell the script of ranks that were lost; called where all ranks are at the same place, outside of operations.

        An exception of its own functions is told to the other ranks.
        """
        told = list(self.changes.untold)
        self._call_back(self.changes.tell)
        if self._first_changes is None and any(self.world_rank in change.joined for change in told):
            self._first_changes = told, self.operations()

    def add_change_callback(self, callback: Callable[[MembershipChange], object]) -> None:
        """Call a function at each change from now on.

        In a process that has just joined also at those that it was told meanwhile: its script may add the function
        behind the place at which it joined, where the members' scripts have added it long ago.
        """
        self.changes.add(callback)
        if self._first_changes is not None and self._first_changes[1] == self.operations():
            missed, _ = self._first_changes
            for change in missed:
                self._call_back(partial(callback, change))
            self._first_changes = missed, self.operations()

    def _call_back(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            self.communicator.interrupt("a function given to on_membership_change", error)
            raise

    def new_device_communicator(
        self,
        name: str,
        device: int,
        streams: Streams,
        ranks: Sequence[int] | None = None,
        gather: Gather | None = None,
        own_stream: bool = False,
    ) -> DeviceCommunicator:
        """A new NCCL communicator for GPU memory, one GPU for each rank; all members call this.

        Args:
            name, ranks, gather: as for `new_communicator`.
            device: this rank's GPU, as the process numbers them.
            streams: the framework's.
            own_stream: whether operations of other communicators may overtake its own.

        Raises:
            MissingDependency: there is no NCCL.
            DeviceError: there is no CUDA driver or no such GPU, or ranks would share one.
            MismatchError: the ranks have different releases of NCCL.
        """
        self.refuse_to_heal("communication between GPUs")
        host = self.new_communicator(name, ranks, gather)
        wait = Wait(name, self.failure_detector)
        choose_interface()
        communicator = DeviceCommunicator(name, device, host, streams, wait, load_nccl(), load_driver(), own_stream)
        self._keep(communicator)
        return communicator

    def addresses(self) -> list[str]:
        """At which ranks of other hosts reach this one, the likeliest first; empty if all are on this host."""
        transport = self._rendezvous.transport
        if isinstance(transport, TcpTransport):  # on the network that was chosen for the job's data
            return [transport.address]
        return self._members[self.world_rank].addresses

    def messenger(self) -> Messenger:
        """The messages between this process and any other rank; made by the first call."""
        if self._messenger is None:
            self.refuse_to_heal("sending messages from rank to rank")
            rank, members = self.world_rank, self._members
            near = [other for other, member in members.items() if member.domain == members[rank].domain]
            addresses = self.addresses() if len(near) < len(members) else []
            self._messenger = Messenger(rank, self.derive_secret("messages"), near, addresses, self.failure_detector)
        return self._messenger

    def device_communicator(self, device: int, streams: Streams) -> DeviceCommunicator:
        """A communicator of all ranks for the public functions; the first call, which all ranks make, creates it."""
        if device not in self._of_devices:
            self._of_devices[device] = self.new_device_communicator("ring on GPUs", device, streams)
        return self._of_devices[device]

    def _in_use(self) -> list[Communicator[Any]]:
        """The communicators still in use, for any thread."""
        while True:
            try:
                return list(self._communicators.values())
            except RuntimeError:  # another thread has just added one
                pass

    def device_communicators(self) -> list[DeviceCommunicator]:
        """GPU communicators still in use."""
        return [communicator for communicator in self._in_use() if isinstance(communicator, DeviceCommunicator)]

    def activities(self) -> list[Activity]:
        """The last operation of this rank in each of its communicators."""
        activities = [communicator.activity() for communicator in self._in_use()]
        return [activity for activity in activities if activity is not None]

    def derive_secret(self, purpose: str) -> bytes:
        """A secret that all ranks of the job can make, and nobody else; a different one for each purpose."""
        return hmac.digest(self._secret, purpose.encode(), "sha256")

    def share_cores(self) -> None:
        """Have this rank compute with its share of its host's cores, unless the user has set a number of threads."""
        rank = self.topology.rank
        here = thread_count.ranks_beside(rank, self._cores)
        if here == 1:
            return
        number = thread_count.share(rank, self._cores)
        changed, too_late = thread_count.set_threads(number)
        if changed and rank == 0:
            each = "1 thread" if number == 1 else f"{number} threads"
            logger.info(
                f"each of the {here} ranks on this host computes with {each}, its share of the cores; "
                f"{thread_count.OPENMP_VARIABLE} chooses another number."
            )
        for library in too_late if rank == 0 else ():
            logger.warning(
                f"{library.name} computed before init() and keeps a thread per core in each of the {here} ranks on "
                f"this host, which slows all of them: call ring_plugins.init() first, or export "
                f"{library.variables[0]}={number}."
            )

    def has_room_to_overlap(self, threads: int) -> bool:
        """Whether communication has something to overlap with: a network, or a core beside those that compute.

        Args:
            threads: how many threads this rank computes with.
        """
        return self.topology.num_nodes > 1 or thread_count.share(self._rendezvous.rank, self._cores) > threads

    @property
    def summary(self) -> str:
        """For messages: "2 ranks on 1 host, started by this script"."""
        if self.topology.size == 1 and self.launcher == "single":
            return self.topology.summary
        return f"{self.topology.summary}, started by {self._started_by}"

    def is_mine(self) -> bool:
        """Whether this process joined the job, rather than being forked from one that did."""
        return os.getpid() == self._pid

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they stop waiting. Only the first call counts."""
        if self.failure_detector is not None and self.observers is not None and self.is_mine():
            self.observers.flush()
            self.failure_detector.fail(error)

    def operations(self) -> int:
        """How many operations this rank has finished."""
        return sum(communicator.statistics.operations for communicator in self._in_use())

    def leave(self, status: int) -> None:
        """Tell the other ranks that this one is about to leave with an exit status."""
        if self.failure_detector is not None and self.is_mine():
            self.failure_detector.leave(status)

    def abort(self) -> None:
        """End the whole job, if the launcher can."""
        self._rendezvous.abort(1)

    def close(self) -> None:
        """Leave the job; peers that still wait for this rank get an error."""
        if self._closed or not self.is_mine():
            return
        self._closed = True
        self.notice.close()
        if self._messenger is not None:
            self._messenger.close()
        if isinstance(self._membership, Mesh):
            self._membership.close()
        if self._local_peers is not None:
            self._local_peers.own.leave()
        if self._monitor is not None:
            self._monitor.close()
        for communicator in self._in_use():
            communicator.close()
        self._rendezvous.close()
        if self._rank_marker is not None:
            self._rank_marker.release()
            leave(self.launcher)

    def detach_after_fork(self) -> None:
        """In a forked child: disturb neither the parent nor its peers."""
        if self.channel is not None:
            self.channel.abandon()
        if self._succession is not None:
            self._succession.detach_after_fork()
        if isinstance(self._membership, Mesh):
            self._membership.detach_after_fork()
            if isinstance(self._rendezvous.transport, TcpTransport):
                self._rendezvous.transport.listener.detach_after_fork()
        if self._messenger is not None:
            self._messenger.detach_after_fork()
        for communicator in self._in_use():
            communicator.detach_after_fork()


_world: World | None = None
_generation = 0  # how often this process has connected


def init(
    ranks: int | None = None,
    *,
    on_failure: str | None = None,
    min_ranks: int | None = None,
    max_ranks: int | None = None,
) -> World:
    """Join the other processes of the job; calling it again changes nothing.

    Under mpirun, torchrun, srun or another launcher the job consists of the ranks that it started. A script that was
    started on its own stays a job of one, or spawns `ranks - 1` further processes that run it too.

    Args:
        ranks: how many processes a script that was started on its own becomes.
        on_failure: what happens when a rank is killed or crashes: "end" ends the job; "continue" lets the other ranks
            finish the step and go on (docs/healing.md says where that works; the script may start again in this call);
            "replace" also starts another process in its place. The default is RING_ON_FAILURE, or "end".
        min_ranks: the fewest ranks with which a job goes on. The default is RING_MIN_RANKS, or 1.
        max_ranks: up to how many ranks the job may grow by `ring add-ranks` while it runs, with "replace". The default
            is RING_MAX_RANKS, or no more than at the start.

    Returns:
        The connected job. Scripts need not keep it.

    Raises:
        ArgumentError: `ranks` is not a positive integer, or `on_failure`, `min_ranks` or `max_ranks` is invalid or not
            supported here.
        LaunchError: the processes cannot find each other, or this one is a child of a rank.
        MissingDependency: the launcher needs a package that is not installed.
    """
    global _world, _generation
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if _world is not None and _world.is_mine():
        return _world
    if _world is not None and _world.topology.size > 1:
        raise LaunchError(
            f"this process was forked from rank {_world.topology.rank} (a data loader's worker?); call "
            "ring_plugins.init() in the ranks themselves."
        )
    policy = FailurePolicy.chosen(on_failure, min_ranks, max_ranks)
    if ranks is not None and max_ranks is not None:
        policy.check_size(ranks)
    check_ancestors()
    if policy.continues:
        prepare_to_continue(ranks, policy, _generation)
    _check_timeline_directory(ranks)
    exit_hooks.install(lambda: _world, shutdown)
    rendezvous = connect(ranks, _generation)
    _generation += 1
    kind = detect().kind
    launcher = "single" if rendezvous.size == 1 else "spawned" if kind == "single" else kind
    _world = World(rendezvous, launcher, policy)
    set_rank(rendezvous.rank)
    if rendezvous.rank == 0 and _generation == 1:
        _warn_of_misspelled_variables()
    _world.share_cores()
    if rendezvous.size > 1 and config.KEEP_MEMORY.get():
        keep_freed_memory()
    return _world


def _check_timeline_directory(ranks: int | None) -> None:
    """Refuse a RING_TIMELINE in which rank 0 cannot write, before the other ranks wait for it.

    Raises:
        ArgumentError: the directory cannot be made or written to.
    """
    name, record = config.TIMELINE.get(), detect()
    if not name or record.rank or (record.kind == "single" and (ranks or 1) == 1):
        return
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        (Path(name) / FILE_NAME).open("a").close()  # to root, os.access allows everything
    except OSError as error:
        raise ArgumentError(
            f"{config.TIMELINE.name}={name!r}: rank 0 cannot write there ({error.strerror}); name a directory that it "
            "can create, or unset the variable."
        ) from None  # one traceback, not one for each parent that `mkdir` has tried


def _warn_of_misspelled_variables() -> None:
    """Name the RING_* variables that look like a misspelled one of ours; others may belong to another program."""
    for name, meant in config.unknown(likeness=0.8).items():
        if meant:
            logger.warning(f"{name} is set, but ring_plugins does not read it. Did you mean {meant}?")


def shutdown() -> None:
    """Leave the job. `init` may be called again afterwards, by all ranks."""
    global _world
    world, _world = _world, None
    if world is not None and world.is_mine():
        world.close()
        kept_results.clear()
        set_rank(None)


def is_initialized() -> bool:
    """Whether `init` has been called in this process and `shutdown` has not been called since."""
    return _world is not None


def current() -> World:
    """The world that `init` made.

    Raises:
        NotInitialized: it has not been called.
    """
    if _world is None:
        raise NotInitialized("call ring_plugins.init() before this.")
    return _world


def is_joining() -> bool:
    """As `World.is_joining`; False outside of a job, where communicators are of threads of one process."""
    return _world is not None and _world.is_joining


def has_room_to_overlap(threads: int) -> bool:
    """As `World.has_room_to_overlap`; False outside of a job, where communicators are of threads of one process."""
    return _world is not None and _world.has_room_to_overlap(threads)


@contextlib.contextmanager
def constructed_by_all(what: str) -> Iterator[None]:
    """Let all ranks know if an exception ends a construction that all take part in."""
    with contextlib.nullcontext() if _world is None else on_all_or_none(_world.communicator, what):
        yield
