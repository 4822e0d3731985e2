"""Messages on an authenticated connection."""

import os
import socket
import struct

import pytest

from ring_plugins.core.net import frames as frames_module
from ring_plugins.core.net.auth import Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket, from_json, to_json


def frames(purpose=Purpose.CONTROL):
    here, there = socket.socketpair()
    return FrameSocket(here, purpose), FrameSocket(there, purpose)


@pytest.mark.parametrize(("seconds", "milliseconds"), [(6, 1000), (3, 1000), (60, 10_000), (900, 120_000)])
def test_what_another_host_does_not_acknowledge_is_soon_repeated_where_linux_can(monkeypatch, seconds, milliseconds):
    """So a network that is back within RING_NETWORK_TIMEOUT is found to be; tests/hosts cuts one.

    Every second for 60 s would be too many repeats: Linux would end the connection after 15 s.
    """
    monkeypatch.setenv("RING_NETWORK_TIMEOUT", str(seconds))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        try:
            default = connected.getsockopt(socket.IPPROTO_TCP, 44)
        except OSError:
            pytest.skip("Linux knows TCP_RTO_MAX_MS since 6.15")
        FrameSocket(connected, Purpose.CONTROL)
        assert connected.getsockopt(socket.IPPROTO_TCP, 44) == min(milliseconds, default)


def test_tcp_keeps_its_own_times_where_it_may_repeat_data_only_a_few_times(monkeypatch, tmp_path):
    """Some clusters let Linux end a connection after 5 repeats. Repeating every second would use these up in 4 s."""
    allowed = tmp_path / "tcp_retries2"
    allowed.write_text("5\n")
    monkeypatch.setattr(frames_module, "_REPEATS_AT_MOST", allowed)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        try:
            default = connected.getsockopt(socket.IPPROTO_TCP, 44)
        except OSError:
            pytest.skip("Linux knows TCP_RTO_MAX_MS since 6.15")
        FrameSocket(connected, Purpose.CONTROL)
        assert connected.getsockopt(socket.IPPROTO_TCP, 44) == default


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


def test_the_kernel_ends_a_connection_whose_other_host_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = FrameSocket(socket.create_connection(listener.getsockname()), Purpose.CONTROL)
    here.end_when_silent(2.5)
    assert here.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
    assert here.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    here.close()
