"""Messages between ranks that are connected to rank 0, or to each other, and intruders."""

import contextlib
import os
import socket
import struct
import threading
import time
from functools import partial

import pytest

from ring_plugins.core.control import channel as channel_module
from ring_plugins.core.control import rank_zero
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.rank_zero import HELLO, RankZero
from ring_plugins.core.net import acceptor, auth
from ring_plugins.core.net.auth import Claim, ClientHandshake, Purpose, authenticate
from ring_plugins.core.net.frames import FrameSocket, to_json


@pytest.fixture
def channels():
    made = []
    yield made
    for channel in reversed(made):
        channel.close()


def connected(channels, ranks, same_host=True, starts=True):
    """The channels of rank 0 and of the others."""
    listening = RankZero(ranks, () if same_host else ("127.0.0.1",))
    address = listening.address
    server = Channel(0, ranks, listening)
    server.address = address
    channels.append(server)
    for rank in range(1, ranks):
        channels.append(Channel(rank, ranks, connect=partial(rank_zero.connect, rank, address, same_host)))
    for channel in channels if starts else channels[:1]:
        channel.start()
    return server, channels[1:]


def run(channels, until, seconds=10):
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        for channel in channels:
            channel.poll(0.005)
    return until()


def ends(channel):
    """Ranks whose connections end without a goodbye, and with one."""
    lost, left = [], []
    channel.on_end(lambda rank, how: left.append(rank) if how is None else lost.append((rank, str(how))))
    return lost, left


def join_by_hand(server, rank):
    """A client's connection after the handshake."""
    client = socket.create_connection(("127.0.0.1", server.address["port"]))
    authenticate(client, ClientHandshake(bytes.fromhex(server.address["secret"]), Purpose.CONTROL, Claim(rank)))
    frames = FrameSocket(client, Purpose.CONTROL)
    frames.send(to_json(HELLO))
    frames.flush(5)
    return frames


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
    server, clients = connected(channels, 3, starts=False)
    got = []
    for client in clients:
        client.on("news", lambda sender, body, rank=client.rank: got.append((rank, body["n"])))
    clients[0].start()
    assert run([server, clients[0]], lambda: server.connected == {1})
    server.tell(EVERYONE, "news", {"n": 1})
    server.tell(2, "news", {"n": 2})
    assert run([server, clients[0]], lambda: got == [(1, 1)])
    clients[1].start()
    assert run(channels, lambda: len(got) == 3) and got == [(1, 1), (2, 1), (2, 2)]
    server.tell(EVERYONE, "news", {"n": 3})
    assert run(channels, lambda: len(got) == 5) and sorted(got[3:]) == [(1, 3), (2, 3)]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_rank_can_send_to_itself(channels, at_once):
    server, _ = connected(channels, 2)
    received = []
    server.on("note", lambda sender, body: received.append((sender, body)), at_once=at_once)
    server.tell(0, "note", {"a": 1})
    assert bool(received) == at_once
    assert run(channels, lambda: received == [(0, {"a": 1})])


def test_an_end_without_goodbye_is_a_loss_and_one_with_it_is_not(channels):
    server, (one, two) = connected(channels, 3)
    lost, left = ends(server)
    assert run(channels, lambda: server.connected == {1, 2})
    one.close()
    with two.peers.lock:
        two.peers._frames[0].socket.shutdown(socket.SHUT_RDWR)
    assert run([server], lambda: bool(lost and left))
    assert (lost, left) == ([(2, "it closed the connection")], [1])
    assert server.connected == set()


def test_a_goodbye_of_rank_0_is_no_loss(channels):
    server, (client,) = connected(channels, 2)
    lost, left = ends(client)
    assert run(channels, lambda: client.connected == {0})
    server.close()
    assert run([client], lambda: bool(lost or left))
    assert (lost, left) == ([], [0])


def test_the_end_of_a_connection_on_which_nothing_was_said_is_no_loss(channels):
    """A rank that has given up an attempt to connect just when rank 0 accepted it tries again."""
    server, (client,) = connected(channels, 2, same_host=False, starts=False)
    lost, left = ends(server)
    with socket.create_connection(("127.0.0.1", server.address["port"])) as given_up:
        authenticate(given_up, ClientHandshake(bytes.fromhex(server.address["secret"]), Purpose.CONTROL, Claim(1)))
    server.tell(1, "news", {"n": 1})
    got = []
    client.on("news", lambda sender, body: got.append(body["n"]))
    client.start()
    assert run(channels, lambda: server.connected == {1} and got == [1])
    assert (lost, left) == ([], [])


