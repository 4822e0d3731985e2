"""The job that this process belongs to: joining it, communicating in it, leaving it.

`init` finds the other processes (core/rendezvous) and makes the `World`. In the world's first exchange every rank says
where it is and how to detect its failure. From that follow which ranks share memory, the channel between the ranks,
the failure detector, and the monitor thread with its services. The first communicator, of all ranks, comes last.

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
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ring_plugins.core import exit_hooks
from ring_plugins.core.arrays.result_memory import kept_results
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, NotInitialized, PeerFailed, SharedMemoryError
from ring_plugins.core.base.log import logger, set_rank
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.base.records import read_as, read_each, read_record
from ring_plugins.core.base.topology import Topology, virtual_nodes
from ring_plugins.core.collectives.api import Activity, Communicator, Statistics
from ring_plugins.core.collectives.host import Gather, HostCommunicator
from ring_plugins.core.collectives.pair_executor import PairExecutor
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.control import rank_zero
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.liveness import MOST_MEMBERS, Liveness, LocalPeers
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.monitor import MonitorThread
from ring_plugins.core.control.rank_zero import RankZero
from ring_plugins.core.control.tcp_liveness import TcpLiveness
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu import load_driver, load_nccl
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gpu.connection import choose_interface
from ring_plugins.core.gpu.executor import DeviceExecutor, GpuWatchdog
from ring_plugins.core.gpu.stream import Streams
from ring_plugins.core.linux import thread_count
from ring_plugins.core.linux.interfaces import own_addresses, reserve_port
from ring_plugins.core.linux.malloc import keep_freed_memory
from ring_plugins.core.linux.shared_memory import is_available, shared_memory_domain
from ring_plugins.core.members.members import Elastic
from ring_plugins.core.members.policy import FailurePolicy, check_policies, check_values, prepare_to_continue
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.tcp import TcpTransport
from ring_plugins.core.net.user_socket import UNIX
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.observe.timeline import check_directory
from ring_plugins.core.rendezvous import Launcher, Rendezvous, connect, exported, launcher_of, launchers, leave
from ring_plugins.core.rendezvous.claim import RankMarker, check_ancestors
from ring_plugins.core.rendezvous.slots import FOLLOWED, HOPELESS, TOLD
from ring_plugins.core.rendezvous.spawn import status_of_child

_NOTHING = contextlib.nullcontext()


class _Introduction(NamedTuple):
    """What a process tells of itself in the first exchange of the job. Travels as JSON.

    Attributes:
        member: this process.
        server: from rank 0, where it listens if the others connect to it, and the secret of the job.
        records: whether rank 0 writes a timeline of the whole job.
        policy: its `FailurePolicy`.
        port: one that it has reserved, for other libraries; 0 if there is none.
    """

    member: Member
    server: dict[str, Any] | None
    records: bool
    policy: list[Any]
    port: int

    @classmethod
    def read(cls, item: Sequence[Any]) -> _Introduction:
        """One that has traveled.

        Raises:
            TypeError, ValueError: it is none.
        """
        member, *rest = item
        found = read_record(cls, (Member.read(member), *rest))
        read_as(bool, found.policy[0])
        return found


class World:
    """A connected job. `init` makes it; a process has one at a time.

    Attributes:
        world_rank: the rank with which this process started.
        recovers: whether the job goes on when ranks are lost.
        replaces: whether other processes take the places of those.
        is_joining: whether this process is to take such a place, and has not yet.
        members: who all ranks are, and where.
        elastic: how they change while the job runs.
        has_left: whether this process has left the job before its end, as others had agreed.
        communicator: of all ranks, for the public functions.
        launcher: that has started the ranks.
        failure_detector, channel, observers: the failure detector, the messages between ranks, the observing services;
            None in a job of one rank.
    """

    def __init__(
        self, rendezvous: Rendezvous, launcher: Launcher, policy: FailurePolicy, asked_ranks: int | None = None
    ) -> None:
        self._rendezvous, self._policy = rendezvous, policy
        self._sizes = rendezvous.size, asked_ranks
        self._variables = {variable: variable.text() for variable in config.READ_BY_INIT}
        self._pid = os.getpid()
        self.is_joining = policy.replaces and config.JOINS.is_set()
        self.world_rank = config.JOINS.get() if self.is_joining else rendezvous.rank
        self.recovers = policy.recovers and rendezvous.size > 1
        self.replaces = policy.replaces and self.recovers
        self.has_left = False
        self.launcher = launcher
        self._closed = False
        self.failure_detector: FailureDetector | None = None
        self.channel: Channel | None = None
        self.observers: Observers | None = None
        self._monitor: MonitorThread | None = None
        #: Communicators still in use, by creation order, which is the same on all ranks.
        self._communicators: weakref.WeakValueDictionary[int, Communicator[Any]] = weakref.WeakValueDictionary()
        self._recovering: weakref.WeakValueDictionary[int, HostCommunicator] = weakref.WeakValueDictionary()
        #: Of all communicators ever made, so that work is not forgotten when its communicator is discarded.
        self._statistics: list[Statistics] = []
        self._made, self._keeping = 0, threading.Lock()
        self._of_devices: dict[int, DeviceCommunicator] = {}
        self.own_slot = rendezvous.slot if rendezvous.size > 1 else None
        #: Connects the members of a job that goes on when some are lost.
        self.listener: Listener | None = self.transport.listener if self.transport is not None else None
        try:
            self._connect_alone() if self.is_joining else self._connect()
        except BaseException as error:
            self._give_up(error)
            raise

    @property
    def topology(self) -> Topology:
        """Rank, host and counts of this process; new when ranks are lost."""
        return self.members.topology

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """Of all ranks that are left, those with which they started, in the order of ranks."""
        return self.members.ranks

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
        """Join the other ranks, which all call this."""
        rendezvous, policy = self._rendezvous, self._policy
        rank, size = rendezvous.rank, rendezvous.size
        own = Liveness.create(rank) if size > 1 and is_available() else None
        most = MOST_MEMBERS if policy.replaces else 0
        server = RankZero(size, rendezvous.addresses) if size > 1 and rank == 0 and not self.recovers else None
        #: A port of this host for other libraries, of which `export_place` tells.
        self._reserved = reserve_port() if size > 1 and not policy.recovers else None
        if self.recovers and self.listener is None:
            self.listener = Listener(UNIX)
        introduction = _Introduction(
            self._own_member(own, rank),
            server.address if server else {"secret": secrets.token_hex(32)} if self.recovers else None,
            config.TIMELINE.is_set(),
            list(policy),
            self._reserved.getsockname()[1] if self._reserved is not None else 0,
        )
        told = read_each(rendezvous.gather(introduction), _Introduction.read)
        self._server = told[0].server or {}
        self._secret = str(self._server.get("secret", "")).encode()
        self._reserved_ports = [one.port for one in told]
        nodes = virtual_nodes([one.member.domain for one in told], config.VIRTUAL_NODES.get())
        if len(set(nodes)) > 1 and rendezvous.transport is None:
            raise LaunchError(
                "RING_VIRTUAL_NODES needs a launcher that connects hosts: start the job with mpirun or torchrun."
            )
        members = [one.member._replace(node=node) for one, node in zip(told, nodes, strict=True)]
        self.members = Members(rank, members)
        have_liveness = all(one.liveness for one in members)
        if any(one.policy[0] for one in told):
            shares_memory, uses_sockets = len(set(nodes)) == 1 and have_liveness, self.transport is not None
            policies = [one.policy for one in told]
            has_slots = self.own_slot is not None and self.own_slot.has_supervisor
            summary = self.topology.summary
            check_policies(policies, shares_memory or size == 1, uses_sockets and have_liveness, summary, has_slots)
        peers = self._watch_local_peers(own) if any(one.liveness for one in members) else None
        self._local_peers = peers
        self._tags = itertools.count(rank, max(size, most))  # no two ranks ever offer the same
        self.elastic = Elastic(self, self.members, peers, policy, self.own_slot)
        if size > 1:
            self._monitor = self._make_monitor(server, told[0].records)
            # Before the last exchange, so that no rank's script goes on while another rank is not yet watched.
            self._monitor.start()
        if self.recovers and self.listener is not None:
            if self.transport is None:
                self.listener.open(rank, members, self.derive_secret("connections").hex())
            self._begin_to_recover()
        self.communicator = self.new_communicator("ring", gather=rendezvous.gather)
        self._rank_marker = RankMarker(rank) if size > 1 else None
        if self.recovers:
            self.elastic.preemption_notice.install()
        if self.own_slot is not None and (self.recovers or self.own_slot.has_supervisor):
            self._write_join_info()
            self.own_slot.take_part(self.members.here)

    def _connect_alone(self) -> None:
        """Be a job of one that looks like one of all slots, until it joins: the others do not wait for this process."""
        rank, slot, size = self.world_rank, self._rendezvous.rank, self._rendezvous.size
        self.channel = Channel(rank, size)
        self._reserved = None
        liveness = Liveness.create(rank)
        assert self.own_slot is not None
        join_info, listener = self.own_slot.read_join_info(), self.listener
        if listener is None:
            listener = self.listener = Listener(str(join_info["address"]))
            listener.open(rank, [], str(join_info["secret"]), accepts_all=True)
        own = self._own_member(liveness, slot)
        listener.add(own)
        self.members = Members.before_joining(own, join_info["slots"], size)
        self._local_peers = LocalPeers(liveness, [], own.host if self.own_slot.has_supervisor else "")
        self._secret, self._tags = b"", itertools.count(rank, MOST_MEMBERS)
        self.elastic = Elastic(self, self.members, self._local_peers, self._policy, self.own_slot)
        self.communicator = self.new_communicator("ring", gather=lambda item: [item])
        self._rank_marker = RankMarker(rank)

    def _begin_to_recover(self, joined: Mesh | None = None) -> None:
        """From now on, the loss of a rank does not end the job; collective. `joined` as in `extend`."""
        assert self._monitor is not None
        assert self.listener is not None
        for service in self.elastic.begin(self.listener, joined):
            self._monitor.add(service)

    def _write_join_info(self) -> None:
        """Say to new processes of this host how to be reached by the others, if processes may join there."""
        if self.own_slot is not None and self.replaces and self.listener is not None:
            address = self.transport.address if self.transport is not None else UNIX  # the same from all ranks
            slots = self.members.told_of_slots()
            self.own_slot.write_join_info({"secret": self.listener.secret, "address": address, "slots": slots})

    def _own_member(self, liveness: Liveness | None, slot: int) -> Member:
        """This process; its node is not known yet."""
        listener = self.listener
        return Member(
            self.world_rank,
            slot,
            socket.gethostname(),
            os.getpid(),
            shared_memory_domain(),
            address=listener.address if listener is not None else "",
            port=listener.port if listener is not None else 0,
            liveness=liveness.address if liveness is not None else None,
            addresses=tuple(own_addresses()) if self._rendezvous.transport is not None else (),
            cores=thread_count.own_cores(),
        )

    def export_place(self) -> None:
        """Tell other libraries in this process which rank it is (core/rendezvous/exported.py)."""
        if self._reserved is None:
            return
        own, known = self.topology, self.members.known
        hosts = [(known[rank].addresses if own.num_nodes > 1 else ()) or ("127.0.0.1",) for rank in sorted(known)]
        hosts[0] = (*(self._rendezvous.addresses if own.num_nodes > 1 else ()), *hosts[0])
        place = [own.rank, own.size, own.local_rank, own.local_size]
        exported.export(place, [(of[0], port) for of, port in zip(hosts, self._reserved_ports, strict=True)])

    def _give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not join, because of an exception, and close what is open."""
        self._closed = True
        if self.failure_detector is not None:
            self.failure_detector.fail(error)
        if self._monitor is not None:
            self._monitor.close()
        self._rendezvous.close()
        if self.listener is not None:
            self.listener.close()

    def _watch_local_peers(self, own: Liveness | None) -> LocalPeers | None:
        """Map the liveness segments of this host's ranks; collective.

        Raises:
            SharedMemoryError: on all ranks, if one cannot.
            LaunchError: a rank has ended, which is why its segment could not be mapped.
        """
        here = self.members.here
        others, problem = list[Liveness](), ""
        try:
            near = [one for one in self.members.known.values() if one is not here and one.domain == here.domain]
            others += [Liveness.open(one.liveness, one.rank) for one in near if one.liveness]
        except SharedMemoryError as error:
            problem = f"rank {here.rank} on {here.host} {error}"
        # No rank leaves before all have mapped its segment, and a rank that did leave is noticed here.
        problems = [text for text in read_each(self._rendezvous.gather(problem), partial(read_as, str)) if text]
        if problems:
            raise SharedMemoryError(problem or problems[0])
        return (
            None if own is None else LocalPeers(own, others, here.host if self.members.are_on_several_hosts() else "")
        )

    def _make_monitor(self, server: RankZero | None, records: bool) -> MonitorThread:
        """Set up what runs beside the job: control channel, failure detector, and the monitor thread's services."""
        members = self.members
        if server is not None and not members.are_on_several_hosts():
            server.only_this_host()
        if self.recovers:  # it starts once it is connected to all
            self.channel = Channel(self.world_rank, self._rendezvous.size)
        else:
            connect = partial(rank_zero.connect, self.world_rank, self._server, members.is_near(0))
            self.channel = Channel(self.world_rank, self._rendezvous.size, server, connect if self.world_rank else None)
            self.channel.start()
        self.failure_detector = FailureDetector(members, self._local_peers, self.channel)
        self.observers = Observers(self.channel, self.failure_detector, self.activities, self.has_communicated, records)
        launched = self.launcher.is_parent or self.own_slot is not None
        monitor = MonitorThread(self.failure_detector, self.channel, launched, self.abort, self.status_after)
        monitor.add(GpuWatchdog(self.failure_detector, self.device_executors), vital=True)
        monitor.add(TcpLiveness(self.failure_detector), vital=True)
        for service in self.observers.services:
            monitor.add(service)
        return monitor

    def new_communicator(
        self,
        name: str,
        ranks: Sequence[int] | None = None,
        gather: Gather | None = None,
        check_gather: Callable[[], object] = lambda: None,
        executor: PairExecutor | None = None,
    ) -> Communicator:
        """A new communicator, whose operations have an order of their own; all members call this.

        Args:
            name: for messages.
            ranks: world ranks of the members, all by default.
            gather: returns every member's payload; by default over `communicator`, which needs all ranks.
            check_gather: raises if a member has been interrupted in `gather`, and does not come.
            executor: on whose thread the members meet; by default a new one.

        Raises:
            ArgumentError: `ranks` are not distinct ranks of this job.
        """
        size = len(self.world_ranks)
        members = self.world_ranks if ranks is None else tuple(ranks)
        if len(set(members)) != len(members) or not set(members) <= set(self.world_ranks):
            raise ArgumentError(f"ranks={list(members)} are not distinct ranks of a job of {size}.")
        if len(members) != size:
            self.refuse_to_recover(f"{name}, a group of some ranks,")
        if gather is None and len(members) != size:
            raise ArgumentError(
                f"ranks={list(members)} are only some of the job's {size}; pass gather, which exchanges "
                "payloads among them."
            )
        if len(members) == 1 and not self.replaces:
            communicator: Communicator = SingleCommunicator(name, members[0])
        else:
            with on_all_or_none(self.communicator, f"the construction of {name}") if gather is None else _NOTHING:
                communicator = made = HostCommunicator(
                    name,
                    self.world_rank,
                    self.members.here.node,
                    2 * next(self._tags),
                    gather or self.communicator.all_gather_object,
                    self.failure_detector,
                    self._rendezvous.transport,
                    check_gather if gather else self.communicator.check,
                    executor,
                    self.elastic.recovery if self.recovers else None,
                )
            if made.recovers:
                self._recovering[self._made] = made
        self._keep(communicator)
        return communicator

    def _keep(self, communicator: Communicator[Any]) -> None:
        with self._keeping:  # messages between two ranks make theirs on threads
            self._communicators[self._made] = communicator
            self._statistics.append(communicator.statistics)
            self._made += 1

    def refuse_to_recover(self, what: str) -> None:
        """Reject what would not survive the loss of a rank, in a job that is to go on after one.

        Args:
            what: begins the error's text, "Keras" for example.

        Raises:
            ArgumentError: on_failure is "continue".
        """
        if self.recovers:
            raise ArgumentError(
                f'{what} does not support on_failure="{self._policy.on_failure}" yet: leave it out, and unset '
                f"{config.ON_FAILURE.name}. The first rank that fails then ends the job."
            )

    def check_same_arguments(
        self,
        caller: str,
        ranks: int | None = None,
        on_failure: str | None = None,
        min_ranks: int | None = None,
        max_ranks: int | None = None,
    ) -> None:
        """Check that the job is as a further call wants it; arguments that are None want nothing.

        Args:
            caller: "init" or what calls it, for the error's text.
            ranks, on_failure, min_ranks, max_ranks: as for `init`.

        Raises:
            ArgumentError: it was made with others, or one is invalid.
        """
        check_values(on_failure, min_ranks, max_ranks)
        policy, size = self._policy, self._sizes[0]
        most = (policy.max_ranks or size) if policy.replaces else None
        now = {"on_failure": policy.on_failure, "min_ranks": policy.min_ranks or None, "max_ranks": most, "ranks": size}
        wanted = {"on_failure": on_failure, "min_ranks": min_ranks, "max_ranks": max_ranks, "ranks": ranks}
        others = {name: value for name, value in wanted.items() if value not in (None, now[name])}
        if ranks == self._sizes[1]:
            others.pop("ranks", None)
        told = [f"{caller}({', '.join(f'{name}={value!r}' for name, value in others.items())})"] if others else []
        before = [f"{name}={now[name]!r}" if now[name] else f"no {name}" for name in others]
        for variable, text in self._variables.items():
            if variable.text() != text:
                told.append(f"{variable.name}={variable.text()!r}")
                before.append(f"{variable.name}={text!r}" if text else f"no {variable.name}")
        if told:
            raise ArgumentError(
                f"{' and '.join(told)}: init() was called before with {' and '.join(before)}, and a job does "
                "not change by another call. Pass all of it to the first call, which comes before anything else that "
                "uses the job, on all ranks; later calls may leave it out."
            )

    # Joining (core/joining/join.py) --------------------------------------------------------------------

    @property
    def local_peers(self) -> LocalPeers:
        """The liveness of all members on this host; before this process has joined, only its own."""
        assert self._local_peers is not None
        return self._local_peers

    @property
    def min_ranks(self) -> int:
        """With how many ranks the job goes on."""
        return self._policy.min_ranks

    def recovering_communicators(self) -> dict[int, HostCommunicator]:
        """Those in use that go on when members are lost, by creation order."""
        return {key: one for key, one in sorted(self._recovering.items()) if one.groups.is_open}

    def introduction(self) -> dict[str, Any]:
        """What this process tells when it joins, or when others join: JSON can hold it."""
        if self.is_joining:
            return {}
        return {
            "view": self.members.view, "made": self._made, "secret": self._secret.decode(),
            "shards": self.members.shards, "pending": sorted(self.elastic.pending),
            "slots": self.members.told_of_slots(),
        }  # fmt: skip

    def extend(
        self,
        everyone: Sequence[Member],
        told: Mapping[int, Mapping[str, Any]],
        others: Sequence[Liveness],
        renew: Callable[[FailureDetector], None],
        mesh: Mesh | None = None,
    ) -> None:
        """Go on with further members, as all have agreed; nothing of this fails.

        Args:
            everyone: all members from now on, in the order of their slots.
            told: the `introduction` of each by world rank.
            others: liveness of those others that share memory with this process.
            renew: lets all communicators go on with everyone.
            mesh: in a process that joins, its connections.
        """
        of_members = next(introduction for introduction in told.values() if "view" in introduction)
        is_new, joined = self.is_joining, [one.rank for one in everyone if "view" not in told[one.rank]]
        if is_new:
            self.members.learn_of_slots(of_members["slots"])
            self._become_member(of_members, others, mesh)
        self.members.divide_among(max(of_members["shards"], 1 + everyone[-1].slot))
        self.elastic.extend(joined, others, renew)
        self._write_join_info()
        if is_new:
            assert self._monitor is not None
            self._monitor.start()
            self.elastic.preemption_notice.install()

    def _become_member(self, told: Mapping[str, Any], others: Sequence[Liveness], mesh: Mesh | None) -> None:
        """Make what a member has beside its communicators.

        Args:
            told: the `introduction` of a member.
            others, mesh: as in `extend`.
        """
        peers = self.local_peers
        peers.add(others)
        self._secret, self._made = told["secret"].encode(), told["made"]
        self.elastic.pending = frozenset(told["pending"])  # who may join later, as all members have agreed
        assert self.channel is not None
        self.failure_detector = FailureDetector(self.members, peers, self.channel)
        self.observers = Observers(self.channel, self.failure_detector, self.activities, self.has_communicated)
        self._monitor = MonitorThread(self.failure_detector, self.channel, True, self.abort, self.status_after)
        self._monitor.add(self.observers.stalls)
        self._begin_to_recover(mesh)
        self._monitor.add(TcpLiveness(self.failure_detector), vital=True)
        self.is_joining = False

    def exit_from_job(self, status: int) -> NoReturn:
        """Leave the job now: what the script still does on its way out is not part of it."""
        self.has_left = True
        self.close()
        sys.exit(status)

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
        self.refuse_to_recover("communication between GPUs")
        host = self.new_communicator(name, ranks, gather)
        wait = Wait(name, self.failure_detector)
        choose_interface()
        communicator = DeviceCommunicator(name, device, host, streams, wait, load_nccl(), load_driver(), own_stream)
        self._keep(communicator)
        return communicator

    def addresses(self) -> list[str]:
        """At which ranks of other hosts reach this one, the likeliest first; empty if all are on this host."""
        if self.transport is not None:  # on the network that was chosen for the job's data
            return [self.transport.address]
        return list(self.members.here.addresses)

    def device_communicator(self, device: int, streams: Streams) -> DeviceCommunicator:
        """A communicator of all ranks for the public functions; the first call, which all ranks make, creates it."""
        if device not in self._of_devices:
            self._of_devices[device] = self.new_device_communicator("ring on GPUs", device, streams)
        return self._of_devices[device]

    def in_use(self) -> list[Communicator[Any]]:
        """The communicators still in use, for any thread."""
        while True:
            try:
                return list(self._communicators.values())
            except RuntimeError:  # another thread has just added one
                pass

    def device_executors(self) -> list[DeviceExecutor]:
        """Those of the GPU communicators still in use."""
        return [one.executor for one in self.in_use() if isinstance(one, DeviceCommunicator)]

    def activities(self) -> list[Activity]:
        """The last operation of this rank in each of its communicators."""
        activities = [communicator.activity() for communicator in self.in_use()]
        return [activity for activity in activities if activity is not None]

    def derive_secret(self, purpose: str) -> bytes:
        """A secret that all ranks of the job can make, and nobody else; a different one for each purpose."""
        return hmac.digest(self._secret, purpose.encode(), "sha256")

    def has_room_to_overlap(self, threads: int) -> bool:
        """Whether communication has something to overlap with: a network, or a core beside those that compute.

        Args:
            threads: how many threads this rank computes with.
        """
        return self.topology.num_nodes > 1 or thread_count.share(*self.members.cores) > threads

    @property
    def summary(self) -> str:
        """For messages: "2 ranks on 1 host, started by this script"."""
        if self.topology.size == 1 and self.launcher.is_none:
            return self.topology.summary
        return f"{self.topology.summary}, started by {self.launcher.name}"

    def is_mine(self) -> bool:
        """Whether this process joined the job, rather than being forked from one that did."""
        return os.getpid() == self._pid

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they stop waiting. Only the first call counts."""
        if self.is_joining and self.is_mine():
            has_no_place = isinstance(error, ArgumentError)  # where processes can join
            self._note_end(HOPELESS if has_no_place else TOLD)
        if self.failure_detector is not None and self.observers is not None and self.is_mine():
            self.observers.flush()
            is_own = not isinstance(error, PeerFailed) or error.rank == self.world_rank
            self._note_end(TOLD if is_own else FOLLOWED)
            if is_own and (status := self.status_after(error)) > 1:
                self.failure_detector.leave(status)
            self.failure_detector.fail(error)

    def _note_end(self, how: int = TOLD) -> None:
        """As `Slots.note_end`, for what started this process."""
        if self.own_slot is not None:
            self.own_slot.note_end(how)

    def operations(self) -> int:
        """How many operations this rank has finished, also with communicators that are gone."""
        return sum(statistics.operations for statistics in self._statistics)

    def has_communicated(self) -> bool:
        """Whether this rank has begun any operation; any thread may call it."""
        return bool(self.activities()) or self.operations() > 0

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
        if self._closed or not self.is_mine():
            return
        self._closed = True
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
            if self._local_peers is not None:
                steps.callback(self._local_peers.own.leave)
            steps.callback(self.elastic.close)

    def detach_after_fork(self) -> None:
        """In a forked child: disturb neither the parent nor its peers."""
        if self.channel is not None:
            self.channel.abandon()
        self.elastic.detach_after_fork()
        if self.elastic.mesh is not None and self.listener is not None:
            self.listener.detach_after_fork()
        for communicator in self.in_use():
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
    """Join the other processes of the job; another call of it must want the same, and changes nothing.

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
            supported here; or this process has joined a job with other arguments already.
        LaunchError: the processes cannot find each other, or this one is a child of a rank.
        MissingDependency: the launcher needs a package that is not installed.
    """
    global _world, _generation
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if _world is not None and _world.is_mine():
        _world.check_same_arguments("init", ranks, on_failure, min_ranks, max_ranks)
        return _world
    if _world is not None and _world.topology.size > 1:
        raise LaunchError(
            f"this process was forked from rank {_world.topology.rank} (a data loader's worker?); call "
            "ring_plugins.init() in the ranks themselves."
        )
    policy = FailurePolicy.chosen(on_failure, min_ranks, max_ranks)
    if ranks is not None and max_ranks is not None:
        policy.check_size(ranks)
    check_ancestors((config.LAUNCHER.name, *launchers.identity()))
    if policy.recovers:
        prepare_to_continue(ranks, policy, _generation)
    check_directory(ranks)
    exit_hooks.install(lambda: _world, shutdown)
    rendezvous = connect(ranks, _generation)
    _generation += 1
    _world = World(rendezvous, launcher_of(rendezvous.size), policy, ranks)
    set_rank(rendezvous.rank)
    _world.export_place()
    if rendezvous.rank == 0 and _generation == 1:
        _warn_of_misspelled_variables()
        for text in policy.idle_variables():
            logger.warning(text)
    thread_count.share_among(*_world.members.cores)
    if rendezvous.size > 1 and config.KEEP_MEMORY.get():
        keep_freed_memory()
    for function in _on_joined:
        function()
    return _world


_on_joined: list[Callable[[], object]] = []


def on_joined(function: Callable[[], object]) -> None:
    """Have `init` call a function whenever this process has joined a job, for checks that name frameworks."""
    _on_joined.append(function)


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
        exported.withdraw()


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


def replaces() -> bool:
    """As `World.replaces`; False outside of a job, as in `is_joining`."""
    return _world is not None and _world.replaces


def is_joining() -> bool:
    """As `World.is_joining`; False outside of a job, where communicators are of threads of one process."""
    return _world is not None and _world.is_joining


def has_not_joined() -> bool:
    """Whether this process was to take the place of a lost rank, and has not: how it ends is of no importance."""
    return config.JOINS.is_set() and (not is_initialized() or is_joining())


def has_room_to_overlap(threads: int) -> bool:
    """As `World.has_room_to_overlap`; False outside of a job, where communicators are of threads of one process."""
    return _world is not None and _world.has_room_to_overlap(threads)


@contextlib.contextmanager
def constructed_by_all(what: str) -> Iterator[None]:
    """Let all ranks know if an exception ends a construction that all take part in."""
    with contextlib.nullcontext() if _world is None else on_all_or_none(_world.communicator, what):
        yield
