"""Ranks with different numbers of batches train to the end of the longest, as one process does on all data."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.torch.changes import Claim
from ring_plugins.torch.consistency import TorchChecks
from ring_plugins.torch.gradient_buckets import GradientBuckets
from ring_plugins.torch.join import join, take_part
from tests.core.collectives.mortal_ranks import on_mortal_ranks
from tests.launch import run_ranks


def test_an_error_in_the_passes_of_one_averager_is_raised_where_the_block_ends(monkeypatch):
    module = importlib.import_module("ring_plugins.torch.join")  # the package has the class by this name
    communicator = SimpleNamespace(size=1)
    parts = [SimpleNamespace(catch_up=lambda: 0, communicator=communicator, steps=0) for _ in range(3)]

    def take_part(averager, weight):
        if averager is parts[1]:
            raise ValueError("no pass")
        return True

    monkeypatch.setattr(module, "take_part", take_part)
    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(communicator=communicator))
    with pytest.raises(ValueError, match="no pass"):
        join(*parts).follow()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_averages_are_those_of_the_ranks_that_have_data(monkeypatch, dtype):
    def run(rank):
        parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
        checks = TorchChecks(Claim(""))
        checks.updates.set(rank.rank)  # only ranks that have data are compared
        buckets = GradientBuckets(
            [("w", parameter)], rank.communicator("gradients"), BucketSizes(), None, set(), True, checks=checks
        )
        ended = rank.rank != 1
        if ended:
            checks.has_ended, checks.weight = True, 0.0
        else:
            parameter.grad = torch.full((3,), 6.0, dtype=dtype)
        outcome = buckets.finish()
        gradient = parameter.grad
        parameter.grad = None
        checks.has_ended, checks.weight = True, 0.0
        last = buckets.finish()
        return gradient.tolist(), outcome.ended, outcome.options_differ, parameter.grad, last.ended

    for gradient, ended, differs, after, last in on_mortal_ranks(monkeypatch, 3, run):
        assert gradient == [6.0] * 3
        assert ended == pytest.approx(2 / 3, rel=0.01)
        assert not differs
        assert (after, last) == (None, 1.0)


def test_averages_weigh_samples(monkeypatch):
    def run(rank):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        checks = TorchChecks(Claim(""))
        buckets = GradientBuckets(
            [("w", parameter)], rank.communicator("gradients"), BucketSizes(), None, set(), True, checks=checks
        )
        samples, mean = ((32, 1.0), (8, 5.0))[rank.rank]
        checks.weight = samples / 32
        parameter.grad = torch.tensor([mean * samples / 32], dtype=torch.float64)
        buckets.finish()
        return parameter.grad.item()

    assert on_mortal_ranks(monkeypatch, 2, run) == [pytest.approx((32 * 1 + 8 * 5) / 40, rel=1e-12)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_few_samples_of_one_rank_weigh_no_less_in_16_bits(monkeypatch, dtype):
    def run(rank):
        parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
        checks = TorchChecks(Claim(""))
        buckets = GradientBuckets(
            [("w", parameter)], rank.communicator("gradients"), BucketSizes(), None, set(), True, checks=checks
        )
        checks.weight, checks.has_ended = (0.0, True) if rank.rank else (3 / 1024, False)
        if not rank.rank:
            parameter.grad = torch.full((1,), 5 * checks.weight, dtype=dtype)
        buckets.finish()
        return parameter.grad.item()

    assert on_mortal_ranks(monkeypatch, 3, run) == [pytest.approx(5, rel=0.01)] * 3


@pytest.mark.parametrize(("parts", "text"), [((), "needs what averages"), ((3,), "was given a int")])
def test_other_parts_are_rejected(monkeypatch, parts, text):
    communicator = SimpleNamespace(size=1, reject=lambda operation, error: None)
    module = importlib.import_module("ring_plugins.torch.join")
    monkeypatch.setattr(module, "current", lambda: SimpleNamespace(communicator=communicator))
    with pytest.raises(ArgumentError, match=text):
        join(*parts)


def test_a_closed_averager_is_not_waited_for_for_ever():
    closed: Any = SimpleNamespace(communicator=SimpleNamespace(size=2, name="gradients"), is_closed=True)
    with pytest.raises(RingError, match=r"gradients: this rank waits in join\(\) .* has been closed"):
        take_part(closed)


SCRIPT = """
import os, torch
import torch.nn.functional as F
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters, join
from tests.worker import report

ranks = int(os.environ["TEST_RANKS"])
ring.init(ranks=ranks)
torch.manual_seed(0)
x, y = torch.randn(2, 160, 4, dtype=torch.float64)
last = {}

def batches(rank, epoch, short):
    count = (5, 3, 0, 1)[(rank + epoch) % ranks]
    sizes = [4 - (short and i == count - 1) for i in range(count)]
    return [slice(40 * rank + 4 * i, 40 * rank + 4 * i + size) for i, size in enumerate(sizes)]

