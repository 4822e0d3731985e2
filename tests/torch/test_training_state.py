"""What a process that joins gets of a model and an optimizer; two processes here are two calls, one after the other."""

import copy
import os
import pickle
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import ring_plugins as ring
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.world import current
from ring_plugins.torch import ElasticSampler, TrainingState, training_state
from ring_plugins.torch.training_state import share_state, take_trained_parts, trained_parts
from tests.joiners import wait_for_joiners
from tests.launch import run_ranks, slowness
from tests.worker import report


def handed_over(state, monkeypatch):
    """What a process gets from one with this state, by the code of both."""
    told, sent = [], []

    def as_one(rank, broadcast, transfer_state):
        communicator = SimpleNamespace(rank=rank, broadcast=broadcast)
        monkeypatch.setattr(training_state, "current", lambda: SimpleNamespace(communicator=communicator))
        monkeypatch.setattr(training_state, "transfer_state", transfer_state)
        return share_state(lambda: state, [1])

    def give(described, joined, send):
        told.append(pickle.dumps(described()))
        send(pickle.loads(told[0])[0], lambda: 0)

    def receive(described, joined, send):
        needed, found = pickle.loads(told[0])
        send(needed, lambda: 0)
        return found

    assert as_one(0, lambda memory, root: sent.append(memory.array.copy()), give) is None
    return as_one(1, lambda memory, root: memory.array.__setitem__(slice(None), sent.pop(0)), receive)


def trained(steps):
    torch.manual_seed(1)
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8)).square().mean().backward()
        optimizer.step()


def test_the_optimizer_s_state_lies_in_memory_as_the_weights_do_so_that_a_fused_update_pairs_the_same_elements(
    monkeypatch,
):
    member, theirs = trained(2)
    joiner, ours = trained(0)
    found = handed_over({"model": member.state_dict(), "optimizer": theirs.state_dict()}, monkeypatch)
    joiner.load_state_dict(found["model"])
    ours.load_state_dict(found["optimizer"])
    for name in ("exp_avg", "exp_avg_sq"):
        mine, other = ours.state[joiner.weight][name], theirs.state[member.weight][name]
        assert mine.stride() == joiner.weight.stride() != mine.contiguous().stride() and torch.equal(mine, other)
    train(member, theirs, 1)
    train(joiner, ours, 1)
    assert torch.equal(joiner.weight, member.weight)


def test_tensors_with_gaps_and_empty_ones_arrive_without_gaps(monkeypatch):
    state = [
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(3.0).expand(2, 3),
        torch.empty(0, 2),
        torch.tensor(5),
    ]
    found = handed_over(state, monkeypatch)
    assert all(torch.equal(mine, given) and mine.is_contiguous() for mine, given in zip(found, state, strict=True))


# Trained parts --------------------------------------------------------------------------------------


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_flags_modes_and_groups_are_taken_over_before_the_optimizer_loads_its_state():
    member, joiner = network(), network()
    for model in (member, joiner):
        model[0].requires_grad_(False)
    theirs = torch.optim.Adam(filter(lambda p: p.requires_grad, member.parameters()), lr=0.1)
    ours = torch.optim.Adam(filter(lambda p: p.requires_grad, joiner.parameters()), lr=0.1)
    member[0].requires_grad_(True)
    theirs.add_param_group({"params": list(member[0].parameters()), "lr": 0.01})
    member[2].bias.requires_grad_(False)
    member[1].eval().track_running_stats = False
    member(torch.ones(3, 4)).sum().backward()
    theirs.step()
    take_trained_parts({"model": joiner, "optimizer": ours}, trained_parts({"model": member, "optimizer": theirs}))
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert [p.requires_grad for p in joiner.parameters()] == [p.requires_grad for p in member.parameters()]
    assert not joiner[1].training and not joiner[1].track_running_stats and joiner[0].training
    assert [group["lr"] for group in ours.param_groups] == [0.1, 0.01]
    assert [id(p) for p in ours.param_groups[1]["params"]] == [id(p) for p in joiner[0].parameters()]
    assert str(ours.state_dict()) == str(theirs.state_dict())


