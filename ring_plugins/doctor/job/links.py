"""Latency and bandwidth between hosts, measured: each pair through ring_plugins, each network through plain sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ring_plugins as ring
from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.world import current
from ring_plugins.doctor.job.facts import Facts

_PINGS = 40
_LARGE = 8 << 20
#: Seconds of one direction of one pair, about; at least three transfers.
_SECONDS = 0.5
_STREAM_SECONDS = 0.4
_STREAM_PIECE = 1 << 18


@dataclass(frozen=True)
class Link:
    """What lies between two hosts, as measured between the first rank of each.

    Attributes:
        nodes, hosts, ranks: of the two.
        microseconds: median time of a small message, one way.
        mpi_microseconds: the same by MPI's own blocking calls, None where MPI did not start the job.
        gigabits: Gbit/s from the first to the second, and back.
        carried_by: the interfaces that carried most of it, at either end; "" where no counter moved.
        streams: Gbit/s of one plain TCP connection, by the network that both hosts are on.
    """

    nodes: tuple[int, int]
    hosts: tuple[str, str]
    ranks: tuple[int, int]
    microseconds: float
    mpi_microseconds: float | None
    gigabits: tuple[float, float]
    carried_by: tuple[str, str]
    streams: dict[str, float]


def rounds(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of hosts, so that everyone meets everyone once and nobody twice in a round (a round-robin tournament)."""
    seats = [*range(hosts), *([-1] if hosts % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def measure(facts: Sequence[Facts]) -> list[Link]:
    """All pairs of hosts; collective. Pairs that share no host are measured at the same time."""
    place = current().topology
    first = {fact.node: fact for fact in reversed(facts)}
    found: list[Link] = []
    for pairs in rounds(place.num_nodes):
        link = None
        mine = next((pair for pair in pairs if place.rank in (first[pair[0]].rank, first[pair[1]].rank)), None)
        ranks = [first[node].rank for node in mine] if mine else None
        pair = _pair(ranks)
        if mine and pair is not None:
            link = _measure_pair(pair, first[mine[0]], first[mine[1]])
            pair.close()
        found += [one for one in ring.all_gather_object(link) if one is not None]
    return sorted(found, key=lambda one: one.nodes)


def _pair(ranks: list[int] | None) -> Communicator | None:
    """A communicator of two ranks, made while all ranks take part in the meeting; None for those of no pair."""
    meet = current().communicator.all_gather_object
    if ranks is None:
        meet((None, None))
        return None

    def gather(payload: Any) -> list[Any]:
        everyones = meet((min(ranks), payload))
        return [item for key, item in everyones if key == min(ranks)]

    return current().new_communicator("doctor's pair", ranks, gather)


def _measure_pair(pair: Communicator, one: Facts, other: Facts) -> Link | None:
    small, large = host_memory(np.zeros(1)), host_memory(np.zeros(_LARGE // 8))
    seconds = []
    for i in range(_PINGS + 5):
        started = time.perf_counter()
        pair.broadcast(small, 0)
        pair.broadcast(small, 1)
        if i >= 5:
            seconds.append((time.perf_counter() - started) / 2)
    by_mpi = _mpi_microseconds(pair) if current().launcher == "mpi" else None
    before = _counters()
    rates = tuple(8e-9 * _LARGE / _transfer(pair, large, root) for root in (0, 1))
    used = pair.all_gather_object(_busiest(before, _counters()))
    streams = {}
    for name, address in _shared_networks(one, other):
        rate = _stream(pair, address)
        if rate:
            streams[name] = rate
    if pair.rank != 0:
        return None
    return Link(
        (one.node, other.node),
        (one.host, other.host),
        (one.rank, other.rank),
        statistics.median(seconds) * 1e6,
        by_mpi,
        (rates[0], rates[1]),
        (used[0], used[1]),
        streams,
    )


def _mpi_microseconds(pair: Communicator) -> float:
    """One way between the two ranks by MPI itself, which waits for messages in a loop that keeps its core busy."""
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


def _transfer(pair: Communicator, memory: Any, root: int) -> float:
    """Seconds of one large message from `root`, the median of as many as time allows, equal on both ranks."""
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


def _counters() -> dict[str, int]:
    import psutil

    return {name: c.bytes_sent + c.bytes_recv for name, c in psutil.net_io_counters(pernic=True).items()}


def _busiest(before: dict[str, int], after: dict[str, int]) -> str:
    """The interface whose counters moved most, if they moved by about what was sent; "" for RDMA and the like."""
    moved = {name: after[name] - before.get(name, 0) for name in after if name != "lo"}
    name = max(moved, key=lambda one: moved[one], default="")
    return name if name and moved[name] > _LARGE else ""


def _shared_networks(one: Facts, other: Facts) -> list[tuple[str, str]]:
    """For each IPv4 network that both hosts are on by an interface of their own: its name, the other's address."""
    found = []
    for interface in one.interfaces:
        for theirs in other.interfaces:
            for address in theirs.addresses:
                if not interface.leads_out or not theirs.leads_out or ":" in address:
                    continue
                networks = [n for n in interface.networks if ipaddress.ip_address(address) in ipaddress.ip_network(n)]
                if networks and address not in interface.addresses:
                    found.append((f"{interface.name} {networks[0]}", address))
    return found


def _stream(pair: Communicator, address: str) -> float:
    """Gbit/s of one TCP connection to the second rank at `address`; 0 where it cannot be reached."""
    if pair.rank == 1:
        with socket.create_server((address, 0)) as server:
            server.settimeout(3.0)
            pair.all_gather_object(server.getsockname()[1])
            received = _take(server)
        return float(pair.all_gather_object(received)[1])
    port = pair.all_gather_object(0)[1]
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=2.0) as connection:
        connection.settimeout(3.0)
        piece, end = bytes(_STREAM_PIECE), time.monotonic() + _STREAM_SECONDS
        while time.monotonic() < end:
            connection.sendall(piece)
    return float(pair.all_gather_object(0.0)[1])


def _take(server: socket.socket) -> float:
    """Gbit/s of what comes in over one connection."""
    total, buffer = 0, bytearray(_STREAM_PIECE)
    with contextlib.suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.settimeout(3.0)
            total = connection.recv_into(buffer)
            started = last = time.monotonic()
            total = 0  # the clock starts with the first bytes
            while count := connection.recv_into(buffer):
                total, last = total + count, time.monotonic()
            return 8e-9 * total / (last - started) if last > started else 0.0
    return 0.0
