"""The world of this process: joining it, leaving it, and finding it again.

What the guard of each rank looks after, beside the job.

A connected job, as one of its processes sees it: who is where, what it communicates with, how it ends.
"""

from __future__ import annotations

import itertools
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ring_plugins.core import exit_hooks
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, NotInitialized
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Activity, Communicator
from ring_plugins.core.collectives.host import Gather, HostCommunicator
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.control import ControlClient, ControlServer
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector, Peer
from ring_plugins.core.control.liveness import Liveness, LocalPeers
from ring_plugins.core.control.monitor import MonitorThread, Service
from ring_plugins.core.control.tcp_liveness import TcpLiveness
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu import load_driver, load_nccl
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gpu.stream import Streams
from ring_plugins.core.gpu.watchdog import GpuWatchdog
from ring_plugins.core.linux.interfaces import own_addresses
from ring_plugins.core.linux.shared_memory import is_available, shared_memory_domain
from ring_plugins.core.observe.stall import StallAggregator, StallWatch
from ring_plugins.core.observe.step_breakdown import StepAggregator, StepReporter
from ring_plugins.core.observe.timeline import TimelineAggregator, TimelineReporter
from ring_plugins.core.rendezvous import Rendezvous, connect, detect
from ring_plugins.core.rendezvous.topology import find_topology, virtual_nodes
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps


class Observers:
    """The observing services of this rank.

    Args:
        channel: between the ranks.
        failure_detector: knows what became of the other ranks.
        activities: returns the last operation of this rank in each communicator.

    Attributes:
        services: all of them, for the monitor thread.
        membership: where the ranks are.
        steps: sends this rank's steps to rank 0.
        all_steps, timeline: on rank 0, the steps and the timeline of all ranks.

    Raises:
        ArgumentError: an environment variable has a value that cannot be used.
    """

    def __init__(
        self, channel: Channel, failure_detector: FailureDetector, activities: Callable[[], Iterable[Activity]]
    ) -> None:
        warning = config.STALL_WARNING.get()
        abort = config.STALL_ABORT.get()
        steps.restart()
        self.membership = membership = failure_detector.membership
        self.steps = StepReporter(channel, steps)
        self.all_steps: StepAggregator | None = None
        self.timeline: TimelineAggregator | None = None
        self._spans = TimelineReporter(channel, membership[channel.rank].domain == membership[0].domain)
        self.services: list[Service] = [StallWatch(channel, failure_detector, activities), self.steps, self._spans]
        if channel.rank == 0:
            self.all_steps = StepAggregator(channel, membership, logger.warning)
            self.timeline = TimelineAggregator(channel, membership)
            stalls = StallAggregator(channel, membership, warning, abort, logger.warning)
            self.services += [stalls, self.all_steps, self.timeline]
            directory = config.TIMELINE.get()
            if directory:
                self.timeline.start(Path(directory))

    def flush(self) -> None:
        """Send the spans that would be lost if this process ended; any thread may call it."""
        if recorder.on:
            self._spans.flush()


