"""Ranks on several hosts in one process: threads stand for ranks, over real sockets and real shared memory."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ring_plugins.core.base.member import Member
from ring_plugins.core.collectives.hierarchical import HierarchicalAllReduce, TwoLevels
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.net_group import NetworkGroup
from ring_plugins.core.collectives.shm_group import SharedMemoryGroup, create_segment
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.tcp import TcpTransport


class Rank(NamedTuple):
    """One rank: a group of all ranks, the shared-memory group of its host if it has one, and all-reduce over both."""

    group: NetworkGroup
    node: SharedMemoryGroup | None
    hierarchical: HierarchicalAllReduce


class Traffic(TcpTransport):
    """A transport that remembers what it sent.

    Attributes:
        sent: (receiving rank, bytes) of every message.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sent: list[tuple[int, int]] = []

    def exchange(self, outgoing: Any, incoming: Any, tag: int) -> Any:
        self.sent += [(rank, data.size) for rank, data in outgoing if data.size]
        return super().exchange(outgoing, incoming, tag)


Everywhere = Callable[[Callable[[int], Any]], list[Any]]


@contextlib.contextmanager
def _job(hosts: Sequence[int]) -> Iterator[tuple[list[Traffic], Everywhere]]:
    """Connectable ranks, `hosts[rank]` being the host of a rank, and a function that calls another on all at once."""
    size = len(hosts)
    listeners = [Listener("127.0.0.1") for _ in range(size)]
    peers = [
        Member(rank, host=f"host{host}", address="127.0.0.1", port=listeners[rank].port)
        for rank, host in enumerate(hosts)
    ]
    transports = [Traffic(rank, peers, listener) for rank, listener in enumerate(listeners)]
    with ThreadPoolExecutor(size) as threads:

        def everywhere(function: Callable[[int], Any]) -> list[Any]:
            together = threading.Barrier(size)  # so that no thread runs two ranks

            def call(rank: int) -> Any:
                together.wait(30)
                try:
                    return function(rank)
                except Exception as error:
                    return error

            return list(threads.map(call, range(size), timeout=60))

        try:
            for rank, listener in enumerate(listeners):
                listener.open(rank, peers, "a secret")
            yield transports, everywhere
        finally:
            list(threads.map(lambda transport: transport.close(), transports))  # each waits for its peers to close


@contextlib.contextmanager
def simulated_hosts(ranks_per_host: Sequence[int]) -> Iterator[Callable[[Callable[[int, Rank], Any]], list[Any]]]:
    """Yield a function that calls `function(rank, its Rank)` on all ranks at once and returns results or errors."""
    size, wait = sum(ranks_per_host), Wait("test", None)
    places = [(host, local) for host, count in enumerate(ranks_per_host) for local in range(count)]
    segments = [create_segment() for _ in range(size)]
    rails = min(ranks_per_host)
    with _job([host for host, _ in places]) as (transports, everywhere):

        def network_group(rank: int, members: list[int], tag: int) -> NetworkGroup:
            group = NetworkGroup(transports[rank], members, members.index(rank), tag, wait, "test")
            group.connect()
            return group

        def build(rank: int) -> Rank:
            host, local = places[rank]
            neighbors = [other for other in range(size) if places[other][0] == host]
            node = None
            if len(neighbors) > 1:
                addresses = [segments[other].address for other in neighbors]
                node = SharedMemoryGroup(segments[rank], addresses, neighbors, local, Wait("test", None), "test")
            rail = None
            if local < rails:
                rail = network_group(rank, [other for other in range(size) if places[other][1] == local], 1)
            group = network_group(rank, list(range(size)), 2)
            hosts = [[other for other in range(size) if places[other][0] == one] for one in range(len(ranks_per_host))]
            return Rank(group, node, HierarchicalAllReduce(TwoLevels(node, rail, hosts, rank)))

        ranks = everywhere(build)
        yield lambda function: everywhere(lambda rank: function(rank, ranks[rank]))


class Job(NamedTuple):
    """Communicators of ranks on simulated hosts.

    Attributes:
        on_all: calls `function(rank, its communicator)` on all ranks at once and returns results or errors.
        transports: by rank.
        communicators: by rank.
        group: makes a communicator of some ranks, and returns each one's end of it.
    """

    on_all: Callable[[Callable[[int, HostCommunicator], Any]], list[Any]]
    transports: list[Traffic]
    communicators: list[HostCommunicator]
    group: Callable[[Sequence[int]], dict[int, HostCommunicator]]


@contextlib.contextmanager
def simulated_communicators(hosts: Sequence[int]) -> Iterator[Job]:
    """A communicator of ranks that live on `hosts[rank]`, in any order."""
    size = len(hosts)
    with _job(hosts) as (transports, everywhere):
        communicators = everywhere(_builder(range(size), hosts, transports, tag=1))
        failed = [error for error in communicators if isinstance(error, Exception)]
        if failed:
            raise failed[0]
        tags, opened = itertools.count(2), list(communicators)

        def group(ranks: Sequence[int]) -> dict[int, HostCommunicator]:
            build = _builder(ranks, hosts, transports, next(tags))
            made = everywhere(lambda rank: build(rank) if rank in ranks else None)
            opened.extend(made[rank] for rank in ranks)
            return {rank: made[rank] for rank in ranks}

        try:
            yield Job(
                lambda function: everywhere(lambda rank: function(rank, communicators[rank])),
                transports,
                communicators,
                group,
            )
        finally:
            for communicator in opened:
                communicator.close()


def _builder(
    ranks: Sequence[int], hosts: Sequence[int], transports: Sequence[Traffic], tag: int
) -> Callable[[int], HostCommunicator]:
    """A function that builds a rank's communicator, to be called for all ranks at once."""
    items: dict[int, Any] = {}
    gathered = threading.Barrier(len(ranks))

    def build(rank: int) -> HostCommunicator:
        def gather(item: Any) -> list[Any]:
            items[rank] = item
            gathered.wait(30)
            return [items[member] for member in ranks]

        return HostCommunicator("test", rank, f"host{hosts[rank]}", tag, gather, None, transports[rank])

    return build
