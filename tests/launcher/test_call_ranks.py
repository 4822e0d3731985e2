"""How `ring_plugins.run` starts ranks, on this host and by `ring run`; the latter is not started here."""

import gc
import os
import sys
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.launcher import call_ranks
from ring_plugins.launcher.call_ranks import LocalRanks, RemoteRanks
from ring_plugins.launcher.calls import Driver
from ring_plugins.launcher.output import Relay


def remote(driver, hosts="localhost:2", variables=None):
    return RemoteRanks(driver, 2, hosts, FailurePolicy(False, 0), None, variables or {}, False, Relay(False))


def test_values_of_variables_travel_in_the_environment_and_not_on_the_command_line(monkeypatch):
    started = {}

    def start(command, env, **_):
        started.update(command=command, env=env)
        return SimpleNamespace(wait=lambda _: 0)

    monkeypatch.setattr(call_ranks.subprocess, "Popen", start)
    with Driver() as driver, remote(driver, variables={"HF_TOKEN": "secret"}):
        pass
    command = started["command"]
    assert command[command.index("HF_TOKEN") - 1] == "-x"
    assert started["env"]["HF_TOKEN"] == "secret"
    key = started["env"]["RING_DRIVER"].split()[-1]
    assert not any("secret" in word or key in word for word in command)


def test_nothing_listens_any_more_if_the_ranks_cannot_be_started(monkeypatch):
    def fail(*_, **__):
        raise OSError(8, "Exec format error")

    def files():
        return len(os.listdir("/proc/self/fd"))

    monkeypatch.setattr(call_ranks.subprocess, "Popen", fail)
    gc.collect()  # what earlier tests left
    gc.disable()
    try:
        before = files()
        with pytest.raises(OSError, match="Exec format"), Driver() as driver:
            remote(driver)
        with pytest.raises(ArgumentError), Driver() as driver:
            remote(driver, "local host")
        assert files() <= before
    finally:
        gc.enable()


def test_ring_run_ends_although_the_wait_for_it_is_interrupted(monkeypatch):
    ended = []

    def wait(_):
        raise KeyboardInterrupt

    process = SimpleNamespace(wait=wait, kill=lambda: ended.append("kill"))
    monkeypatch.setattr(call_ranks.subprocess, "Popen", lambda *_, **__: process)
    with pytest.raises(KeyboardInterrupt), Driver() as driver, remote(driver):
        pass
    assert ended == ["kill"]


#: Keeps the connection of the process open that it is forked from.
_FORK = "os.fork() or time.sleep(600);"


@pytest.mark.parametrize(
    ("code", "summary", "is_loss"),
    [("exit(3)", "exit status 3", False), ("end", "SIGKILL", True), ("fork and end", "SIGKILL", True)],
)
def test_the_end_of_a_process_of_this_host_that_reports_nothing_is_told(monkeypatch, code, summary, is_loss):
    if code != "exit(3)":
        code = f"import os, time; {_FORK if 'fork' in code else ''} os.kill(os.getpid(), 9)"
    monkeypatch.setattr(call_ranks, "own_python", lambda _: [sys.executable, "-c", code])
    with (
        Driver(listens=False) as driver,
        Relay(False) as relay,
        LocalRanks(driver, 1, dict(os.environ), relay) as ranks,
    ):
        (outcome,) = driver.outcomes(b"", 1, ranks.trouble, 60)
    assert summary in outcome.failure.summary and outcome.failure.is_loss == is_loss