def test_groups_with_parameters_that_have_no_name_are_rejected_with_a_remedy():
    member, joiner, nameless = network(), network(), nn.Linear(1, 1)
    theirs, ours = (torch.optim.SGD(model.parameters(), 0.1) for model in (member, joiner))
    theirs.add_param_group({"params": list(nameless.parameters())})
    told = trained_parts({"model": member, "optimizer": theirs})
    with pytest.raises(MismatchError, match=r"the optimizer 'optimizer' has 2 .* 1 of this .*Add that module to the"):
        take_trained_parts({"model": joiner, "optimizer": ours}, told)
    equal = trained_parts({"optimizer": ours})
    take_trained_parts({"optimizer": ours}, equal)  # without any names, as long as the groups are equal


class Masked(nn.Module):
    """Counts its forwards, and keeps a mask of the largest input that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("rows", torch.zeros(1).expand(3), persistent=False)

    def forward(self, x):
        self.count += 1
        if self.mask is None or len(self.mask) < x.shape[1]:
            self.mask = torch.ones(x.shape[1], x.shape[1]).tril()
        self.rows = self.rows + 1
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.ones(2), persistent=False)
        return x


def test_buffers_that_are_not_saved_are_taken_over_even_if_they_are_made_later_or_have_grown():
    member, joiner = nn.Sequential(Masked(), Masked()), nn.Sequential(Masked(), Masked())
    count = joiner[0].count
    joiner[0](torch.ones(1, 2))
    member[0](torch.ones(1, 3))
    member[0](torch.ones(1, 4))
    take_trained_parts({"model": joiner}, trained_parts({"model": member}))
    theirs, ours = dict(member.named_buffers()), dict(joiner.named_buffers())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["0.count"] is count and ours["0.mask"].shape == (4, 4) and not joiner.state_dict()


#: Rank 1 dies after the others have changed what is trained, and later rank 0; the others wait for those that take
#: their places.
SCRIPT = """
    import hashlib, os, signal, torch
    import ring_plugins as ring
    from ring_plugins.core.world import current
    from ring_plugins.torch import DistributedOptimizer, GradientAverager, TrainingState
    from tests.joiners import wait_for_joiners
    from tests.torch.test_training_state import network
    from tests.worker import report

    way = os.environ["TEST_WAY"]
    ring.init(ranks=3, on_failure="replace")
    slot, number = ring.rank(), current().world_rank
    torch.manual_seed(1)
    model = network()
    model[0].requires_grad_(way == "freeze")
    if way == "groups":
        averager = GradientAverager(model)
        optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), 0.01, momentum=0.5)
    else:
        plain = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
        optimizer = DistributedOptimizer(plain, model.named_parameters())
    state = TrainingState(optimizer=optimizer, model=model, epoch=0, before=None)
    for state.epoch in range(state.epoch, 4):
        for batch in state.batches(range(4)):
            if (state.epoch, batch) == (1, 0):
                state.before = model[0].weight.detach().clone()
                model[0].requires_grad_(way != "freeze")
                if way == "freeze":
                    model[1].eval()
                if way == "groups":
                    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})
            if (state.epoch, batch, number) in ((1, 2, 1), (3, 1, 0)):
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for_joiners({0, 1, 2} - set(current().members.known[one].slot for one in current().world_ranks), 60)
            optimizer.zero_grad()
            model(torch.arange(12.0).reshape(3, 4) * (batch + slot + 1)).square().mean().backward()
            optimizer.step()
            state.commit()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    momenta = [optimizer.state[p].get("momentum_buffer") for group in optimizer.param_groups for p in group["params"]]
    found = {
        "weights": hashlib.sha256(weights).hexdigest(),
        "momenta": [one if one is None else one.tolist() for one in momenta],
        "flags": [p.requires_grad for p in model.parameters()],
        "groups": [[len(group["params"]), group["lr"]] for group in optimizer.param_groups],
        "modes": [module.training for module in model],
        "moved": not torch.equal(state.before, model[0].weight),
        "numbers": ring.all_gather_object(number),
    }
    report("found", found, slot)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["thaw", "freeze", "groups"])
