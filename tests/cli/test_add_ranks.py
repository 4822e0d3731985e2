"""`ring add-ranks` says what the job answers, and exits with 2 if nothing can be asked."""

import pytest
from typer.testing import CliRunner

from ring_plugins import LaunchError
from ring_plugins.cli.main import app
from ring_plugins.launcher import growth


@pytest.fixture(autouse=True)
def no_job_runs(monkeypatch):
    """A job that the same user runs beside the tests would be named in what the command prints."""
    monkeypatch.setattr(growth, "running_jobs", dict)


def run(*arguments):
    result = CliRunner().invoke(app, ["add-ranks", *arguments])
    return result.exit_code, result.output


def test_what_is_asked_and_answered(monkeypatch):
    asked = []

    def answer(*what):
        asked.append(what)
        return "ranks 2, 3 will join where an epoch begins."

    monkeypatch.setattr(growth, "request_ranks", answer)
    assert run("2") == (0, "ring add-ranks: ranks 2, 3 will join where an epoch begins.\n")
    assert run("1", "--job", "4711", "--host", "node7")[0] == 0
    assert asked == [(2, None, None), (1, 4711, "node7")]


def test_the_only_job_is_named_before_it_gets_ranks(monkeypatch):
    monkeypatch.setattr(growth, "running_jobs", lambda: {4711: "ring run -n 2 python train.py"})
    monkeypatch.setattr(growth, "request_ranks", lambda *what: f"asked {what}.")
    expected = "ring add-ranks: add 1 rank to process 4711: ring run -n 2 python train.py\n"
    assert run("1") == (0, f"{expected}ring add-ranks: asked (1, 4711, None).\n")
    monkeypatch.setattr(growth, "running_jobs", lambda: {4711: "ring run a", 4712: "ring run b"})
    assert run("1") == (0, "ring add-ranks: asked (1, None, None).\n")  # which says that there are several


def unboxed(output):
    """Text as one line, without the box that typer draws around it."""
    return " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [["two"], ["2", "--job", "mine"]])
def test_what_is_no_number_is_shown(arguments):
    code, output = run(*arguments)
    assert code == 2 and f"'{arguments[-1]}' is not a whole number. Give one, such as 2." in unboxed(output)


def test_a_rejection_is_printed_and_is_status_2(monkeypatch):
    def reject(*_):
        raise LaunchError("the job may not grow.")

    monkeypatch.setattr(growth, "request_ranks", reject)
    assert run("2") == (2, "ring add-ranks: the job may not grow.\n")
