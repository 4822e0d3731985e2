"""What a finalizer does to a communicator that nobody refers to: at any moment, without waiting for anybody."""

import gc
import threading
import weakref

import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.base.errors import RingError
from tests.core.collectives.thread_ranks import on_thread_ranks


def test_what_waits_for_peers_in_a_discarded_communicator_ends_on_this_rank_only():
    is_over = threading.Event()

    def rank_of(rank, communicator):
        work = communicator.start("a sum", lambda: communicator.all_reduce(host_memory(np.ones(4)), Op.SUM))
        if rank == 1:
            work.wait()  # rank 0 had joined before it discarded
            assert is_over.wait(60)  # and its communicator stays as it is until then
            return
        work.wait()
        alone = communicator.start("a sum", lambda: communicator.all_reduce(host_memory(np.ones(4)), Op.SUM))
        while communicator.activity().ended:
            threading.Event().wait(0.001)  # it has not begun to wait for rank 1
        communicator.discard()
        with pytest.raises(RingError, match="test is no longer in use"):
            alone.wait()
        with pytest.raises(RingError, match="test is no longer in use"):
            communicator.barrier()
        is_over.set()

    on_thread_ranks(2, rank_of)


def test_a_communicator_that_nobody_refers_to_goes_without_the_garbage_collector():
    def rank_of(rank, communicator):
        communicator.start("a sum", lambda: communicator.all_reduce(host_memory(np.ones(4)), Op.SUM)).wait()
        return [weakref.ref(part) for part in (communicator._executor, communicator.groups.node)]

    gc.disable()
    try:
        found = [reference for references in on_thread_ranks(2, rank_of) for reference in references]
        for _ in range(1200):
            if not any(reference() for reference in found):
                return
            threading.Event().wait(0.05)
    finally:
        gc.enable()
    raise AssertionError([reference() for reference in found])
