"""Hierarchical all-reduce on simulated hosts, and its progress while ranks of a host wait for each other."""

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import Compression, HalfCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.collectives import hierarchical
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.collectives.hierarchical import piece_bytes
from tests.core.collectives.simulated_hosts import simulated_hosts
from tests.launch import run_ranks

EXPECTED = {Op.SUM: np.sum, Op.AVERAGE: np.mean, Op.MAX: np.max}
#: Numbers of elements for one round, for the pair exchange, and for the direct algorithm even on two hosts.
SMALL, MEDIUM, LARGE = 3, 300_007, 700_001


def numbers(count, dtype, rank):
    return ((np.arange(count) * 7 + rank * 3) % 11 - 5).astype(dtype)


def name(op, dtype, count):
    return fingerprint("all_reduce", dtype, count, op.name)


@pytest.mark.parametrize("ranks_per_host", [(1, 1), (2, 2), (1, 2), (1, 1, 2)], ids=str)
def test_every_member_gets_the_same_right_bits(ranks_per_host):
    size = sum(ranks_per_host)
    with simulated_hosts(ranks_per_host) as on_all:
        for count, dtype, op in [
            (SMALL, "float32", Op.SUM),
            (MEDIUM, "float32", Op.AVERAGE),
            (MEDIUM, "float16", Op.AVERAGE),
            (LARGE, "float32", Op.MAX),
            (LARGE, "float64", Op.SUM),
        ]:

            def reduce(rank, member, count=count, dtype=dtype, op=op):
                array = numbers(count, dtype, rank)
                member.hierarchical.all_reduce(array, array, op, dtype, None, name(op, dtype, count))
                return array

            results = on_all(reduce)
            expected = EXPECTED[op]([numbers(count, np.float64, rank) for rank in range(size)], axis=0)
            assert np.allclose(results[0], expected, rtol=2e-3 if dtype == "float16" else 1e-6, atol=1e-3), (count, op)
            assert all(result.tobytes() == results[0].tobytes() for result in results), (count, dtype, op)


def test_memory_that_a_host_maps_is_reduced_in_place():
    with simulated_hosts((2, 2)) as on_all:

        def reduce(rank, member):
            buffer = member.node.allocate(4 * LARGE, fingerprint("allocate", "bytes", LARGE))
            array = buffer.array.view(np.float32)
            array[:] = numbers(LARGE, "float32", rank)
            member.hierarchical.all_reduce(array, array, Op.SUM, "float32", None, name(Op.SUM, "float32", LARGE))
            return array

        expected = np.sum([numbers(LARGE, "float32", rank) for rank in range(4)], axis=0)
        for result in on_all(reduce):
            assert np.array_equal(result, expected)


