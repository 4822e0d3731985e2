"""Options of optimizers that differ among ranks are found in any precision, by ranks that are threads."""

import re

import pytest
import torch
from torch import nn

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.observe.consistency import Place, bits_of, differ
from ring_plugins.torch import GradientAverager
from ring_plugins.torch.compared_options import Options, options_error
from tests.core.collectives.simulated_hosts import simulated_communicators
from tests.core.collectives.thread_ranks import on_thread_ranks


def numbers_of(*groups):
    options = Options()
    options.groups = lambda: groups
    options.look(0)
    return bits_of(options.number)


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
        ({"lr": float("nan")}, {"lr": -float("nan")}),
        ({"lr": 0.1}, {"lr": torch.tensor(0.1)}),
        ({"lr": 0.1, "fused": True}, {"lr": 0.1, "fused": None}),
    ],
)
def test_what_makes_no_difference_is_no_difference(one, other):
    assert not differ(shares(numbers_of(one), numbers_of(other)))


def test_the_checksum_is_computed_when_a_value_has_changed():
    group = {"lr": torch.tensor(0.1)}
    options = Options()
    options.groups = lambda: [group]
    options.look(0)
    first = options.number
    options.look(0)
    assert options.number == first
    group["lr"].fill_(0.2)  # as torch's schedulers do
    options.look(0)
    assert options.number != first


def test_the_error_names_the_group_the_values_and_the_ranks():
    text = str(options_error([["lr=0.1", "lr=1"], ["lr=0.1", "lr=2"], ["lr=0.1", "lr=1"]], [3, 5, 8]))
    assert text.startswith("the options of parameter group 1 differ among ranks (ranks 3, 8: lr=1; rank 5: lr=2). ")
    assert "no such group" in str(options_error([["lr=1"], []], [0, 1]))


@pytest.mark.parametrize("until", [1, 2])
def test_with_a_remedy_a_difference_in_the_first_step_is_a_warning_and_an_error_in_the_second(until, caplog):
    """A script may broadcast the optimizer's state only after its first step."""
    caplog.set_level("WARNING", "ring_plugins")

    def rank_of(rank, communicator):
        parameter = nn.Parameter(torch.ones(3))
        averager = GradientAverager([("p", parameter)], communicator=communicator, autotune=False)
        group = {"lr": 0.1 + rank, "nesterov": bool(rank)}
        averager.checks.options.remedy = "Broadcast it."
        averager.compare_options(lambda: [group])
        outcomes = []
        for step in range(3):
            if step == until:
                group["lr"], group["nesterov"] = 0.1, False
            try:
                parameter.sum().backward()
                outcomes.append("")
                averager.checks.updates.add()
            except MismatchError as error:
                outcomes.append(str(error))
        averager._hooks.remove()
        return outcomes

    for outcomes in on_thread_ranks(2, rank_of):
        assert outcomes[0] == outcomes[2] == ""
        assert bool(outcomes[1]) == (until == 2) and ("lr=1.1" in outcomes[1]) == (until == 2)
    assert [record.message[-13:] for record in caplog.records] == ["Broadcast it."]  # once, of both


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_that_leaves_out_an_update_is_named_on_all_in_the_next_backward(dtype):
    def rank_of(rank, communicator):
        parameter = nn.Parameter(torch.ones(3, dtype=dtype))
        averager = GradientAverager([("p", parameter)], communicator=communicator, autotune=False)
        averager.compare_options(lambda: [{"lr": 0.1}])
        outcomes = []
        for step in range(40):
            try:
                parameter.sum().backward()
                outcomes.append("")
            except MismatchError as error:
                outcomes.append(str(error))
            if (rank, step) != (1, 34):
                averager.checks.updates.add()
        averager._hooks.remove()
        return outcomes

    for outcomes in on_thread_ranks(3, rank_of):
        assert [step for step, text in enumerate(outcomes) if text] == [35]
        assert "different numbers of updates with averaged gradients (ranks 0, 2: 35; rank 1: 34)" in outcomes[35]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ([{"lr": 0.1, "nesterov": True}], r"rank 0: nesterov=False; rank 1: nesterov=True; rank 2: nesterov=False\)"),
        ([{"lr": 0.1, "nesterov": False, "eps": 1e-8}], r"rank 0: no eps; rank 1: eps=1e-08; rank 2: no eps\)"),
        ([{"lr": 0.1, "nesterov": False}, {"lr": 0.1}], r"parameter group 1 has other options \(rank 0: no lr;"),
        ([{"lr": 0.2, "nesterov": False, "foreach": True}], ""),  # rates are compared in every step
    ],
)
def test_options_that_schedulers_do_not_change_are_compared_at_once(other, text):
    def rank_of(rank, communicator):
        averager = GradientAverager([("p", nn.Parameter(torch.ones(3)))], communicator=communicator, autotune=False)
        groups = other if rank == 1 else [{"lr": 0.1, "nesterov": False, "foreach": None}]
        found = ""
        try:
            averager.compare_options(lambda: groups)
        except MismatchError as error:
            found = str(error)
        averager._hooks.remove()
        return found

    found = on_thread_ranks(3, rank_of)
    assert len(set(found)) == 1
    assert re.search(text, found[0]) if text else not found[0], found


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


