"""The strategies' reductions, over a job and a gloo group of one rank."""

import pytest
import torch
import torch.distributed as dist

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError, NotInitialized
from ring_plugins.lightning.process_group import all_gather, all_reduce


@pytest.fixture
def _group():
    ring.init(ranks=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    ring.shutdown()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("has_group", [False, True])
def test_the_mean_of_integers_is_a_float(has_group):
    group = dist.group.WORLD if has_group else None
    assert all_reduce(torch.tensor(3), group).item() == 3.0
    assert all_reduce(torch.tensor(3), group).dtype == torch.float32
    assert all_reduce(torch.tensor(3), group, reduce_op="sum").dtype == torch.int64


@pytest.mark.usefixtures("_group")
def test_a_gloo_group_has_an_average_too():
    tensor = torch.full((2,), 3.0)
    assert all_reduce(tensor, dist.group.WORLD) is tensor
    assert tensor.tolist() == [3, 3]


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("sync_grads", [False, True])
def test_gathered_tensors_are_stacked(sync_grads):
    tensor = torch.ones(2, requires_grad=True)
    gathered = all_gather(tensor, sync_grads=sync_grads)
    assert gathered.shape == (1, 2)
    assert gathered.requires_grad == sync_grads


def test_gathering_too_early_is_rejected():
    with pytest.raises(NotInitialized, match="before the strategy had set up its processes"):
        all_gather(torch.ones(1))


def test_an_unknown_reduction_is_named():
    with pytest.raises(ArgumentError, match="reduce_op='median'.*mean, avg, sum"):
        all_reduce(torch.ones(1), reduce_op="median")
