"""`ring run` hands its options to a plan, checks hosts, says what it does, and exits with the job's status."""

import pytest
import typer
from typer.testing import CliRunner

from ring_plugins import LaunchError
from ring_plugins.cli.main import app
from ring_plugins.cli.run import whole_number
from ring_plugins.launcher import job, preflight


@pytest.fixture
def plans(monkeypatch):
    """The plans that were run, each to status 3."""
    found = []
    monkeypatch.setattr(job, "run", lambda plan, notify: found.append(plan) or 3)
    return found


def run(*arguments):
    return CliRunner().invoke(app, ["run", *arguments])


def test_the_options_become_a_plan_whose_hosts_are_checked(plans, monkeypatch):
    monkeypatch.setattr(preflight, "check_hosts", lambda *_: ({"name": "here"}, {"far1": 1, "far2": 8}))
    result = run("-n", "4", "-H", "far1:2,far2:2", "--on-failure", "replace", "--max-ranks", "6", "-x", "A=b", "true")
    (plan,) = plans
    assert result.exit_code == 3 and plan.own_report == {"name": "here"}
    assert (plan.job.ranks, plan.hosts, plan.replaces, plan.max_ranks) == (4, ("far1", "far2"), True, 6)
    assert plan.job.environment["A"] == "b" and plan.job.environment["RING_MAX_RANKS"] == "6"
    assert "2 ranks share 1 cores of far1" in result.stderr and "# ranks: 2 on far1, 2 on far2" in result.stderr


def test_nothing_is_checked_or_run_where_it_is_not_wanted(plans, monkeypatch):
    monkeypatch.setattr(preflight, "check_hosts", lambda *_: pytest.fail("asked"))
    hosts = ("-n", "2", "-H", "far1,far2", "--on-failure", "continue")
    assert run(*hosts, "--no-check", "true").exit_code == 3 and plans.pop().own_report is None
    result = run(*hosts, "--dry-run", "true")
    assert result.exit_code == 0 and not plans and "true  # ranks: 1 on far1, 1 on far2" in result.stdout


def test_an_error_is_one_line_and_status_2(plans, monkeypatch):
    def reject(*_):
        raise LaunchError("far1 does not answer.")

    monkeypatch.setattr(preflight, "check_hosts", reject)
    result = run("-n", "1", "-H", "far1", "--on-failure", "continue", "true")
    assert (result.exit_code, result.stderr, plans) == (2, "ring run: far1 does not answer.\n", [])


def test_whole_numbers_show_what_was_given():
    assert whole_number("2") == whole_number(2) == 2
    with pytest.raises(typer.BadParameter, match="'two' is not a whole number. Give one, such as 2"):
        whole_number("two")
