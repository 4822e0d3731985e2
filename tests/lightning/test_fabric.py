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
            "unequal": [[0], [1, 1]],
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


@pytest.mark.slow
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


DATA = """
import os
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, WeightedRandomSampler
import ring_plugins as ring
from ring_plugins.lightning import RingFabricStrategy
from ring_plugins.torch import TrainingState
from tests.worker import report

fabric = Fabric(accelerator="cpu", devices=2, strategy=RingFabricStrategy())
fabric.launch()
fabric.seed_everything(1 + ring.rank(), verbose=False)
os.environ["PL_GLOBAL_SEED"] = "1"
data = torch.arange(10.0).unsqueeze(1)

def read(loader):
    return [batch.int().flatten().tolist() for batch in loader]

order = [9, 7, 5, 3, 1, 0, 2, 4, 6, 8]
report("order", read(fabric.setup_dataloaders(DataLoader(data, 2))))
report("sampler", read(fabric.setup_dataloaders(DataLoader(data, 2, sampler=order))))
report("batches", read(fabric.setup_dataloaders(DataLoader(data, batch_sampler=[[0, 1, 2], [5], [9, 3], [4]]))))
weighted = WeightedRandomSampler(torch.ones(10), 10, replacement=False)
report("weighted", read(fabric.setup_dataloaders(DataLoader(data, 1, sampler=weighted))))

def train(saves, path=None):
    torch.manual_seed(1)
    network = torch.nn.Linear(1, 1)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.001))
    loader = fabric.setup_dataloaders(DataLoader(data, 1, shuffle=True))
    state, seen = TrainingState(model=model, optimizer=optimizer, epoch=0), []
    if path:
        state.load_state_dict(torch.load(path))
    for state.epoch in range(state.epoch, 3):
        for batch in state.batches(loader):
            seen.append(batch.item())
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) == saves and ring.rank() == 0:
                torch.save(state.state_dict(), os.environ["TEST_PATH"])
    fabric.barrier()
    return seen, network.weight.item()

whole, weight = train(8)
report("resumed", train(0, os.environ["TEST_PATH"]) == (whole[8:], weight))

torch.manual_seed(1)
network = torch.nn.Linear(1, 1)
reference = torch.nn.Linear(1, 1)
reference.load_state_dict(network.state_dict())
model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.001))
with fabric.strategy.join(model, optimizer):
    for batch in data[: 5 - 2 * ring.rank()]:
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
plain = torch.optim.SGD(reference.parameters(), lr=0.001)
for batch in data[:5]:
    plain.zero_grad()
    reference(batch).square().mean().backward()
    plain.step()
report("joined", torch.allclose(network.weight, reference.weight, atol=1e-6))
"""


@pytest.mark.slow
def test_loaders_keep_their_order_and_loops_go_on_in_mid_epoch_and_to_the_end_of_the_longest(tmp_path) -> None:
    result = run_ranks(DATA, 2, env={"TEST_PATH": str(tmp_path / "state.pt")}, timeout=240)
    assert result.values("order") == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    assert result.values("sampler") == [[[9, 5], [1, 2], [6]], [[7, 3], [0, 4], [8]]]
    assert result.values("batches") == [[[0, 1, 2], [9, 3]], [[5], [4]]]
    weighted = result.values("weighted")
    assert sorted(number for share in weighted for batch in share for number in batch) == list(range(10))
    assert result.values("resumed") == [True, True]
    assert result.values("joined") == [True, True]


STEADY = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.fabric import Fabric
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingFabricStrategy
from tests.worker import report

size = int(os.environ["TEST_RANKS"])
fabric = Fabric(accelerator="cpu", devices=size, strategy=RingFabricStrategy())
fabric.launch()
torch.manual_seed(3)
network = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), 0.1))
data = TensorDataset(torch.randn(30, 4))
loader = DataLoader(data, 4, shuffle=True)
seen = []
for epoch in range(2):
    seen.append([])
    for step in fabric.strategy.global_batches(loader, model, global_batch_size=12, exact=True):
        for (x,) in step:
            seen[-1] += x[:, 0].tolist()
            fabric.backward(model(x).square().mean())
        optimizer.step()
report("epochs", seen)
report("weights", torch.cat([one.detach().flatten() for one in network.parameters()]))
if size > 1:
    for given in (fabric.setup_dataloaders(loader), loader):
        try:
            fabric.strategy.global_batches(given, network if given is loader else model, global_batch_size=10)
        except ArgumentError as error:
            report(type(given).__name__, str(error))
"""


@pytest.mark.slow
def test_steps_of_a_global_batch_train_to_the_same_bits_on_any_number_of_ranks() -> None:
    results = [run_ranks(STEADY, size, timeout=120) for size in (1, 2, 3)]
    weights = [found for result in results for found in result.values("weights")]
    assert len(weights) == 6 and all(found == weights[0] for found in weights)
    first, second = results[0].values("epochs")[0]
    assert first != second and sorted(first) == sorted(second)
    assert all("has a DistributedSampler, which divides" in text for text in results[1].values("_FabricDataLoader"))
    assert all("is no multiple of the loader's batch_size=4" in text for text in results[1].values("DataLoader"))
