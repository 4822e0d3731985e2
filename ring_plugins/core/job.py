"""A connected job, as one of its processes sees it: who is where, what it communicates with, how it ends."""

from __future__ import annotations

import itertools
import os
import socket
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ring_plugins.core import nccl
from ring_plugins.core.collectives.alone import AloneCommunicator
from ring_plugins.core.collectives.device import DeviceCommunicator
from ring_plugins.core.collectives.host import Gather, HostCommunicator
from ring_plugins.core.collectives.ordered import Activity, OrderedOperations
from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.collectives.stream_queue import Streams
from ring_plugins.core.control import Channel, Hub, Link
from ring_plugins.core.errors import ArgumentError, LaunchError
from ring_plugins.core.failure import Peer, Watch
from ring_plugins.core.guard import Guard
from ring_plugins.core.launch import Connection
from ring_plugins.core.launch.interfaces import own_addresses
from ring_plugins.core.nccl.watch import DeviceWatch
from ring_plugins.core.observe.services import Observers
from ring_plugins.core.place import find_place, virtual_nodes
from ring_plugins.core.presence import Neighbourhood, Presence
from ring_plugins.core.shared_memory import domain, is_available
from ring_plugins.core.silence import SilenceWatch
from ring_plugins.core.waiting import Wait


class Closable(Protocol):
    """What the world keeps of a communicator."""

    def close(self) -> None: ...


class World:
    """A connected job. Made by `init`; there is one a process at a time.

    Attributes:
        place: who this process is.
        communicator: all ranks, for the public functions.
        launcher: "mpi", "rendezvous", "grown" or "alone".
    """

    def __init__(self, connection: Connection, launcher: str) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self.launcher = launcher
        rank, size = connection.rank, connection.size
        own = Presence.create(rank) if size > 1 and is_available() else None
        hub = Hub(size, connection.addresses) if size > 1 and rank == 0 else None
        told = [
            _Introduction(*item)
            for item in connection.gather(
                _Introduction(
                    domain(),
                    socket.gethostname(),
                    os.getpid(),
                    list(own.address) if own else None,
                    hub.address if hub else None,
                    own_addresses(),
                )
            )
        ]
        domains = [item.domain for item in told]
        self._nodes = virtual_nodes(domains, os.environ.get("RING_VIRTUAL_NODES", ""))
        if len(set(self._nodes)) > 1 and connection.plane is None:
            raise LaunchError(
                "RING_VIRTUAL_NODES needs a launcher that carries data between hosts: mpirun or torchrun."
            )
        self.place = find_place(rank, self._nodes, [item.host for item in told])
        neighbourhood: Neighbourhood | None = None
        if own is not None:
            others = [
                Presence.open((pid, fd, nbytes), other)
                for other, item in enumerate(told)
                if other != rank and item.domain == domains[rank] and item.presence
                for pid, fd, nbytes in [item.presence]
            ]
            connection.gather(None)  # everyone has opened what it needs before anyone may leave
            neighbourhood = Neighbourhood(own, others, told[rank].host if len(set(domains)) > 1 else "")
        self._neighbourhood = neighbourhood
        self._tags = itertools.count(rank, size)  # no two ranks ever offer the same
        #: Those that somebody still uses, by the order in which they were made, which is the same on all ranks.
        self._communicators: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()
        self._made = itertools.count()
        self._of_devices: dict[int, DeviceCommunicator] = {}
        self._closed = False
        self._guard: Guard | None = None
        #: What becomes of the other ranks, the line to rank 0, and who looks on; None in a job of one.
        self.watch: Watch | None = None
        self.channel: Channel | None = None
        self.observers: Observers | None = None
        guard = self._connect_channel(hub, told) if size > 1 else None
        self.communicator = self.new_communicator("ring", gather=connection.gather)
        if guard is not None:
            guard.start()

    def _connect_channel(self, hub: Hub | None, told: list[_Introduction]) -> Guard:
        """Set up what runs beside the job."""
        rank, size, domains = self._connection.rank, self._connection.size, [item.domain for item in told]
        if hub is not None and len(set(domains)) == 1:
            hub.only_this_host()
        address = told[0].hub
        assert address is not None
        self.channel = hub or Link(rank, size, address, domains[0] == domains[rank])
        roster = [Peer(item.host, item.pid, item.domain) for item in told]
        self.watch = Watch(rank, roster, self._neighbourhood, self.channel)
        launched = self.launcher in ("mpi", "grown") or "TORCHELASTIC_RUN_ID" in os.environ
        self._guard = Guard(self.watch, self.channel, launched, self.abort)
        self._guard.add(DeviceWatch(self.watch, self.device_communicators))
        self._guard.add(SilenceWatch(self.watch, [item.addresses for item in told]))
        self.observers = Observers(self.channel, self.watch, self.activities)
        for service in self.observers.services:
            self._guard.add(service)
        return self._guard

    def activities(self) -> list[Activity]:
        """What this rank did last with each of its communicators."""
        communicators = self._communicators.copy().values()
        found = [one.activity() for one in communicators if isinstance(one, OrderedOperations | DeviceCommunicator)]
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
        size = self.place.size
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
            communicator: Communicator = AloneCommunicator(name, members[0])
        else:
            host = HostCommunicator(
                name,
                self.place.rank,
                self._nodes[self.place.rank],
                2 * next(self._tags),
                gather,
                self.watch,
                self._connection.plane,
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
        wait = Wait(name, self.watch)
        communicator = DeviceCommunicator(
            name, device, host, streams, wait, nccl.load_nccl(), nccl.load_driver(), own_stream
        )
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
        if self.watch is not None and self.observers is not None and self.is_mine():
            self.observers.last_words()
            self.watch.fail(error)

    def abort(self) -> None:
        """End the whole job where the launcher offers that."""
        self._connection.abort(1)

    def close(self) -> None:
        """Leave the job; peers that still wait for this rank are told."""
        if self._closed or not self.is_mine():
            return
        self._closed = True
        if self._neighbourhood is not None:
            self._neighbourhood.own.leave()
        if self._guard is not None:
            self._guard.close()
        for communicator in self._communicators.copy().values():
            communicator.close()

    def leave_to_parent(self) -> None:
        """In a forked child: disturb neither the parent nor its peers."""
        if self.channel is not None:
            self.channel.abandon()
        for communicator in self._communicators.copy().values():
            if isinstance(communicator, OrderedOperations | DeviceCommunicator):
                communicator.leave_to_parent()


class _Introduction(NamedTuple):
    """What a rank says of itself in the job's first gather."""

    domain: str
    host: str
    pid: int
    presence: list[int] | None
    hub: dict[str, Any] | None
    addresses: list[str]
