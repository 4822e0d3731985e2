"""Transfers over sockets, with threads as ranks."""

import contextlib
import threading
import time

import numpy as np
import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError, PeerFailed, RingError
from ring_plugins.core.base.member import Member
from ring_plugins.core.net import tcp
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.tcp import TcpTransport


@contextlib.contextmanager
def transports(size):
    """One transport for each rank, all in this process."""
    listeners = [Listener("127.0.0.1") for _ in range(size)]
    peers = [
        Member(rank, host=f"host{rank}", address="127.0.0.1", port=listener.port)
        for rank, listener in enumerate(listeners)
    ]
    for rank, listener in enumerate(listeners):
        listener.open(rank, peers, "ab" * 32)
    made = [TcpTransport(rank, peers, listener) for rank, listener in enumerate(listeners)]
    try:
        yield made
    finally:
        for transport in made:
            transport.close()


def finish(*requests):
    end = time.monotonic() + 30
    while [request for request in requests if not request.done()]:
        assert time.monotonic() < end
        for request in requests:
            request.nap(0.0005)


def data(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def test_all_pairs_exchange_at_once_headers_and_data_of_any_size():
    sizes = [1, 40, 3_000_000]
    with transports(3) as ranks:
        requests, checks = [], []
        for one in ranks:
            others = [rank for rank in range(3) if rank != one.rank]
            for nbytes in sizes:
                into = {rank: np.zeros(nbytes, np.uint8) for rank in others}
                outgoing = [(rank, data(nbytes, 10 * one.rank + rank)) for rank in others]
                requests.append(one.exchange(outgoing, list(into.items()), tag=4))
                checks += [(into[rank], data(nbytes, 10 * rank + one.rank)) for rank in others]
        finish(*requests)
        assert all(np.array_equal(found, expected) for found, expected in checks)


def test_tags_do_not_wait_for_each_other():
    with transports(2) as (one, two):
        never = two.exchange([], [(0, np.zeros(8, np.uint8))], tag=1)
        into = np.zeros(5, np.uint8)
        finish(one.exchange([(1, data(5, 0))], [], tag=2), two.exchange([], [(0, into)], tag=2))
        assert np.array_equal(into, data(5, 0)) and not never.done()


def test_an_empty_exchange_is_done_and_needs_no_connection():
    with transports(2) as (one, _):
        assert one.exchange([(1, np.zeros(0, np.uint8))], [], tag=1).done()
        one.progress(1)
        one.progress(99)


def test_ranks_connect_ahead_of_the_first_exchange():
    with transports(2) as (one, two):
        requests = one.connect([0, 1], 1), two.connect([0, 1], 1)
        finish(*requests)
        assert all(request.done() for request in requests)


def test_a_rank_that_does_not_connect_is_named(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "0.1")
    with transports(2) as (_, two), pytest.raises(LaunchError, match="rank 0 on host0"):
        finish(two.connect([0], 1))


def test_a_peer_that_closes_in_the_middle_is_named_but_its_data_is_read_first():
    with transports(2) as (one, two):
        finish(one.connect([1], 1), two.connect([0], 1))
        first, second = np.zeros(5, np.uint8), np.zeros(5, np.uint8)
        finish(one.exchange([(1, data(5, 0))], [], tag=1))
        one.disconnect(1)
        both = two.exchange([], [(0, first), (0, second)], tag=1)
        with pytest.raises(
            PeerFailed, match=r"rank 1 lost its connection to rank 0 on host0 \(it closed the conn"
        ) as error:
            finish(both)
        assert error.value.rank == 0
        assert np.array_equal(first, data(5, 0))


def test_a_host_that_is_lost_before_a_connection_to_it_is_made_is_a_lost_peer():
    """The waits can then go on without it. Without that, the job would end as at a start."""
    with transports(2) as (one, _):
        one.listener.add(
            Member(1, host="host1", address="192.0.2.1", port=1)
        )  # to which nothing leads from the loopback interface
        with pytest.raises(PeerFailed, match="rank 0 on host0 cannot reach rank 1 on host1") as error:
            finish(one.exchange([(1, data(5, 0))], [], tag=1))
    assert error.value.rank == 1


def test_a_rank_that_gives_up_drains_what_arrives_so_that_its_own_data_is_not_lost():
    with transports(2) as (one, two):
        finish(one.connect([1], 1), two.connect([0], 1))
        # Rank 0 waits for more than it gets, and gives up while rank 1's data is unread in its socket.
        one.exchange([(1, data(1000, 1))], [(1, np.zeros(10, np.uint8))], tag=1)
        one.progress(1)
        sent = two.exchange([(0, data(3000, 2))], [], tag=1)
        finish(sent)
        into = np.zeros(1000, np.uint8)
        closing = threading.Thread(target=one.disconnect, args=(1,))
        closing.start()
        finish(two.exchange([], [(0, into)], tag=1))
        two.disconnect(1)
        closing.join()
        assert np.array_equal(into, data(1000, 1))


def test_the_kernel_wakes_a_rank_only_when_enough_has_arrived():
    with transports(2) as (one, two):
        finish(one.connect([1], 1), two.connect([0], 1))
        into = np.zeros(tcp._WORTH_WAKING * 3, np.uint8)
        request = two.exchange([], [(0, into)], tag=1)
        request.done()
        request.nap(0.0)
        connected = two._groups[1].connections[0].socket
        assert connected.getsockopt(tcp.socket.SOL_SOCKET, tcp.socket.SO_RCVLOWAT) == tcp._WORTH_WAKING


def test_invalid_exchanges_are_rejected():
    with transports(2) as (one, _):
        for peer in (0, 2, -1):
            with pytest.raises(ArgumentError, match=f"asked to exchange with rank {peer} of 2"):
                one.exchange([(peer, data(1, 0))], [], tag=1)
        one.close()
        with pytest.raises(RingError, match="the TCP transport of rank 0 has been closed"):
            one.exchange([], [], tag=1)