class World:
    """A connected job. Made by `init`; there is one a process at a time.

    Attributes:
        place: who this process is.
        communicator: all ranks, for the public functions.
        launcher: "mpi", "rendezvous", "spawned" or "single".
    """

    def __init__(self, connection: Rendezvous, launcher: str) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self.launcher = launcher
        rank, size = connection.rank, connection.size
        own = Liveness.create(rank) if size > 1 and is_available() else None
        hub = ControlServer(size, connection.addresses) if size > 1 and rank == 0 else None
        told = [
            _Introduction(*item)
            for item in connection.gather(
                _Introduction(
                    shared_memory_domain(),
                    socket.gethostname(),
                    os.getpid(),
                    list(own.address) if own else None,
                    hub.address if hub else None,
                    own_addresses(),
                )
            )
        ]
        domains = [item.domain for item in told]
        self._nodes = virtual_nodes(domains, config.VIRTUAL_NODES.text())
        if len(set(self._nodes)) > 1 and connection.transport is None:
            raise LaunchError(
                "RING_VIRTUAL_NODES needs a launcher that carries data between hosts: mpirun or torchrun."
            )
        self.topology = find_topology(rank, self._nodes, [item.host for item in told])
        local_peers: LocalPeers | None = None
        if own is not None:
            others = [
                Liveness.open((pid, fd, nbytes), other)
                for other, item in enumerate(told)
                if other != rank and item.domain == domains[rank] and item.presence
                for pid, fd, nbytes in [item.presence]
            ]
            connection.gather(None)  # everyone has opened what it needs before anyone may leave
            local_peers = LocalPeers(own, others, told[rank].host if len(set(domains)) > 1 else "")
        self._local_peers = local_peers
        self._tags = itertools.count(rank, size)  # no two ranks ever offer the same
        #: Those that somebody still uses, by the order in which they were made, which is the same on all ranks.
        self._communicators: weakref.WeakValueDictionary[int, Communicator[Any]] = weakref.WeakValueDictionary()
        self._made = itertools.count()
        self._of_devices: dict[int, DeviceCommunicator] = {}
        self._closed = False
        self._monitor: MonitorThread | None = None
        #: What becomes of the other ranks, the line to rank 0, and who looks on; None in a job of one.
        self.failure_detector: FailureDetector | None = None
        self.channel: Channel | None = None
        self.observers: Observers | None = None
        monitor = self._connect_channel(hub, told) if size > 1 else None
        self.communicator = self.new_communicator("ring", gather=connection.gather)
        if monitor is not None:
            monitor.start()

    def _connect_channel(self, hub: ControlServer | None, told: list[_Introduction]) -> MonitorThread:
        """Set up what runs beside the job."""
        rank, size, domains = self._connection.rank, self._connection.size, [item.domain for item in told]
        if hub is not None and len(set(domains)) == 1:
            hub.only_this_host()
        address = told[0].hub
        assert address is not None
        self.channel = hub or ControlClient(rank, size, address, domains[0] == domains[rank])
        membership = [Peer(item.host, item.pid, item.domain) for item in told]
        self.failure_detector = FailureDetector(rank, membership, self._local_peers, self.channel)
        launched = self.launcher in ("mpi", "spawned") or "TORCHELASTIC_RUN_ID" in os.environ
        self._monitor = MonitorThread(self.failure_detector, self.channel, launched, self.abort)
        self._monitor.add(GpuWatchdog(self.failure_detector, self.device_communicators))
        self._monitor.add(TcpLiveness(self.failure_detector, [item.addresses for item in told]))
        self.observers = Observers(self.channel, self.failure_detector, self.activities)
        for service in self.observers.services:
            self._monitor.add(service)
        return self._monitor

    def activities(self) -> list[Activity]:
        """What this rank did last with each of its communicators."""
        communicators = self._communicators.copy().values()
        found = [one.activity() for one in communicators]
        return [activity for activity in found if activity is not None]

    def new_communicator(
        self, name: str, ranks: Sequence[int] | None = None, gather: Gather | None = None
    ) -> Communicator:
        """A communicator of its own, with its own order of operations; called by all members.

        Args:
            name: for texts.
            ranks: world ranks of the members, all by default.
            gather: how the members meet; by default over `communicator`, which needs all ranks.

        Raises:
            ArgumentError: `ranks` are not distinct ranks of this job.
        """
        size = self.topology.size
        members = tuple(range(size)) if ranks is None else tuple(ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < size for rank in members):
            raise ArgumentError(f"ranks={list(members)} are not distinct ranks of a job of {size}.")
        if gather is None:
            if len(members) != size:
                raise ArgumentError(
                    f"ranks={list(members)} is a part of the job; pass gather, so that its members can meet."
                )
            gather = self.communicator.all_gather_object
        if len(members) == 1:
            communicator: Communicator = SingleCommunicator(name, members[0])
        else:
            host = HostCommunicator(
                name,
                self.topology.rank,
                self._nodes[self.topology.rank],
                2 * next(self._tags),
                gather,
                self.failure_detector,
                self._connection.transport,
            )
            communicator = host
        self._communicators[next(self._made)] = communicator
        return communicator

    def new_device_communicator(
        self,
        name: str,
        device: int,
        streams: Streams,
        ranks: Sequence[int] | None = None,
        gather: Gather | None = None,
        own_stream: bool = False,
    ) -> DeviceCommunicator:
        """As `new_communicator`, for the memory of one GPU a rank, by NCCL.

        Args:
            name, ranks, gather: as there.
            device: this rank's GPU, as the process numbers them.
            streams: the framework's.
            own_stream: whether other communicators' operations may overtake its own.

        Raises:
            MissingDependency: there is no NCCL.
            DeviceError: there is no CUDA driver or no such GPU, or ranks would share one.
            MismatchError: the ranks have different releases of NCCL.
        """
        host = self.new_communicator(name, ranks, gather)
        wait = Wait(name, self.failure_detector)
        communicator = DeviceCommunicator(name, device, host, streams, wait, load_nccl(), load_driver(), own_stream)
        self._communicators[next(self._made)] = communicator
        return communicator

    def device_communicator(self, device: int, streams: Streams) -> DeviceCommunicator:
        """All ranks, for what a script asks for by itself; made at the first call, which all ranks make together."""
        if device not in self._of_devices:
            self._of_devices[device] = self.new_device_communicator("ring on GPUs", device, streams)
        return self._of_devices[device]

    def device_communicators(self) -> list[DeviceCommunicator]:
        """Those that somebody still uses."""
        return [one for one in self._communicators.copy().values() if isinstance(one, DeviceCommunicator)]

    def is_mine(self) -> bool:
        """Whether this process joined the job, and was not forked from one that did."""
        return os.getpid() == self._pid

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they stop waiting. The first call counts."""
        if self.failure_detector is not None and self.observers is not None and self.is_mine():
            self.observers.flush()
            self.failure_detector.fail(error)

    def abort(self) -> None:
        """End the whole job where the launcher offers that."""
        self._connection.abort(1)

    def close(self) -> None:
        """Leave the job; peers that still wait for this rank are told."""
        if self._closed or not self.is_mine():
            return
        self._closed = True
        if self._local_peers is not None:
            self._local_peers.own.leave()
        if self._monitor is not None:
            self._monitor.close()
        for communicator in self._communicators.copy().values():
            communicator.close()

    def detach_after_fork(self) -> None:
        """In a forked child: disturb neither the parent nor its peers."""
        if self.channel is not None:
            self.channel.abandon()
        for communicator in self._communicators.copy().values():
            communicator.detach_after_fork()


class _Introduction(NamedTuple):
    """What a rank says of itself in the job's first gather."""

    domain: str
    host: str
    pid: int
    presence: list[int] | None
    hub: dict[str, Any] | None
    addresses: list[str]