def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()

def train(shard, by_samples):
    own = model()
    broadcast_parameters(own)
    inner = torch.optim.Adam(own.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(inner, own.named_parameters(), shard=shard)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    for epoch in range(3):
        with join(optimizer, scheduler, batch_size=4) as data:
            for batch in batches(ring.rank(), epoch, by_samples):
                optimizer.zero_grad()
                loss = F.mse_loss(own(x[batch]), y[batch])
                (data.weighted(loss, batch.stop - batch.start) if by_samples else loss).backward()
                torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
    optimizer.close()
    return torch.cat([p.detach().reshape(-1) for p in own.parameters()])

def alone(by_samples):
    own = model()
    optimizer = torch.optim.Adam(own.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for epoch in range(3):
        by_rank = [batches(rank, epoch, by_samples) for rank in range(ranks)]
        for i in range(max(map(len, by_rank))):
            optimizer.zero_grad()
            now = [some[i] for some in by_rank if i < len(some)]
            F.mse_loss(own(torch.cat([x[b] for b in now])), torch.cat([y[b] for b in now])).backward()
            torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    return torch.cat([p.detach().reshape(-1) for p in own.parameters()])

for shard, by_samples in ((False, False), (False, True), (True, True)):
    weights = train(shard, by_samples)
    error = (weights - alone(by_samples)).abs().max().item()
    report(f"{shard} {by_samples}", [error, all(torch.equal(weights, one) for one in ring.all_gather_object(weights))])
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_weights_equal_one_process_on_the_concatenated_batches(count):
    result = run_ranks(SCRIPT, count)
    for case in ("False False", "False True", "True True"):
        values = result.values(case)
        assert len(values) == count
        for error, is_same in values:
            assert error < 1e-12, case
            assert is_same, case


LOST = """
import os, signal, torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters, join
from tests.worker import report

ring.init(ranks=4, on_failure="continue")
before, model = ring.rank(), torch.nn.Linear(2, 2)
broadcast_parameters(model)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = DistributedOptimizer(inner)
scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)

class Part:
    of = before

    def state_dict(self):
        if before == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.of

    def load_state_dict(self, state):
        self.of = state

part, most = Part(), int(os.environ["TEST_MOST"])
with join(optimizer, part, scheduler) as data:
    for _ in range(3 if before == most else 1):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
report("got", [ring.size(), data.last, part.of, scheduler.last_epoch], before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3])
def test_all_parts_come_from_one_rank_where_another_is_lost_meanwhile(most):
    result = run_ranks(LOST, 4, env={"TEST_MOST": str(most)}, check=False)
    assert result.values("got") == [[3, most - 1, most, 3]] * 3, result


LEFT_OUT = """
import torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters, join
from tests.worker import report

ring.init(ranks=3)
model = torch.nn.Linear(2, 2, bias=False)
broadcast_parameters(model)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), shard=True)
start = model.weight.detach().clone()
for epoch in range(2):
    with join(optimizer):
        for batch in range(1 + 5 * (ring.rank() == epoch)):
            with optimizer.skip_step_on(ValueError):
                optimizer.zero_grad()
                if batch == 1:
                    raise ValueError("a batch that cannot be computed")
                model(torch.ones(1, 2)).sum().backward()
                if batch not in (3, 5):  # as a GradScaler does where gradients overflow
                    optimizer.step()
weights = ring.all_gather_object(model.weight.detach())
report("steps", [(start - model.weight).detach().max().item(), all(torch.equal(weights[0], one) for one in weights)])
"""


@pytest.mark.slow
def test_a_sharded_step_that_is_left_out_keeps_nobody_waiting():
    result = run_ranks(LEFT_OUT, 3)
    assert result.values("steps") == [[pytest.approx(2 * 3, rel=1e-5), True]] * 3


TOLD = """
import os, signal, torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters, join
from tests.worker import report

ring.init(ranks=3)
ring.preempted()
model = torch.nn.Linear(2, 2)
broadcast_parameters(model)
optimizer, steps = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()), 0
with join(optimizer):
    for _ in range((20, 1, 0)[ring.rank()]):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()
        steps += 1
        if ring.preempted():
            break
    if ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
report("preempted", ring.preempted())
report("steps", steps)
report("weights", model.weight.flatten().tolist())
ring.barrier()
"""


@pytest.mark.slow
def test_a_rank_that_waits_in_join_hears_with_the_others_that_the_job_is_to_end():
    result = run_ranks(TOLD, 3)
    assert result.values("preempted") == [True] * 3
    assert result.values("steps")[0] < 20 and result.values("steps")[1:] == [1, 0]
    assert result.values("weights") == [result.values("weights")[0]] * 3
