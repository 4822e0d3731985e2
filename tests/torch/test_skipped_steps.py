"""Ranks die while all agree to skip a step: those that are left skip it alike."""

import pytest
import torch

from ring_plugins.core.base.errors import RingError, StepSkipped
from ring_plugins.torch.skipped_steps import Failure, SkippableStep, SkippedSteps
from tests.core.collectives.mortal_ranks import on_mortal_ranks


@pytest.mark.parametrize("how", ["before", "in"])
@pytest.mark.parametrize(
    ("victim", "reason"),
    [(0, "rank 1: OutOfMemoryError: 4 GiB"), (1, "the rank that could not has died")],
)
def test_survivors_skip_a_step_together_when_a_rank_dies_as_they_agree(monkeypatch, victim, reason, how):
    number, died = 0, True
    while died:
        number += 1

        def run(rank, number=number):
            steps = SkippedSteps(rank.communicator("gradients"))
            steps.step, parameter = SkippableStep(), torch.nn.Parameter(torch.zeros(1))
            parameter.grad = torch.ones(1)
            first = rank.barriers
            if rank.rank == victim:
                rank.dies = lambda at: how if at - first == number else None
            failure = Failure("OutOfMemoryError: 4 GiB", wants_to_skip=True) if rank.rank == 1 else None
            with pytest.raises(StepSkipped):
                steps.decide(1 / 3, failure, [parameter])
            return steps.count, steps.step.reason, parameter.grad

        results = on_mortal_ranks(monkeypatch, 3, run)
        died = results[victim] is None
        survivors = [result for rank, result in enumerate(results) if rank != victim]
        assert survivors[0] == survivors[1]
        assert survivors[0] in {(1, "rank 1: OutOfMemoryError: 4 GiB", None), (1, reason, None)}
    assert number > 2  # the last run is one in which it lives


def test_survivors_give_up_together_when_a_rank_dies_as_they_agree(monkeypatch):
    def run(rank):
        steps = SkippedSteps(rank.communicator("gradients"))
        if rank.rank == 0:
            rank.dies = lambda _: "before"
        failure = Failure("a backward raised", wants_to_skip=False) if rank.rank == 1 else None
        with pytest.raises(RingError, match="a backward raised an exception on rank 1, which the script caught"):
            steps.decide(1 / 3, failure, [])
        return True

    assert on_mortal_ranks(monkeypatch, 3, run) == [None, True, True]
