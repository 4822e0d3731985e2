"""Measure latency and bandwidth between hosts: each pair through ring_plugins, each network through plain sockets.

Pairs that share no host are measured at the same time, in the rounds of a round-robin tournament, so that the time
grows with the number of hosts and not with the number of pairs. A plain TCP connection shows the rate of the network
itself: the probe of `init()` (core/net/network_choice.py), for longer, because a report quotes its figures.
"""

from __future__ import annotations

import ipaddress
import math
import secrets
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

import ring_plugins as ring
from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.net.network_choice import receive_timed, send_timed
from ring_plugins.core.world import current
from ring_plugins.doctor.host import Facts

_PINGS, _WARM_UP = 40, 5
_LARGE = 8 << 20
#: Approximate seconds per direction of a pair; at least three transfers.
_SECONDS = 0.5
_TCP_SECONDS = 0.4


@dataclass(frozen=True)
class Link:
    """The network between two hosts, as measured between the first rank of each.

    Attributes:
        nodes, hosts, ranks: node ranks, names and first ranks of the two hosts.
        microseconds: median one-way time of a small message.
        mpi_microseconds: the same with MPI's own blocking calls; None unless MPI started the job.
        gigabits: Gbit/s from the first host to the second, and in reverse.
        interfaces: the interface at each end that carried most of the traffic; "" if no counter moved.
        tcp_gigabits: each network that both hosts are on -> Gbit/s of one plain TCP connection.
    """

    nodes: tuple[int, int]
    hosts: tuple[str, str]
    ranks: tuple[int, int]
    microseconds: float
    mpi_microseconds: float | None
    gigabits: tuple[float, float]
    interfaces: tuple[str, str]
    tcp_gigabits: dict[str, float]

    @property
    def slowest_message(self) -> float:
        """Microseconds of a small message, through ring_plugins or MPI, whichever takes longer."""
        return max(self.microseconds, self.mpi_microseconds or 0.0)


def rounds(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of hosts: every pair occurs once in all, every host at most once per round."""
    # The circle method: the first place is fixed, all others rotate by one.
    places = [*range(hosts), *([-1] if hosts % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        places = [places[0], places[-1], *places[1:-1]]


def measure_links(facts: Sequence[Facts]) -> list[Link]:
    """Measure all pairs of hosts. Collective."""
    topology = current().topology
    first = {fact.node: fact for fact in reversed(facts)}
    found: list[Link] = []
    for pairs in rounds(topology.num_nodes):
        link = None
        mine = next((pair for pair in pairs if topology.rank in (first[pair[0]].rank, first[pair[1]].rank)), None)
        if mine:
            pair = ring.Group(first[node].rank for node in mine)
            link = _measure_pair(pair.communicator, first[mine[0]], first[mine[1]])
            pair.close()
        found += [one for one in ring.all_gather_object(link) if one is not None]
    return sorted(found, key=lambda one: one.nodes)


def _measure_pair(pair: Communicator, one: Facts, other: Facts) -> Link | None:
    """Measure the link. Returns it on the first rank of the pair, None on the second."""
    small, large = host_memory(np.zeros(1)), host_memory(np.zeros(_LARGE // 8))
    seconds = []
    for i in range(_PINGS + _WARM_UP):
        started = time.perf_counter()
        pair.broadcast(small, 0)
        pair.broadcast(small, 1)
        if i >= _WARM_UP:
            seconds.append((time.perf_counter() - started) / 2)
    mpi_microseconds = _mpi_microseconds(pair) if current().launcher.uses_mpi else None
    before = _traffic()
    rates = tuple(8e-9 * _LARGE / _transfer_seconds(pair, large, root) for root in (0, 1))
    moved = {name: total - before.get(name, 0) for name, total in _traffic().items() if name != "lo"}
    busiest = max(moved, key=lambda name: moved[name], default="")
    # No counter has grown by one message where RDMA moves the bytes.
    used = pair.all_gather_object(busiest if moved.get(busiest, 0) > _LARGE else "")
    tcp_gigabits = {}
    for name, address in _common_networks(one, other):
        rate = _tcp_gigabits(pair, address)
        if rate:
            tcp_gigabits[name] = rate
    if pair.rank != 0:
        return None
    return Link(
        (one.node, other.node),
        (one.host, other.host),
        (one.rank, other.rank),
        statistics.median(seconds) * 1e6,
        mpi_microseconds,
        (rates[0], rates[1]),
        (used[0], used[1]),
        tcp_gigabits,
    )


def _mpi_microseconds(pair: Communicator) -> float:
    """Time of a small message with MPI's own calls, which keep their core busy while they wait."""
    from mpi4py import MPI

    world, data, other = MPI.COMM_WORLD, np.zeros(1), pair.ranks[1 - pair.rank]
    seconds = []
    for _ in range(_PINGS // 2):
        started = time.perf_counter()
        if pair.rank == 0:
            world.Send(data, other)
            world.Recv(data, other)
        else:
            world.Recv(data, other)
            world.Send(data, other)
        seconds.append((time.perf_counter() - started) / 2)
    return statistics.median(seconds) * 1e6


def _transfer_seconds(pair: Communicator, memory: Any, root: int) -> float:
    """Seconds of one large message from `root`: the median of as many as fit in the time, equal on both ranks."""
    pair.broadcast(memory, root)
    started = time.perf_counter()
    pair.broadcast(memory, root)
    pair.barrier()
    times = max(3, min(20, int(_SECONDS / (time.perf_counter() - started))))
    seconds = []
    for _ in range(min(pair.all_gather_object(times))):
        pair.barrier()
        started = time.perf_counter()
        pair.broadcast(memory, root)
        pair.barrier()
        seconds.append(time.perf_counter() - started)
    return float(max(pair.all_gather_object(statistics.median(seconds))))


def _traffic() -> dict[str, int]:
    """Interface -> bytes that it has sent and received."""
    return {name: c.bytes_sent + c.bytes_recv for name, c in psutil.net_io_counters(pernic=True).items()}


def _common_networks(one: Facts, other: Facts) -> list[tuple[str, str]]:
    """Each IPv4 network that both hosts are on: the interface and network of `one`, and the address of `other`."""
    found = []
    for interface in one.interfaces:
        for address in other.external_addresses:
            if not interface.external:
                continue
            networks = [n for n in interface.networks if ipaddress.ip_address(address) in ipaddress.ip_network(n)]
            if networks and address not in interface.addresses:
                found.append((f"{interface.name} {networks[0]}", address))
    return found


def _tcp_gigabits(pair: Communicator, address: str) -> float:
    """Gbit/s of one TCP connection to the second rank at `address`, 0 if it cannot be reached. Equal on both ranks."""
    if pair.rank == 1:
        server, secret = socket.create_server((address, 0)), secrets.token_bytes(32)
        pair.all_gather_object((server.getsockname()[1], secret))
        return float(pair.all_gather_object(receive_timed(server, secret, 0) / 1e3)[1])
    port, secret = pair.all_gather_object(None)[1]
    send_timed((address, port), secret, 0, seconds=_TCP_SECONDS, most=math.inf)
    return float(pair.all_gather_object(0.0)[1])
