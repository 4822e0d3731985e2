"""The public functions on a communicator of one rank; `collectives/test_host.py` runs them on several."""

import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ring_plugins.core import functions
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.result_memory import SMALLEST
from ring_plugins.core.base.errors import ArgumentError, MembersLost
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.members.changes import ChangeCallbacks


class Doubling(SingleCommunicator):
    """Its all-reduce doubles, as if a second rank had the same numbers."""

    def all_reduce(self, memory, op, codec=None):
        super().all_reduce(memory, op, codec)
        memory.array[:] = 2 * memory.array


@pytest.fixture(autouse=True)
def world(monkeypatch):
    topology = SimpleNamespace(rank=5, size=8, local_rank=1, local_size=2, node_rank=2, num_nodes=4)
    world = SimpleNamespace(
        communicator=Doubling("test"),
        topology=topology,
        elastic=SimpleNamespace(changes=ChangeCallbacks(), end_if_all_are_told=lambda: None),
        is_joining=False,
    )
    monkeypatch.setattr(functions, "current", lambda: world)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("wait", ["no", "False", None, [True]])
def test_wait_is_true_or_false(name, wait):
    with pytest.raises(ArgumentError, match=r"wait=.* must be True or False"):
        getattr(functions, name)(np.ones(1), wait=wait)
    assert getattr(functions, name)(np.ones(1), wait=np.False_).wait() is not None


def test_rank_and_counts_come_from_the_topology():
    names = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
    assert [getattr(functions, name)() for name in names] == [5, 8, 1, 2, 2, 4]


def test_the_result_is_new_and_of_the_type_of_x():
    for x in (np.ones((2, 3), np.float32), torch.ones(2, 3)):
        result = functions.all_reduce(x, Op.SUM)
        assert type(result) is type(x)
        assert result.shape == (2, 3)
        assert float(result.sum()) == 12
        assert float(x.sum()) == 6
    assert functions.all_reduce(1.5, Op.SUM) == 3.0


LARGE = 34 << 20  # bytes; malloc takes more than 32 MiB from the kernel anew each time