def test_only_an_expected_rank_is_accepted(channels):
    server, _ = connected(channels, 3, same_host=False, starts=False)
    first = join_by_hand(server, 1)
    assert run([server], lambda: server.connected == {1})
    for rank in (0, 1, 3, -1):
        with pytest.raises(auth.Rejected, match="does not expect this rank"):
            join_by_hand(server, rank)
    assert server.connected == {1}
    first.close()


@pytest.mark.parametrize("same_host", [True, False], ids=["one host", "over TCP"])
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 4096,
        struct.pack("!I", 1024) + b"[" * 1024,
        "\u00e9".encode() * 40,
        b"\0",
    ],
)
def test_intruders_are_disconnected_and_harm_nobody(channels, said, same_host):
    server, _ = connected(channels, 2, same_host)
    where = "\0" + server.address["local"] if same_host else ("127.0.0.1", server.address["port"])
    with socket.socket(socket.AF_UNIX if same_host else socket.AF_INET) as intruder:
        intruder.connect(where)
        intruder.settimeout(5)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            intruder.sendall(said)
            while intruder.recv(1000):
                pass
    assert run(channels, lambda: server.connected == {1})


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    "said", [b"[" * 100_000, b"\xff", b'{"a": 1}', b"[1]", b"null", b'["note", 1]', b'["note", {}]']
)
def test_invalid_messages_disconnect_only_their_sender(channels, said):
    server, _ = connected(channels, 4, same_host=False, starts=False)
    server.on("note", lambda sender, body: body["number"], at_once=True)
    lost, _ = ends(server)
    good, bad = (join_by_hand(server, rank) for rank in (1, 2))
    bad.send(said)
    bad.flush(1)
    assert run([server], lambda: bool(lost))
    ((rank, how),) = lost
    assert rank == 2 and how.startswith("it sent an invalid message: ")
    assert run([server], lambda: server.connected == {1})
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
    server, _ = connected(channels, 2, same_host=False, starts=False)
    waiting = server.peers._acceptor.waiting
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.address["port"])))
            assert waiting() <= 66
        assert run([server], lambda: waiting() == 0, seconds=5)


def test_a_forked_child_leaves_the_parents_channel_alone(channels):
    server, (client,) = connected(channels, 2)
    assert run(channels, lambda: server.connected == {1})
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


def test_ranks_that_are_connected_to_each_other_need_no_rank_0(channels):
    one, two = channels[:] = Channel(1, 3), Channel(2, 3)
    ours, theirs = socket.socketpair()
    got = []
    two.on("news", lambda sender, body: got.append((sender, body)))
    one.add(2, FrameSocket(ours, Purpose.CONTROL))
    two.add(1, FrameSocket(theirs, Purpose.CONTROL))
    for channel in channels:
        channel.start()
    one.tell(EVERYONE, "news", {"n": 1})
    assert run(channels, lambda: got == [(1, {"n": 1})])
    _, left = ends(one)
    two.close()
    assert run([one], lambda: left == [2])


def test_what_waits_is_sent_before_flush_returns(channels):
    server, (client,) = connected(channels, 2, starts=False)
    client.tell(0, "note", {"text": "x" * 1_000_000})
    assert not client.flush(0.05)
    client.start()
    threading.Thread(target=lambda: run([server], lambda: False, 0.2)).start()
    assert client.flush(10)


def test_reports_are_dropped_while_nobody_reads_them_and_nothing_else_is(channels, monkeypatch):
    monkeypatch.setattr(channel_module, "MOST_UNREAD", 3)
    server, _ = connected(channels, 2, starts=False)
    seen = []
    server.on("report", lambda sender, body: seen.append(body["number"]), droppable=True)
    server.on("failure", lambda sender, body: seen.append("failure"))
    for number in range(100):
        server.receive(1, to_json(["report", {"number": number}]))
    server.receive(1, to_json(["failure", {}]))
    while server._inbox.qsize():
        server.poll(0.0)
    assert seen[-1] == "failure" and len(seen) <= 4
    server.receive(1, to_json(["report", {"number": 7}]))
    server.poll(0.0)
    assert seen[-1] == 7  # read again, so taken again
