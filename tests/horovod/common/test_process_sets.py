"""Horovod's process sets: arguments in one process, and operations in sets at once."""

import pytest

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod import basics
from ring_plugins.horovod.common import process_sets
from ring_plugins.horovod.common.process_sets import ProcessSet
from tests.launch import run_ranks


@pytest.fixture
def _job_of_one():
    ring.init(ranks=1)
    yield
    ring.shutdown()


@pytest.mark.parametrize("given", [[], ["0"], [True], "01"])
def test_what_are_no_ranks_is_rejected(given):
    with pytest.raises(ArgumentError, match="is not a list of ranks"):
        ProcessSet(given)


@pytest.mark.usefixtures("_job_of_one")
def test_a_set_is_in_use_between_adding_and_removing_it():
    part = ProcessSet(range(1))
    assert [part.included(), part.size(), part.rank(), part.process_set_id] == [None] * 4
    with pytest.raises(ArgumentError, match="add_process_set"):
        basics.allgather_object(1, process_set=part)
    with pytest.raises(ArgumentError, match="has been added already"):
        process_sets.add_process_set(part)  # equal to the set of all
    everyone = process_sets.global_process_set
    assert [everyone.process_set_id, everyone.ranks, everyone.rank(), everyone.included()] == [0, [0], 0, True]
    assert basics.allgather_object(1, process_set=everyone) == [1]
    assert not process_sets.remove_process_set(everyone) and not process_sets.remove_process_set(part)
    with pytest.raises(ArgumentError, match="is not a ProcessSet"):
        basics.barrier([0])
    with pytest.raises(ArgumentError, match="not distinct ranks"):
        process_sets.add_process_set([3])
    with pytest.raises(ArgumentError, match="neither a list of ranks nor a communicator"):
        process_sets.add_process_set(ProcessSet(object()))


@pytest.mark.usefixtures("_job_of_one")
def test_all_ranks_are_a_communicator_for_init_and_others_are_not(monkeypatch):
    monkeypatch.setattr(basics.settings, "init", lambda: None)
    basics.init(comm=[0])
    basics.init(process_sets="dynamic")
    with pytest.raises(ArgumentError, match=r"ranks \[1, 0\], but this process has joined a job of 1 already"):
        basics.init(comm=[1, 0])


SCRIPT = """
import torch
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=4)
import ring_plugins.horovod.torch as hvd

given = hvd.ProcessSet([0, 3])
hvd.init(process_sets=[given])
rank = hvd.rank()
parts = [hvd.add_process_set([2, 0]), hvd.add_process_set([1, 3])]
mine, others = parts[rank % 2], parts[1 - rank % 2]
report("numbers", [given.process_set_id, mine.process_set_id, mine.ranks, mine.rank(), others.included()])
x = torch.tensor([rank, 3.0])
report("floats", [
    hvd.allreduce(x, process_set=mine).tolist(),
    hvd.allreduce(x, name="x", op=hvd.Sum, process_set=mine).tolist(),
    hvd.grouped_allreduce([x, x * 2], process_set=mine)[1].tolist(),
    hvd.synchronize(hvd.allreduce_async_(x.clone(), process_set=mine)).tolist(),
    hvd.allgather(x[:1], process_set=mine).tolist(),
    hvd.broadcast(x[:1], 2 + rank % 2, process_set=mine).tolist(),
    hvd.reducescatter(x, process_set=mine).tolist(),
    hvd.alltoall(x, process_set=mine).tolist(),
])
report("whole", hvd.allreduce(torch.tensor([rank + 1, -rank]), process_set=mine))
report("objects", [
    hvd.allgather_object(rank, process_set=mine), hvd.broadcast_object(rank, 2 + rank % 2, process_set=mine),
])
refused = []
for call in (lambda: hvd.allreduce(x, process_set=others), lambda: hvd.allreduce(x, op=hvd.Adasum, process_set=mine)):
    try:
        call()
    except ring.ArgumentError as error:
        refused.append(str(error))
report("refused", refused)
trained = []
for part in (parts[0], mine):  # outside of a set, a rank trains on its own
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=part)
    hvd.broadcast_parameters(model.state_dict(), 0)
    model(torch.full((1, 1), float(rank))).sum().backward()
    optimizer.step()
    trained.append(model.weight.grad.item())
weight = torch.ones(2, requires_grad=True)
gathered = hvd.allgather(weight, process_set=mine)
(hvd.allreduce(weight * rank, op=hvd.Sum, process_set=mine).sum() + gathered.sum()).backward()
report("gradients", [*trained, weight.grad.tolist()])
hvd.barrier(mine)
report("after", [hvd.allreduce(x, process_set=mine).tolist(), hvd.allreduce(x).tolist()])
report("removed", [hvd.remove_process_set(part) for part in (*parts, parts[0])])
report("again", hvd.add_process_set([0, 2]).process_set_id)
"""


@pytest.mark.slow
def test_two_sets_work_at_once():
    result = run_ranks(SCRIPT, 4)
    for rank in range(4):
        odd = rank % 2
        values = {key: result.values(key)[rank] for key in ("numbers", "floats", "whole", "objects", "refused")}
        assert values["numbers"] == [1, 2 + odd, [odd, 2 + odd], rank // 2, False]
        assert values["floats"] == [
            [1 + odd, 3],
            [2 + 2 * odd, 6],
            [2 + 2 * odd, 6],
            [1 + odd, 3],
            [odd, 2 + odd],
            [2 + odd],
            [[1 + odd], [3]][rank // 2],
            [[odd, 2 + odd], [3, 3]][rank // 2],
        ]
        assert values["whole"] == [2 + odd, -1 - odd]
        assert values["objects"] == [[odd, 2 + odd], 2 + odd]
        assert "is not in the group" in values["refused"][0] and "Adasum" in values["refused"][1]
        assert result.values("gradients")[rank] == [rank if odd else 1, 1 + odd, [2 * rank + 1] * 2]
    assert result.values("after") == [[[1 + rank % 2, 3], [1.5, 3]] for rank in range(4)]
    assert result.values("removed") == [[True, True, False]] * 4
    assert result.values("again") == [4] * 4
