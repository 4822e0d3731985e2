"""The bytes of an all-reduce between hosts, moved by nothing but sockets: what this machine's network stack can do.

No numbers are added and nothing depends on anything else, so no all-reduce over sockets can be faster. Every rank has a
connection with the rank of equal place on every other host, as ring_plugins has, and sends the least bytes there are.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

import numpy as np

import ring_plugins as ring
from ring_plugins.core.net.network_choice import choose, own_interfaces

#: Wake for so much, as ring_plugins does, if that much is awaited.
_ENOUGH = 512 * 1024


def bare_sockets() -> Callable[[int], Callable[[], object]]:
    """A backend, connected; collective."""
    lines = _connect()
    for line in lines:
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def make(nbytes: int) -> Callable[[], object]:
        # Of 2(n-1)/n of the data a rank sends its part to each of n-1 hosts.
        each = max(1, 2 * nbytes // (ring.num_nodes() * ring.local_size()))
        outgoing, incoming = np.ones(each, np.uint8), [np.empty(each, np.uint8) for _ in lines]
        return lambda: _swap(lines, memoryview(outgoing), [memoryview(one) for one in incoming])

    return make


def _connect() -> list[socket.socket]:
    offers = ring.all_gather_object(own_interfaces(ring.rank()))
    mine = choose(offers).addresses[ring.rank()]
    with socket.create_server((mine, 0), backlog=64) as server:
        everyone = ring.all_gather_object((ring.local_rank(), server.getsockname()))
        counterparts = [(rank, address) for rank, (place, address) in enumerate(everyone) if place == ring.local_rank()]
        lines = []
        for rank, address in counterparts:
            if rank > ring.rank():
                lines.append(socket.create_connection(address))
            elif rank < ring.rank():
                lines.append(server.accept()[0])
    return lines


def _swap(lines: list[socket.socket], outgoing: memoryview, incoming: list[memoryview]) -> None:
    """Send `outgoing` over every line while filling `incoming` from them."""
    size, poll = len(outgoing), select.poll()
    left = {line.fileno(): [line, 0, 0, space] for line, space in zip(lines, incoming, strict=True)}
    for number in left:
        poll.register(number, select.POLLOUT | select.POLLIN)
    ready = [(number, select.POLLOUT) for number in left]
    while left:
        for number, events in ready:
            line, sent, received, space = left[number]
            if events & select.POLLOUT:
                sent += line.send(outgoing[sent:])
            if events & select.POLLIN:
                received += line.recv_into(space[received:])
            left[number][1:3] = sent, received
            if sent == size and received == size:
                del left[number]
                poll.unregister(number)
                continue
            if received < size:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(size - received, _ENOUGH))
            poll.modify(number, select.POLLOUT * (sent < size) | select.POLLIN * (received < size))
        ready = poll.poll() if left else []
