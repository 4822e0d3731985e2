"""Every collective of the group among threads that stand for the ranks of a host; segments are really shared."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.collectives.fingerprint import fingerprint, fingerprint_of_several
from ring_plugins.core.collectives.shm_group import (
    ROUND_BYTES,
    SMALL_BYTES,
    STAGING_BYTES,
    SharedMemoryGroup,
    create_segment,
)
from ring_plugins.core.control.wait import Wait

SIZE = 3
COUNTS = [0, 1, 7, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, STAGING_BYTES // 4 * 2 + 5]


@pytest.fixture(scope="module")
def on_all():
    """Call something with every member of a group, each in its thread, and return the results."""
    segments = [create_segment() for _ in range(SIZE)]
    addresses = [segment.address for segment in segments]
    with ThreadPoolExecutor(SIZE) as threads:
        together = threading.Barrier(SIZE)

        def everywhere(function):
            def call(rank):
                together.wait(10)
                return function(rank)

            return list(threads.map(call, range(SIZE), timeout=30))

        groups = everywhere(
            lambda i: SharedMemoryGroup(segments[i], addresses, range(SIZE), i, Wait("test", None), "test")
        )
        yield lambda function: everywhere(lambda i: function(groups[i]))


def numbers(count, rank):
    return ((np.arange(count) * 7 + rank * 3) % 5).astype(np.float32)


def total(count):
    return np.sum([numbers(count, rank) for rank in range(SIZE)], axis=0)


def reduce(group, array, op=Op.SUM):
    group.all_reduce(array, array, op, "float32", None, fingerprint("all_reduce", "float32", array.size, op.name))
    return array


@pytest.mark.parametrize("count", COUNTS)
def test_all_reduce_sums_ordinary_memory(on_all, count):
    for result in on_all(lambda group: reduce(group, numbers(count, group.position))):
        assert np.array_equal(result, total(count))


def test_small_operations_of_changing_sizes_and_types_find_their_own_staging(on_all):
    few, more = (3, np.float32), (5, np.float32)
    # Both staging buffers see each kind, kept from the operation before and not.
    kinds = [few, few, few, more, more, (5, np.int32), (5, np.int32), few, (5, np.float64), more, few]

    def alternate(group):
        return [reduce(group, numbers(count, group.position).astype(storage)) for count, storage in kinds * 2]

    for results in on_all(alternate):
        for (count, storage), result in zip(kinds * 2, results, strict=True):
            np.testing.assert_array_equal(result, total(count).astype(storage))


def test_all_reduce_averages_to_the_same_bits_everywhere(on_all):
    rows = np.random.default_rng(0).standard_normal((SIZE, 100_003)).astype(np.float32)
    results = on_all(lambda group: reduce(group, rows[group.position].copy(), Op.AVERAGE))
    assert np.allclose(results[0], rows.mean(0), atol=1e-6)
    assert all(result.tobytes() == results[0].tobytes() for result in results)


@pytest.mark.parametrize("count", [1000, 100_003])
def test_all_reduce_works_in_memory_that_all_map(on_all, count):
    def allocate_and_reduce(group):
        buffer = group.allocate(4 * count + 64, fingerprint("allocate", "bytes", count))
        array = buffer.array[64:].view(np.float32)
        array[:] = numbers(count, group.position)
        result = reduce(group, array).copy()
        group.release(buffer)
        assert group.mapped(array) is None
        return result

    for result in on_all(allocate_and_reduce):
        assert np.array_equal(result, total(count))


@pytest.mark.parametrize("nbytes", [0, 5, 2 * STAGING_BYTES + 3])
def test_broadcast_overwrites_with_the_roots_bytes(on_all, nbytes):
    sent = (np.arange(nbytes) % 251).astype(np.uint8)

    def broadcast(group):
        data = sent.copy() if group.position == 1 else np.zeros(nbytes, np.uint8)
        group.broadcast(data, 1, fingerprint("broadcast", "uint8", nbytes))
        return data

    assert all(np.array_equal(result, sent) for result in on_all(broadcast))


def test_all_gather_of_different_sizes(on_all):
    sizes = [0, 3, STAGING_BYTES + 1]

    def gather(group):
        parts = [np.empty(size, np.uint8) for size in sizes]
        mine = np.full(sizes[group.position], group.position, np.uint8)
        group.all_gather(mine, parts, fingerprint("all_gather"))
        return parts

    for parts in on_all(gather):
        assert all((part == i).all() for i, part in enumerate(parts))


@pytest.mark.parametrize("scale", [1, 300_000])
def test_all_to_all_of_different_sizes(on_all, scale):
    def exchange(group):
        outgoing = [np.full((group.position + i) % 3 * scale, 10 * group.position + i, np.uint8) for i in range(SIZE)]
        incoming = [np.empty((group.position + i) % 3 * scale, np.uint8) for i in range(SIZE)]
        group.all_to_all(outgoing, incoming, fingerprint("all_to_all"))
        return incoming

    for rank, incoming in enumerate(on_all(exchange)):
        assert all((part == 10 * i + rank).all() for i, part in enumerate(incoming))


def test_parts_of_another_size_than_expected_are_a_mismatch_on_all_ranks(on_all):
    def exchange(group):
        outgoing = [np.full(5, group.position, np.uint8) for _ in range(SIZE)]
        incoming = [np.zeros(5, np.uint8) for _ in range(SIZE)]
        if group.position == 1:
            incoming[2] = np.zeros(7, np.uint8)
        with pytest.raises(MismatchError, match="rank 2 sends 5 bytes to rank 1, which expects 7"):
            group.all_to_all(outgoing, incoming, fingerprint("all_to_all", "uint8"))

    on_all(exchange)


def test_members_go_on_after_a_mismatch_that_all_of_them_saw(on_all):
    def different(group, count):
        if group.position == 0:
            group.barrier(fingerprint("barrier"))
        else:
            reduce(group, numbers(count, group.position))

    def call(group):
        for count in COUNTS[1:]:
            with pytest.raises(MismatchError, match=r"rank 0 calls barrier\(\) at .*, but ranks 1, 2 call all_reduce"):
                different(group, count)
            assert np.array_equal(reduce(group, numbers(count, group.position)), total(count))

    on_all(call)


@pytest.mark.parametrize("nbytes", [SMALL_BYTES + 1, 2 * STAGING_BYTES + 5])
def test_all_gather_in_place_does_not_write_the_own_part(on_all, nbytes):
    def gather(group):
        parts = [np.zeros(nbytes, np.uint8) for _ in range(SIZE)]
        mine = parts[group.position]
        mine[:] = np.arange(nbytes) % 251 + group.position
        mine.flags.writeable = False
        group.all_gather(mine, parts, fingerprint("all_gather", "uint8", SIZE * nbytes))
        return np.stack(parts)

    for result in on_all(gather):
        assert np.array_equal(result, [np.arange(nbytes) % 251 + rank for rank in range(SIZE)])


def test_several_arrays_share_their_barriers(on_all):
    counts = [5, 0, SMALL_BYTES // 4 + 1, 7, ROUND_BYTES // 4 - SMALL_BYTES // 4 - 64]
    operation = fingerprint_of_several("all_reduce", tuple(("float32", count) for count in counts), "sum")

    def reduce_all(group, counts):
        buffer = group.allocate(4 * SMALL_BYTES, fingerprint("allocate", "bytes", 4 * SMALL_BYTES))
        arrays = [numbers(count, group.position) for count in counts]
        arrays.append(buffer.array.view(np.float32))
        arrays[-1][:] = numbers(SMALL_BYTES, group.position)
        before = group.barriers._own[0]
        group.all_reduce_coalesced(arrays, arrays, Op.SUM, ["float32"] * len(arrays), operation)
        group.release(buffer)
        return arrays, group.barriers._own[0] - before

    for more, barriers in ([], 2), ([ROUND_BYTES // 4], 3):
        for arrays, found in on_all(lambda group, more=more: reduce_all(group, counts + more)):
            assert found == barriers
            assert all(np.array_equal(array, total(array.size)) for array in arrays)


def test_several_small_arrays_take_one_barrier(on_all):
    counts, operation = [3, 0, 70], fingerprint_of_several("all_reduce", (("float32", 73),), "sum")

    def reduce_all(group):
        arrays = [numbers(count, group.position) for count in counts]
        before = group.barriers._own[0]
        group.all_reduce_coalesced(arrays, arrays, Op.SUM, ["float32"] * 3, operation)
        return arrays, group.barriers._own[0] - before

    for arrays, barriers in on_all(reduce_all):
        assert barriers == 1
        assert all(np.array_equal(array, total(array.size)) for array in arrays)
