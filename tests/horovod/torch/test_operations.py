"""What Horovod's operations on tensors do, in a job of one; tests/horovod/test_torch.py has several ranks."""

from functools import partial

import pytest
import torch

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod.basics import Average, Max, Sum
from ring_plugins.horovod.torch import operations
from tests.launch import run_ranks


@pytest.fixture(scope="module", autouse=True)
def _job_of_one():
    ring.init(ranks=1)
    yield
    ring.shutdown()


def test_a_group_is_one_operation_for_each_dtype_and_keeps_shapes():
    tensors = [torch.ones(2, 3), torch.tensor([4, 5]), torch.zeros(()), torch.ones(2, dtype=torch.float64)]
    operation = operations.grouped_reduction(tensors, Sum, 1.0, 2.0, None)
    flat = operation.operate(True, None)
    assert [values.numel() for values in flat] == [7, 2, 2]
    results = operation.finish(*flat)
    assert [(r.shape, r.dtype) for r in results] == [(t.shape, t.dtype) for t in tensors]
    assert [r.sum().item() for r in results] == [12, 18, 0, 4]


def test_results_of_a_group_may_be_changed_in_place_while_they_have_gradients():
    weight = torch.ones(2, requires_grad=True)
    first, second = operations.grouped_reduction([weight, weight * 2], Average, 1.0, 1.0, None).run(None)
    first.mul_(3)
    (first + second).sum().backward()
    assert weight.grad.tolist() == [5, 5]


@pytest.mark.parametrize("make", [operations.grouped_gathering, partial(operations.grouped_scattering, op=Sum)])
def test_a_group_of_gathers_or_scatters_is_one_operation_for_each_dtype(make, monkeypatch):
    started = []

    def counted(call):
        return lambda x, *arguments, **options: started.append(x) or call(x, *arguments, **options)

    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(ring, name, counted(getattr(ring, name)))
    options = {"before": 1.0, "after": 1.0} if isinstance(make, partial) else {}
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor([4, 5]), torch.zeros(0, 2), torch.full((1,), 7.0)]
    results = make(tensors, process_set=None, **options).run(None)
    assert all(r.dtype == t.dtype and torch.equal(r, t) for r, t in zip(results, tensors, strict=True))
    assert len(started) == 3 - isinstance(make, partial)  # and one for the numbers of rows
    assert make([], process_set=None, **options).run(None) == []


GROUPS = """
import os
import torch
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=int(os.environ["TEST_RANKS"]))
import ring_plugins.horovod.torch as hvd

rank, size = hvd.rank(), hvd.size()


def tensors(rows, kind=torch.float32):
    torch.manual_seed(rank)
    return [
        torch.randn(rows, 3).to(kind), torch.randn(size + 1, 2, 2).to(kind), torch.randint(9, (size, 1)),
        torch.randn(1, dtype=torch.float64), torch.randint(9, (2 * size + 1,)),
    ]


def with_gradients(grouped, single, rows):
    found = []
    for call in (grouped, lambda all: [single(x) for x in all]):
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in tensors(rows)]
        results = call(inputs)
        sum((x.double() ** 2).sum() * (i + 1) for i, x in enumerate(results)).backward()
        found.append([*results, *(x.grad for x in inputs if x.requires_grad)])
    return all(one.dtype == other.dtype and torch.allclose(one, other) for one, other in zip(*found, strict=True))


report("gathers", with_gradients(hvd.grouped_allgather, hvd.allgather, rank))
for op in (hvd.Sum, hvd.Average):
    report(f"scatters {op}", with_gradients(
        lambda all: hvd.grouped_reducescatter(all, op=op, prescale_factor=1.5),
        lambda one: hvd.reducescatter(one, op=op, prescale_factor=1.5), 4))
without = [x.detach() for x in tensors(rank)]
for name in (None, "g"):
    handle = hvd.grouped_allgather_async(without, name=name)
    own = hvd.synchronize(handle)
    report(f"async {name}", [torch.equal(one, hvd.allgather(x)) for one, x in zip(own, without, strict=True)])
    rows = hvd.synchronize(hvd.grouped_reducescatter_async(tensors(2), name=name, op=hvd.Sum))
    report(f"rows {name}", [torch.allclose(x, hvd.reducescatter(y, op=hvd.Sum)) for x, y in zip(rows, tensors(2))])
report("numbers", [x.tolist() for x in hvd.grouped_allgather([torch.tensor(float(rank)), torch.ones(rank % 2)])])
refused = []
wrong = torch.ones(2, 3) if rank else torch.ones(3, 2)  # of as many elements
for call in (
    lambda: hvd.grouped_allgather([torch.ones(2), wrong]), lambda: hvd.grouped_reducescatter([torch.ones(2), wrong]),
    lambda: hvd.grouped_allgather([torch.ones(2)] * (1 + rank)), lambda: hvd.grouped_allreduce([torch.ones(2), wrong]),
):
    try:
        call()
    except ring.MismatchError as error:
        refused.append(str(error))
report("refused", refused)
some = hvd.add_process_set([0, size - 1])
if some.included():
    report("set", [x.tolist() for x in hvd.grouped_reducescatter([torch.ones(3), torch.ones(1)], op=hvd.Sum,
        process_set=some)], rank)
"""


@pytest.mark.slow
def test_groups_equal_their_operations_one_by_one():
    ranks = 3
    run = run_ranks(GROUPS, ranks)
    for key in ("gathers", f"scatters {Sum}", f"scatters {Average}"):
        assert run.values(key) == [True] * ranks
    for name in (None, "g"):
        assert all(map(all, run.values(f"async {name}") + run.values(f"rows {name}")))
    assert run.values("numbers") == [[[float(rank) for rank in range(ranks)], [1.0] * (ranks // 2)]] * ranks
    for texts in run.values("refused"):
        assert len(texts) == 4 and "grouped_allgather of 2 tensors" in texts[0] and "grouped_reducescatter" in texts[1]
    assert run.values("set") == [[[2, 2], [2]], [[2], []]]


def test_what_cannot_be_reduced_is_rejected_before_anything_is_sent():
    with pytest.raises(ArgumentError, match="0-d"):
        operations.scattering(torch.ones(()), Sum, 1.0, 1.0, None)
    with pytest.raises(ArgumentError, match="must be hvd.Average or hvd.Sum"):
        operations.scattering(torch.ones(2), Max, 1.0, 1.0, None)
    with pytest.raises(ArgumentError, match="tensor=1.5 is a float"):
        operations.all_reduction(1.5, Sum, 1.0, 1.0, None)
