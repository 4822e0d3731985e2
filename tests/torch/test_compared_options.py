"""Options of optimizers that differ among ranks are found in any precision, by ranks that are threads."""

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.compared_options import COUNT, ComparedOptions, differ, options_error
from tests.core.collectives.simulated_hosts import simulated_communicators
from tests.core.collectives.thread_ranks import on_thread_ranks


def numbers_of(*groups):
    options = ComparedOptions()
    options.follow(lambda: groups)
    return options.update()


def shares(*ranks):
    return [sum(map(int, numbers)) / len(ranks) for numbers in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lr": 0.1}, {"lr": 0.1001}),
        ({"lr": 0.1, "betas": (0.9, 0.999)}, {"lr": 0.1, "betas": (0.8, 0.999)}),
        ({"lr": 0.1}, {"lr": torch.tensor(0.2)}),
        ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.8}),
        ({"lr": float("nan")}, {"lr": 0.1}),
    ],
)
def test_a_difference_on_one_rank_of_many_is_found(one, other):
    equal = [numbers_of(one)] * 299
    assert not differ(shares(*equal))
    assert differ(shares(*equal, numbers_of(other)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lr": 0.1}, {"lr": 0.1 + 1e-15}),  # another math library
        ({"lr": 1}, {"lr": 1.0}),
        ({"lr": 0.1}, {"lr": torch.tensor(0.1)}),
        ({"lr": 0.1, "fused": True}, {"lr": 0.1, "fused": None}),
    ],
)
def test_what_makes_no_difference_is_no_difference(one, other):
    assert not differ(shares(numbers_of(one), numbers_of(other)))


def test_ranks_that_compare_nothing_differ_from_none():
    assert ComparedOptions().update().tolist() == [0] * COUNT
    assert not differ(shares(ComparedOptions().update(), numbers_of({"lr": 0.1})))


def test_the_checksum_is_computed_when_a_value_has_changed():
    group = {"lr": torch.tensor(0.1)}
    options = ComparedOptions()
    options.follow(lambda: [group])
    first = options.update()
    assert options.update() is first
    group["lr"].fill_(0.2)  # as torch's schedulers do
    assert options.update().tolist() != first.tolist()


def test_the_error_names_the_group_the_values_and_the_ranks():
    text = str(options_error([["lr=0.1", "lr=1"], ["lr=0.1", "lr=2"], ["lr=0.1", "lr=1"]], [3, 5, 8]))
    assert text.startswith("the options of parameter group 1 differ among ranks (ranks 3, 8: lr=1; rank 5: lr=2). ")
    assert "no such group" in str(options_error([["lr=1"], []], [0, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_ranks_with_other_learning_rates_all_raise_in_their_backward(dtype):
    def rank_of(rank, communicator):
        parameter = nn.Parameter(torch.ones(3, dtype=dtype))
        averager = GradientAverager([("p", parameter)], communicator=communicator, autotune=False)
        group = {"lr": 0.1}
        averager.compare_options(lambda: [group])
        outcomes = []
        for step in range(4):
            group["lr"] = 0.1 if step % 2 == 0 else 0.2 + rank
            try:
                parameter.abs().sum().backward()
                outcomes.append("")
            except MismatchError as error:
                outcomes.append(str(error))
        averager._hooks.remove()
        return outcomes

    for outcomes in on_thread_ranks(3, rank_of):
        assert outcomes[0] == outcomes[2] == ""
        for text in outcomes[1::2]:
            assert "(rank 0: lr=0.2; rank 1: lr=1.2; rank 2: lr=2.2)" in text


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 0, 1, 2, 3, 4, 5, 6)], ids=str)
def test_rounding_between_hosts_is_no_difference_and_hides_none(hosts, compression):
    """With error feedback too, which carries a step's rounding into the next."""

    def rank_of(rank, communicator):
        parameter = nn.Parameter(torch.ones(3))
        averager = GradientAverager(
            [("p", parameter)],
            communicator=communicator,
            autotune=False,
            compression=compression,
            error_feedback=True,
            overlap=True,
        )
        group = {"lr": 0.1}
        averager.compare_options(lambda: [group])
        differed = []
        for step in range(12):
            group["lr"] *= 0.9 + 0.001 * (step == 10 and rank == 1)
            try:
                (parameter * (rank + step)).sum().backward()
            except MismatchError:
                differed.append(step)
        averager._hooks.remove()
        return differed

    with simulated_communicators(hosts) as job:
        assert job.on_all(rank_of) == [[10, 11]] * len(hosts)
