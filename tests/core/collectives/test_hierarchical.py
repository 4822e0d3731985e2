"""All-reduce among sixteen and more hosts, where data goes in a ring: threads stand for hosts, over real sockets."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import Compression, HalfCodec
from ring_plugins.core.arrays.dtypes import AVERAGE, MAX, SUM
from ring_plugins.core.collectives import algorithms as stream
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.collectives.hierarchical import HierarchicalAllReduce
from ring_plugins.core.collectives.net_group import NetworkGroup
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.listener import Listener, Peer
from ring_plugins.core.net.tcp import TcpTransport


@contextlib.contextmanager
def hosts(number):
    """Communicators of so many hosts with one rank each, and a function that calls something on all at once."""
    boards = [Listener("127.0.0.1") for _ in range(number)]
    peers = [Peer(f"host{rank}", "127.0.0.1", board.port) for rank, board in enumerate(boards)]
    planes = [TcpTransport(rank, peers, board) for rank, board in enumerate(boards)]
    with ThreadPoolExecutor(number) as threads:

        def everywhere(call):
            everyone = threading.Barrier(number)  # so that no thread does two ranks' parts

            def one(rank):
                everyone.wait(30)
                return call(rank)

            return list(threads.map(one, range(number), timeout=60))

        try:
            for rank, board in enumerate(boards):
                board.open(rank, peers, "a secret")
            lanes = [
                NetworkGroup(transport, range(number), i, 1, Wait("many", None), "many")
                for i, transport in enumerate(planes)
            ]
            everywhere(lambda rank: lanes[rank].connect())
            yield [HierarchicalAllReduce(None, lane, 0, 1, number, number) for lane in lanes], everywhere
        finally:
            for transport in planes:
                transport.close()


def inputs(count, dtype, of):
    return ((np.arange(count) * 7 + of * 3) % 11 - 5).astype(dtype)


EXPECTED = {
    SUM: lambda rows: rows.sum(axis=0),
    AVERAGE: lambda rows: rows.mean(axis=0),
    MAX: lambda rows: rows.max(axis=0),
}


@pytest.mark.parametrize("number", [stream.RING_FROM, stream.RING_FROM + 1])
def test_a_ring_of_hosts_gives_all_the_same_and_the_right_bits(number):
    with hosts(number) as (communicators, everywhere):
        for count, dtype, op in [
            (3, "float32", SUM),
            (16_411, "float32", AVERAGE),
            (16_411, "float16", AVERAGE),
            (600_011, "float32", MAX),
            (1_000_003, "float64", SUM),
        ]:
            what = fingerprint("all_reduce", dtype, count, op.name)
            arrays = [inputs(count, dtype, rank) for rank in range(number)]
            expected = EXPECTED[op](np.array(arrays, np.float64))
            everywhere(lambda rank: communicators[rank].all_reduce(arrays[rank], arrays[rank], op, dtype, None, what))  # noqa: B023
            assert np.allclose(arrays[0], expected, rtol=2e-3 if dtype == "float16" else 1e-6, atol=1e-3), (count, op)
            assert all(array.tobytes() == arrays[0].tobytes() for array in arrays), (count, dtype, op)


def test_a_ring_of_hosts_sends_rounded_numbers_and_all_get_the_same():
    number, count, what = stream.RING_FROM + 1, 100_003, fingerprint("all_reduce", "float32", 100_003, "average")
    with hosts(number) as (communicators, everywhere):
        arrays = [inputs(count, "float32", rank) for rank in range(number)]
        expected = EXPECTED[AVERAGE](np.array(arrays, np.float64))

        def reduce(rank):
            codec = HalfCodec(Compression.named("fp16"))
            codec.begin(arrays[rank])
            communicators[rank].all_reduce(arrays[rank], arrays[rank], AVERAGE, "float32", codec, what)

        everywhere(reduce)
    assert np.allclose(arrays[0], expected, rtol=1e-2, atol=1e-2)
    assert all(array.tobytes() == arrays[0].tobytes() for array in arrays)
