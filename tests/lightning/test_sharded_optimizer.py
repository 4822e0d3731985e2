"""Sharded optimizers under Trainer and Fabric: each rank has its share, and checkpoints have the ordinary format."""

import pytest
import torch
from lightning.pytorch import Trainer

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingStrategy
from tests.launch import run_ranks
from tests.lightning.models import WithAdam, loader

PREPARE = """
import os
import ring_plugins as ring
ring.init(ranks=int(os.environ["TEST_RANKS"]))
import torch
from tests.lightning.models import WithAdam, loader
from tests.worker import report

def share(optimizer):
    own = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    return own / (2 * sum(p.numel() for group in optimizer.param_groups for p in group["params"]))
"""
TRAINER = """
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from ring_plugins.lightning import RingStrategy

directory = os.environ["TEST_REPORTS"]
settings = dict(accelerator="cpu", devices=ring.size(), enable_progress_bar=False, enable_model_summary=False)
monitor = LearningRateMonitor()
trainer = Trainer(
    strategy=RingStrategy(shard_optimizer=True), max_epochs=2, logger=CSVLogger(directory), callbacks=[monitor],
    enable_checkpointing=False, **settings,
)
model = WithAdam()
trainer.fit(model, loader())
report("share", share(trainer.optimizers[0]))
report("rates", list(monitor.lrs))
path = os.path.join(directory, "last.ckpt")
trainer.save_checkpoint(path)
state = torch.load(path, weights_only=False)["optimizer_states"][0]
adam = torch.optim.Adam(model.parameters())
adam.load_state_dict(state)
report("shapes", [list(adam.state[p]["exp_avg"].shape) == list(p.shape) for p in model.parameters()])
continued = []
for shard in (True, "tensors", False):
    model = WithAdam()
    again = Trainer(
        strategy=RingStrategy(shard_optimizer=shard), max_epochs=3, logger=False, enable_checkpointing=False, **settings
    )
    again.fit(model, loader(), ckpt_path=path)
    continued.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
report("same", [torch.allclose(one, continued[0], rtol=1e-6, atol=1e-6) for one in continued])
"""
FABRIC = """
from lightning.fabric import Fabric
from ring_plugins.lightning import RingFabricStrategy

fabric = Fabric(accelerator="cpu", devices=ring.size(), strategy=RingFabricStrategy(shard_optimizer=True))
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
inner = torch.optim.Adam(model.parameters(), 0.1)
model, optimizer = fabric.setup(model, inner)

def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        fabric.backward(model(torch.full((2, 8), float(step + fabric.global_rank))).square().mean())
        optimizer.step()

train(3)
report("share", share(optimizer.optimizer))
path = os.path.join(os.environ["TEST_REPORTS"], "fabric.ckpt")
fabric.save(path, {"model": model, "optimizer": optimizer})
fabric.barrier()
train(2)
before = model.weight.detach().clone()
fabric.load(path, {"model": model, "optimizer": optimizer})
train(2)
report("same", bool(torch.equal(before, model.weight)))
report("saved", len(torch.load(path)["optimizer"]["state"]))
"""


@pytest.mark.slow
def test_trainer():
    result = run_ranks(PREPARE + TRAINER, 2, timeout=200)
    assert sum(result.values("share")) == pytest.approx(1.0) and max(result.values("share")) < 0.65
    assert result.values("rates") == [["lr-Adam"]] * 2
    assert all(map(all, result.values("shapes")))
    assert all(map(all, result.values("same")))


@pytest.mark.slow
def test_fabric():
    result = run_ranks(PREPARE + FABRIC, 2, timeout=200)
    assert sum(result.values("share")) == pytest.approx(1.0) and max(result.values("share")) < 0.7
    assert result.values("same") == [True, True]
    assert result.values("saved") == [2, 2]


def test_a_single_rank_rejects_what_several_would(tmp_path):
    class WithLbfgs(WithAdam):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    strategy = RingStrategy(shard_optimizer=True)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    with pytest.raises(ArgumentError, match="LBFGS cannot be sharded"):
        trainer.fit(WithLbfgs(), loader())
