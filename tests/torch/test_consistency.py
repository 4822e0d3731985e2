"""Checksums of parameters, what other optimizers update, and when weights are compared after ranks have changed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import DriftError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.observe import consistency as shared
from ring_plugins.torch import consistency
from ring_plugins.torch.changes import Claim
from ring_plugins.torch.consistency import OtherOptimizers, TorchChecks, _on_device, parameter_checksums
from tests.launch import run_ranks

ALONE = SingleCommunicator("alone")

# Forward raises on rank 0 in its third batch, and its script goes on. It has one batch more than rank 1.
MISSED_BATCH = """
import torch
import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer
from tests.worker import report

ring.init(ranks=2)
rank = ring.rank()

def train(counts_inside):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), drift_check_every=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(6 - rank):
        try:
            optimizer.zero_grad()
            if (rank, number) == (0, 2):
                raise ValueError("a batch that cannot be read")
            model(torch.full((2, 3), rank + number + 1.0)).sum().backward()
            optimizer.step()
            if counts_inside:
                scheduler.step()
        except ValueError:
            pass
        if not counts_inside:
            scheduler.step()
    return [value.tolist() for value in model.parameters()]

report("inside", train(True))
try:
    train(False)
except ring.MismatchError as error:
    report("outside", str(error))
"""


@pytest.mark.slow
def test_a_batch_missed_before_the_first_gradient_leaves_weights_equal_or_the_learning_rates_are_compared():
    result = run_ranks(MISSED_BATCH, 2)
    first, second = result.values("inside")
    assert first == second
    assert len(result.values("outside")) == 2
    for text in result.values("outside"):
        assert "the options of parameter group 0 differ among ranks (rank 0: lr=0.0125" in text
        assert "rank 1: lr=0.025" in text


def test_one_flipped_bit_changes_one_checksum():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    names, before = parameter_checksums(model.named_parameters())
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model[1].bias.data.view(torch.int32)[0] ^= 1
    _, after = parameter_checksums(model.named_parameters())
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, True, False]


def test_layout_does_not_matter_and_odd_sizes_are_summed_up():
    weight = torch.randn(2, 3, 2, 2)
    both = [("a", nn.Parameter(weight)), ("b", nn.Parameter(weight.to(memory_format=torch.channels_last)))]
    _, (first, second) = parameter_checksums(both)
    assert first == second
    assert int(_on_device(torch.arange(5, dtype=torch.uint8))) == 10


def test_weights_that_no_optimizer_of_torch_updates_are_read_anew_for_each_pass(monkeypatch):
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)
    weight, claim, numbers = nn.Parameter(torch.zeros(2)), Claim("a"), []
    claim.take([("weight", weight)], ALONE)
    checks = TorchChecks(claim)
    checks.weights.named = [("weight", weight)]
    for _ in range(3):
        checks.number()
        numbers.append(checks.weights.number)
        checks.note_compared()
        weight.data += 1
    claim.drop()
    assert numbers[0] is None
    assert len(set(numbers)) == 3


def test_frozen_weights_are_compared_up_to_the_first_step(monkeypatch):
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)

    def numbers(frozen):
        named = [("trained", nn.Parameter(torch.zeros(2))), ("frozen", nn.Parameter(torch.full((2,), frozen), False))]
        claim = Claim("a")
        claim.take(named[:1], ALONE)
        checks = TorchChecks(claim)
        checks.weights.named = named
        found = []
        for _ in range(3):
            checks.number()
            found.append(checks.weights.number)
            checks.note_compared()
        claim.drop()
        return found

    (_, one, trained), (_, other, trained_too) = numbers(0.0), numbers(1.0)
    assert one != other
    assert trained == trained_too


def test_weights_that_no_given_optimizer_has_are_compared_by_whoever_updates_them(monkeypatch):
    monkeypatch.setattr(consistency, "is_check_wanted", lambda: True)

    def number(value):
        named = [("trained", nn.Parameter(torch.full((2,), value)))]
        claim = Claim("a")
        claim.take(named, ALONE)
        checks = TorchChecks(claim)
        checks.weights.named = named
        checks.options.groups = lambda: [{"lr": 0.1}]  # as Keras gives them
        checks.number()
        checks.note_compared()
        checks.number()
        claim.drop()
        return checks.weights.number

    assert number(0.0) == number(1.0)


class Partitioned(torch.optim.Optimizer):
    """As ZeroRedundancyOptimizer: has all parameters, and an optimizer inside that has those of this rank."""

    def __init__(self, parameters, own):
        super().__init__(parameters, {})
        self.inside = torch.optim.Adam(own)

    def step(self, closure=None):
        self.inside.step(closure)


@pytest.mark.parametrize("own", [slice(0, 1), slice(2, 0, -1), slice(None)], ids=["first", "others", "all"])
def test_an_optimizer_inside_another_is_not_compared_since_ranks_may_have_different_parts(own):
    others, parameters = OtherOptimizers({}), [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for one in parameters:
        one.grad = torch.ones(2)
    alone = torch.nn.Parameter(torch.ones(1))
    optimizer, second = Partitioned(parameters, parameters[own]), torch.optim.SGD([alone], 0.1)
    optimizer.step()
    second.step()
    found = others.stepped()
    assert [(id(one), kind) for one, kind in found] == [
        *((id(one), "Partitioned") for one in parameters),
        (id(alone), "SGD"),
    ]
    assert not others.stepped()


def test_weights_are_compared_in_the_pass_after_a_change_and_behind_the_first_update(monkeypatch):
    elastic, compared, told = SimpleNamespace(view=0, tell_changes=lambda: told.append(1)), [], []
    monkeypatch.setattr(consistency, "current", lambda: SimpleNamespace(elastic=elastic))
    monkeypatch.setattr(shared, "differing_weights", lambda *_: compared.append(elastic.view) or outcome)
    check, outcome = consistency.RecoveryCheck(None), ""
    named = list(nn.Linear(1, 1).named_parameters())

    def passes(number):
        compared.clear()
        for _ in range(number):
            check.after_pass(named)
        return list(compared)

    assert passes(2) == []
    elastic.view = 1
    assert passes(4) == [1, 1]
    elastic.view = 2
    assert passes(1) == [2]
    elastic.view = 3  # before the second comparison, which is put off
    assert passes(4) == [3, 3] and told
    elastic.view, outcome = 4, "they differ."
    with pytest.raises(DriftError, match=r"they differ\. Continue from a checkpoint"):
        passes(1)
