"""Local updates in Lightning and Fabric, on ranks that count as several hosts, against those in a plain loop."""

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.lightning import RingFabricStrategy, RingStrategy
from ring_plugins.lightning.local_updates import local_settings
from tests.launch import run_ranks

SCRIPT = """
import os
import sys
import warnings

import torch

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ring_plugins.lightning import RingStrategy
from ring_plugins.torch import LocalUpdates, broadcast_parameters
from tests.worker import report

warnings.simplefilter("ignore")
RANK, SIZE, HOST = ring.rank(), ring.size(), ring.node_rank()
OPTIONS = {"every": 6, "outer": (0.9, 0.6), "fragments": 3, "compression": "bf16"}
OPTIONS["delay"] = int(os.environ["TEST_DELAY"])  # one exchange is under way when an epoch ends


def network():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


def batch(index, rank):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * index + rank))
    return x, x.sum(1, keepdim=True)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.at_validation = network(), []

    def training_step(self, data, index):
        x, y = data
        return (self.net(x) - y).square().mean()

    def validation_step(self, data, index):
        own = torch.cat([one.detach().reshape(-1) for one in self.net.parameters()])
        others = ring.all_gather_object(own)
        self.at_validation.append(all(torch.equal(own, other) for other in others))
        self.log("loss", self.training_step(data, index), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


class Batches:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter([batch(index, RANK) for index in range(self.count)])


def fit(count, path, epochs=1, ckpt_path=None, **options):
    model = Model()
    keeps = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", devices=SIZE, strategy=RingStrategy(**options), callbacks=[keeps],
        logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(model, Batches(count), Batches(1), ckpt_path=ckpt_path)
    return model, trainer


def weights(module):
    return torch.cat([one.detach().reshape(-1).float() for one in module.state_dict().values()])


def all_equal(tensor):
    return all(torch.equal(tensor, other) for other in ring.all_gather_object(tensor))


path = os.path.join(os.environ["TEST_PATH"], "")
arguments = {**OPTIONS, "sync_every": OPTIONS["every"]}
del arguments["every"]
model, trainer = fit(8, path, epochs=2, **arguments)
report("equal", all_equal(weights(model.net)))
report("validated", all(model.at_validation) and len(model.at_validation) > 1)

# The same as a plain loop does.
plain = network()
optimizer = LocalUpdates(torch.optim.Adam(plain.parameters(), 0.05), plain, **OPTIONS)
for epoch in range(2):
    for index in range(8):
        x, y = batch(index, RANK)
        optimizer.zero_grad()
        (plain(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.exchange()
    optimizer.exchange()  # of the checkpoint
optimizer.close()
ours = [one.detach() for one in model.net.parameters()]
for one, other in zip(ours, plain.parameters(), strict=True):
    torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)
report("loop", "ok")

# A checkpoint of the first epoch, and on from there. Adam's moments are those of the rank that saved.
saved = torch.load(path + "epoch=0.ckpt", weights_only=True)
report("anchor", bool(torch.equal(saved["optimizer_states"][0]["local_updates"]["anchor"][:80],
                                  saved["state_dict"]["net.0.weight"].reshape(-1))))
again, _ = fit(8, path, epochs=2, ckpt_path=path + "epoch=0.ckpt", **arguments)
report("resumed", all_equal(weights(again.net)) and bool(weights(again.net).isfinite().all()))

# Hosts with different numbers of batches; the ranks of a host may have, too.
uneven, trainer = fit(5 + 4 * HOST + ring.local_rank(), path + "uneven", sync_every=2)
report("uneven", all_equal(weights(uneven.net)) and all(uneven.at_validation))
report("steps", trainer.global_step)

# Nothing but exchanges crosses hosts.
timed, _ = fit(30, path + "timed", sync_every="0.05s", broadcast_buffers=False)
report("timed", all_equal(weights(timed.net)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "nodes", "delay"), [(4, "2", 1), (2, "1,1", 0), (3, "1,2", 1)])
def test_hosts_exchange_weights(processes, nodes, delay, tmp_path):
    env = {"RING_VIRTUAL_NODES": nodes, "TEST_PATH": str(tmp_path), "TEST_DELAY": str(delay)}
    result = run_ranks(SCRIPT, processes, "exported", env=env, timeout=300)
    for name in ("equal", "validated", "anchor", "resumed", "uneven", "timed"):
        assert result.values(name) == [True] * processes, name
    assert result.values("loop") == ["ok"] * processes


FABRIC = """
import os

