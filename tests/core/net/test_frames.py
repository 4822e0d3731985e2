"""Messages on an authenticated connection."""

import os
import socket
import struct

import pytest

from ring_plugins.core.net.auth import Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket, from_json, to_json


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
