"""The command by which `ring_plugins.run(hosts=...)` starts ranks; nothing is started here."""

from types import SimpleNamespace

from ring_plugins.launcher import remote_ranks
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.remote_ranks import RemoteRanks


def test_values_of_variables_travel_in_the_environment_and_not_on_the_command_line(monkeypatch):
    started = {}

    def start(command, env, **_):
        started.update(command=command, env=env)
        return SimpleNamespace(wait=lambda _: 0)

    monkeypatch.setattr(remote_ranks.subprocess, "Popen", start)
    with RemoteRanks(2, "localhost:2", None, {"HF_TOKEN": "secret"}, False, Relay(False)):
        pass
    command = started["command"]
    assert command[command.index("HF_TOKEN") - 1] == "-x"
    assert started["env"]["HF_TOKEN"] == "secret"
    key = started["env"]["RING_DRIVER"].split()[-1]
    assert not any("secret" in word or key in word for word in command)
