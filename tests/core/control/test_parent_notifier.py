"""Messages from ranks to the launcher; other users cannot send any."""

import os

import pytest

from ring_plugins.core.control.parent_notifier import ParentNotifier, notify_parent


@pytest.fixture
def notifier(monkeypatch):
    with ParentNotifier() as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


def in_child(function):
    """The exit status of a process that calls a function."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_first_message_is_kept(notifier):
    assert notifier.first_message() is None
    assert in_child(lambda: notify_parent("rank 1 failed: é")) == 0
    assert in_child(lambda: notify_parent("rank 0 failed too")) == 0
    assert notifier.first_message() == "rank 1 failed: é"
    assert notifier.first_message() == "rank 1 failed: é"


def test_long_messages_are_cut_and_many_do_not_grow_without_bound(notifier):
    for _ in range(400):
        notify_parent("x" * 10_000)
    assert notifier.first_message() == "x" * 4096
    assert os.fstat(notifier._file).st_size < (1 << 20) + 5000


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_cannot_send(notifier):
    def other_user():
        os.setgid(65534)
        os.setuid(65534)
        notify_parent("x")
        pid, number, _ = notifier.environment["RING_PARENT_NOTIFIER"].split(":")
        try:
            os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY)
        except PermissionError:
            return
        raise AssertionError("opened")

    assert in_child(other_user) == 0
    assert notifier.first_message() is None


def test_nothing_is_written_to_another_file_that_has_the_same_number(notifier, monkeypatch, tmp_path):
    """As on another host, where the environment is the same."""
    with open(tmp_path / "file", "w") as file:
        _, _, name = notifier.environment["RING_PARENT_NOTIFIER"].split(":")
        monkeypatch.setenv("RING_PARENT_NOTIFIER", f"{os.getpid()}:{file.fileno()}:{name}")
        notify_parent("rank 1 failed")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("value", ["", "1", "x:y:z", "999999999:3:name", "1:2:3:4"])
def test_without_a_launcher_that_listens_nothing_happens(monkeypatch, value):
    monkeypatch.setenv("RING_PARENT_NOTIFIER", value)
    notify_parent("rank 1 failed")
