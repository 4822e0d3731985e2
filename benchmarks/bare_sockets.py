"""Move the bytes of an all-reduce between hosts over bare sockets: the limit of this machine's network stack.

Nothing is summed and nothing waits for other data, so no all-reduce over sockets can be faster. As in ring_plugins,
every rank has a connection to the same local rank on every other host. It sends the minimum number of bytes.

`sockets_and_sums` then also computes what an all-reduce has to. Where ranks and packets share the cores, as on test
hosts, that is the fairer limit.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

import numpy as np

import ring_plugins as ring
from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.net.network_choice import choose, own_interfaces

#: Wake up only when this many bytes have arrived, as ring_plugins does.
_ENOUGH = 512 * 1024
#: Elements that a rank sums at once for each host, as in ring_plugins.
_PIECE = 64 * 1024


def bare_sockets() -> Callable[[int], Callable[[], object]]:
    """Connect the ranks, and return a backend. Collective."""
    sockets = _connect()
    for one in sockets:
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def make(nbytes: int) -> Callable[[], object]:
        # Each of n hosts sends 2(n-1)/n of the data, in equal parts by each of its ranks to each of n-1 hosts.
        each = max(1, 2 * nbytes // (ring.num_nodes() * ring.local_size()))
        outgoing, incoming = np.ones(each, np.uint8), [np.empty(each, np.uint8) for _ in sockets]
        return lambda: _swap(sockets, memoryview(outgoing), [memoryview(one) for one in incoming])

    return make


def sockets_and_sums() -> Callable[[int], Callable[[], object]]:
    """As `bare_sockets`; a rank also sums and copies as much as in an all-reduce of a bucket. Collective."""
    swapping = bare_sockets()

    def make(nbytes: int) -> Callable[[], object]:
        swap, arithmetic = swapping(nbytes), _arithmetic(nbytes)

        def run() -> None:
            swap()
            arithmetic()

        return run

    return make


def _arithmetic(nbytes: int) -> Callable[[], object]:
    """Sum a share over this host, sum a part of that over all hosts, and copy the share to the others of this host."""
    hosts, ranks = ring.num_nodes(), ring.local_size()
    own, *others = (np.ones(max(1, nbytes // 4 // ranks), np.float32) for _ in range(ranks))
    received = [np.ones(_PIECE, np.float32) for _ in range(hosts - 1)]

    def run() -> None:
        for start in range(0, own.size, hosts * _PIECE):
            share, *rest = (array[start : start + hosts * _PIECE] for array in (own, *others))
            reduce_into(share, [share, *rest], Op.SUM, "float32")
            part = share[: -(-share.size // hosts)]
            reduce_into(part, [part, *(term[: part.size] for term in received)], Op.AVERAGE, "float32", ring.size())
            for other in rest:
                np.copyto(other, share)

    return run


def _connect() -> list[socket.socket]:
    interfaces = ring.all_gather_object(own_interfaces(ring.rank()))
    mine = choose(interfaces).addresses[ring.rank()]
    with socket.create_server((mine, 0), backlog=64) as server:
        everyone = ring.all_gather_object((ring.local_rank(), server.getsockname()))
        counterparts = [(rank, address) for rank, (local, address) in enumerate(everyone) if local == ring.local_rank()]
        sockets = []
        for rank, address in counterparts:
            if rank > ring.rank():
                sockets.append(socket.create_connection(address))
            elif rank < ring.rank():
                sockets.append(server.accept()[0])
    return sockets


def _swap(sockets: list[socket.socket], outgoing: memoryview, incoming: list[memoryview]) -> None:
    """Send `outgoing` over every socket while receiving `incoming` from each."""
    size, poll = len(outgoing), select.poll()
    left = {one.fileno(): [one, 0, 0, space] for one, space in zip(sockets, incoming, strict=True)}
    for number in left:
        poll.register(number, select.POLLOUT | select.POLLIN)
    ready = [(number, select.POLLOUT) for number in left]
    while left:
        for number, events in ready:
            one, sent, received, space = left[number]
            if events & select.POLLOUT:
                sent += one.send(outgoing[sent:])
            if events & select.POLLIN:
                received += one.recv_into(space[received:])
            left[number][1:3] = sent, received
            if sent == size and received == size:
                del left[number]
                poll.unregister(number)
                continue
            if received < size:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(size - received, _ENOUGH))
            poll.modify(number, select.POLLOUT * (sent < size) | select.POLLIN * (received < size))
        ready = poll.poll() if left else []
