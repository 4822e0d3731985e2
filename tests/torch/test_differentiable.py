"""Collectives that pass gradients on, in a job of one; those of several ranks are in checks_process_group.py's jobs."""

from types import SimpleNamespace

import pytest
import torch

import ring_plugins as ring
from ring_plugins import SUM, ArgumentError, MismatchError
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.torch import differentiable


@pytest.fixture(scope="module", autouse=True)
def _job_of_one():
    ring.init(ranks=1)
    yield
    ring.shutdown()


CALLS = {
    "all_reduce": differentiable.all_reduce,
    "all_gather": differentiable.all_gather,
    "reduce_scatter": differentiable.reduce_scatter,
    "broadcast": differentiable.broadcast,
    "all_to_all": differentiable.all_to_all,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_and_second_derivatives_of_one_rank_are_those_of_the_identity(call):
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, x) and torch.autograd.gradgradcheck(call, x)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_integers_have_no_gradient(call):
    with pytest.raises(ArgumentError, match="int64, which has no gradient; call ring_plugins"):
        call(torch.arange(4))


@pytest.mark.parametrize("call", [differentiable.all_reduce, differentiable.reduce_scatter])
def test_only_sums_and_averages_have_gradients(call):
    assert torch.equal(call(torch.ones(2), SUM), torch.ones(2))
    with pytest.raises(ArgumentError, match="has no gradient here, only SUM and AVERAGE have"):
        call(torch.ones(2), Op.MAX)


def test_backwards_of_different_collectives_are_a_mismatch_that_names_both():
    class Members:
        size, ranks = 2, (0, 5)

        def all_gather_object(self, own, _):
            return [own, ("broadcast", 7)]

    with pytest.raises(MismatchError, match=r"rank 0: all_reduce \(number 3\), rank 5: broadcast \(number 7\)"):
        differentiable._Collective.backward(
            SimpleNamespace(name="all_reduce", number=3, members=Members()), torch.ones(1)
        )


def test_results_stay_where_their_tensors_are_whatever_the_default_device():
    with torch.device("meta"):
        x = torch.arange(3.0, device="cpu")
        assert differentiable.all_gather(x).device.type == differentiable.all_to_all(x).device.type == "cpu"
