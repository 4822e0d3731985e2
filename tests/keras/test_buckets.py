"""Buckets that a framework fills by host calls."""

import threading

import numpy as np
import pytest

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.gradients.fusion import BucketSizes, Entry
from tests.core.collectives.mortal_ranks import on_mortal_ranks
from tests.core.collectives.thread_ranks import on_thread_ranks


def test_a_step_that_was_cut_off_after_its_first_bucket_gives_nobody_old_averages():
    """An exception in another branch of TensorFlow's graph may end a step between two calls that fill buckets."""
    from ring_plugins.keras.buckets import HostBuckets

    rank_1_has_given = threading.Event()  # before that, it would hear of the exception in its constructor

    def rank_of(rank, communicator):
        buckets = HostBuckets([Entry(f"entry {i}", "float32", 4) for i in range(2)], communicator, BucketSizes(16, 16))
        first, second = (entry for bucket in buckets.plan.buckets for entry in bucket.entries)
        gradients = [np.full(4, rank + 1.0, "float32")]
        buckets.give([first], gradients)
        if rank == 1:
            rank_1_has_given.set()
        else:  # its next step begins
            assert rank_1_has_given.wait(60)
            with pytest.raises(RingError, match="got a second gradient before the averages of the first"):
                buckets.give([first], gradients)

        def end_step():
            buckets.give([second], gradients)
            buckets.finish()

        with pytest.raises(RingError, match="a second gradient before"):
            end_step()

    on_thread_ranks(2, rank_of)


def test_averages_that_somebody_keeps_are_not_written_again_and_others_are():
    from ring_plugins.keras.buckets import HostBuckets

    entries = [Entry("small", "float32", 3), Entry("large", "float32", 40_000), Entry("small too", "bfloat16", 2)]

    def rank_of(rank, communicator):
        buckets = HostBuckets(entries, communicator, BucketSizes(64, 64, 1024))

        def averages(value):
            buckets.give([0, 1], [np.full(3, value, "float32"), np.full(40_000, value, "float32")])
            return buckets.finish()

        kept, addresses = [], set()
        for step in range(9):
            found = averages(np.float32(step))
            addresses.add((found[0].ctypes.data, found[1].ctypes.data))
            if step in (2, 3, 5):
                kept.append((step, found[0][1:], memoryview(found[1])))
            del found
        for step, small, large in kept:
            assert set(small.tolist()) == set(np.asarray(large).tolist()) == {step}
        return len(addresses)

    assert on_thread_ranks(2, rank_of) == [4, 4]


@pytest.mark.parametrize(("in_place", "full"), [(False, 300), (True, 70_000)])
def test_averages_are_those_of_the_samples_that_came(in_place, full):
    """What a rank gives is multiplied by its part of a full batch; a rank that has run out gives zeros."""
    from ring_plugins.keras.buckets import HostBuckets

    entries = [Entry("small", "float32", 3), Entry("large", "float32", 40_000), Entry("half", "bfloat16", 2)]
    samples = (full, 7, 0)

    def rank_of(rank, communicator):
        buckets = HostBuckets(entries, communicator, BucketSizes(64, 64, 1024), in_place=in_place)

        def averages(of):
            buckets.take(None, of[rank], full)
            value = np.float32((rank + 1) * of[rank] / full)
            half = np.full(2, value).view(np.uint32) >> 16
            buckets.give([0, 1, 2], [*(np.full(e.count, value) for e in entries[:2]), half.astype(np.uint16)])
            found = buckets.finish()
            half = (found[2].astype(np.uint32) << 16).view(np.float32)
            return [*(float(found[i][-1]) for i in range(2)), float(half[0])]

        return averages(samples), averages((0, 0, 0)), averages((full,) * 3)

    for came, nobody, all_ranks in on_thread_ranks(3, rank_of):
        assert came[:2] == pytest.approx([(full + 14) / (full + 7)] * 2, rel=1e-6)
        assert came[2] == pytest.approx((full + 14) / (full + 7), rel=0.02)  # in 8 bits
        assert (nobody, all_ranks) == ([0.0] * 3, [2.0] * 3)


@pytest.mark.parametrize("how", ["before", "in"])
@pytest.mark.parametrize("in_place", [False, True])
def test_averages_of_a_pass_in_which_a_rank_dies_are_taken_over_the_same_ranks(monkeypatch, how, in_place):
    """Small gradients lie in buckets; large ones are read in the framework's memory, or overwritten there."""
    from ring_plugins.keras.buckets import HostBuckets

    entries = [Entry("small", "float32", 3), Entry("large", "float32", 40_000), Entry("small too", "float32", 2)]
    seen = set()
    for number in range(1, 8):

        def rank_of(rank, number=number):
            buckets = HostBuckets(entries, rank.communicator("gradients"), BucketSizes(64, 64), in_place=in_place)
            if rank.rank == 1:
                alive = rank.barriers
                rank.dies = lambda barrier: how if barrier == alive + number else None
            passes = []
            for step in range(3):
                value = np.float32(6 * ((0, 2, 1)[rank.rank] + 3 * step))
                gradients = [np.full(entry.count, value) for entry in entries]
                buckets.give([0, 1, 2], gradients)
                averages = buckets.finish()
                passes.append([sorted(set(averages[i].tolist())) for i in range(3)])
            return passes, rank.view

        found = on_mortal_ranks(monkeypatch, 3, rank_of)
        (passes, view), other = found[0], found[2]
        assert other == (passes, view)
        for step, averages in enumerate(passes):
            possible = [6.0 * (sum(values) / len(values) + 3 * step) for values in ((0, 2, 1), (0, 1))]
            assert averages in [[[value]] * 3 for value in possible]
            seen.add((step, possible.index(averages[0][0])))
    assert {(0, 0), (0, 1)} <= seen  # it died in the first pass, and after it


def test_a_rank_that_has_run_out_of_data_counts_as_zeros_until_all_have():
    from ring_plugins.keras.buckets import HostBuckets

    entries = [Entry("half", "bfloat16", 2), Entry("never given", "float32", 3), Entry("large", "float32", 40_000)]

    def rank_of(rank, communicator):
        buckets = HostBuckets(entries, communicator, BucketSizes(64, 64, 1024))
        found = []
        for _ in range(rank + 1):
            buckets.checks.rates.take(0.1)  # which one that has run out does not tell
            buckets.give([0, 2], [np.full(2, 0x4040, np.uint16), np.full(40_000, 3, "float32")])  # 3 in bfloat16
            averages = buckets.finish()
            found.append([int(averages[0][0]) << 16, float(averages[2][5]), buckets.ended])
        waited = 0
        while not buckets.take_part():
            waited += 1
        return [[np.array([bits], np.uint32).view(np.float32)[0], *others] for bits, *others in found], waited

    for rank, (found, waited) in enumerate(on_thread_ranks(3, rank_of)):
        assert [values[1] for values in found] == [3.0, 2.0, 1.0][: rank + 1]
        assert [float(values[0]) for values in found] == [3.0, 2.0, 1.0][: rank + 1]
        assert [values[2] for values in found] == pytest.approx([0, 1 / 3, 2 / 3][: rank + 1], abs=0.01)
        assert waited == 2 - rank
