"""Fabric with ours gives what Fabric with DDP gives."""

from pathlib import Path

import pytest

from tests.launch import run_ranks

WORKER = Path(__file__).with_name("fabric_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
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


SKIPS = """
import os
import ring_plugins
ring_plugins.init(ranks=int(os.environ["TEST_RANKS"]))
import torch
from lightning.fabric import Fabric
from ring_plugins.core.base.errors import ArgumentError
import ring_plugins.lightning
from tests.worker import report

if __name__ == "__main__":
    size = int(os.environ["TEST_RANKS"])
    fabric = Fabric(accelerator="cpu", devices=size, strategy="ring")
    fabric.launch()
    fabric.seed_everything(2, verbose=False)
    network = torch.nn.Linear(3, 1)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), 0.1))
    before, skipped = network.weight.detach().clone(), []
    for number in range(3):
        with fabric.strategy.skip_step_on(model, MemoryError) as step:
            optimizer.zero_grad()
            if number == 1 and fabric.global_rank == size - 1:
                raise MemoryError("no room")
            fabric.backward(model(torch.full((1, 3), fabric.global_rank + 1.0)).sum())
            optimizer.step()
        skipped.append(step.skipped)
    report("skipped", skipped)
    report("moved", (before - network.weight).detach())
    if size > 1:
        try:
            fabric.strategy.skip_step_on(torch.nn.Linear(1, 1), MemoryError)
        except ArgumentError as error:
            report("rejected", str(error))
"""


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_ranks_skip_a_step_that_one_cannot_compute(size: int) -> None:
    result = run_ranks(SKIPS, size)
    assert result.values("skipped") == [[False, True, False]] * size
    for moved in result.values("moved"):
        assert moved[0] == pytest.approx([0.2 * (size + 1) / 2] * 3)
    assert all(
        "skip_step_on() was given a Linear that has not been set up" in text for text in result.values("rejected")
    )


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
from tests.worker import report

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
try:
    fabric.save("checkpoint", {"model": model})
except ring_plugins.DriftError as error:
    report("error", str(error))
"""


@pytest.mark.slow
def test_weights_that_differ_are_reported_after_the_first_step_and_not_saved(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_ranks(DIFFERS)
    assert result.stderr.count("after the first step the weights of rank") == 1, result
    assert len(result.values("error")) == 2
    for text in result.values("error"):
        assert text.startswith("before this checkpoint is saved the weights of rank"), text
    assert not (tmp_path / "checkpoint").exists()


RATES = """
import torch
import ring_plugins
ring_plugins.init(ranks=2)
from lightning.fabric import Fabric
import ring_plugins.lightning
from tests.worker import report

fabric = Fabric(accelerator="cpu", devices=2, strategy="ring")
fabric.launch()
model = torch.nn.Linear(4, 1)
other = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
other, second = fabric.setup(other, torch.optim.Adam(other.parameters(), 0.1))
for step in range(3):
    fabric.backward(other(torch.ones(2, 4)).sum())
    second.step()
    if step == 2:
        optimizer.param_groups[0]["lr"] *= 1 + fabric.global_rank
    try:
        fabric.backward(model(torch.ones(2, 4)).sum())
    except ring_plugins.MismatchError as error:
        report("found", [step, str(error)])
    optimizer.step()
"""


@pytest.mark.slow
def test_learning_rates_that_differ_are_an_error_in_that_step() -> None:
    found = run_ranks(RATES).values("found")
    assert len(found) == 2
    for step, text in found:
        assert step == 2
        assert "rank 0: lr=0.1" in text and "rank 1: lr=0.2" in text
