"""Ranks are killed in the middle of a training: the others end with the weights that a replay of the losses gives."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import run_ranks
from tests.torch.checks_recovery import STEPS, gradient

CHECKS = Path(__file__).with_name("checks_recovery.py")


def train(deaths, ranks=4, min_ranks=1, env=None, **options):
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_MIN": str(min_ranks), **(env or {})}
    return run_ranks(CHECKS, ranks, env=env, timeout=120, **options)


def replayed(averaged_over):
    """The weight of every parameter after one process has taken the same averages."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    for step, ranks in enumerate(averaged_over):
        weight.grad = torch.full((1,), sum(gradient(step, rank) for rank in ranks) / len(ranks))
        optimizer.step()
    return weight.tolist()


def check_survivors(result, deaths, ranks=4):
    left = [rank for rank in range(ranks) if rank not in deaths]
    found = [result.reports[rank]["found"] for rank in left]
    assert all(one == found[0] for one in found), str(result)
    assert found[0]["left"] == left
    leaving = [{rank for rank, death in deaths.items() if death == [step, "SIGTERM"]} for step in range(STEPS)]
    averaged_over = [step[0] for step in found[0]["history"]]
    assert found[0]["weights"] == [replayed(averaged_over)] * 3
    for step, (in_backward, after_step, mean) in enumerate(found[0]["history"]):
        assert set(after_step) <= set(in_backward) and mean == 12 * sum(after_step) / len(after_step)
        alive = {rank for rank in range(ranks) if rank not in deaths or deaths[rank][0] >= step}
        assert leaving[step] <= set(in_backward) <= alive and leaving[step].isdisjoint(after_step)
    assert len(averaged_over) == STEPS
    changes = found[0]["changes"]
    assert sorted(lost for _, losses, _, _ in changes for lost in losses) == sorted(deaths)
    assert [before - size for _, _, before, size in changes] == [len(losses) for _, losses, _, _ in changes]
    assert all(
        step == deaths[lost][0] or (step == deaths[lost][0] + 1 and deaths[lost][1] != "SIGTERM")
        for step, losses, _, _ in changes
        for lost in losses
    )
    for rank in deaths:
        assert f"rank {rank} (process " in result.output


#: Averages while backward runs, and rounds between hosts.
OVERLAPPED = {"TEST_OPTIONS": json.dumps({"overlap": True, "compression": "bf16", "error_feedback": True})}


def test_two_ranks_are_killed_first_rank_0_and_one_leaves_and_the_last_one_trains_on():
    """The default suite's one job with real processes and signals; the points of a step are tried in threads."""
    deaths = {0: [2, "barrier 2 in"], 2: [5, "in step"], 3: [6, "SIGTERM"]}
    result = train(deaths, env=OVERLAPPED)
    check_survivors(result, deaths)
    assert "the job goes on with 3 of its 4 ranks" in result.output
    assert "rank 1 is now 0, 3 is now 1" in result.output
    assert re.search(r"rank 3 \(process \d+\) left on SIGTERM; the job goes on with 1 of its 4 ranks", result.output)
    assert "ring run: rank 3 left, ranks 0, 2 died, and the other 1 ended normally." in result.output


BETWEEN_BROADCASTS = """
import torch
import ring_plugins as ring
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.torch import broadcast_optimizer_state, broadcast_parameters
from ring_plugins.torch.training_state import share_state
from tests.mortal import die
from tests.worker import report

ring.init(on_failure="continue")
me = ring.rank()
broadcast, calls = HostCommunicator.broadcast, 0

def counted(self, *args):
    global calls
    calls += self._recovery.is_outside(self._executor)
    if (me, calls) in ((0, 2), (1, 7)):
        die()
    broadcast(self, *args)

HostCommunicator.broadcast = counted
own = {name: torch.full((3,), me + 1.0) for name in "abcd"}
received = share_state(lambda: own, [0, 4])  # rank 1 gives, and rank 0 dies behind the first tensor
assert ring.size() == 4, ring.size()
shared = {name: tensor.tolist() for name, tensor in (own if received is None else received).items()}
own = {name: torch.full((3,), me + 1.0) for name in "abcd"}
broadcast_parameters(own, root=2)  # which is the third of 1, 2, 3, 4, and 1 dies behind its second tensor
assert ring.size() == 3, ring.size()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=float(ring.rank()), momentum=0.5)
broadcast_optimizer_state(optimizer, root=1)
report("found", [shared, {name: tensor.tolist() for name, tensor in own.items()}, optimizer.param_groups[0]["lr"]], me)
"""


@pytest.mark.slow
def test_all_tensors_are_of_the_same_rank_if_a_lower_one_dies_between_two_of_them():
    result = run_ranks(BETWEEN_BROADCASTS, 5, "ring run", env={"RING_ON_FAILURE": "continue"}, timeout=60)
    for rank, given in {2: 3.0, 3: 4.0, 4: 2.0}.items():  # rank 4 has rank 1's, the others keep theirs
        shared, broadcast, rate = result.reports[rank]["found"]
        assert shared == {name: [given] * 3 for name in "abcd"}
        assert broadcast == {name: [4.0] * 3 for name in "abcd"} and rate == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: [3, "SIGTERM"]},
        {1: [2, "SIGTERM"], 3: [2, "SIGTERM"]},
        {0: [2, "SIGTERM"], 1: [2, "barrier 2 in"], 2: [2, "barrier 4 before"]},
        {1: [2, "SIGTERM"], 0: [2, "barrier 5 in"]},
        {1: [2, "SIGTERM"], 0: [2, "barrier 6 before"]},
        {3: [2, "SIGTERM"], 0: [2, "in step"], 2: [3, "SIGTERM"]},
    ],
)
def test_ranks_may_leave_while_others_leave_or_die(deaths):
    result = train(deaths)
    check_survivors(result, deaths)
    assert "left on SIGTERM" in result.output


