"""Sockets by which processes of one user find each other."""

import os
import socket

import pytest

from ring_plugins.core.net.user_socket import connect_below, connect_to, listen_below, names_below


@pytest.fixture
def name():
    return f"ring_plugins/test/{os.urandom(8).hex()}"


def test_a_process_finds_the_socket_of_its_user_below_a_name(name):
    assert connect_below(name) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listen_below(listener, name, 1)
        assert len(names_below(name)) == 1
        with connect_below(name) as connection:
            listener.accept()[0].sendall(b"x")
            assert connection.recv(1) == b"x"
    assert connect_below(name) is None and names_below(name) == []


def test_a_socket_of_another_user_and_one_at_the_name_itself_do_not_count(name, monkeypatch):
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as listener:
        stranger.bind(f"\0{name}")
        stranger.listen()
        assert connect_below(name) is None
        listen_below(listener, name, 1)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert connect_below(name) is None


def test_a_socket_that_nobody_serves_is_waited_for(name):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listen_below(listener, name, 0)
        waiting.connect(listener.getsockname())
        with pytest.raises(BlockingIOError):
            connect_to(names_below(name)[0])
        assert connect_below(name, seconds=0.05) is None
