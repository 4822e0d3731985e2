"""RingStrategy on GPUs: with a stand-in for them (tests/gpu_stand_in.py), and which GPU is whose."""

import pytest
import torch

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning.parallel import devices_of_node
from tests.launch import run_ranks

FIT = """
import ring_plugins
ring_plugins.init(ranks=2)  # before the imports, which ranks then do at the same time
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel

from ring_plugins.lightning import RingStrategy
from tests.gpu_stand_in import install_for_torch
from tests.worker import report

library = None


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return self.layer(self.norm(x))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss


quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
for where in ("CPU", "GPU"):
    if where == "GPU":
        library, _ = install_for_torch()
    for precision in ("32-true", "bf16-mixed"):
        seed_everything(3, verbose=False)
        model = Model()
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=RingStrategy(), max_epochs=1, limit_train_batches=5,
            limit_val_batches=2, precision=precision, gradient_clip_val=1.0, **quiet,
        )
        trainer.fit(model)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        report(f"{where} {precision}", weights, trainer.global_rank)
report("launched", len(library.log), trainer.global_rank)
"""


def test_training_is_the_same_as_on_the_cpu():
    result = run_ranks(FIT)
    assert min(result.values("launched")) > 20
    for precision in ("32-true", "bf16-mixed"):
        first, second = result.values(f"GPU {precision}")
        assert first == second
        on_cpu = result.values(f"CPU {precision}")[0]
        assert torch.allclose(torch.tensor(first), torch.tensor(on_cpu), rtol=1e-6, atol=1e-7)


def gpus(*indices):
    return [torch.device("cuda", index) for index in indices]


@pytest.mark.parametrize(
    ("given", "local_size", "visible", "expected"),
    [
        ([0, 1], 2, 2, [0, 1]),
        ([2, 3], 2, 4, [2, 3]),  # those that the script chose
        ([0], 2, 1, [0, 0]),  # CUDA_VISIBLE_DEVICES names one for each rank
        ([0], 4, 4, [0, 1, 2, 3]),  # devices=1, but the launcher started four and all see all
    ],
)
def test_which_gpu_is_whose(monkeypatch, given, local_size, visible, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert devices_of_node(gpus(*given), local_size) == gpus(*expected)


def test_fewer_gpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="started 4 processes on this node, which has 2 cuda devices"):
        devices_of_node(gpus(0), 4)
