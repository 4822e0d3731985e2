"""`ring top` shows what a job sends, and says which jobs there are."""

import json
import os
import threading
import time

import pytest
from typer.testing import CliRunner

from ring_plugins.cli.main import app
from ring_plugins.core.net import local_service
from ring_plugins.core.net.local_service import LocalService

RANK = {
    "host": "a", "pid": 1, "answers": True, "steps": 1200, "step_seconds": 0.025, "waiting": 0.25, "moving": 0.05,
    "step_bytes": 4_000_000, "compression": "int8", "memory_bytes": 300_000_000, "waits_in": None, "waits_for": [],
    "waits_seconds": 0.0,
}  # fmt: skip
JOB = {
    "time": "", "command": "train.py \x1b[2J\udcff", "pid": 4711, "seconds": 3723.0, "ranks": 3,
    "ranks_at_start": 4, "changes": 1, "lost": [2],
    "rows": [
        {"rank": 0, **RANK},
        {"rank": 1, **RANK, "host": "b", "waits_for": [0], "waits_in": "all_reduce", "waits_seconds": 12.0},
        {"rank": 2, "host": "b", "pid": 3, "answers": False},
    ],
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "160"})


@pytest.fixture
def job():
    """A job whose rank 0 is this process."""
    service, over = LocalService("top", 0), threading.Event()

    def serve():
        while not over.is_set():
            list(service.poll())
            for number in service:
                service.send(number, json.dumps(JOB))
            time.sleep(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    over.set()
    thread.join()
    service.close()


def test_the_job_is_one_screen_or_a_line_of_json(job, monkeypatch):
    monkeypatch.setattr(local_service, "processes", lambda service: {os.getpid(): []})  # others' jobs may run here
    lines = run("--once", "--job", str(os.getpid())).output.splitlines()
    assert (
        "train.py \\x1b[2J\\udcff (process 4711): 3 of 4 ranks on 2 hosts, 1:02:03, step 1,200; 1 change of" in lines[0]
    )
    (first, second, third) = [line.split() for line in lines if line.strip()[:2] in ("0 ", "1 ", "2 ")]
    assert first == ["0", "a", "1,200", "25.0", "25%", "5%", "4.0", "int8", "300", "MB"]
    assert " ".join(second).endswith("waits for rank 0 in all_reduce, 12 s")
    assert " ".join(third) == "2 b has not answered yet"
    assert json.loads(run("--once", "--json").output) == JOB
    assert json.loads(run("--once", "--json", "--job", str(os.getppid())).output) == JOB  # which has started it


def test_what_names_no_job_or_several_is_told(job, monkeypatch):
    result = run("--job", "1000000")
    assert result.exit_code == 2
    assert "--job 1000000 is none of your jobs with rank 0 on this host:" in result.output and "python" in result.output
    monkeypatch.setattr(local_service, "processes", lambda service: {5: ["python", "a"], 6: ["python", "b"]})
    result = run()
    assert (
        result.exit_code == 2 and "choose one with --job and its process id:\n  5: python a\n  6: py" in result.output
    )
    monkeypatch.setattr(local_service, "processes", lambda service: {})
    assert "no job of yours has its rank 0 on this host" in run().output


def test_whoever_shows_nothing_says_so():
    service, over = LocalService("top", 0), threading.Event()

    def hang_up():
        while not over.is_set():
            list(service.poll())
            for number in service:
                service.hang_up(number)
            time.sleep(0.01)

    thread = threading.Thread(target=hang_up)
    thread.start()
    result = run("--once", "--job", str(os.getpid()))
    over.set()
    thread.join()
    service.close()
    assert result.exit_code == 2 and "the job has ended, or more than 8 watch it." in result.output


def test_a_stopped_job_is_told_from_one_that_has_ended(monkeypatch):
    service = LocalService("top", 0)  # which nobody polls
    monkeypatch.setattr("ring_plugins.cli.top._WAITS", 0.02)
    result = run("--job", str(os.getpid()))
    service.close()
    assert (
        result.exit_code == 2 and f"process {os.getpid()} does not answer; its rank 0 may be stopped" in result.output
    )
