"""Connections between ranks, with several listeners in one process as ranks of several hosts."""

import contextlib
import select
import socket
import threading
import time

import pytest

from ring_plugins.core.base.errors import LaunchError, PeerFailed
from ring_plugins.core.base.member import Member
from ring_plugins.core.net import acceptor, sockets
from ring_plugins.core.net import listener as listener_module
from ring_plugins.core.net.auth import Claim, ClientHandshake, Purpose, authenticate
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.sockets import UNIX


def _peer(rank, host, port):
    return Member(rank, host=host, address="127.0.0.1", port=port)


@pytest.fixture
def job():
    """A function that makes the listeners of `count` ranks, with one secret or one for each."""
    made = []

    def make(count, secrets=None, patience=5.0):
        listeners = [Listener("127.0.0.1", patience) for _ in range(count)]
        made.extend(listeners)
        peers = [
            Member(rank, host=f"host{rank}", address="127.0.0.1", port=listener.port)
            for rank, listener in enumerate(listeners)
        ]
        for rank, listener in enumerate(listeners):
            listener.open(rank, peers, secrets[rank] if secrets else "a secret")
        return listeners

    yield make
    for listener in made:
        listener.close()


def ask(listener, peer, tag, seconds=60.0):
    """Poll for a connection until it is there."""
    end = time.monotonic() + seconds
    while (connected := listener.connection(peer, tag)) is None and time.monotonic() < end:
        time.sleep(0.001)
    return connected


def test_a_pair_of_ranks_has_a_connection_for_each_tag(job):
    low, high = job(2)
    ends = [(ask(low, 1, tag), ask(high, 0, tag)) for tag in (0, 7, 1 << 40)]
    for number, (here, there) in enumerate(ends):
        here.sendall(bytes([number]))
        there.setblocking(True)
        assert there.recv(10) == bytes([number])
    for here, there in ends:
        here.close()
        there.close()


def test_many_connections_are_made_at_once(job):
    first, *others = job(20)
    found = {}
    end = time.monotonic() + 60
    while len(found) < len(others) and time.monotonic() < end:
        for rank in range(1, 20):
            if rank not in found and (connected := first.connection(rank, 3)) is not None:
                found[rank] = connected
    assert len(found) == 19
    for rank, connected in found.items():
        connected.close()
        ask(others[rank - 1], 0, 3).close()


def test_connecting_reserves_no_port(job):
    low, high = job(2)
    here, there = ask(low, 1, 0), ask(high, 0, 0)
    assert here.getsockname()[0] == "127.0.0.1"
    assert here.getsockopt(socket.IPPROTO_IP, listener_module._IP_BIND_ADDRESS_NO_PORT) == 1
    here.close()
    there.close()


def test_a_rank_that_has_ended_is_named(job):
    low, high = job(2)
    high.close()
    with pytest.raises(PeerFailed, match="rank 1 on host1 does not listen on 127.0.0.1:"):
        ask(low, 1, 0)


def test_a_rank_of_another_job_is_rejected(job):
    low, _ = job(2, ["one job", "another"])
    with pytest.raises(LaunchError, match="is not rank 1 of this job on host1: it rejected this rank's secret"):
        ask(low, 1, 0)


def test_a_wrong_rank_of_the_job_is_rejected(job):
    low, _, other = job(3)
    low.peers = {0: low.peers[0], 1: low.peers[2], 2: low.peers[2]}
    with pytest.raises(LaunchError, match="is not rank 1 of this job on host2: it does not expect this rank"):
        ask(low, 1, 0)
    assert other.connection(0, 0) is None


def test_silent_clients_start_no_threads_and_block_nobody(job, monkeypatch):
    low, high = job(2)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 600.0)  # the silent ones stay, however slow this machine is
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", high.port))) for _ in range(100)]
        silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        here, there = ask(low, 1, 0), ask(high, 0, 0)
        assert here is not None and there is not None
        assert threading.active_count() <= before
    here.close()
    there.close()


def test_a_connection_that_was_dropped_before_the_answer_is_made_again():
    """A rank drops the oldest connections if too many are unauthenticated."""
    with socket.create_server(("127.0.0.1", 0)) as far:
        low = Listener("127.0.0.1")
        low.open(0, [_peer(0, "a", low.port), _peer(1, "b", far.getsockname()[1])], "a secret")
        for _ in range(2):
            end = time.monotonic() + 60
            while not select.select([far], [], [], 0.001)[0] and time.monotonic() < end:
                assert low.connection(1, 0) is None
            far.settimeout(1)
            far.accept()[0].close()
        low.close()


def test_a_proxy_that_never_lets_anyone_through_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as far:
        far.settimeout(0.02)
        low = Listener("127.0.0.1", patience=0.2)
        low.open(0, [_peer(0, "a", low.port), _peer(1, "b", far.getsockname()[1])], "a secret")

        def try_for_long():
            for _ in range(1000):
                low.connection(1, 0)
                with contextlib.suppress(TimeoutError):
                    far.accept()[0].close()

        with pytest.raises(LaunchError, match="rank 1 on b accepted a connection from rank 0 on a but did not"):
            try_for_long()
        low.close()


