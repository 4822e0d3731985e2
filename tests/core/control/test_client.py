"""The control channel's end on ranks other than rank 0."""

import socket
import threading
import time

import pytest

from ring_plugins.core.control import ControlClient, ControlServer
from ring_plugins.core.control import client as client_module


@pytest.fixture
def server():
    made = ControlServer(2, ("127.0.0.1",))
    yield made
    made.abandon()


def run(channels, until, seconds=60):
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        for channel in channels:
            channel.poll(0.005)
    return until()


def client_of(server, same_host=False, **changes):
    return ControlClient(1, 2, {**server.address, **changes}, same_host)


def test_rank_0s_end_is_noticed(server):
    client = client_of(server)
    lost = []
    client.on_lost = lambda rank, how: lost.append((rank, str(how)))
    assert run([server, client], lambda: client.connected == [0] and server.connected == [1])
    server.abandon()
    assert run([client], lambda: bool(lost))
    assert lost == [(0, "it closed the connection")]
    client.abandon()


def test_rank_0s_goodbye_is_no_loss(server):
    client = client_of(server, same_host=True)
    lost, left = [], []
    client.on_lost, client.on_left = lambda rank, how: lost.append(rank), left.append
    assert run([server, client], lambda: client.connected == [0])
    server.close()
    assert run([client], lambda: bool(lost or left))
    assert (lost, left) == ([], [0])
    client.abandon()


def test_a_wrong_secret_delivers_nothing_and_is_logged_once(server, capsys):
    client = client_of(server, secret="00" * 32)
    received = []
    server.on("note", lambda sender, body: received.append(body))
    client.tell(0, "note", {"a": 1})
    assert run([server, client], lambda: client._ended)
    assert not run([server, client], lambda: bool(received or server.connected), seconds=0.2)
    assert capsys.readouterr().err.count("without a control channel to rank 0 (it rejected this rank's secret)") == 1
    client.abandon()


def test_an_impostor_of_rank_0_is_detected():
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address = {"secret": "11" * 32, "local": "", "port": impostor.getsockname()[1], "addresses": ["127.0.0.1"]}
        client = ControlClient(1, 2, address, same_host=False)
        client.poll(0)
        with impostor.accept()[0] as connection:
            connection.sendall(b"220 mail.example.org ESMTP\r\n")
            assert run([client], lambda: client._pending is None)
        assert client.connected == []
        client.abandon()


def test_a_dropped_handshake_is_tried_again(server, monkeypatch):
    monkeypatch.setattr(client_module, "_PAUSE", 0.01)
    client = client_of(server)
    client.poll(0)
    assert client._pending is not None
    server.poll(0.05)
    while server._acceptor._waiting:
        server._acceptor._drop(next(iter(server._acceptor._waiting.values())))
    assert run([server, client], lambda: client.connected == [0])
    client.abandon()


def test_a_rank_that_was_stopped_during_the_handshake_tries_again(server, monkeypatch):
    client = client_of(server)
    client.poll(0)  # connects
    deadline = time.monotonic() + 60
    while not server._acceptor.waiting() and time.monotonic() < deadline:
        server.poll(0.01)
    monkeypatch.setattr(client_module, "_GIVE_UP", 0.0)  # as if a minute had passed
    server._acceptor._drop(next(iter(server._acceptor._waiting.values())))
    assert run([client, server], lambda: client.connected == [0])
    client.abandon()


def test_a_thread_that_dies_before_it_has_connected_still_tells_the_cause(server):
    client, received = client_of(server), []
    server.on("failed", lambda sender, body: received.append((sender, body["text"])))
    stop = threading.Event()
    serving = threading.Thread(target=lambda: run([server], stop.is_set, 30))
    serving.start()
    client._poller = threading.get_ident()  # it polls no more
    client.tell(0, "failed", {"text": "its monitor died"})
    assert client.flush(20)
    client.abandon()
    run([], lambda: bool(received), 20)
    stop.set()
    serving.join()
    assert received == [(1, "its monitor died")]


def test_messages_queued_before_connecting_arrive_before_the_goodbye(server):
    client = client_of(server)
    received = []
    server.on("note", lambda sender, body: received.append(body["n"]))
    server.on_left = lambda rank: received.append("left")
    for number in range(3):
        client.tell(0, "note", {"n": number})
    thread = threading.Thread(target=client.close)
    thread.start()
    assert run([server], lambda: "left" in received)
    thread.join()
    assert received == [0, 1, 2, "left"]


def test_a_rank_that_leaves_while_rank_0_is_busy_still_says_goodbye(server, monkeypatch):
    monkeypatch.setattr(client_module, "CLOSE_SECONDS", 0.05)
    client = client_of(server)
    run([server, client], lambda: client._handshake.has_proved and client._pending is not None, seconds=0.01)
    lost, left = [], []
    server.on_lost, server.on_left = lambda rank, how: lost.append(rank), left.append
    client.close()
    run([server], lambda: bool(lost or left), seconds=0.3)
    assert lost == []


def test_without_a_server_it_gives_up_with_a_reason(monkeypatch, capsys):
    monkeypatch.setattr(client_module, "_GIVE_UP", 0.0)
    monkeypatch.setattr(client_module, "_PAUSE", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = {"secret": "11" * 32, "local": "nobody", "port": port, "addresses": ["127.0.0.1"]}
    client = ControlClient(1, 2, address, same_host=True)
    client.tell(0, "note")
    time.sleep(0.01)
    assert run([client], lambda: client._ended)
    assert f"127.0.0.1 port {port}" in capsys.readouterr().err
    assert client.flush(1) or run([client], lambda: client.flush(0))
    client.abandon()