import torch

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
from lightning.fabric import Fabric

from ring_plugins.lightning import RingFabricStrategy
from ring_plugins.torch import LocalUpdates
from tests.worker import report

RANK, SIZE, HOST = ring.rank(), ring.size(), ring.node_rank()
OPTIONS = {"outer": (0.9, 0.6), "fragments": 3, "delay": int(os.environ["TEST_DELAY"]), "compression": "bf16"}
path = os.path.join(os.environ["TEST_PATH"], "fabric.ckpt")


def network(seed=5):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


def loss_of(model, index):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * index + RANK))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def flat(module):
    values = module.state_dict().values()  # of which hosts count batches each for itself
    return torch.cat([one.detach().reshape(-1) for one in values if one.is_floating_point()])


def are_equal(module):
    own = flat(module)
    return all(torch.equal(own, other) for other in ring.all_gather_object(own))


def refusal(call):
    try:
        call()
    except ring.ArgumentError as error:
        return str(error)
    return ""


def begun(seed, **options):
    fabric = Fabric(accelerator="cpu", devices=SIZE, strategy=RingFabricStrategy(**options))
    fabric.launch()
    module = network(seed)
    return fabric, module, *fabric.setup(module, torch.optim.Adam(module.parameters(), 0.05))


def step(fabric, model, optimizer, index):
    optimizer.zero_grad()
    fabric.backward(loss_of(model, index))
    optimizer.step()


fabric, module, model, optimizer = begun(5 + RANK, sync_every=6, **OPTIONS)
report("join", refusal(lambda: fabric.strategy.join(model)))
for index in range(8):  # an exchange is under way then, if there is a delay
    step(fabric, model, optimizer, index)
fabric.save(path, {"model": model, "optimizer": optimizer})
report("saved", are_equal(module))
for index in range(8, 13):
    step(fabric, model, optimizer, index)
fabric.strategy.exchange()
report("equal", are_equal(module))

plain = network()
local = LocalUpdates(torch.optim.Adam(plain.parameters(), 0.05), plain, every=6, **OPTIONS)
for index in range(13):
    if index == 8:
        local.exchange()
    local.zero_grad()
    loss_of(plain, index).backward()
    local.step()
local.exchange()
local.close()
pairs = zip(module.parameters(), plain.parameters(), strict=True)
report("loop", max(float((one - other).detach().abs().max()) for one, other in pairs))

# Another job goes on from the file. Adam's moments are those of the rank that saved.
again, other, model, optimizer = begun(1, sync_every=6, **OPTIONS)
again.load(path, {"model": model, "optimizer": optimizer})
saved = torch.load(path, weights_only=True)
velocity = again.strategy.get_optimizer_state(optimizer.optimizer)["local_updates"]["velocity"]
report("resumed", torch.equal(velocity, saved["optimizer"]["local_updates"]["velocity"]) and bool(velocity.any()))
for index in range(8, 13):
    step(again, model, optimizer, index)
again.strategy.exchange()
report("goes on", are_equal(other))

# Hosts with different numbers of steps, of which one skips some.
third, module, model, optimizer = begun(0, sync_every=4)
for index in range(5 + 3 * HOST):
    with third.strategy.skip_step_on(model, MemoryError) as one:
        if index == 2 and RANK == 0:
            raise MemoryError
        step(third, model, optimizer, index)
