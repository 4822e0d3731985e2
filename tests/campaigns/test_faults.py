"""The short form of the fault campaign, and the drawing and judging of its runs."""

import pytest

from tests.campaigns.faults import BETWEEN, CLUSTERS, KINDS, LOCAL, Campaign, Machine, draw, table


@pytest.fixture(scope="module")
def campaign():
    return Campaign(slack=2)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_a_random_fault(number, campaign, tmp_path, monkeypatch):
    monkeypatch.setenv("CAMPAIGN_DIRECTORY", str(tmp_path))
    plan = draw(2, number, Machine.this())
    line = campaign.run(plan)
    assert line["verdict"] == "ok", f"{plan}\n{line['text']}"


def test_a_run_is_drawn_from_its_seed_and_number_alone():
    plans = [draw(1, number, Machine()) for number in range(300)]
    assert plans == [draw(1, number, Machine()) for number in range(300)]
    assert {plan.fault for plan in plans} == set(KINDS)
    assert {plan.launcher for plan in plans} == {*LOCAL, *BETWEEN, *CLUSTERS}
    assert sum(plan.launcher in CLUSTERS for plan in plans) < 45  # their start takes long
    assert all(plan.launcher in BETWEEN for plan in plans if KINDS[plan.fault].between)
    bare = Machine(hosts=False, cgroups=False, clusters=())
    plans = [draw(1, number, bare) for number in range(300)]
    assert {plan.launcher for plan in plans} == set(LOCAL)
    assert {plan.fault for plan in plans} == {
        name for name, kind in KINDS.items() if not kind.between and not kind.cgroup
    }


def test_the_table_counts_verdicts():
    lines = [
        {"fault": "SIGKILL", "verdict": word, "seconds": seconds} for word, seconds in [("ok", 1.0), ("hang", None)]
    ]
    assert "| SIGKILL | 2 | 1 | 1 hang | 1.0 | 1.0 |" in table(lines)
