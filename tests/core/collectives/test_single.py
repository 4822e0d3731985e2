import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.single import SingleCommunicator

SINGLE = SingleCommunicator("single", world_rank=3)


def memory(*values):
    return HostMemory(np.array(values, np.float32), "float32")


def test_it_is_rank_0_of_1_whatever_its_world_rank():
    assert (SINGLE.rank, SINGLE.size, SINGLE.ranks) == (0, 1, (3,))


def test_every_collective_is_the_identity():
    x, out = memory(1, 2), memory(0, 0)
    SINGLE.all_reduce(x, Op.AVERAGE)
    SINGLE.broadcast(x, 0)
    SINGLE.barrier()
    assert x.array.tolist() == [1, 2]
    for collective in (
        lambda: SINGLE.all_gather(x, out, [2]),
        lambda: SINGLE.reduce_scatter(x, out, [2], Op.SUM),
        lambda: SINGLE.all_to_all(x, [2], out, [2]),
    ):
        out.array[:] = 0
        collective()
        assert out.array.tolist() == [1, 2]


def test_all_reduce_takes_numbers_from_their_source():
    out = memory(0, 0)
    SINGLE.all_reduce(out._replace(source=memory(5, 6).array), Op.SUM)
    assert out.array.tolist() == [5, 6]


def test_types_are_checked_as_on_many_ranks():
    with pytest.raises(ArgumentError, match="op=AVERAGE"):
        SINGLE.all_reduce(HostMemory(np.ones(1, np.int32), "int32"), Op.AVERAGE)


def test_gathered_objects_are_copies():
    item = {"a": [1]}
    (copied,) = SINGLE.all_gather_object(item)
    assert copied == item
    assert copied["a"] is not item["a"]


def test_started_work_is_done_at_once_and_keeps_its_error_for_wait():
    assert SINGLE.start("x", lambda: 7).wait() == 7
    work = SINGLE.start("x", lambda: 1 / 0)
    assert work.done()
    with pytest.raises(ZeroDivisionError):
        work.wait()


def test_roots_and_counts_are_checked_as_on_many_ranks():
    x, out = memory(1, 2), memory(0, 0)
    for rejected in (
        lambda: SINGLE.broadcast(x, 1),
        lambda: SINGLE.broadcast_object("x", 1),
        lambda: SINGLE.all_gather(memory(1), out, [2]),
        lambda: SINGLE.all_gather(x, out, [1, 1]),
        lambda: SINGLE.reduce_scatter(x, memory(0), [1], Op.SUM),
        lambda: SINGLE.all_to_all(x, [1], out, [2]),
    ):
        with pytest.raises(ArgumentError, match=r"root=1|counts=\[|send_counts=\[1\]"):
            rejected()
    with pytest.raises(MismatchError, match="rank 3 sends 8 bytes to rank 3, which expects 4"):
        SINGLE.all_to_all(x, [2], memory(0), [1])
    assert out.array.tolist() == [0, 0]
