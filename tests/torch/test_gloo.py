"""The gloo plane. Its ranks are threads here, except where one must die."""

import concurrent.futures
import multiprocessing
import os
import pickle
import time
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from ring_plugins.core.errors import ArgumentError, LaunchError, PeerFailed, RingError
from ring_plugins.torch import gloo, network


def on_ranks(size, function):
    """`function(rank)` in a thread a rank; results in rank order."""
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size)))


@pytest.fixture
def planes(ranks):
    store = dist.HashStore()
    made = on_ranks(ranks, lambda rank: gloo.GlooPlane(store, rank, ranks, address="127.0.0.1"))
    yield made
    on_ranks(ranks, lambda rank: made[rank].close())


def finish(pending, seconds=10.0):
    end = time.monotonic() + seconds
    while not pending.done():
        assert time.monotonic() < end, "the exchange does not end"
        time.sleep(1e-4)


def numbers(count, seed):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@pytest.mark.ranks(2, 3)
def test_everyone_exchanges_with_everyone_including_itself(planes, ranks, monkeypatch):
    monkeypatch.setattr(gloo, "PIECE_BYTES", 1000)
    sizes = [0, 1, 1000, 2500, 300_000]  # in one, exactly one, two and a half, and many pieces

    def exchange(rank):
        for size in sizes:
            found = [np.zeros(size, np.uint8) for _ in range(ranks)]
            sent = [(peer, numbers(size, (rank, peer))) for peer in range(ranks)]
            for _, array in sent:
                array.flags.writeable = False
            finish(planes[rank].exchange(sent, list(enumerate(found)), tag=size))
            for peer in range(ranks):
                np.testing.assert_array_equal(found[peer], numbers(size, (peer, rank)))

    on_ranks(ranks, exchange)


def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix(planes, ranks):
    def exchange(rank):
        peer = 1 - rank
        running = []
        for number in range(30):
            tag = number % 2 if rank == 0 else 1 - number % 2  # the ranks take the tags in turn, each in its own
            found = np.zeros(number // 2 * 100 + 1, np.uint8)
            sent = numbers(found.size, (rank, tag, number // 2))
            running.append((tag, number // 2, found, planes[rank].exchange([(peer, sent)], [(peer, found)], tag)))
        for tag, number, found, pending in reversed(running):
            finish(pending)
            np.testing.assert_array_equal(found, numbers(found.size, (peer, tag, number)))

    on_ranks(ranks, exchange)


def test_a_finished_exchange_is_seen_while_an_older_one_waits(planes):
    never, found = np.zeros(1, np.uint8), np.zeros(4, np.uint8)
    older = planes[0].exchange([], [(1, never)], tag=1)
    newer = planes[0].exchange([], [(1, found)], tag=2)
    finish(planes[1].exchange([(0, np.arange(4, dtype=np.uint8))], [], tag=2))
    finish(newer)
    assert not older.done()
    assert found.tolist() == [0, 1, 2, 3]
    started = time.monotonic()
    planes[0].close()  # gives the older one up
    assert time.monotonic() - started < 1
    with pytest.raises(PeerFailed):
        older.done()


@pytest.mark.ranks(1, 3)
def test_objects_of_different_sizes_are_gathered(planes, ranks):
    said = on_ranks(ranks, lambda rank: planes[rank].all_gather_object({"rank": rank, "text": "x" * rank * 1000}))
    assert said == [[{"rank": rank, "text": "x" * rank * 1000} for rank in range(ranks)]] * ranks


def test_wrong_arguments_are_named(planes):
    with pytest.raises(ArgumentError, match=r"tag=-1 on rank 0"):
        planes[0].exchange([], [], tag=-1)
    with pytest.raises(ArgumentError, match=r"rank 0 was asked to exchange with rank 7 of 2"):
        planes[0].exchange([(7, np.zeros(1, np.uint8))], [], tag=0)
    planes[0].close()
    with pytest.raises(RingError, match="plane of rank 0 has been closed"):
        planes[0].exchange([(1, np.zeros(1, np.uint8))], [], tag=0)


def _peer(port):
    store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=20))
    plane = gloo.GlooPlane(store, 1, 2, address="127.0.0.1")
    plane.all_gather_object("alive")
    time.sleep(0.2)
    os._exit(9)


def test_a_peer_that_dies_is_named_at_once():
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False)
    peer = multiprocessing.get_context("spawn").Process(target=_peer, args=(store.port,))
    peer.start()
    plane = gloo.GlooPlane(store, 0, 2, address="127.0.0.1")
    plane.all_gather_object("alive")
    started = time.monotonic()
    with pytest.raises(PeerFailed, match="rank 0 lost its connection to rank 1") as caught:
        finish(plane.exchange([], [(1, np.zeros(1, np.uint8))], tag=0))
    assert caught.value.rank == 1
    assert time.monotonic() - started < 2
    with pytest.raises(PeerFailed):
        finish(plane.exchange([(1, np.zeros(1, np.uint8))], [], tag=0))
    peer.join()
    plane.close()


def test_the_interface_is_the_users_choice(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo, lo")
    assert len(network.choose_devices(dist.HashStore(), 0, 1)) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME='no_such'.*this host has .*lo"):
        network.choose_devices(dist.HashStore(), 0, 1)


class Hosts:
    """Two ranks that believe to be on two hosts, and what each one's name resolves to."""

    def __init__(self, monkeypatch, own, routes):
        self._own = own
        monkeypatch.setattr(network, "_network_identity", lambda: ("host", self._rank))
        monkeypatch.setattr(network, "_route_to", routes.get)
        monkeypatch.setattr(network.ProcessGroupGloo, "create_device", staticmethod(lambda hostname: hostname))

    def choose(self, rank):
        self._rank = rank
        store = dist.HashStore()
        other = 1 - rank
        store.set(f"gloo/addresses/{other}", pickle.dumps((("host", other), self._own[other])))
        return network.choose_devices(store, rank, 2, self._own[rank])


def test_a_host_that_knows_itself_as_loopback_takes_the_address_that_reaches_the_others(monkeypatch):
    hosts = Hosts(monkeypatch, own=["127.0.1.1", "10.0.0.2"], routes={"10.0.0.2": "10.0.0.1"})
    assert hosts.choose(0) == ["10.0.0.1"]
    assert hosts.choose(1) == ["10.0.0.2"]


def test_hosts_that_only_know_loopback_are_told_what_to_set(monkeypatch):
    hosts = Hosts(monkeypatch, own=["127.0.1.1", "127.0.0.1"], routes={})
    with pytest.raises(LaunchError, match=r"rank 0 on .* found no network address.*GLOO_SOCKET_IFNAME"):
        hosts.choose(0)
