"""Messages on an authenticated connection."""

import contextlib
import os
import socket
import struct
import threading

import pytest

from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose, WrongSecret
from ring_plugins.core.net.frames import FrameSocket, Unreached, from_json, reach, to_json


def frames(purpose=Purpose.CONTROL):
    here, there = socket.socketpair()
    return FrameSocket(here, purpose), FrameSocket(there, purpose)


def test_messages_arrive_whole_and_in_order_large_ones_too():
    here, there = frames()
    sent = [b"", b"x", os.urandom(1 << 22), b"y" * 300_000, b"z"]
    for message in sent:
        here.send(message)
    got = []
    while len(got) < len(sent):
        here.write()
        got += there.read()
    assert got == sent and here.unsent == 0
    here.close()
    with pytest.raises(Disconnected, match="it closed the connection"):
        there.receive(1)
    there.close()


def test_a_message_above_the_limit_ends_the_connection_after_earlier_messages():
    here, there = frames()
    here.send(b"before")
    here.flush(1)
    here.socket.sendall(struct.pack("!Q", (1 << 24) + 1))
    assert there.read() == [b"before"]
    with pytest.raises(Disconnected, match="16777217 bytes"):
        there.read()
    here.close()
    there.close()


def test_receive_and_flush_are_bounded():
    here, there = frames()
    assert there.receive(0.01) is None
    here.send(b"x" * (1 << 22))
    with pytest.raises(TimeoutError):
        here.flush(0.01)
    here.close()
    there.close()


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff", "é".encode("latin-1"), b"{", b'"\\ud800'])
@pytest.mark.usefixtures("no_garbage_collection")
def test_invalid_json_is_a_disconnection(data):
    with pytest.raises(Disconnected):
        from_json(data)
    assert from_json(to_json(["x", {"é": [1.5, None]}])) == ["x", {"é": [1.5, None]}]


@contextlib.contextmanager
def served(drops=0):
    """Places of which nobody listens at the first, and the second drops so many connections before it answers."""
    accepted, over = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = gone.getsockname()
    listener, acceptor = socket.create_server(("127.0.0.1", 0)), Acceptor(b"a secret", Purpose.CONTROL)

    def answer():
        for _ in range(drops):
            listener.accept()[0].close()
        acceptor.add(listener)
        while not over.is_set():
            accepted.extend(acceptor.poll(0.02))

    thread = threading.Thread(target=answer)
    thread.start()
    yield [nobody, listener.getsockname()], accepted
    over.set()
    thread.join()
    acceptor.close()


def test_the_first_place_that_answers_is_reached_though_it_drops_connections():
    with served(drops=2) as (places, accepted):
        found = reach(lambda: places, b"a secret", Purpose.CONTROL, Claim(3), 5.0, lambda why: False)
        found.say(b"hello", 5.0)
        while not accepted:
            threading.Event().wait(0.01)
    assert accepted[0].claim.rank == 3
    assert FrameSocket(accepted[0].socket, Purpose.CONTROL).receive(5.0) == b"hello"
    for one in (found, accepted[0].socket):
        one.close()


def test_why_no_place_was_reached_names_each_and_the_caller_decides_when_to_end():
    asked = []
    with served() as (places, _), pytest.raises(Unreached) as found:
        reach(
            lambda: places, b"another", Purpose.CONTROL, Claim(3), 5.0, lambda why: asked.append(why) or len(asked) > 1
        )
    first, second = str(found.value).split("; ")
    assert first.endswith("Connection refused") and second.endswith("it rejected this rank's secret")
    assert len(asked) == 2 and isinstance(found.value.error, WrongSecret)

    # A name may lead to several addresses, of which rank 0 listens at some: the rejection is what counts.
    with served() as (places, _), pytest.raises(Unreached) as found:
        reach(lambda: places[::-1], b"another", Purpose.CONTROL, Claim(3), 5.0)
    assert isinstance(found.value.error, WrongSecret)

    def no_name():
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(Unreached) as found:
        reach(no_name, b"a secret", Purpose.CONTROL, Claim(3), 5.0)
    assert isinstance(found.value.error, socket.gaierror)
