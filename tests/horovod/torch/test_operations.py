"""What Horovod's operations on tensors do, in a job of one; tests/horovod/test_torch.py has several ranks."""

import pytest
import torch

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod.basics import Average, Max, Sum
from ring_plugins.horovod.torch import operations


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


def test_several_operations_give_their_results_in_a_list():
    parts = [operations.gathering(torch.ones(n), None) for n in (1, 2)]
    assert [len(one) for one in operations.together("both", parts, None).start(None).wait()] == [1, 2]


def test_what_cannot_be_reduced_is_rejected_before_anything_is_sent():
    with pytest.raises(ArgumentError, match="0-d"):
        operations.scattering(torch.ones(()), Sum, 1.0, 1.0, None)
    with pytest.raises(ArgumentError, match="must be hvd.Average or hvd.Sum"):
        operations.scattering(torch.ones(2), Max, 1.0, 1.0, None)
    with pytest.raises(ArgumentError, match="tensor=1.5 is a float"):
        operations.all_reduction(1.5, Sum, 1.0, 1.0, None)
