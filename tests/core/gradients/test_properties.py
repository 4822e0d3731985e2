"""Random plans, and random orders of gradients through a reducer, with ranks as threads."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import CACHE_LINE, HostMemory
from ring_plugins.core.collectives.shm_group import ROUND_BYTES, SMALL_BYTES
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gradients.fusion import BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer, is_filled
from ring_plugins.core.gradients.trials import Choice
from tests.core.collectives.thread_ranks import on_thread_ranks

entries = st.lists(
    st.builds(
        Entry,
        name=st.just("w"),
        dtype=st.sampled_from(["float32", "float64"]),
        count=st.sampled_from([0, 1, 7, 64, 500]),
    ),
    max_size=12,
)
sizes = st.builds(
    BucketSizes,
    bucket_bytes=st.sampled_from([1, 100, 3000]),
    first_bucket_bytes=st.sampled_from([1, 100, 3000]),
    direct_bytes=st.sampled_from([None, 1, 300]),
)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(entries, sizes, st.sampled_from([0, 2, 40]))
def test_every_tensor_and_flag_has_its_own_place_in_one_bucket(entries, sizes, control):
    plan = FusionPlan(entries, sizes, control)
    assert sorted(i for bucket in plan.buckets for i in bucket.entries) == list(range(len(entries)))
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert len(plan.buckets) > 0 or (not entries and not control)
    for bucket in plan.buckets:
        taken = np.zeros(bucket.count, int)
        for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
            assert entries[i].dtype == bucket.dtype
            assert (i in bucket.direct) == (offset < 0)
            if offset >= 0:
                assert offset * STORAGE[bucket.dtype].itemsize % CACHE_LINE == 0
                taken[offset : offset + entries[i].count] += 1
        own_control = control if bucket is plan.buckets[-1] else 0
        end = bucket.flags + len(bucket.entries) + own_control
        assert end <= bucket.count
        taken[bucket.flags : end] += 1
        assert taken.max(initial=0) <= 1
        is_open = sum(entries[i].count for i in bucket.entries[:-1]) * STORAGE[bucket.dtype].itemsize
        assert is_open < max(sizes.bucket_bytes, sizes.first_bucket_bytes)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.integers(1, 5),
    st.lists(
        st.builds(
            Entry,
            name=st.just("w"),
            dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16", "complex64"]),
            count=st.sampled_from([0, 1, 7, 500, SMALL_BYTES // 4 + 1, ROUND_BYTES // 4 + 3]),
        ),
        max_size=5,
    ),
    st.lists(sizes, min_size=2, max_size=2),
)
def test_averages_have_the_same_bits_however_tensors_are_put_into_buckets_and_these_are_reduced(size, entries, sizes):
    def rank_of(rank, communicator):
        random = np.random.default_rng(rank)
        given = [random.standard_normal(2 * each.count).astype(np.float32) for each in entries]
        for each, values in zip(entries, given, strict=True):
            if each.dtype == "bfloat16":
                values.view(np.uint32)[...] = values.view(np.uint32) >> 16
        given = [
            values.view(np.uint32).astype(np.uint16)[: each.count]
            if each.dtype == "bfloat16"
            else values.view(STORAGE[each.dtype])
            if each.dtype == "complex64"
            else values[: each.count].astype(STORAGE[each.dtype])
            for each, values in zip(entries, given, strict=True)
        ]
        found = []
        for some, overlaps in itertools.product(sizes, (True, False)):
            plan = FusionPlan(entries, some, control=2)
            buffer, direct = FusionBuffer(plan, communicator), [values.copy() for values in given]

            def fill(bucket, plan=plan, buffer=buffer, direct=direct):
                array = buffer.memories[bucket.index].array
                for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                    if offset >= 0:
                        array[offset : offset + entries[i].count] = given[i]
                return [HostMemory(direct[i], bucket.dtype) for i in bucket.direct]

            GradientReducer(buffer, communicator, overlap=Choice(overlaps)).finish(fill)
            averages = {}
            for bucket in plan.buckets:
                array = buffer.memories[bucket.index].array
                for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                    average = direct[i] if offset < 0 else array[offset : offset + entries[i].count]
                    averages[i] = average.tobytes()
            found.append([averages[i] for i in range(len(entries))])
        return found

    by_rank = on_thread_ranks(size, rank_of) if size > 1 else [rank_of(0, SingleCommunicator("alone"))]
    assert all(averages == by_rank[0][0] for found in by_rank for averages in found)


passes = st.lists(st.tuples(st.randoms(use_true_random=False), st.booleans()), min_size=1, max_size=3)


def check_reducer(size, count, bucket_bytes, holds_last, passes):
    """Each pass: (source of the orders, whether one rank gives up); every rank has its own order and lacks some."""
    plan = FusionPlan(
        [Entry(str(i), "float64", 40) for i in range(count)], BucketSizes(bucket_bytes, bucket_bytes, None)
    )
    orders = [[random.sample(range(count), random.randint(0, count)) for _ in range(size)] for random, _ in passes]

    def rank_of(rank, communicator):
        buffer = FusionBuffer(plan, communicator)
        given: set[int] = set()

        def fill(bucket):
            array = buffer.memories[bucket.index].array
            array[:] = 0
            for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                if i in given:
                    array[offset : offset + 40] = (rank + 1) * (i + 1)

        reducer = GradientReducer(buffer, communicator, holds_last=holds_last)
        found = []
        for number, (_, gives_up) in enumerate(passes):
            given.clear()
            for i in orders[number][rank]:
                given.add(i)  # a bucket that left before its last gradient would lack it
                reducer.mark_ready(i, fill)
                if holds_last:
                    assert not reducer.has_left(len(plan.buckets) - 1)
            if gives_up and rank == 0:
                reducer.abandon(is_filled)
            else:
                reducer.finish(fill)
            assert not reducer.is_under_way
            found.append(
                [
                    float(buffer.memories[bucket.index].array[offset + place])
                    for bucket in plan.buckets
                    for offset in bucket.offsets
                    for place in (0, 39)
                ]
            )
        assert reducer.passes == len(passes)
        return found

    by_rank = on_thread_ranks(size, rank_of)
    assert all(found == by_rank[0] for found in by_rank)  # given up or not, all ranks have the same bits
    for number, (_, gives_up) in enumerate(passes):
        expected = [
            sum((rank + 1) * (i + 1) for rank in range(size) if i in orders[number][rank]) / size
            for bucket in plan.buckets
            for i in bucket.entries
            for _ in range(2)
        ]
        assert gives_up or np.allclose(by_rank[0][number], expected)


reducers = given(st.integers(2, 4), st.integers(1, 12), st.sampled_from([1, 700, 1 << 20]), st.booleans(), passes)


@settings(deadline=None, derandomize=True, max_examples=30)
@reducers
def test_averages_do_not_depend_on_the_order_of_gradients(size, count, bucket_bytes, holds_last, passes):
    check_reducer(size, count, bucket_bytes, holds_last, passes)


@pytest.mark.slow
@settings(deadline=None, max_examples=600)
@reducers
def test_averages_do_not_depend_on_the_order_of_gradients_in_many_cases(size, count, bucket_bytes, holds_last, passes):
    check_reducer(size, count, bucket_bytes, holds_last, passes)