@pytest.mark.parametrize(
    "x",
    [
        np.ones(LARGE // 4, np.float32),
        torch.ones(LARGE // 4),
        torch.zeros(LARGE // 2, dtype=torch.bfloat16),
        np.ones((2, LARGE // 16)),
    ],
    ids=["numpy", "torch", "bfloat16", "float64"],
)
def test_large_results_take_memory_that_nobody_uses_and_no_page_faults(x):
    for _ in range(3):  # one result is in use while the next one comes
        result = functions.all_reduce(x, Op.SUM)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(3):
        result = functions.all_reduce(x, Op.SUM)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < LARGE // 4096 // 4, f"{faults} page faults"
    assert type(result) is type(x)
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    assert bool((result == 2 * x).all())


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_later_call_never_changes_a_result(monkeypatch, collective, kind):
    monkeypatch.setattr(functions.current(), "communicator", SingleCommunicator("test"))
    call = getattr(functions, collective)
    arguments = {"broadcast": [0]}.get(collective, [])
    results = [call(kind(np.full(SMALLEST // 4, number, np.float32)), *arguments) for number in range(5)]
    assert [set(result.tolist()) for result in results] == [{float(number)} for number in range(5)]
    parts = [result[5:9] for result in results]
    del results
    for _ in range(5):
        call(kind(np.full(SMALLEST // 4, -1, np.float32)), *arguments)
    assert [set(part.tolist()) for part in parts] == [{float(number)} for number in range(5)]


def test_tensors_of_a_users_class_make_their_own_results():
    class Own(torch.Tensor):
        pass

    x = torch.ones(SMALLEST // 4).as_subclass(Own)
    for _ in range(3):
        assert type(functions.all_reduce(x, Op.SUM)) is Own


def test_out_takes_the_result_whatever_its_strides():
    x, whole = np.ones((2, 3), np.float32), np.zeros((2, 6), np.float32)
    out = whole[:, ::2]
    assert functions.all_reduce(x, Op.SUM, out=out) is out
    assert whole[:, ::2].sum() == 12
    assert whole[:, 1::2].sum() == 0


def test_x_itself_may_take_the_result():
    x = np.ones(3, np.float32)
    assert functions.all_reduce(x, Op.SUM, out=x) is x
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("out", "said"), [(np.ones(4), "out has 4"), (np.ones(3, np.float32), "float32"), ([1.0, 2.0, 3.0], "read-only")]
)
def test_memory_that_cannot_take_the_result_is_rejected(out, said):
    with pytest.raises(ArgumentError, match=said):
        functions.all_reduce(np.ones(3), out=out)


def test_out_has_the_shape_of_x():
    assert functions.all_reduce(1.0, out=np.zeros(1)).tolist() == [2]
    with pytest.raises(ArgumentError, match=r"out has shape \(3, 2\), but x has \(2, 3\)"):
        functions.all_reduce(np.ones((2, 3)), out=np.zeros((3, 2)))


def test_a_masked_array_is_rejected():
    """The numbers under its mask would be added, too."""
    with pytest.raises(ArgumentError, match="x is a masked array"):
        functions.all_reduce(np.ma.array([1.0, 2.0], mask=[False, True]))


def test_without_waiting_there_is_a_work():
    assert functions.all_reduce(np.ones(3), Op.SUM, wait=False).wait().tolist() == [2, 2, 2]
    assert functions.all_gather(np.ones((3, 2)), wait=False).wait().shape == (3, 2)


def test_a_0_d_x_is_one_row_of_a_gather_and_rejected_where_rows_are_split():
    assert functions.all_gather(7.0).tolist() == [7.0]
    for collective in (functions.reduce_scatter, functions.all_to_all):
        with pytest.raises(ArgumentError, match=f"x is 0-d; {collective.__name__}"):
            collective(np.array(1.0))


def test_bad_roots_and_splits_are_rejected():
    for collective in (functions.broadcast, functions.broadcast_object):
        with pytest.raises(ArgumentError, match="root=1 is not a rank"):
            collective(1.0, root=1)
    with pytest.raises(ArgumentError, match="splits="):
        functions.all_to_all(np.ones(3), [2])


class OnGpu:
    """A tensor of a made-up framework, on a GPU."""

    device = "gpu:0"

    def __dlpack__(self):
        raise AssertionError("its memory is not the CPU's")

    def __dlpack_device__(self):
        return 2, 0


OnGpu.__module__ = "framework.tensors"


def test_tensors_on_gpus_go_to_the_functions_of_their_framework(monkeypatch):
    calls = []
    monkeypatch.setitem(
        functions.gpu_functions, "framework", SimpleNamespace(all_reduce=lambda *arguments: calls.append(arguments))
    )
    x = OnGpu()
    functions.all_reduce(x, Op.SUM)
    assert calls == [(x, Op.SUM, None, True, None)]


def test_tensors_on_gpus_of_other_frameworks_are_rejected():
    with pytest.raises(ArgumentError, match="x is on device gpu:0"):
        functions.all_gather(OnGpu())


def test_parts_that_were_cut_for_more_ranks_than_are_left_are_not_sent(monkeypatch):
    """A rank is lost while the ranks tell each other their sizes, which the survivors repeat."""
    communicator = SingleCommunicator("test", 0)
    communicator.size = 3
    monkeypatch.setattr(functions, "current", lambda: SimpleNamespace(communicator=communicator, recovers=True))
    monkeypatch.setattr(functions, "exchange_rows", lambda *_: [(1, 1, 1)] * 2)
    with pytest.raises(MembersLost, match="x has parts for 3 ranks, of which 2 are left"):
        functions.all_to_all.__wrapped__(np.ones(3))
