"""Requests for added ranks, as `ring add-ranks` makes them and `ring run` answers them."""

import contextlib
import os
import re
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from ring_plugins.cli.main import app
from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.net import local_service, sockets
from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, authenticate
from ring_plugins.launcher import growth
from ring_plugins.launcher.growth import GrowthRequests, request_ranks, running_jobs


@pytest.fixture
def asked():
    """What a `ring run` in this process was asked for; it refuses more than three ranks."""
    numbers: list[int] = []
    over = threading.Event()

    def add(number: int, host: str | None) -> str:
        numbers.append(number if host is None else (number, host))
        return "ok: they will join" if number <= 3 else "no: 3 slots are free"

    with GrowthRequests(add) as requests:

        def poll() -> None:
            while not over.is_set():
                requests.poll()
                time.sleep(0.002)

        polling = threading.Thread(target=poll)
        polling.start()
        try:
            yield numbers
        finally:
            over.set()
            polling.join()


def test_a_request_is_answered_and_the_only_job_needs_no_name(asked, monkeypatch):
    assert request_ranks(2, os.getpid()) == "they will join."
    assert request_ranks(2, os.getpid(), "me@host-2.example") == "they will join."
    with pytest.raises(LaunchError, match="3 slots are free"):
        request_ranks(4, os.getpid())
    assert "python" in running_jobs()[os.getpid()]
    command = b"python\0-c\0import ring_plugins.__main__\0run\0-n\0" + b"2\0train.py\0"
    with monkeypatch.context() as patch:  # a job that init() has started
        patch.setattr(local_service, "Path", lambda _: SimpleNamespace(read_bytes=lambda: command))
        assert running_jobs()[os.getpid()] == "ring run -n 2 train.py"
    monkeypatch.setattr(growth, "running_jobs", lambda: {os.getpid(): "ring run"})
    done = CliRunner().invoke(app, ["add-ranks", "1"])
    assert (done.exit_code, done.stdout) == (0, "ring add-ranks: they will join.\n")
    assert CliRunner().invoke(app, ["add-ranks", "9"]).exit_code == 2
    assert asked == [2, (2, "me@host-2.example"), 4, 1, 9]


def test_what_names_no_job_or_several_is_rejected(monkeypatch):
    monkeypatch.setattr(growth, "running_jobs", dict)
    with pytest.raises(ArgumentError, match="no `ring run` of yours on this host has a job that can grow"):
        request_ranks(1, None)
    with pytest.raises(
        ArgumentError, match=r"--job 1 is not the process id of a `ring run --on-failure replace` of yours"
    ):
        request_ranks(1, 1)
    monkeypatch.setattr(growth, "running_jobs", lambda: {5: "ring run a", 6: "ring run b"})
    with pytest.raises(ArgumentError, match=r"choose one with --job and its process id:\n  5: ring run a\n  6: ring"):
        request_ranks(1, None)
    with pytest.raises(ArgumentError, match="0 is not a number of ranks by which a job can grow"):
        request_ranks(0, None)
    with pytest.raises(ArgumentError, match=r"--host 'a b' is not a host: give the name that `ring run -H` has for it"):
        request_ranks(1, None, "a b")


def test_a_job_that_is_listed_and_takes_no_request_is_not_called_none(monkeypatch):
    monkeypatch.setattr(growth, "running_jobs", lambda: {5: "ring run a"})
    monkeypatch.setattr(local_service, "connect_below", lambda name, seconds: None)
    for job in (5, None):
        with pytest.raises(LaunchError, match=r"ring run \(process 5\) takes no requests at the moment, or has just"):
            request_ranks(1, job)
    with pytest.raises(ArgumentError, match=r"--job 6 is not the process id .*Those that can:\n  5: ring run a"):
        request_ranks(1, 6)


def test_where_strangers_show_as_this_user_nobody_is_asked_and_nobody_is_answered(asked, monkeypatch):
    user = os.geteuid()
    (name,) = re.findall(f"@({local_service._name('run', os.getpid())}/.*)", Path("/proc/net/unix").read_text())
    for module in (growth, local_service):
        monkeypatch.setattr(module, "why_users_are_unknown", lambda: f"all show as {user}")
    with pytest.raises(LaunchError, match=f"tell your `ring run` from a stranger's, as all show as {user}"):
        request_ranks(1, os.getpid())
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{name}")
        with pytest.raises(Disconnected):
            authenticate(stranger, ClientHandshake(b"", Purpose.LAUNCHER, Claim(0)), 20)
    assert asked == []
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert not sockets.why_users_are_unknown()
    monkeypatch.setattr(sockets, "_ALL_USERS", [])
    assert "show as this one (65534)" in sockets.why_users_are_unknown()


def test_neither_silence_nor_nonsense_nor_another_user_keeps_others_from_asking(asked, monkeypatch):
    (name,) = re.findall(f"@({local_service._name('run', os.getpid())}/.*)", Path("/proc/net/unix").read_text())
    connections = []
    for sent in (b"", b"a" * 512, b"add 1", *[b""] * 20):
        connections.append(connection := socket.socket(socket.AF_UNIX))
        connection.connect(f"\0{name}")
        connection.sendall(sent)
    for sent in (b"a" * 513, b"add x", b"add -1", b"add 1\nadd 1", *[b""] * 20):
        connections.append(connection := socket.socket(socket.AF_UNIX))
        connection.connect(f"\0{name}")
        authenticate(connection, ClientHandshake(b"", Purpose.LAUNCHER, Claim(0)), 20)
        connection.sendall(struct.pack("!Q", len(sent)) + sent)
    assert request_ranks(2, os.getpid()) == "they will join."
    user, stranger = os.geteuid(), socket.socket(socket.AF_UNIX)
    stranger.bind(f"\0ring_plugins/run/{user + 1}/{os.getpid()}/0123456789abcdef")  # in which another user's would be
    stranger.listen()
    listed = [stranger]
    for number in range(100):  # those of jobs that never accept
        listed += [full := socket.socket(socket.AF_UNIX), waiting := socket.socket(socket.AF_UNIX)]
        full.bind(f"\0ring_plugins/run/{user}/{10**6 + number}/0123456789abcdef")
        full.listen(0)
        waiting.connect(full.getsockname())
    reads = []

    def counted(path, **options):
        reads.append(path)
        return open(path, **options)

    monkeypatch.setattr(sockets, "open", counted, raising=False)
    assert os.getpid() in running_jobs()
    assert reads == ["/proc/net/unix"]  # of the kernel's list, however long others make it
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # so that all sockets are another user's
    with pytest.raises(ArgumentError, match=f"--job {os.getpid()} is not the process id of a `ring run"):
        request_ranks(3, os.getpid())
    assert running_jobs() == {}
    for one in listed:
        one.close()
    monkeypatch.undo()
    assert asked == [2]
    for connection in connections:
        connection.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):  # until it is dropped
                pass
        connection.close()
