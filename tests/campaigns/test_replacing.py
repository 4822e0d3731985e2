"""The short form of the campaign of replaced ranks, and the drawing and judging of its runs."""

import subprocess
import sys

import pytest

from tests.campaigns.healing import replayed
from tests.campaigns.replacing import NEW_POINTS, STEP_POINTS, STEPS, Fault, Plan, draw, judge


@pytest.mark.slow
def test_random_deaths_of_ranks_and_of_those_that_take_their_places_leave_all_whole():
    command = [sys.executable, "-m", "tests.campaigns.replacing", "--runs", "25", "--seed", "7"]  # they fork
    result = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "25 jobs, " in result.stdout


def test_a_run_is_drawn_from_its_seed_and_number_alone_and_somebody_stays():
    plans = [draw(1, number) for number in range(300)]
    assert plans == [draw(1, number) for number in range(300)]
    assert {fault.point for plan in plans for fault in plan.faults} == {*STEP_POINTS, *NEW_POINTS}
    assert {plan.spares for plan in plans} == {0, 1, 2} and {plan.ranks for plan in plans} == {2, 3, 4}
    assert all(0 < sum(fault.process < plan.ranks for fault in plan.faults) < plan.ranks for plan in plans)


def test_a_job_is_whole_if_all_agree_with_a_replay():
    plan = Plan(1, 1, 2, 0, (Fault(1, 2, "forward", 1, "in"),))
    history = [[0, 1]] * 2 + [[0]] * 2 + [[0, 1]] * (STEPS - 4)
    weights = replayed([[averaged] for averaged in history], STEPS)
    found = [{"seat": seat, "history": history, "weights": weights, "members": [0, 1]} for seat in range(2)]
    assert judge(plan, [0, 0], found, []) == ("whole", "")
    assert judge(plan, [0, None], found, [])[0] == "hang"
    assert judge(plan, [0, 0], found, [7]) == ("left", "processes [7]")
    assert judge(plan, [0, 1], found, [])[0] == "wrong"
    other = {**found[1], "weights": ["", "", ""]}
    assert judge(plan, [0, 0], [found[0], other], []) == ("wrong", "the weights are not those of the replay")
    assert judge(plan, [0, 0], found[:1], [])[1] == "members [0, 1]"
