"""Layers of a Trainer compute their statistics over all ranks, until it is over."""

import copy
import pickle

import torch

from ring_plugins.lightning.sync_batchnorm import OwnSyncBatchNorm


def test_batch_norm_layers_come_back_with_what_they_learned():
    model = torch.nn.ModuleDict({"a": torch.nn.Sequential(torch.nn.BatchNorm2d(3)), "b": torch.nn.BatchNorm1d(2)})
    before, keys = copy.deepcopy(model), list(model.state_dict())
    sync = OwnSyncBatchNorm()
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
