"""A connected job: how it is built, and how this process leaves it.

In the first exchange every rank says where it is and how to detect its failure. From that follow which ranks share
memory, the channel between the ranks, the failure detector, and the monitor thread with its services. The first
communicator, of all ranks, comes last.

Who the ranks are, and how they change while the job runs, is kept in members/.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import signal
import socket
import sys
from functools import partial
from typing import Any, NoReturn

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, PeerFailed
from ring_plugins.core.base.member import Members
from ring_plugins.core.communicators import Communicators
from ring_plugins.core.control import rank_zero
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.liveness import MOST_MEMBERS, Liveness, LocalPeers
from ring_plugins.core.control.meetings import Meetings
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.monitor import MonitorThread, Service
from ring_plugins.core.control.named_calls import NamedCalls
from ring_plugins.core.control.rank_zero import RankZero
from ring_plugins.core.control.tcp_liveness import TcpLiveness
from ring_plugins.core.gpu.watchdog import GpuWatchdog
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.core.linux.shared_memory import is_available
from ring_plugins.core.members.introduction import Introduction, meet, own_member
from ring_plugins.core.members.members import Elastic
from ring_plugins.core.members.policy import FailurePolicy, FirstCall
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.sockets import UNIX
from ring_plugins.core.net.tcp import TcpTransport
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.rendezvous import Launcher, Rendezvous, leave, tcp
from ring_plugins.core.rendezvous.claim import RankMarker
from ring_plugins.core.rendezvous.slots import FOLLOWED, HOPELESS, TOLD
from ring_plugins.core.rendezvous.spawn import status_of_child


class World(Communicators):
    """A connected job. `init` makes it; a process has one at a time.

    Attributes:
        world_rank: the rank with which this process started.
        is_joining: whether this process is to take the place of a lost rank, or the job to grow by it, and it has not
            joined yet.
        elastic: how the members change while the job runs.
        has_left: whether this process has left the job before its end, as others had agreed.
        launcher: that has started the ranks.
        first_call: of `init`.
        part: a job that some of the ranks have made, and that ends with this one; None if there is none.
        local_peers: the liveness of all members on this host; before this process has joined, only its own.
        channel, observers: the messages between ranks and the observing services; None in a job of one rank.
        meetings, named_calls: of some ranks, and calls that match by name; None in a job of one rank, and in one that
            goes on after losses.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        launcher: Launcher,
        policy: FailurePolicy,
        asked: int | None = None,
        is_part: bool = False,
    ) -> None:
        super().__init__(policy, rendezvous.size, rendezvous.transport)
        self._rendezvous, self.launcher = rendezvous, launcher
        self.first_call = FirstCall(policy, rendezvous.size, asked)
        self._pid, self._is_part = os.getpid(), is_part
        self.is_joining = policy.replaces and config.JOINS.is_set()
        self.world_rank = config.JOINS.get() if self.is_joining else rendezvous.rank
        self.has_left = self.is_closed = False
        self.part: World | None = None
        self.channel: Channel | None = None
        self.observers: Observers | None = None
        self.meetings: Meetings | None = None
        self.named_calls: NamedCalls | None = None
        self._monitor: MonitorThread | None = None
        self._rank_marker: RankMarker | None = None
        self._reserved: socket.socket | None = None
        self.local_peers: LocalPeers | None = None
        self.secret = b""
        self.own_slot = rendezvous.slot if rendezvous.size > 1 else None
        #: Connects the members of a job that goes on when some are lost.
        self.listener: Listener | None = self.transport.listener if self.transport is not None else None
        try:
            self._connect_alone() if self.is_joining else self._connect()
        except BaseException as error:
            self._give_up(error)
            raise

    @property
    def shard(self) -> tuple[int, int]:
        """Which of how many shards of the data is this rank's: that of its slot, if lost ranks are replaced."""
        if self.replaces:
            return self.members.here.slot, self.members.shards
        return self.topology.rank, self.topology.size

    @property
    def transport(self) -> TcpTransport | None:
        """What moves data between hosts, if sockets do."""
        transport = self._rendezvous.transport
        return transport if isinstance(transport, TcpTransport) else None

    # Joining the job ------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the other ranks; collective."""
        rendezvous, policy = self._rendezvous, self._policy
        rank, size = rendezvous.rank, rendezvous.size
        own = Liveness.create(rank) if size > 1 and is_available() else None
        most = MOST_MEMBERS if policy.replaces else 0
        server = RankZero(size, rendezvous.addresses) if size > 1 and rank == 0 and not self.recovers else None
        #: A port of this host for other libraries, of which `export_place` tells.
        self._reserved = reserve_port() if size > 1 and not policy.recovers else None
        if self.recovers and self.listener is None:
            self.listener = Listener(UNIX)
        introduction = Introduction(
            own_member(rank, rank, self.listener, own, self._transport is not None),
            server.address if server else {"secret": secrets.token_hex(32)} if self.recovers else None,
            config.TIMELINE.is_set(),
            list(policy),
            self._reserved.getsockname()[1] if self._reserved is not None else 0,
        )
        has_slots = self.own_slot is not None and self.own_slot.has_supervisor
        told, self.members = meet(rank, introduction, rendezvous.gather, rendezvous.transport, has_slots)
        address = told[0].server or {}
        self.secret = str(address.get("secret", "")).encode()
        self._ports = [one.port for one in told]
        self.local_peers = LocalPeers.map(own, self.members, rendezvous.gather)
        self._begin(itertools.count(rank, max(size, most)))
        if size > 1:
            # Before the last exchange, so that no rank's script goes on while another rank is not yet watched.
            self._open_channel(server, address)
            self.watch(told[0].records).start()
        if self.recovers and self.listener is not None:
            if self.transport is None:
                self.listener.open(rank, self.members.known.values(), self.derive_secret("connections").hex())
            self.begin_to_recover()
        self.communicator = self.new_communicator("ring", gather=rendezvous.gather)
        if size > 1:
            self._rank_marker = RankMarker(rank)
        if self.recovers:
            self.elastic.preemption_notice.install()
        if self.own_slot is not None and (self.recovers or self.own_slot.has_supervisor):
            self.write_join_info()
            self.own_slot.take_part(self.members.here)

    def _connect_alone(self) -> None:
        """Pretend to be the full-size job until this process has joined; nobody waits for it."""
        rank, slot, size = self.world_rank, self._rendezvous.rank, self._rendezvous.size
        self.channel, liveness = Channel(rank, size), Liveness.create(rank)
        assert self.own_slot is not None
        join_info, listener = self.own_slot.read_join_info(), self.listener
        if listener is None:
            listener = self.listener = Listener(str(join_info["address"]))
            listener.open(rank, [], str(join_info["secret"]), accepts_all=True)
        own = own_member(rank, slot, listener, liveness, self._transport is not None)
        listener.add(own)
        self.members = Members.before_joining(own, join_info["slots"], size)
        self.local_peers = LocalPeers(liveness, [], own.host if self.own_slot.has_supervisor else "")
        self._begin(itertools.count(rank, MOST_MEMBERS))
        self.communicator = self.new_communicator("ring", gather=lambda item: [item])
        self._rank_marker = RankMarker(rank)

    def _begin(self, tags: itertools.count[int]) -> None:
        """Be able to make communicators."""
        self.elastic = Elastic(self, self.members, self.local_peers, self._policy, self.own_slot)
        self._tags, self._recovery = tags, self.elastic.recovery if self.recovers else None

    def begin_to_recover(self, joined: Mesh | None = None) -> None:
        """From now on, the loss of a rank does not end the job; collective. `joined` as in `extend`."""
        assert self._monitor is not None
        assert self.listener is not None
        for service in self.elastic.begin(self.listener, joined):
            self._monitor.add(service)

    def addresses(self) -> list[str]:
        """At which ranks of other hosts reach this one, the likeliest first; empty if all are on this host."""
        if self.transport is not None:  # on the network that was chosen for the job's data
            return [self.transport.address]
        return list(self.members.here.addresses)

    def write_join_info(self) -> None:
        """Publish the job's addresses and secret for processes that join on this host, if any may."""
        if self.own_slot is not None and self.replaces and self.listener is not None:
            address = self.transport.address if self.transport is not None else UNIX  # the same from all ranks
            slots = self.members.told_of_slots()
            self.own_slot.join_info.write({"secret": self.listener.secret, "address": address, "slots": slots})

    def _give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not join, because of an exception, and close what is open."""
        self.is_closed = True
        if self.failure_detector is not None:
            self.failure_detector.fail(error)
        if self._monitor is not None:
            self._monitor.close()
        self._rendezvous.close()
        if self.listener is not None:
            self.listener.close()

    def _open_channel(self, server: RankZero | None, address: dict[str, Any]) -> None:
        """Connect to rank 0, which listens there; in a job that goes on after losses, a mesh connects all ranks."""
        rank, size = self.world_rank, self._rendezvous.size
        if self.recovers:
            self.channel = Channel(rank, size)
            return
        if server is not None and not self.members.are_on_several_hosts():
            server.only_this_host()
        connect = partial(rank_zero.connect, rank, address, self.members.is_near(0)) if rank else None
        self.channel = Channel(rank, size, server, connect)
        self.channel.start()

    def watch(self, records: bool) -> MonitorThread:
        """Set up what runs beside the job: failure detector, and the monitor thread's services."""
        joins = self.is_joining
        assert self.channel is not None
        detector = self.failure_detector = FailureDetector(self.members, self.local_peers, self.channel)
        if not self.recovers:
            self.meetings, self.named_calls = Meetings(self.channel, detector), NamedCalls(self.channel, detector)
        observers = Observers(self.channel, detector, self.activities, records, self._is_part)
        self.observers = observers
        launched = self.launcher.is_parent or self.own_slot is not None
        monitor = MonitorThread(detector, self.channel, launched, self.abort, self.status_after)
        monitor.add(GpuWatchdog(detector, self.device_executors), vital=True)
        monitor.add(TcpLiveness(detector), vital=True)
        for service in [observers.stalls] if joins else observers.services:
            monitor.add(service)
        self._monitor = monitor
        return monitor

    def add_service(self, service: Service) -> None:
        """Let the monitor's thread call a service from now on."""
        if self._monitor is not None:
            self._monitor.add(service)

    def exit_from_job(self, status: int) -> NoReturn:
        """Leave the job now: what the script still does on its way out is not part of it."""
        self.has_left = True
        self.close()
        sys.exit(status)

    def derive_secret(self, purpose: str) -> bytes:
        """A secret that all ranks of the job can make, and nobody else; a different one for each purpose."""
        return hmac.digest(self.secret, purpose.encode(), "sha256")

    @property
    def summary(self) -> str:
        """For messages: "2 ranks on 1 host, started by this script"."""
        if self.topology.size == 1 and self.launcher.is_none:
            return self.topology.summary
        return f"{self.topology.summary}, started by {self.launcher.name}"

    def is_mine(self) -> bool:
        """Whether this process joined the job, rather than being forked from one that did."""
        return os.getpid() == self._pid

    def export_place(self) -> None:
        """Tell other libraries in this process which rank it is (core/rendezvous/tcp.py)."""
        if self._reserved is not None:
            tcp.export_members(self.members, self._ports, self._rendezvous.addresses)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they stop waiting. Only the first call counts."""
        if self.is_joining and self.is_mine():
            has_no_place = isinstance(error, ArgumentError)  # where processes can join
            self._note_end(HOPELESS if has_no_place else TOLD)
        if self.failure_detector is not None and self.observers is not None and self.is_mine():
            self.observers.spans.flush()
            is_own = not isinstance(error, PeerFailed) or error.rank == self.world_rank
            self._note_end(TOLD if is_own else FOLLOWED)
            if is_own and (status := self.status_after(error)) > 1:
                self.failure_detector.leave(status)
            self.failure_detector.fail(error)

    def _note_end(self, how: int = TOLD) -> None:
        """As `Slots.note_end`, for what started this process."""
        if self.own_slot is not None:
            self.own_slot.note_end(how)

    def leave(self, status: int) -> None:
        """Tell the other ranks that this one is about to leave with an exit status."""
        if self.failure_detector is not None and self.is_mine():
            self.failure_detector.leave(status)

    def status_after(self, error: BaseException) -> int:
        """The exit status of a job that ends because of an error; a failed peer's own, if that is known here."""
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            return error.code & 0xFF
        if not isinstance(error, PeerFailed):
            return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        exited = self.failure_detector.exited() if self.failure_detector is not None else {}
        # A rank that gave up because of another's exit is no cause, but may be the one that was heard of first.
        return exited.get(error.rank) or status_of_child(error.rank) or next(iter(exited.values()), 1)

    def abort(self, status: int = 1) -> None:
        """End the whole job with an exit status, if the launcher can."""
        self._rendezvous.abort(status)

    def close(self) -> None:
        """Leave the job; peers that still wait for this rank get an error."""
        if self.is_closed or not self.is_mine():
            return
        self.is_closed = True
        if not self.is_joining:
            self._note_end()
        with contextlib.ExitStack() as steps:  # all of them, the last first, even if a signal's handler raises in one
            if self._rank_marker is not None:
                steps.callback(leave, self.launcher)
                steps.callback(self._rank_marker.release)
            if self._reserved is not None:
                steps.callback(self._reserved.close)
            steps.callback(self._rendezvous.close)
            if self.listener is not None and self.transport is None:
                steps.callback(self.listener.close)
            for communicator in reversed(self.in_use()):
                steps.callback(communicator.close)
            if self._monitor is not None:
                steps.callback(self._monitor.close)
            if self.local_peers is not None:
                steps.callback(self.local_peers.own.leave)
            steps.callback(self.elastic.close)
            if self.part is not None:
                steps.callback(self.part.close)

    def detach_after_fork(self) -> None:
        """In a forked child: disturb neither the parent nor its peers."""
        if self.part is not None:
            self.part.detach_after_fork()
        if self.observers is not None:
            self.observers.live.detach_after_fork()
        if self.channel is not None:
            self.channel.abandon()
        self.elastic.detach_after_fork()
        if self.elastic.mesh is not None and self.listener is not None:
            self.listener.detach_after_fork()
        for communicator in self.in_use():
            communicator.detach_after_fork()