@pytest.mark.parametrize("ranks_per_host", [(2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("count", [SMALL, MEDIUM, LARGE])
def test_a_separate_source_is_only_read(ranks_per_host, count):
    with simulated_hosts(ranks_per_host) as on_all:

        def reduce(rank, member):
            source, array = numbers(count, "float32", rank), np.full(count, 7, np.float32)
            source.setflags(write=False)
            member.hierarchical.all_reduce(array, source, Op.SUM, "float32", None, name(Op.SUM, "float32", count))
            return array

        expected = np.sum([numbers(count, "float32", rank) for rank in range(sum(ranks_per_host))], axis=0)
        assert all(np.array_equal(result, expected) for result in on_all(reduce))


@pytest.mark.parametrize("ranks_per_host", [(2, 2), (1, 1, 1), (1,) * 12, (1,) * 37], ids=str)
@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounded_numbers_are_the_same_on_all_ranks(ranks_per_host, kind, dtype):
    count, tolerance = 100_003, 1e-2 if kind == "fp16" else 0.2
    with simulated_hosts(ranks_per_host) as on_all:

        def reduce(rank, member):
            array, codec = numbers(count, dtype, rank), Compression.named(kind).codec()
            codec.begin(array)
            member.hierarchical.all_reduce(array, array, Op.AVERAGE, dtype, codec, name(Op.AVERAGE, dtype, count))
            return array

        results = on_all(reduce)
    expected = np.mean([numbers(count, np.float64, rank) for rank in range(sum(ranks_per_host))], axis=0)
    assert np.allclose(results[0], expected, rtol=tolerance, atol=tolerance)
    assert np.sqrt(np.mean((results[0] - expected) ** 2)) < tolerance / 4 * np.sqrt(np.mean(expected**2))
    assert all(result.tobytes() == results[0].tobytes() for result in results)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "ranks_per_host",
    [(1,) * 3, (2, 1, 2), *(pytest.param((1,) * n, marks=pytest.mark.slow) for n in (5, 6, 7))],
    ids=str,
)
def test_the_average_of_equal_flags_is_exact_where_numbers_travel_in_16_bits(ranks_per_host, dtype, feedback):
    with simulated_hosts(ranks_per_host) as on_all:

        def reduce(rank, member):
            for count in (SMALL, LARGE):
                codec = HalfCodec(dtype, feedback)
                for _ in range(3):
                    array = np.ones(count, np.float32)
                    array[::3] = 0
                    codec.begin(array)
                    member.hierarchical.all_reduce(
                        array, array, Op.AVERAGE, "float32", codec, name(Op.AVERAGE, "float32", count)
                    )
                    assert set(array.tolist()) == {0.0, 1.0}

        assert on_all(reduce) == [None] * sum(ranks_per_host)


@pytest.mark.parametrize("number", [12, 18, pytest.param(37, marks=pytest.mark.slow)])
def test_many_hosts(number):
    """12 hosts exchange in groups of 4 and 3, 18 in three groups each, 37 around a ring."""
    with simulated_hosts((1,) * number) as on_all:
        for count, dtype, op in [
            (SMALL, "float32", Op.SUM),
            (16_411, "float32", Op.AVERAGE),
            (16_411, "float16", Op.AVERAGE),
            (600_011, "float32", Op.MAX),
            (1_000_003, "float64", Op.SUM),
        ]:

            def reduce(rank, member, count=count, dtype=dtype, op=op):
                array = numbers(count, dtype, rank)
                member.hierarchical.all_reduce(array, array, op, dtype, None, name(op, dtype, count))
                return array

            results = on_all(reduce)
            expected = EXPECTED[op]([numbers(count, np.float64, rank) for rank in range(number)], axis=0)
            assert np.allclose(results[0], expected, rtol=2e-3 if dtype == "float16" else 1e-6, atol=1e-3), (count, op)
            assert all(result.tobytes() == results[0].tobytes() for result in results), (count, dtype, op)


def test_an_average_of_float16_does_not_overflow_although_the_sum_does():
    with simulated_hosts((2, 1)) as on_all:

        def reduce(rank, member):
            array = np.full(LARGE, 60_000, np.float16)
            member.hierarchical.all_reduce(
                array, array, Op.AVERAGE, "float16", None, name(Op.AVERAGE, "float16", LARGE)
            )
            return array

        for result in on_all(reduce):
            assert (result == 60_000).all()


def test_a_mismatch_between_hosts_is_raised_by_all_ranks():
    with simulated_hosts((2, 2)) as on_all:

        def reduce(rank, member):
            count = LARGE if rank < 2 else LARGE + 1
            array = np.ones(count, np.float32)
            member.hierarchical.all_reduce(array, array, Op.SUM, "float32", None, name(Op.SUM, "float32", count))

        errors = on_all(reduce)
    assert [type(error) for error in errors] == [MismatchError] * 4
    assert all(f"{LARGE} x float32" in str(error) for error in errors)


@pytest.mark.parametrize("nbytes", [300_000, 1 << 20, 25 << 20, 1 << 30])
@pytest.mark.parametrize(("rails", "num_nodes"), [(1, 2), (2, 2), (3, 5), (8, 16)])
def test_pieces_fit_the_staging_buffers_and_cut_into_aligned_parts(nbytes, rails, num_nodes):
    piece = piece_bytes(nbytes, rails, num_nodes)
    assert 0 < piece <= hierarchical.CHUNK_STAGING_BYTES
    assert piece % (64 * rails * num_nodes) == 0


# The socket buffers are so small that most of a message waits in the sending process, and ranks arrive late.
SMALL_BUFFERS = """
import os, random, socket, time
import numpy as np
import ring_plugins as ring
from ring_plugins.core.net import listener
from ring_plugins.core.collectives.shm_barrier import SharedMemoryBarrier

ready, synchronize = listener._ready, SharedMemoryBarrier.synchronize

class SmallBuffers(socket.socket):
    def setsockopt(self, level, option, *value):
        if option != socket.SO_RCVLOWAT:  # which would enlarge them again
            super().setsockopt(level, option, *value)

def with_small_buffers(connected):
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connected.setsockopt(socket.SOL_SOCKET, option, 20_000)
    return ready(SmallBuffers(fileno=connected.detach()))

def late(self, *arguments, **options):
    if chance.random() < 0.2:
        time.sleep(chance.random() * 0.01)
    synchronize(self, *arguments, **options)

chance = random.Random(int(os.environ["RANK"]))
listener._ready, SharedMemoryBarrier.synchronize = with_small_buffers, late
ring.init()
for i in range(10):
    x = np.full(600_000, ring.rank() + i, np.float32)
    ring.all_reduce(x, ring.SUM, out=x)
    assert (x == 6 + 4 * i).all()
"""


@pytest.mark.slow
def test_a_rank_that_waits_for_its_host_keeps_sending():
    run_ranks(SMALL_BUFFERS, 4, "exported", env={"RING_VIRTUAL_NODES": "2", "RING_TIMEOUT": "40"}, timeout=150)