def test_a_rank_that_is_held_up_again_and_again_is_no_error(monkeypatch):
    """Each time it resumes, it drops the connections that waited too long."""
    monkeypatch.setattr(listener_module, "_HELD_UP", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as far:
        far.settimeout(60)
        low = Listener("127.0.0.1", patience=0.05)
        low.open(0, [_peer(0, "a", low.port), _peer(1, "b", far.getsockname()[1])], "a secret")
        for _ in range(3):
            end = time.monotonic() + 60
            while not select.select([far], [], [], 0)[0] and time.monotonic() < end:
                assert low.connection(1, 0) is None
            time.sleep(0.03)
            far.accept()[0].close()
            time.sleep(0.01)
            assert low.connection(1, 0) is None
        low.close()


def test_a_rank_that_holds_the_interpreters_lock_is_waited_for():
    """Its kernel accepts the connection, and its process cannot answer. RING_TIMEOUT bounds that, not our patience."""
    with socket.create_server(("127.0.0.1", 0)) as far:
        low = Listener("127.0.0.1", patience=60)
        low.open(0, [_peer(0, "a", low.port), _peer(1, "b", far.getsockname()[1])], "a secret")
        while (1, 0) not in low._attempts or not low._attempts[1, 0].has_reached_host:
            assert low.connection(1, 0) is None
        low._attempts[1, 0]._patience = 0.0
        for _ in range(100):
            assert low.connection(1, 0) is None
            time.sleep(0.001)
        low.close()


def test_a_later_connection_of_a_rank_replaces_an_abandoned_one(job):
    _, high = job(2)
    for _ in range(2):
        before = high._accepted.get((0, 5))
        connected = socket.create_connection(("127.0.0.1", high.port))
        authenticate(connected, ClientHandshake(b"a secret", Purpose.DATA, Claim(0, 1, 5)))
        end = time.monotonic() + 60
        while high._accepted.get((0, 5)) in (before, None) and time.monotonic() < end:
            time.sleep(0.001)
    connected.setblocking(True)
    connected.sendall(b"later")
    there = ask(high, 0, 5)
    there.setblocking(True)
    assert there.recv(10) == b"later"
    there.close()
    connected.close()


def test_closing_a_tag_closes_connections_never_asked_for(job):
    low, high = job(2)
    here = ask(low, 1, 4)
    end = time.monotonic() + 60
    while (0, 4) not in high._accepted and time.monotonic() < end:
        time.sleep(0.001)
    high.close_tag(4)
    here.setblocking(True)
    assert here.recv(1) == b""
    here.close()


def test_missing_ranks_are_named_with_the_direction(job):
    _, middle, _ = job(3)
    with pytest.raises(
        LaunchError, match=r"timed out after RING_START_TIMEOUT waiting for a connection from rank 0 on host0"
    ):
        middle.raise_missing([0, 2])
    with pytest.raises(LaunchError, match=r"rank 2 on host2 accepted a connection from rank 1 on host1 but did not"):
        middle.raise_missing([2])


def test_closing_leaves_no_thread_and_no_port(job):
    (one,) = job(1)
    thread = one._thread
    one.close()
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", one.port))


def test_an_unreachable_host_is_named_even_if_the_start_times_out_first(monkeypatch):
    low = Listener("127.0.0.1", patience=30)
    low.open(0, [_peer(0, "a", low.port), _peer(1, "b", 9)], "a secret")
    monkeypatch.setattr(listener_module._Attempt, "_connects", lambda self, connecting: False)
    assert low.connection(1, 0) is None
    with pytest.raises(LaunchError, match=r"rank 0 on a cannot reach rank 1 on b at 127.0.0.1:9: no answer in 30 s"):
        low.raise_missing([1])
    low.close()


def test_ranks_of_one_host_are_connected_without_a_port():
    listeners = [Listener(UNIX) for _ in range(2)]
    peers = [Member(rank, host="here", address=one.address, port=one.port) for rank, one in enumerate(listeners)]
    try:
        for rank, listener in enumerate(listeners):
            listener.open(rank, peers, "a secret")
        low, high = ask(listeners[0], 1, 3), ask(listeners[1], 0, 3)
        assert low.family == socket.AF_UNIX and {one.port for one in listeners} == {0}
        low.sendall(b"7")
        high.setblocking(True)
        assert high.recv(10) == b"7"
        low.close()
        high.close()
        listeners[1].close()
        with pytest.raises(PeerFailed, match="rank 1 on here does not listen"):
            ask(listeners[0], 1, 4)
    finally:
        for listener in listeners:
            listener.close()


def test_a_unix_socket_of_another_user_counts_for_nobody(monkeypatch):
    ours, theirs = Listener(UNIX, patience=0.2), Listener(UNIX)
    try:
        ours.open(
            0, [Member(rank, host="here", address=one.address) for rank, one in enumerate((ours, theirs))], "a secret"
        )
        monkeypatch.setattr(sockets, "is_same_unix_user", lambda connected: False)
        with pytest.raises(LaunchError, match="another user's process listens there"):
            ask(ours, 1, 3)
    finally:
        ours.close()
        theirs.close()
