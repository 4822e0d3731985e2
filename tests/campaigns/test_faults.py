"""The short form of the fault campaign, and the drawing and judging of its runs."""

import pytest

from tests.campaigns.faults import BETWEEN, KINDS, Campaign, draw, table
from tests.hosts import why_not


@pytest.fixture(scope="module")
def campaign():
    return Campaign(slack=2)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 12))])
def test_a_random_fault(number, campaign, tmp_path, monkeypatch):
    monkeypatch.setenv("CAMPAIGN_DIRECTORY", str(tmp_path))
    plan = draw(2, number, not why_not())
    line = campaign.run(plan)
    assert line["verdict"] == "ok", f"{plan}\n{line['text']}"


def test_a_run_is_drawn_from_its_seed_and_number_alone():
    plans = [draw(1, number, True) for number in range(300)]
    assert plans == [draw(1, number, True) for number in range(300)]
    assert {plan.fault for plan in plans} == set(KINDS)
    assert all(plan.launcher in BETWEEN for plan in plans if KINDS[plan.fault].between)


def test_the_table_counts_verdicts():
    lines = [
        {"fault": "SIGKILL", "verdict": word, "seconds": seconds} for word, seconds in [("ok", 1.0), ("hang", None)]
    ]
    assert "| SIGKILL | 2 | 1 | 1 hang | 1.0 | 1.0 |" in table(lines)
