"""How the other ranks of a job connect to rank 0."""

import contextlib
import select
import socket
import threading
import time
from functools import partial

import pytest

from ring_plugins.core.control import rank_zero
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.rank_zero import RankZero, connect
from tests.core.control.test_channel import channels, ends, run

__all__ = ["channels"]


@pytest.fixture
def server(channels):
    listening = RankZero(2, ("127.0.0.1",))
    made = Channel(0, 2, listening)
    made.address = listening.address
    channels.append(made)
    return made


def client_of(server, channels, **changes):
    made = Channel(1, 2, connect=partial(connect, 1, {**server.address, **changes}, False))
    channels.append(made)
    return made


def test_a_wrong_secret_delivers_nothing_and_is_logged_once(server, channels, capsys):
    client = client_of(server, channels, secret="00" * 32)
    received = []
    server.on("note", lambda sender, body: received.append(body))
    client.tell(0, "note", {"a": 1})
    server.start()
    client.start()
    assert client.flush(10)  # nothing waits any more
    assert not run([server, client], lambda: bool(received or server.connected), seconds=0.2)
    assert capsys.readouterr().err.count("it rejected this rank's secret): reports lack this rank") == 1


def test_an_impostor_of_rank_0_is_detected(monkeypatch, capsys):
    monkeypatch.setattr(rank_zero, "_GIVE_UP", 0.0)
    monkeypatch.setattr(rank_zero, "_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = {"secret": "11" * 32, "local": "", "port": impostor.getsockname()[1], "addresses": ["127.0.0.1"]}
        found = []
        thread = threading.Thread(target=lambda: found.append(connect(1, address, False, lambda: False)))
        thread.start()
        impostor.settimeout(0.1)
        while thread.is_alive():
            with contextlib.suppress(TimeoutError), impostor.accept()[0] as connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")
    assert found == [None]
    assert "rank 1 goes on without a control channel to rank 0 (127.0.0.1:" in capsys.readouterr().err


def test_a_dropped_handshake_is_tried_again(server, channels, monkeypatch):
    """Also by a rank that was stopped for so long that its time is over."""
    monkeypatch.setattr(rank_zero, "_PAUSE", 0.01)
    monkeypatch.setattr(rank_zero, "_GIVE_UP", 0.0)
    client = client_of(server, channels)
    client.start()
    listener = server.peers._acceptor._listeners[1]
    assert select.select([listener], [], [], 10)[0]
    listener.accept()[0].close()
    server.start()
    assert run([server, client], lambda: client.connected == {0} and server.connected == {1})


def test_messages_queued_before_connecting_arrive_before_the_goodbye(server, channels):
    client = client_of(server, channels)
    received = []
    server.on("note", lambda sender, body: received.append(body["n"]))
    server.on_end(lambda rank, how: received.append(how))
    for number in range(3):
        client.tell(0, "note", {"n": number})
    server.start()
    client.start()
    client.close()
    assert run([server], lambda: None in received)
    assert received == [0, 1, 2, None]


def test_a_rank_that_leaves_while_rank_0_is_busy_is_not_lost(server, channels):
    client = client_of(server, channels)
    lost, left = ends(server)
    with server.peers.lock:
        server.start()  # it accepts nothing before the lock is free
        client.start()
        server.peers._acceptor.poll(5)  # but has sent its challenge
        time.sleep(0.1)
        client.close()
    run([server], lambda: bool(lost or left), seconds=3)
    assert lost == []


def test_the_port_for_other_hosts_closes_where_there_are_none():
    listening = RankZero(2, ("127.0.0.1",))
    port = listening.address["port"]
    listening.only_this_host()
    assert listening.address["port"] == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    listening.acceptor(lambda rank: False).close()


def test_without_a_server_it_gives_up_with_a_reason(monkeypatch, capsys):
    monkeypatch.setattr(rank_zero, "_GIVE_UP", 0.0)
    monkeypatch.setattr(rank_zero, "_PAUSE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = {"secret": "11" * 32, "local": "nobody", "port": port, "addresses": ["127.0.0.1"]}
    assert connect(1, address, True, lambda: False) is None
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
    assert connect(1, address, True, lambda: True) is None  # it leaves already
