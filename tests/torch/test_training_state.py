"""What a process that joins gets of a model and an optimizer; two processes here are two calls, one after the other."""

import pickle
from types import SimpleNamespace

import torch
from torch import nn

from ring_plugins.torch import training_state
from ring_plugins.torch.training_state import share_state


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
