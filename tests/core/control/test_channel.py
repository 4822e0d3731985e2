import socket

from ring_plugins.core.control.channel import ControlConnection
from ring_plugins.core.net.auth import Purpose
from ring_plugins.core.net.frames import FrameSocket


def test_droppable_messages_are_dropped_where_too_much_waits_and_the_rest_is_kept():
    here, there = socket.socketpair()
    sender = ControlConnection(1, FrameSocket(here, Purpose.CONTROL))
    receiver = FrameSocket(there, Purpose.CONTROL)
    for _ in range(100):
        sender.send(b"x" * 100_000, droppable=True)
    sender.send(b"kept")
    messages = []
    while not messages or messages[-1] != b"kept":
        sender.frames.write()
        messages += receiver.read()
    assert 1 < len(messages) < 51  # 4 MiB, and the one that was kept
    sender.frames.close()
    assert not sender.is_open
    receiver.close()
