"""What the pre-flight check says about hosts that do not answer or differ; the hosts are this one."""

import contextlib
import socket
import sys

import pytest

from ring_plugins.launcher import preflight
from ring_plugins.launcher.mpirun import JobSpec, Mpirun
from ring_plugins.launcher.preflight import differences, explain
from tests.launch import REPOSITORY

OWN = {
    "name": "host1", "python": "3.11.7", "cores": 8, "ring_plugins": "0.1.0", "trouble": "",
    "packages": {"torch": "2.13.0", "nvidia-nccl-cu12": "2.32.3"}, "missing": [], "program": "abc", "reaches": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"python": "3.11.2"}, []),
        ({"packages": {**OWN["packages"], "jax": "0.4"}}, []),  # what is not here is not used
        ({"python": "3.10.1"}, ["Python 3.10.1, but 3.11.7 on host1"]),
        ({"ring_plugins": "0.0.9"}, ["ring_plugins 0.0.9, but 0.1.0 on host1: install it there from what it was"]),
        (
            {"ring_plugins": None, "trouble": "ModuleNotFoundError: no"},
            ["cannot be imported (ModuleNotFoundError: no)"],
        ),
        (
            {"packages": {"torch": "2.5.0"}},
            ["torch 2.5.0, but 2.13.0 on host1: pip install torch==2.13.0 there", "nvidia-nccl-cu12 is missing"],
        ),
        ({"missing": ["/data/train.py"], "program": None}, ["has no /data/train.py"]),
        ({"program": "abd"}, ["copy of the script differs"]),
        ({"reaches": False}, ["is a firewall between them?"]),
    ],
)
def test_differences_that_matter_come_with_a_remedy(change, expected):
    found = differences(OWN, {**OWN, "name": "host2", **change})
    assert len(found) == len(expected)
    for text, part in zip(found, expected, strict=True):
        assert part in text


def test_a_host_without_an_answer_differs_by_its_reason():
    assert differences(OWN, "no answer") == ["no answer"]


@pytest.mark.parametrize(
    ("status", "stderr", "part"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known\n", "add it to /etc/hosts"),
        (
            255,
            "banner\nme@b: Permission denied (publickey).\n",
            "Permission denied (publickey). (login must work without",
        ),
        (255, "Host key verification failed.\n", "accept its key once: ssh b"),
        (255, "ssh: connect to host b port 22: Connection refused\n", "is sshd running"),
        (255, "ssh: connect to host b port 22: Connection timed out\n", "a firewall"),
        (127, "sh: 1: /venv/bin/python: not found\n", "/venv/bin/python must exist there"),
        (3, "", "exit status 3 without a message"),
    ],
)
def test_errors_of_ssh_are_explained(status, stderr, part):
    assert part in explain("b", "/venv/bin/python", status, stderr)


def test_hosts_reach_a_crowded_launcher_and_the_secret_is_on_no_command_line(tmp_path, monkeypatch):
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nexec sh -c "$2"\n')
    agent.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(preflight, "address_towards", lambda name: "127.0.0.1")
    job = JobSpec((sys.executable, "train.py"), 2, agent=str(agent), environment={"PYTHONPATH": None})
    mpirun = Mpirun(sys.executable, "Open MPI", "5.0")
    with preflight._listening(1) as (port, secret), contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        report = preflight._ask("there", job, mpirun, port, secret)
        assert report["reaches"] and report["ring_plugins"]
        assert secret not in (tmp_path / "said").read_text()
        assert not preflight._ask("there", job, mpirun, port, "another")["reaches"]


@pytest.mark.parametrize("host", [None, "host2"])
def test_a_host_that_does_not_answer_in_time_is_named_with_what_waits_longer(monkeypatch, host):
    asked = []

    def run(command, timeout, **_):
        asked.append(timeout)
        raise preflight.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(preflight.subprocess, "run", run)
    job = JobSpec(("python", "train.py"), 2)
    text = preflight._ask(host, job, None, None, "")
    looks = "`python -c pass`" if host is None else "`ssh -o BatchMode=yes -o ConnectTimeout=8 host2 true`"
    assert text.startswith("no answer within 18 s: ") and f"does {looks} return at once" in text
    assert text.endswith("RING_START_TIMEOUT=72 waits longer, and --no-check asks nobody.")
    monkeypatch.setenv("RING_START_TIMEOUT", "72")
    assert preflight._ask(host, job, None, None, "").startswith("no answer within 72 s: ") and asked == [18, 72]


def test_what_a_host_says_is_shown_as_what_it_is():
    evil = "x\x1b[2J\nring_plugins: all is well"
    packages = dict.fromkeys(OWN["packages"], evil)
    other = {**OWN, "python": evil, "ring_plugins": None, "trouble": evil, "packages": packages, "missing": [evil]}
    found = [*differences(OWN, other), explain("host2", "python", 1, "\x1b[2J gone")]
    assert len(found) >= 4 and all(text.isprintable() for text in found)