@pytest.mark.parametrize("compares_options", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_at_different_places_all_raise_in_their_next_backward(dtype, compares_options):
    """Also a rank that is where the average of all is, and such for which another number makes up."""

    def rank_of(rank, communicator):
        parameter = nn.Parameter(torch.ones(3, dtype=dtype))
        averager = GradientAverager([("p", parameter)], communicator=communicator, autotune=False)
        place = averager.checks.place = averager.checks.list[1] = Place()
        if compares_options:
            averager.compare_options(lambda: [{"lr": 0.1}])
        outcomes = []
        for step in range(6):
            if step >= 2:  # a process has joined
                off = rank - 1 if step == 4 else 0
                place.take({"epoch": 1 + off, "batches": step - off})
            try:
                parameter.sum().backward()
                outcomes.append("")
            except MismatchError as error:
                outcomes.append(str(error))
            assert place.is_compared
            averager.checks.updates.add()
        averager._hooks.remove()
        return outcomes

    for outcomes in on_thread_ranks(3, rank_of):
        assert [step for step, text in enumerate(outcomes) if text] == [4]
        assert (
            "different places of the training since a process has joined: {0: {'epoch': 0, 'batches': 5}, "
            "1: {'epoch': 1, 'batches': 4}, 2: {'epoch': 2, 'batches': 3}}" in outcomes[4]
        )


def test_a_place_is_to_be_compared_until_a_pass_has_succeeded():
    """So a step that all ranks skip does not count."""

    def rank_of(rank, communicator):
        parameter = nn.Parameter(torch.ones(3))
        averager = GradientAverager([("p", parameter)], communicator=communicator, autotune=False)
        own = averager.checks.place = averager.checks.list[1] = Place()
        own.take({"epoch": 2**70})
        with averager.skip_step_on(MemoryError) as step:
            if rank == 1:
                raise MemoryError
            parameter.sum().backward()
        found = [step.skipped, own.is_compared]
        parameter.sum().backward()
        averager._hooks.remove()
        return [*found, own.is_compared]

    assert on_thread_ranks(2, rank_of) == [[True, False, True]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [["a", "b"], ["weight", "weight"]])
def test_ranks_that_train_different_parameters_of_equal_sizes_all_raise(names, dtype):
    """Both have buckets for either set, so nothing else differs."""

    def rank_of(rank, communicator):
        parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in names]
        averager = GradientAverager(
            list(zip(names, parameters, strict=True)), communicator=communicator, autotune=False
        )
        outcomes = []
        for step in range(8):
            trained = (step + (step == 6 and rank == 1)) % 2
            for place, one in enumerate(parameters):
                one.requires_grad_(place == trained)
            try:
                parameters[trained].sum().backward()
                outcomes.append("")
            except MismatchError as error:
                outcomes.append(str(error))
        averager._hooks.remove()
        return outcomes

    first, second = ("a", "b") if names[0] == "a" else ("weight (number 0)", "weight (number 1)")
    for outcomes in on_thread_ranks(3, rank_of):
        assert [step for step, text in enumerate(outcomes) if text] == [6]
        assert f"different parameters in this step (ranks 0, 2: {first}; rank 1: {second})" in outcomes[6]
