"""The message loop, with pairs of sockets in the place of other processes."""

import errno
import os
import socket
import struct
import threading
import time

import pytest

from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket, reach
from ring_plugins.core.net.peers import Peers


@pytest.fixture
def loop():
    """Peers 1 and 2 of a loop, and their ends."""
    peers, others = Peers(), {}
    for number in (1, 2):
        ours, theirs = socket.socketpair()
        peers.add(number, FrameSocket(ours, Purpose.CONTROL))
        others[number] = FrameSocket(theirs, Purpose.CONTROL)
    yield peers, others
    peers.close()
    for other in others.values():
        other.close()


def turn(peers, seconds=0.0):
    ready = peers.wait(seconds)
    with peers.lock:
        return list(peers.events(ready))


def turns(peers, number):
    """So many events."""
    found, end = [], time.monotonic() + 5
    while len(found) < number and time.monotonic() < end:
        found += turn(peers, 0.1)
    return found


def say(frames, *messages):
    for message in messages:
        frames.send(message)
    frames.flush(5)


def test_messages_of_a_peer_come_in_order_and_its_end_after_them(loop):
    peers, others = loop
    say(others[1], b"one", b"two")
    others[1].close()
    found = turns(peers, 3)
    assert found[:2] == [(1, b"one"), (1, b"two")]
    number, how = found[2]
    assert number == 1 and isinstance(how, Disconnected) and str(how) == "it closed the connection"
    assert list(peers) == [2]


def test_nothing_more_of_a_peer_counts_once_this_side_has_hung_up(loop):
    peers, others = loop
    say(others[1], b"one", b"two")
    say(others[2], b"three")
    ready, found = peers.wait(1), []
    with peers.lock:
        for _, event in peers.events(ready):
            found.append(event)
            peers.hang_up(1)
            peers.hang_up(2)
    assert found in ([b"one"], [b"three"])


def test_the_last_messages_of_a_peer_are_read_even_if_sending_to_it_fails(loop):
    peers, others = loop
    peers.wait(0.0)
    say(others[1], b"the cause")
    others[1].close()
    for _ in range(3):
        peers.send(1, b"x" * 100_000)
    with peers.lock:
        found = list(peers.events([]))  # only what has to be sent is looked at
    assert found[0] == (1, b"the cause") and isinstance(found[1][1], Disconnected)


def test_the_end_of_a_peer_says_what_the_kernel_told_a_thread_that_sent():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    peers = Peers()
    peers.add(1, FrameSocket(ours, Purpose.CONTROL))
    peers.wait(0.0)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
    theirs.close()
    peers.send(1, b"told by any thread")
    [(_, how)] = turns(peers, 1)
    assert how.code == errno.ECONNRESET
    peers.close()


def test_droppable_messages_are_dropped_where_too_much_waits_and_the_rest_is_kept(loop):
    peers, others = loop
    for _ in range(100):
        peers.send(1, b"x" * 100_000, droppable=True)
    peers.send(1, b"kept")
    assert not peers.flush(0.0)
    messages = []
    while not messages or messages[-1] != b"kept":
        turn(peers)
        messages += others[1].read()
    assert 1 < len(messages) < 55  # 4 MiB beside what the kernel holds, and the one that was kept
    assert peers.flush(1)


def test_a_message_from_another_thread_wakes_the_loop(loop):
    peers, others = loop
    peers.wait(0.0)
    thread = threading.Timer(0.1, peers.wake)
    thread.start()
    assert peers.wait(30) == []
    thread.join()
    peers.send(3, b"nobody")
    peers.send(2, b"somebody")
    assert others[2].receive(5) == b"somebody"


def test_new_peers_are_those_that_know_the_secret(loop):
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(b"a secret", Purpose.CONTROL)
    acceptor.add(listener)
    peers, came, end = Peers(acceptor), [], time.monotonic() + 5
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1")
        friend = []
        places, claim = lambda: [("127.0.0.1", port)], Claim(7)
        thread = threading.Thread(
            target=lambda: friend.append(reach(places, b"a secret", Purpose.CONTROL, claim, 5).socket)
        )
        thread.start()
        while not came and time.monotonic() < end:
            peers.wait(0.1)
            came += peers.accepted()
        thread.join()
    assert [new.claim.rank for new in came] == [7]
    for one in (came[0].socket, friend[0]):
        one.close()
    peers.close()


def test_the_last_messages_are_read_before_the_connections_close(loop):
    peers, others = loop
    peers.send(1, b"the last")
    said = []
    thread = threading.Thread(target=lambda: (said.append(others[1].receive(5)), others[1].close(), others[2].close()))
    thread.start()
    peers.close(5)
    thread.join()
    assert said == [b"the last"]


def test_a_forked_child_leaves_the_parents_connections_alone(loop):
    peers, others = loop
    pid = os.fork()
    if pid == 0:
        peers.abandon()
        os._exit(0)
    os.waitpid(pid, 0)
    say(others[1], b"still here")
    assert turns(peers, 1) == [(1, b"still here")]
