"""Fabric with ours gives what Fabric with DDP gives."""

from pathlib import Path

import pytest

from tests.launch import run_ranks

WORKER = Path(__file__).with_name("fabric_worker.py")


@pytest.mark.parametrize("package", ["lightning.fabric", pytest.param("lightning_fabric", marks=pytest.mark.slow)])
def test_same_weights_as_ddp(package: str) -> None:
    """Also that one RingFabricStrategy serves both packages."""
    result = run_ranks(WORKER, env={"TEST_PACKAGE": package})
    for name in ("name", "class", "half"):
        assert result.values(name) == [0.0, 0.0]
    assert result.values("same_on_all") == [True, True]
    for rank, answers in enumerate(result.values("answers")):
        assert answers == {
            "place": [rank, 0, 2],
            "mean_of_integers": 0.5,
            "sum": [1.0],
            "gathered": [[0], [1]],
            "broadcast": "from 1",
        }


def test_alone_it_is_a_single_device() -> None:
    result = run_ranks(WORKER, ranks=1)
    assert result.values("same") == [True]
    assert result.values("launcher") == [True]


FAILS = """
import ring_plugins
ring_plugins.init(ranks=2)  # before the import, which ranks then do at the same time
from lightning.fabric import Fabric
import ring_plugins.lightning

def loop(fabric):
    if fabric.global_rank == 1:
        raise ValueError("the first cause")
    fabric.barrier()

if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy="ring").launch(loop)
"""


@pytest.mark.slow
def test_an_exception_on_one_rank() -> None:
    result = run_ranks(FAILS, check=False, timeout=30)
    assert result.returncode != 0
    assert "ValueError: the first cause" in result.stderr
    assert "rank 0 ends because rank 1 failed: ValueError: the first cause" in result.stderr


DIFFERS = """
import torch
import ring_plugins
ring_plugins.init(ranks=2)
from lightning.fabric import Fabric
import ring_plugins.lightning

fabric = Fabric(accelerator="cpu", devices=2, strategy="ring")
fabric.launch()
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(2):
    fabric.backward(model(torch.ones(2, 4)).sum())
    if fabric.global_rank == 1 and step == 0:
        model.bias.grad *= 2
    optimizer.step()
    optimizer.zero_grad()
fabric.save("checkpoint", {"model": model})
"""


def test_weights_that_differ_are_reported_after_the_first_step_and_before_a_checkpoint(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_ranks(DIFFERS)
    for when in ("after the first step", "before a checkpoint"):
        assert result.stderr.count(f"{when} the weights of rank") == 1, result
