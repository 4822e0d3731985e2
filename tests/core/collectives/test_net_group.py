"""Collectives among simulated hosts, over real sockets."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from ring_plugins.core.base.errors import MismatchError, PeerFailed, PeerLeft
from ring_plugins.core.base.member import Member
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.collectives.net_group import SMALL_BYTES, NetworkGroup
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.tcp import TcpTransport
from tests.core.collectives.simulated_hosts import simulated_hosts
from tests.launch import run_ranks

SIZE = 3


@pytest.fixture
def on_all():
    with simulated_hosts((1,) * SIZE) as everywhere:
        yield everywhere


@pytest.mark.parametrize("nbytes", [0, 5, SMALL_BYTES, SMALL_BYTES + 1, 300_001])
def test_broadcast_overwrites_with_the_roots_bytes(on_all, nbytes):
    sent = (np.arange(nbytes) % 251).astype(np.uint8)

    def broadcast(rank, member):
        data = sent.copy() if rank == 1 else np.zeros(nbytes, np.uint8)
        member.group.broadcast(data, 1, fingerprint("broadcast", "uint8", nbytes))
        return data

    assert all(np.array_equal(result, sent) for result in on_all(broadcast))


@pytest.mark.parametrize("root", [0, 1])
def test_of_two_members_the_root_sends_everything_in_one_exchange(root, monkeypatch):
    sent = (np.arange(SMALL_BYTES + 1) % 251).astype(np.uint8)
    exchanges, moving = [], NetworkGroup.exchange_parts
    monkeypatch.setattr(NetworkGroup, "exchange_parts", lambda *of: exchanges.append(1) or moving(*of))

    def broadcast(rank, member):
        data = sent.copy() if rank == root else np.zeros_like(sent)
        member.group.broadcast(data, root, fingerprint("broadcast", "uint8", sent.size))
        return data

    with simulated_hosts((1, 1)) as everywhere:
        assert all(np.array_equal(result, sent) for result in everywhere(broadcast))
    assert len(exchanges) == 2


def test_all_gather_of_different_sizes(on_all):
    sizes = [0, 3, 200_000]

    def gather(rank, member):
        parts = [np.empty(size, np.uint8) for size in sizes]
        member.group.all_gather(np.full(sizes[rank], rank, np.uint8), parts, fingerprint("all_gather"))
        return parts

    for parts in on_all(gather):
        assert all((part == i).all() for i, part in enumerate(parts))


def test_all_to_all_of_different_sizes(on_all):
    def exchange(rank, member):
        outgoing = [np.full((rank + i) % 3 * 1000, 10 * rank + i, np.uint8) for i in range(SIZE)]
        incoming = [np.empty((rank + i) % 3 * 1000, np.uint8) for i in range(SIZE)]
        member.group.all_to_all(outgoing, incoming, fingerprint("all_to_all"))
        return incoming

    for rank, incoming in enumerate(on_all(exchange)):
        assert all((part == 10 * i + rank).all() for i, part in enumerate(incoming))


def test_ranks_in_different_operations_all_learn_who_calls_what(on_all):
    def call(rank, member):
        member.group.barrier(fingerprint("barrier" if rank != 2 else "broadcast"))

    errors = on_all(call)
    assert [type(error) for error in errors] == [MismatchError] * SIZE
    assert all("ranks 0, 1 call barrier(), but rank 2 calls broadcast()" in str(error) for error in errors)


def test_sizes_that_disagree_are_named_before_data_is_used(on_all):
    def exchange(rank, member):
        outgoing = [np.zeros(8 if rank == 0 else 4, np.uint8)] * SIZE
        incoming = [np.full(4, 7, np.uint8) for _ in range(SIZE)]
        member.group.all_to_all(outgoing, incoming, fingerprint("all_to_all"))

    error = on_all(exchange)[1]
    assert isinstance(error, MismatchError)
    assert "rank 0 sends 8 bytes to rank 1, which expects 4" in str(error)


def test_buffers_are_used_again(on_all):
    def reuse(rank, member):
        buffer = member.group.take_buffer(1000)
        member.group.return_buffer(buffer[:100].view(np.float32))
        return np.shares_memory(member.group.take_buffer(500), buffer)

    assert on_all(reuse) == [True] * SIZE


UNEVEN = """
import os
import numpy as np
import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
much = 60_000_000
splits = [much, 1, 1] if ring.rank() == 1 else [1, 1, 1]
received = ring.all_to_all(np.ones(sum(splits), np.float32), splits)
assert received.size == (much + 2 if ring.rank() == 0 else 3)
"""


def test_a_rank_that_has_all_it_needs_may_leave_while_others_still_transfer():
    run_ranks(UNEVEN, 3, "mpirun", env={"RING_VIRTUAL_NODES": "3"})


def test_a_connection_found_closed_before_the_wait_still_gives_the_peers_reason():
    class Broken:
        def done(self):
            raise PeerFailed("lost the connection to rank 1", 1)

        def missing(self):
            return [1]

        def nap(self, seconds):
            pass

    class Detector:
        aborted = False

        mesh = None

        def lost(self):
            return frozenset()

        def dead(self):
            return frozenset()

        def check(self, communicator, missing, what):
            raise PeerFailed("rank 1 died without reporting an error", 1)

    transport = SimpleNamespace(rank=0, size=2, disconnect=lambda tag: None)
    group = NetworkGroup(transport, (0, 1), 0, 1, Wait("ring", Detector()), "ring")
    with pytest.raises(PeerFailed, match="died without reporting an error"):
        group.wait([Broken()], fingerprint("barrier"))


def test_what_a_rank_sent_before_it_left_arrives_however_slowly():
    class Detector:  # for which rank 0 has left long ago
        aborted = False

        mesh = None

        def lost(self):
            return frozenset()

        def dead(self):
            return frozenset()

        def check(self, communicator, missing, what):
            if 0 in missing:
                raise PeerLeft("rank 0 has left the job", 0)

    sent = (np.arange(200_000) % 251).astype(np.uint8)
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    peers = [Member(rank, host="host", address="127.0.0.1", port=one.port) for rank, one in enumerate(listeners)]
    for rank, listener in enumerate(listeners):
        listener.open(rank, peers, "a secret")
    sender, receiver = [TcpTransport(rank, peers, listener) for rank, listener in enumerate(listeners)]
    groups = [
        NetworkGroup(transport, (0, 1), rank, 1, Wait("ring", detector), "ring")
        for rank, transport, detector in [(0, sender, None), (1, receiver, Detector())]
    ]
    received = np.zeros_like(sent)
    with ThreadPoolExecutor(1) as threads:
        try:

            def send_slowly():
                for start in range(0, sent.size, 10_000):
                    groups[0].wait([groups[0].exchange([(1, sent[start : start + 10_000])], [])], fingerprint("send"))
                    time.sleep(0.01)

            sending = threads.submit(send_slowly)
            first = groups[1].exchange([], [(0, received[:10_000])])
            while not first.done():
                first.nap(0.001)
            groups[1].wait([groups[1].exchange([], [(0, received[10_000:])])], fingerprint("receive"))
            sending.result(10)
        finally:
            for transport in (sender, receiver):
                transport.close()
    assert np.array_equal(received, sent)


def test_closing_it_disconnects_and_hears_of_an_interruption():
    class Transport:
        def disconnect(self, tag):
            raise KeyboardInterrupt

    group = NetworkGroup(Transport(), (0, 1), 0, 1, Wait("ring", None), "ring")
    with pytest.raises(KeyboardInterrupt):
        group.close()
    group._transport = SimpleNamespace(disconnect=lambda tag: None)  # for its finalizer