@pytest.mark.slow
def test_the_job_ends_as_if_told_to_if_too_few_would_be_left():
    result = train({1: [2, "SIGTERM"], 3: [2, "SIGTERM"]}, min_ranks=3, check=False)
    assert result.returncode == 128 + signal.SIGTERM
    assert not any("found" in report for report in result.reports.values())
    assert "All ranks end after this step, since training cannot go on with 2 ranks: min_ranks=3." in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("point", ["in forward", "in backward", "in step", *(f"barrier {n} in" for n in range(1, 8))])
@pytest.mark.parametrize("env", [{}, OVERLAPPED], ids=["auto", "overlapped"])
def test_a_rank_may_be_killed_anywhere_in_a_step(victim, point, env):
    deaths = {victim: [3, point]}
    check_survivors(train(deaths, env=env), deaths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: [3, "in forward"], 1: [3, "in forward"]},
        {0: [1, "in backward"], 1: [2, "barrier 3 in"], 2: [3, "barrier 1 before"]},
        {1: [3, "barrier 2 before"], 0: [3, "barrier 3 before"]},
        {3: [0, "in step"], 0: [7, "in step"]},
    ],
)
def test_several_may_be_killed_at_once_or_in_a_row(deaths):
    check_survivors(train(deaths), deaths)


@pytest.mark.slow
def test_the_job_ends_when_fewer_than_min_ranks_are_left():
    result = train({1: [2, "in forward"], 0: [4, "in forward"]}, min_ranks=3, check=False)
    assert result.returncode == 1 and not any("found" in report for report in result.reports.values())
    assert "the job goes on with 3 of its 4 ranks" in result.output
    assert "rank 0 (process " in result.output
    assert "Training cannot go on with 2 ranks: min_ranks=3." in result.output


@pytest.mark.slow
def test_an_exception_ends_the_job_all_the_same():
    result = train({1: [2, "exception"]}, check=False)
    assert result.returncode == 1 and not any("found" in report for report in result.reports.values())
    assert "rank 1 failed: ValueError: a bad sample" in result.output


@pytest.mark.slow
def test_an_exception_in_what_hears_of_a_loss_ends_the_job():
    result = train({1: [2, "in forward"]}, check=False, env={"TEST_CALLBACK_RAISES": "3"})
    assert result.returncode == 1 and not any("found" in report for report in result.reports.values())
    assert "rank 3 was interrupted in a function given to on_membership_change by ZeroDivisionError" in result.output
    assert "rank 3 failed:\nTraceback" in result.output  # the number with which it started, as in all errors


@pytest.mark.slow
def test_ring_run_starts_such_a_job_too():
    """As docs/fault_tolerance.md starts train.py."""
    command = [sys.executable, "-m", "ring_plugins", "run", "-n", "3", "--on-failure", "continue", "--min-ranks", "2"]
    script = f"""
        import os, runpy, sys
        if "RING_SPAWNED" in os.environ:
            sys.argv = ["checks"]
            runpy.run_path({str(CHECKS)!r}, run_name="__main__")
        else:
            os.execv(sys.executable, {[*command, "--", sys.executable]!r} + sys.argv)
    """
    deaths = {2: [4, "in forward"]}
    result = run_ranks(
        script, 3, env={"TEST_DEATHS": json.dumps(deaths), "TEST_MIN": "2", "PYTHONPATH": os.getcwd()}, timeout=120
    )
    check_survivors(result, deaths, 3)


@pytest.mark.slow
def test_what_does_not_survive_a_loss_is_rejected_with_a_remedy():
    """One job of one launch, in which each rejection is caught: all ranks reject alike."""
    result = run_ranks(
        """
        import os, torch
        import ring_plugins as ring
        from ring_plugins.core import world
        from ring_plugins.torch import DistributedOptimizer
        from tests.worker import report

        ring.init(ranks=2, on_failure="continue")

        def rejected(call):
            try:
                call()
            except ring.ArgumentError as error:
                return str(error)

        def optimizer(**options):
            model = torch.nn.Linear(2, 2)
            named = list(model.named_parameters())
            return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, **options)

        def backend():  # rank 0, which has the store, is rejected before the other has connected to it
            import torch.distributed as dist
            dist.init_process_group("ring")

        from ring_plugins.torch import differentiable, GradientAverager
        report("found", {
            "autotune": rejected(lambda: optimizer(autotune=True)),
            "shard": rejected(lambda: optimizer(shard=True)),
            "sparse": rejected(lambda: GradientAverager(torch.nn.Embedding(4, 2, sparse=True))),
            "backend": rejected(backend),
            "backend of the CPU": rejected(lambda: torch.distributed.init_process_group("cpu:ring")),
            "gradients": rejected(lambda: differentiable.all_reduce(torch.zeros(2, requires_grad=True))),
            "group": rejected(lambda: world.current().new_communicator("one", [ring.rank()], lambda item: [item])),
        })
        optimizer().step()
        """,
        2,
        timeout=120,
    )
    for rank in (0, 1):
        found = result.reports[rank]["found"]
        assert [name for name, text in found.items() if not text or "RING_ON_FAILURE" not in text] == []
        assert found["shard"].startswith("a sharded optimizer, whose state is lost with a rank, does not support")
