"""A script of Horovod's elastic training goes on when a rank is killed, and with the process that takes its place."""

import pytest

from tests.launch import run_ranks, slowness

SCRIPT = """
import os
import signal
import time

import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from ring_plugins.core.world import current
from tests.worker import report

EPOCHS, SAMPLES = 4, 24
ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure=os.environ["TEST_ON_FAILURE"])
hvd.init()
joins = current().is_joining
slot = hvd.rank()
torch.manual_seed(slot)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = torch.utils.data.TensorDataset(torch.arange(3.0 * SAMPLES).reshape(SAMPLES, 3) / 72, torch.arange(SAMPLES))
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
began, resets, seen = [], [], {}


def adjust():
    resets.append(hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * hvd.size()


state.register_reset_callbacks([adjust])


def is_time_to_die():
    return not joins and slot == 1 and (state.epoch, state.batch) == (1, 2)


def wait_for_joiner():
    deadline = time.monotonic() + float(os.environ["TEST_PATIENCE"])
    while current().replaces and not current().elastic.wants_change and time.monotonic() < deadline:
        time.sleep(0.01)


@hvd.elastic.run
def train(state):
    began.append([state.epoch, state.batch, hvd.size(), int(os.environ["HOROVOD_SIZE"])])
    for state.epoch in range(state.epoch, EPOCHS):
        for state.batch, (inputs, numbers) in enumerate(loader, state.batch):
            optimizer.zero_grad()
            (model(inputs) - 1).square().mean().backward()
            if is_time_to_die():
                os.kill(os.getpid(), signal.SIGKILL)
            if resets == [2] and state.epoch == 2 and state.batch == 1:
                wait_for_joiner()
            optimizer.step()
            seen.setdefault(state.epoch, []).extend(numbers.tolist())
            sampler.record_batch(state.batch, len(numbers))
            state.commit()
        state.batch = 0
        sampler.set_epoch(state.epoch + 1)
    return "done"


report("result", train(state))
report("began", began)
report("resets", resets)
report("seen", [sorted(seen.get(epoch, [])) for epoch in range(EPOCHS)])
report("rate", optimizer.param_groups[0]["lr"])
report("weights", [parameter.tolist() for parameter in model.parameters()])
"""


def trained(on_failure):
    env = {"TEST_ON_FAILURE": on_failure, "TEST_PATIENCE": str(60 * slowness())}
    return run_ranks(SCRIPT, 3, "spawned", env=env, timeout=150)


def check(result, slots):
    found = [result.reports[slot] for slot in slots]
    assert [one["result"] for one in found] == ["done"] * len(found), str(result)
    assert all(one["weights"] == found[0]["weights"] and one["rate"] == found[0]["rate"] for one in found)
    return found


@pytest.mark.slow
def test_the_other_ranks_begin_again_with_the_rest_of_the_epoch():
    result = trained("continue")
    found = check(result, (0, 1))
    for one in found:
        assert one["began"] == [[0, 0, 3, 3], [1, 3, 2, 2]]
        assert one["resets"] == [2] and one["rate"] == pytest.approx(0.2)
    for epoch in (2, 3):
        assert sorted(found[0]["seen"][epoch] + found[1]["seen"][epoch]) == [*range(24)]


@pytest.mark.slow
def test_a_process_that_takes_the_place_begins_with_the_others_state():
    result = trained("replace")
    found = check(result, (0, 1, 2))
    for slot in (0, 2):
        assert found[slot]["began"] == [[0, 0, 3, 3], [1, 3, 2, 2], [2, 2, 3, 3]]
        assert found[slot]["resets"] == [2, 3]
    assert found[1]["began"] == [[2, 2, 3, 3]] and found[1]["resets"] == [3]
    assert sorted(number for one in found for number in one["seen"][3]) == [*range(24)]
    assert found[0]["rate"] == pytest.approx(0.3)
