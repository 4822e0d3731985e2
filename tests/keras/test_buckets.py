"""Buckets that a framework fills by host calls."""

import threading

import numpy as np
import pytest

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.gradients.fusion import BucketSizes, Entry
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