def test_processes_join_after_parameters_were_frozen_or_unfrozen(way):
    result = run_ranks(SCRIPT, 3, env={"TEST_WAY": way}, timeout=int(120 * slowness()))
    found = result.values("found")
    assert found == [found[0]] * 3, str(result)
    assert found[0]["numbers"] == [4, 3, 2]
    assert found[0]["moved"] == (way != "freeze")
    assert found[0]["flags"] == [way != "freeze"] * 2 + [True] * 4
    assert found[0]["modes"] == [True, way != "freeze", True]
    assert found[0]["groups"] == ([[4, 0.01], [2, 0.001]] if way == "groups" else [[6, 0.01]])
    assert found[0]["momenta"].count(None) == 0


def leave_or_join_without_a_pass_of_gradients():
    """A script that averages by itself: one rank is killed, another is told to leave, and both are replaced."""
    ring.init(ranks=3, on_failure="replace")
    slot, number = ring.rank(), current().world_rank
    state = TrainingState(step=0, total=torch.zeros(3))
    while state.step < 12:
        if (state.step, number) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if (state.step, number) == (6, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        lost = {0, 1, 2} - {current().members.known[one].slot for one in current().world_ranks}
        wait_for_joiners(lost, 60)
        state.total += ring.all_reduce(torch.full((3,), slot + 1.0) * (state.step + 1))
        state.step += 1
        state.commit()
    report("found", {"total": state.total.tolist(), "numbers": ring.all_gather_object(number)}, slot)


@pytest.mark.slow
def test_processes_join_and_leave_where_a_loop_averages_by_itself_and_calls_commit():
    script = "from tests.torch.test_training_state import *\nleave_or_join_without_a_pass_of_gradients()"
    result = run_ranks(script, 3, timeout=int(120 * slowness()))
    found = result.values("found")
    assert found == [found[0]] * 3, str(result)
    assert found[0]["numbers"] == [0, 3, 4]
    assert "rank 2 (process" in result.output and "left on SIGTERM" in result.output


@pytest.fixture
def _alone():
    yield
    ring.shutdown()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("elastic", [False, True])
def test_a_loop_goes_on_in_the_middle_of_an_epoch_with_equal_bits(tmp_path, elastic):
    ring.init(ranks=1)

    def fit(stops, resumes=False):
        model, read = nn.Linear(1, 1), []
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
        data = torch.arange(10.0).unsqueeze(1)
        sampler = ElasticSampler(data, seed=2) if elastic else DistributedSampler(data, 1, 0, seed=2)
        loader = DataLoader(data, 2, sampler=sampler)
        state = TrainingState(model=model, optimizer=optimizer, epoch=0)
        if resumes:
            state.load_state_dict(torch.load(tmp_path / "state.pt"))
        for state.epoch in range(state.epoch, 3):  # noqa: B020 - as the docs show it
            sampler.set_epoch(state.epoch)
            for batch in state.batches(loader):
                read.append((state.epoch, batch.flatten().tolist()))
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                state.commit()
                if len(read) in stops:
                    torch.save(state.state_dict(), tmp_path / "state.pt")
        return read, model.weight.item()

    whole, weight = fit({8})
    assert fit({2}, resumes=True) == (whole[8:], weight)
    # The second checkpoint is of the last batch of epoch 1, behind which the rest of it is empty.
    assert fit({}, resumes=True) == (whole[10:], weight)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.usefixtures("_alone")
def test_a_loop_over_data_without_a_length_goes_on_too():
    ring.init(ranks=1)
    state, loader = TrainingState(epoch=0), DataLoader(Numbers(), 2)
    batches = state.batches(loader)
    assert next(batches).tolist() == [0, 1]
    saved = state.state_dict()
    batches.close()
    state.load_state_dict(saved)
    assert [batch.tolist() for batch in state.batches(loader)] == [[2, 3], [4, 5], [6, 7]]
