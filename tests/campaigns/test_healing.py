"""The short form of the healing campaign, and the drawing and judging of its runs."""

import subprocess
import sys

import pytest
import torch

from tests.campaigns.healing import (
    AT_EPOCH_END,
    COUNTS,
    FACES,
    POINTS,
    STEPS,
    Fault,
    Plan,
    checksums,
    draw,
    judge,
    replayed,
)
from tests.forked_ranks import Ended


@pytest.mark.parametrize(
    ("runs", "options"),
    [
        (4, []),
        (4, ["--hosts"]),
        pytest.param(80, [], marks=pytest.mark.slow),
        pytest.param(80, ["--hosts"], marks=pytest.mark.slow),
        pytest.param(30, ["--hosts", "--faces", "lightning", "keras"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_deaths_leave_the_others_whole(runs, options):
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.healing",
        "--runs",
        str(runs),
        "--seed",
        "5",
        *options,
    ]  # they fork
    result = subprocess.run(command, capture_output=True, text=True, timeout=60 * runs, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{runs} jobs, " in result.stdout


def test_a_run_is_drawn_from_its_seed_and_number_alone():
    plans = [draw(1, number) for number in range(300)]
    assert plans == [draw(1, number) for number in range(300)]
    assert {fault.point for plan in plans for fault in plan.faults} == set(POINTS)
    assert {len(plan.faults) for plan in plans} == {1, 2, 3, 4, 5} and {plan.ranks for plan in plans} == {2, 3, 4, 5, 6}
    assert all(len({fault.rank for fault in plan.faults}) == len(plan.faults) < plan.ranks for plan in plans)


def test_between_hosts_ranks_also_leave_and_gradients_are_rounded():
    plans = [draw(1, number, True, FACES) for number in range(300)]
    assert {plan.face for plan in plans} == set(FACES) and {plan.compression for plan in plans} == {"", "bf16", "fp16"}
    points = {fault.point for plan in plans for fault in plan.faults if plan.face != "torch"}
    assert points == {"forward", "reduction", "update", "healing", *AT_EPOCH_END.values(), "SIGTERM"}
    assert all(sum(map(int, plan.nodes.split(","))) == plan.ranks for plan in plans)


PLAN = Plan(1, 1, 3, (Fault(1, 3, "forward", 1, "in"),), False, (6, 0), 0.3)


def job(weights=None, averaged=None, told=(1,)):
    """A job of which rank 1 died in step 3."""
    history = []
    for step in range(STEPS):
        ranks = [0, 1, 2] if step < 3 else [0, 2]
        value = {0: 60.0 * sum(ranks) / len(ranks), 2: None, 4: "from "}.get(step % 5, ranks)
        history.append([None if step == 6 else ranks, ranks, value])
    if averaged:
        history[averaged[0]][0] = averaged[1]
    found = {"history": history, "weights": weights or replayed(history), "left": [0, 2], "told": list(told)}
    return Ended({0: 0, 1: -9, 2: 0}, {0: found, 2: found}, "", 1.0)


def test_a_job_that_went_on_is_compared_with_the_replay_of_its_log():
    assert judge(PLAN, job()) == ("went on", "")
    other = checksums([torch.zeros(count) for count in COUNTS])
    assert judge(PLAN, job(weights=other)) == ("wrong", "the weights are not those of the replay")
    assert judge(PLAN, job(averaged=(6, [0, 2])))[1] == "step 6: not skipped"
    assert judge(PLAN, job(averaged=(5, [0, 1, 2])))[1] == "step 5: a lost rank came back"
    assert judge(PLAN, job(told=(2,)))[1] == "told of the loss of [2]"


def test_a_hang_an_unplanned_end_and_what_stays_behind_are_bad():
    assert judge(PLAN, Ended({0: None, 1: -9, 2: 0}, {}, "", 1.0))[0] == "hang"
    assert judge(PLAN, Ended({0: 1, 1: -9, 2: 1}, {}, "rank 1 died", 1.0)) == (
        "wrong",
        "ended with {0: 1, 1: -9, 2: 1}",
    )
    assert judge(PLAN, Ended({0: 0, 1: -9, 2: 0}, {}, "", 1.0, ["process 7"])) == ("left", "process 7")
    root_died = "no broadcast from 1\n" * 2
    assert judge(PLAN, Ended({0: 1, 1: -9, 2: 1}, {}, root_died + "rank 1 died", 1.0)) == ("ended", "")
    assert judge(PLAN, Ended({0: 1, 1: -9, 2: 1}, {}, root_died + "a rank died", 1.0))[0] == "wrong"
