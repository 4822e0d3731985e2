"""The command by which `ring_plugins.run(hosts=...)` starts ranks; nothing is started here."""

import gc
import os
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.launcher import remote_ranks
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.remote_ranks import RemoteRanks

END = FailurePolicy(False, 0)


def test_values_of_variables_travel_in_the_environment_and_not_on_the_command_line(monkeypatch):
    started = {}

    def start(command, env, **_):
        started.update(command=command, env=env)
        return SimpleNamespace(wait=lambda _: 0)

    monkeypatch.setattr(remote_ranks.subprocess, "Popen", start)
    with RemoteRanks(2, "localhost:2", END, None, {"HF_TOKEN": "secret"}, False, Relay(False)):
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

    monkeypatch.setattr(remote_ranks.subprocess, "Popen", fail)
    gc.collect()  # what earlier tests left
    gc.disable()
    try:
        before = files()
        with pytest.raises(OSError, match="Exec format"):
            RemoteRanks(2, "localhost:2", END, None, {}, False, Relay(False))
        with pytest.raises(ArgumentError):
            RemoteRanks(2, "local host", END, None, {}, False, Relay(False))
        assert files() <= before
    finally:
        gc.enable()


def test_ring_run_ends_although_the_wait_for_it_is_interrupted(monkeypatch):
    ended = []

    def wait(_):
        raise KeyboardInterrupt

    process = SimpleNamespace(wait=wait, kill=lambda: ended.append("kill"))
    monkeypatch.setattr(remote_ranks.subprocess, "Popen", lambda *_, **__: process)
    with pytest.raises(KeyboardInterrupt), RemoteRanks(2, "localhost:2", END, None, {}, False, Relay(False)):
        pass
    assert ended == ["kill"]