third.strategy.exchange()
report("uneven", are_equal(module))
report("steps", third.strategy._local[id(module)]._rounds.steps - 3 * HOST)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "nodes"), [(4, "2"), (2, "1,1")])
def test_hosts_exchange_weights_in_fabric(processes, nodes, tmp_path):
    delay = str(int(processes == 4))
    env = {"RING_VIRTUAL_NODES": nodes, "TEST_PATH": str(tmp_path), "TEST_DELAY": delay}
    result = run_ranks(FABRIC, processes, "exported", env=env, timeout=300)
    for name in ("saved", "equal", "resumed", "goes on", "uneven"):
        assert result.values(name) == [True] * processes, name
    assert max(result.values("loop")) < 1e-5
    assert result.values("steps") == [5] * processes
    assert all("does not work with join()" in text for text in result.values("join"))


@pytest.mark.parametrize("strategy", [RingStrategy, RingFabricStrategy])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every=0 must be a number of steps from 1, or a time"),
        ({"sync_every": 8, "fragments": 3}, "fragments=3 must divide sync_every=8"),
        ({"sync_every": 8, "outer": "adam"}, "outer='adam' must be"),
        ({"outer": "nesterov"}, r"Strategy\(outer='nesterov'\) needs sync_every"),
        ({"fragments": 2}, r"Strategy\(fragments=2\) needs sync_every"),
        ({"delay": 2}, r"Strategy\(delay=2\) needs sync_every"),
        ({"sync_every": 8, "fragments": 4, "delay": 2}, "delay=2 must be 0, or .* below sync_every / fragments = 2"),
        ({"sync_every": 8, "shard_optimizer": True}, "does not work with shard_optimizer=True"),
    ],
)
def test_bad_arguments(strategy, options, text):
    with pytest.raises(ArgumentError, match=text):
        strategy(**options)


def test_settings_know_the_number_of_steps():
    given = {"sync_every": 10, "outer": (0.7, 0.9), "fragments": 1, "delay": 0, "shard_optimizer": False}
    given |= {"compression": "int8", "error_feedback": None}
    settings = local_settings(given)
    assert settings is not None
    assert (settings.every, settings.compression) == (10, ("int8", True))
    with pytest.raises(ArgumentError, match="with 5 exchanges"):
        local_settings(given, steps=50)
    assert local_settings({**given, "sync_every": None, "outer": "average"}) is None


STOPPED = """
import os
import signal

import ring_plugins as ring

ring.init(ranks=int(os.environ["TEST_RANKS"]))
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from tests.worker import report
import torch

from ring_plugins.lightning import RingStrategy


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.net = torch.nn.Linear(3, 2)

    def training_step(self, x, index):
        if ring.rank() == 1 and self.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.net(x + ring.rank()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


DELAY = int(os.environ["TEST_DELAY"])
path = os.path.join(os.environ["TEST_PATH"], "own")
trainer = Trainer(
    max_epochs=2, accelerator="cpu", devices=ring.size(), strategy=RingStrategy(sync_every=4, delay=DELAY),
    callbacks=[OnExceptionCheckpoint(path)], logger=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False,
)
model, batches = Model(), 6 if ring.node_rank() == 1 and os.environ["TEST_UNEVEN"] else 50
try:
    trainer.fit(model, torch.utils.data.DataLoader([torch.ones(3)] * batches))
except SystemExit as error:
    report("ended", type(error).__name__)
report("steps", trainer.global_step)
own = model.net.weight.detach()
report("equal", all(torch.equal(one, own) for one in ring.all_gather_object(own)))
report("saved", os.path.exists(path + "/on_exception.ckpt"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "uneven", "delay"), [("1,1", "", 2), ("1,1", "1", 0), ("2,1", "", 0), ("2,1", "1", 2)]
)
def test_all_trainers_stop_behind_the_next_exchange_when_one_gets_a_sigterm(nodes, uneven, delay, tmp_path):
    """Where hosts have different numbers of batches, one that has ended its epoch stops there."""
    ranks = sum(map(int, nodes.split(",")))
    env = {"RING_VIRTUAL_NODES": nodes, "TEST_PATH": str(tmp_path), "TEST_UNEVEN": uneven, "TEST_DELAY": str(delay)}
    result = run_ranks(STOPPED, ranks, "exported", env=env, timeout=200)
    assert result.values("ended") == ["SIGTERMException"] * ranks
    assert result.values("equal") == [True] * ranks
    assert all(result.values("saved"))
    assert result.values("steps")[0] == 8 + delay
