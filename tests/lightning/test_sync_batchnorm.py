"""Batch norm over all ranks, with a gloo group of one rank."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from ring_plugins.lightning.sync_batchnorm import HostSyncBatchNorm


def test_batch_norm_layers_come_back_with_what_they_learned():
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.BatchNorm2d(3)), "b": torch.nn.BatchNorm1d(2)})
    before, keys = copy.deepcopy(model), list(model.state_dict())
    sync = HostSyncBatchNorm()
    synchronized = sync.apply(model)
    assert list(synchronized.state_dict()) == keys
    norms = [synchronized["a"][0], synchronized["b"]]
    assert all("forward" in vars(module) for module in norms)
    for again in (copy.deepcopy(synchronized), pickle.loads(pickle.dumps(synchronized))):
        assert vars(again["b"])["forward"].args[0] is again["b"]
    synchronized.double().eval()
    synchronized["b"].running_mean.fill_(7)
    reverted = sync.revert(synchronized)
    assert [type(module) for module in reverted.modules()] == [type(module) for module in before.modules()]
    assert reverted["b"].running_mean.dtype == torch.float64
    assert reverted["b"].running_mean.tolist() == [7, 7]
    assert not reverted["b"].training
    assert not any("forward" in vars(module) for module in norms)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_rank_computes_what_torchs_layer_computes(momentum):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(4, momentum=momentum))
    model = HostSyncBatchNorm().apply(copy.deepcopy(plain))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        results = []
        for each in (plain, model):
            x = torch.arange(20.0).view(5, 4).sin().requires_grad_()
            each(x).square().mul(torch.arange(4.0)).sum().backward()
            results.append([x.grad, each[0].weight.grad, each[0].running_mean, each[0].running_var])
    finally:
        dist.destroy_process_group()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
