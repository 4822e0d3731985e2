"""The command that starts the supervisor of another host, what that gets, and how a host is compared."""

import json
import sys

from ring_plugins.launcher import probe
from ring_plugins.launcher.coordinator_link import HostJob
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.logins import Logins, command_for
from ring_plugins.launcher.mpirun import JobSpec
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.preflight import question_about
from ring_plugins.launcher.processes import Processes


def test_secrets_do_not_stand_on_command_lines(monkeypatch):
    monkeypatch.setenv("RING_SECRET", "hush")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = {"RING_SECRET": None, "PYTHONPATH": None}
    spec = JobSpec(("/bin/python3", "x.py"), 2, (Share("localhost", 1), Share("me@far", 1)), environment=environment)
    local, remote = (command_for(spec, part.host) for part in spec.shares)
    assert "hush" not in " ".join([*local, *remote]) and remote[0] == "ssh"
    assert "me@far" in remote and "PYTHONPATH=/somewhere PYTHONSAFEPATH=1 /bin/python3 -c " in remote[-1]
    assert all("ring_plugins.launcher.host" in command[-1] for command in (local, remote))


def test_a_login_gets_the_job_on_its_standard_input(tmp_path):
    login = tmp_path / "login"
    login.write_text(f"#!/bin/sh\ncat > {tmp_path}/job; exit 255\n")
    login.chmod(0o755)
    spec = JobSpec((sys.executable, "x.py"), 2, (Share("me@far", 2),), agent=str(login))
    job = HostJob([], 0, "", 0, 1, [], 2, ["x"])
    with Relay(False) as relay, Processes() as processes:
        logins = Logins(spec, job, processes, relay)
        assert logins.start(29, "key", "me@far", 1, [2, 3], is_added=False).wait() == 255
        found = HostJob.unpack((tmp_path / "job").read_bytes())
        assert (found.port, found.key, found.index, found.hosts, found.ranks) == (29, "key", 1, 2, [2, 3])
        assert not found.is_added and found.question is None
        logins.leave()


def test_a_host_that_is_added_later_is_compared_with_this_one():
    spec = JobSpec((sys.executable, __file__), 2)
    report = json.loads(json.dumps(probe.report(question_about(spec, None))))
    added = Logins(spec, None, None, None, report)
    assert added.problems("host3", report) == []
    other = {**report, "packages": {**report["packages"], "numpy": "1.0"}}
    assert "numpy 1.0, but" in added.problems("host3", other)[0]
    assert "copy of the script differs" in added.problems("host3", {**report, "program": "other"})[0]
    assert "another release of ring_plugins" in added.problems("host3", None)[0]
    # where `ring` may be installed apart from the Python of the ranks
    assert added.problems("localhost", {**report, "python": "2.7.18"}) == []
    assert Logins(spec, None, None, None).problems("host3", None) == []  # --no-check
