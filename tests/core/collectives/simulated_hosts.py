"""Ranks on several hosts in one process: threads stand for ranks, over real sockets and real shared memory."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ring_plugins.core.collectives.hierarchical import HierarchicalAllReduce
from ring_plugins.core.collectives.net_group import NetworkGroup
from ring_plugins.core.collectives.shm_group import SharedMemoryGroup, create_segment
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.listener import Listener, Peer
from ring_plugins.core.net.tcp import TcpTransport


class Rank(NamedTuple):
    """One rank: a group of all ranks, the shared-memory group of its host if it has one, and all-reduce over both."""

    group: NetworkGroup
    node: SharedMemoryGroup | None
    hierarchical: HierarchicalAllReduce


@contextlib.contextmanager
def simulated_hosts(ranks_per_host: Sequence[int]) -> Iterator[Callable[[Callable[[int, Rank], Any]], list[Any]]]:
    """Yield a function that calls `function(rank, its Rank)` on all ranks at once and returns results or errors."""
    size, wait = sum(ranks_per_host), Wait("test", None)
    places = [(host, local) for host, count in enumerate(ranks_per_host) for local in range(count)]
    listeners = [Listener("127.0.0.1") for _ in range(size)]
    peers = [Peer(f"host{host}", "127.0.0.1", listeners[rank].port) for rank, (host, _) in enumerate(places)]
    transports = [TcpTransport(rank, peers, listener) for rank, listener in enumerate(listeners)]
    segments = [create_segment() for _ in range(size)]
    rails = min(ranks_per_host)
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
            hierarchical = HierarchicalAllReduce(node, rail, local, rails, len(ranks_per_host), size)
            return Rank(group, node, hierarchical)

        try:
            for rank, listener in enumerate(listeners):
                listener.open(rank, peers, "a secret")
            ranks = everywhere(build)
            yield lambda function: everywhere(lambda rank: function(rank, ranks[rank]))
        finally:
            for transport in transports:
                transport.close()