_world: World | None = None
_generation = 0


def init(ranks: int | None = None) -> World:
    """Join the other processes of the job; calling it again changes nothing.

    Started by mpirun, torchrun, srun or another launcher it finds the ranks that were started. Started
    alone, the process stays alone, or starts itself `ranks - 1` times more.

    Args:
        ranks: how many processes a script that was started alone becomes.

    Returns:
        The world, which most users need not keep.

    Raises:
        ArgumentError: `ranks` is not a positive integer.
        LaunchError: the processes cannot find each other, or this one is a rank's forked child.
        MissingDependency: the launcher needs a package that is missing.
    """
    global _world, _generation
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if _world is not None and _world.is_mine():
        return _world
    if _world is not None and _world.topology.size > 1:
        raise LaunchError(
            f"this process was forked from rank {_world.topology.rank} (a data loader's worker?); ring_plugins.init() "
            "belongs into the ranks themselves."
        )
    exit_hooks.install(lambda: _world, shutdown)
    connection = connect(ranks, _generation)
    _generation += 1
    kind = detect().kind
    launcher = "single" if connection.size == 1 else "spawned" if kind == "single" else kind
    _world = World(connection, launcher)
    return _world


def shutdown() -> None:
    """Leave the job. `init` may be called again afterwards, by all ranks."""
    global _world
    world, _world = _world, None
    if world is not None and world.is_mine():
        world.close()
        world._connection.close()


def is_initialized() -> bool:
    """Whether `init` has been called in this process, and `shutdown` not since."""
    return _world is not None


def current() -> World:
    """The world that `init` made.

    Raises:
        NotInitialized: it has not been called.
    """
    if _world is None:
        raise NotInitialized("call ring_plugins.init() before this.")
    return _world
