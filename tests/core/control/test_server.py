"""Rank 0's end of the control channel, with clients of the job and intruders."""

import contextlib
import os
import socket
import struct
import threading
import time

import pytest

from ring_plugins.core.control import ControlClient, ControlServer
from ring_plugins.core.control.channel import EVERYONE, GOODBYE
from ring_plugins.core.net import acceptor, auth
from ring_plugins.core.net.auth import Claim, ClientHandshake, Purpose, authenticate
from ring_plugins.core.net.frames import FrameSocket, to_json


@pytest.fixture
def channels():
    made = []
    yield made
    for channel in made:
        channel.abandon()


def connected(channels, ranks, same_host=True, address=None):
    """A server and its clients; `address` overrides parts of the address that clients get."""
    server = ControlServer(ranks, () if same_host else ("127.0.0.1",))
    where = {**server.address, **(address or {})}
    channels += [server, *(ControlClient(rank, ranks, where, same_host) for rank in range(1, ranks))]
    return server, channels[1:]


def run(channels, until, seconds=10):
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        for channel in channels:
            channel.poll(0.005)
    return until()


def join_by_hand(server, rank):
    """A client's connection after the handshake, which the server answers only when it polls."""
    client = socket.create_connection(("127.0.0.1", server.address["port"]))
    handshake = ClientHandshake(bytes.fromhex(server.address["secret"]), Purpose.CONTROL, Claim(rank))
    client.setblocking(False)
    assert run([server], lambda: auth.advance(client, handshake))
    return client


@pytest.mark.parametrize("same_host", [True, False], ids=["one host", "over TCP"])
def test_messages_both_ways_whole_and_in_order(channels, same_host):
    server, clients = connected(channels, 5, same_host)
    received = []
    server.on("to_server", lambda sender, body: received.append((sender, body["i"], len(body["text"]))))
    for client in clients:
        for i in range(20):
            client.tell(0, "to_server", {"i": i, "text": "x" * (100_000 if i == 7 else 3)})
    assert run(channels, lambda: len(received) == 80)
    for rank in range(1, 5):
        assert [(i, n) for sender, i, n in received if sender == rank] == [
            (i, 100_000 if i == 7 else 3) for i in range(20)
        ]
    got = []
    for client in clients:
        client.on("news", lambda sender, body, rank=client.rank: got.append((rank, sender, body["n"])))
    server.tell(EVERYONE, "news", {"n": 1})
    server.tell(3, "news", {"n": 2})
    assert run(channels, lambda: len(got) == 5)
    assert sorted(got) == [(1, 0, 1), (2, 0, 1), (3, 0, 1), (3, 0, 2), (4, 0, 1)]


def test_a_rank_hears_what_was_told_before_it_connected(channels):
    server, clients = connected(channels, 3)
    got = []
    for client in clients:
        client.on("news", lambda sender, body, rank=client.rank: got.append((rank, body["n"])))
    assert run([server, clients[0]], lambda: server.connected == [1])
    server.tell(EVERYONE, "news", {"n": 1})
    server.tell(EVERYONE, "report", droppable=True)
    server.tell(2, "news", {"n": 2})
    assert run([server, clients[0]], lambda: got == [(1, 1)])
    assert run(channels, lambda: len(got) == 3) and got == [(1, 1), (2, 1), (2, 2)]
    server.tell(EVERYONE, "news", {"n": 3})
    assert run(channels, lambda: len(got) == 5) and sorted(got[3:]) == [(1, 3), (2, 3)]


def test_rank_0_can_send_to_itself(channels):
    server, _ = connected(channels, 2)
    received = []
    server.on("note", lambda sender, body: received.append((sender, body)))
    server.tell(0, "note", {"a": 1})
    assert run(channels, lambda: bool(received))
    assert received == [(0, {"a": 1})]


def test_an_end_without_goodbye_is_a_loss_and_one_with_it_is_not(channels):
    server, (one, two) = connected(channels, 3)
    lost, left = [], []
    server.on_lost, server.on_left = lambda rank, how: lost.append(rank), left.append
    assert run(channels, lambda: len(server.connected) == 2)
    one.close()
    two.abandon()
    assert run([server], lambda: bool(lost and left))
    assert (lost, left) == ([2], [1])


def test_the_last_messages_of_a_rank_are_read_even_if_sending_to_it_fails(channels):
    server, _ = connected(channels, 2, same_host=False)
    received, lost = [], []
    server.on("failed", lambda sender, body: received.append(sender))
    server.on_lost = lambda rank, how: lost.append(rank)
    frames = FrameSocket(join_by_hand(server, 1), Purpose.CONTROL)
    assert run([server], lambda: server.connected == [1])
    frames.send(to_json(["failed", {}]))
    frames.flush(1)
    frames.close()
    time.sleep(0.02)
    for _ in range(3):
        server.tell(1, "x", {"much": "x" * 100_000})
    assert run([server], lambda: bool(lost))
    assert (received, lost) == ([1], [1])


def test_a_goodbye_right_after_the_proof_is_no_loss(channels):
    """A rank that ends before rank 0 has answered it."""
    server, _ = connected(channels, 2, same_host=False)
    lost, left = [], []
    server.on_lost, server.on_left = lambda rank, how: lost.append(rank), left.append
    server.on_joined = lambda rank: server.tell(rank, "welcome")
    with socket.create_connection(("127.0.0.1", server.address["port"])) as client:
        handshake = ClientHandshake(bytes.fromhex(server.address["secret"]), Purpose.CONTROL, Claim(1))
        client.setblocking(False)
        server.poll(0.05)
        for _ in range(100):
            if handshake.has_proved:
                break
            auth.advance(client, handshake)
            time.sleep(0.005)
        frames = FrameSocket(client, Purpose.CONTROL)
        frames.send(to_json(GOODBYE))
        frames.write()
    assert run([server], lambda: bool(lost or left))
    assert (lost, left) == ([], [1])


def test_only_an_expected_rank_is_accepted(channels):
    server, _ = connected(channels, 3, same_host=False)
    first = join_by_hand(server, 1)
    for rank in (0, 1, 3, -1):
        with pytest.raises(auth.Rejected, match="does not expect this rank"):
            join_by_hand(server, rank)
    assert server.connected == [1]
    first.close()


@pytest.mark.parametrize("same_host", [True, False], ids=["one host", "over TCP"])
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 4096,
        struct.pack("!I", 1024) + b"[" * 1024,
        "é".encode() * 40,
        b"\0",
    ],
)
def test_intruders_are_disconnected_and_harm_nobody(channels, said, same_host):
    server, _ = connected(channels, 2, same_host)
    address = server.address
    where = "\0" + address["local"] if same_host else ("127.0.0.1", address["port"])
    with socket.socket(socket.AF_UNIX if same_host else socket.AF_INET) as intruder:
        intruder.connect(where)
        intruder.sendall(said)
        assert run([server], lambda: server._acceptor.waiting() == 1 or _is_closed(intruder))
        assert run([server], lambda: server._acceptor.waiting() == 0, seconds=2)
    assert run(channels, lambda: server.connected == [1])


def _is_closed(connected):
    connected.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            return not connected.recv(1000)
        except ConnectionResetError:
            return True
    return False


@pytest.mark.usefixtures("no_garbage_collection")
def test_invalid_messages_disconnect_only_their_sender(channels):
    for said in (b"[" * 100_000, b"\xff", b'{"a": 1}', b"[1]", b"null"):
        server, _ = connected(channels, 4, same_host=False)
        lost = []
        server.on_lost = lambda rank, how, lost=lost: lost.append((rank, str(how)))
        good, bad = (FrameSocket(join_by_hand(server, rank), Purpose.CONTROL) for rank in (1, 2))
        bad.send(said)
        bad.flush(1)
        assert run([server], lambda lost=lost: bool(lost))
        assert lost == [(2, "it sent an invalid message")]
        assert server.connected == [1]
        good.close()
        bad.close()


def test_an_error_in_a_handler_ends_nothing(channels, capsys):
    server, (client,) = connected(channels, 2)
    received = []

    def handler(sender, body):
        received.append(body["number"])

    server.on("note", handler)
    for body in ({}, {}, {"number": 1}):
        client.tell(0, "note", body)
    assert run(channels, lambda: received == [1])
    said = capsys.readouterr().err
    assert said.count('handling the message "note" of rank 1 failed') == 1 and "KeyError: 'number'" in said


def test_silent_clients_are_dropped_in_time(channels, monkeypatch):
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 0.1)
    server, _ = connected(channels, 2, same_host=False)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.address["port"])))
            server.poll(0)
        assert 0 < server._acceptor.waiting() <= 66
        assert run([server], lambda: server._acceptor.waiting() == 0, seconds=3)


def test_a_forked_child_leaves_the_parents_channel_alone(channels):
    server, (client,) = connected(channels, 2)
    assert run(channels, lambda: server.connected == [1])
    pid = os.fork()
    if pid == 0:
        server.abandon()
        client.abandon()
        os._exit(0)
    os.waitpid(pid, 0)
    received = []
    client.on("note", lambda sender, body: received.append(body))
    server.tell(1, "note", {"a": 1})
    assert run(channels, lambda: bool(received))
    late = ControlClient(1, 2, server.address, same_host=True)
    channels.append(late)
    client.abandon()
    assert run([server, late], lambda: server.connected == [1] and late.connected == [0])


def test_the_port_for_other_hosts_closes_where_there_are_none(channels):
    server, _ = connected(channels, 2, same_host=False)
    port = server.address["port"]
    server.only_this_host()
    assert server.address["port"] == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_authenticate_works_against_a_server_in_another_thread(channels):
    server, _ = connected(channels, 2, same_host=False)
    thread = threading.Thread(target=run, args=([server], lambda: bool(server.connected)))
    thread.start()
    with socket.create_connection(("127.0.0.1", server.address["port"])) as client:
        authenticate(client, ClientHandshake(bytes.fromhex(server.address["secret"]), Purpose.CONTROL, Claim(1)))
        thread.join()
        assert server.connected == [1]
