"""Accepting: unauthenticated clients are bounded in number and time, and each affects only its own connection."""

import contextlib
import os
import resource
import socket
import time

import pytest

from ring_plugins.core.net import acceptor as acceptor_module
from ring_plugins.core.net import sockets
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import (
    Claim,
    ClientHandshake,
    Purpose,
    WrongSecret,
    advance,
)

SECRET = b"a secret"
CLAIM = Claim(3, 0, 1 << 40)


@pytest.fixture
def acceptor():
    made = []

    def make(*args, **options):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        made.append(Acceptor(SECRET, Purpose.DATA, *args, **options))
        made[-1].add(listener)
        return made[-1], listener.getsockname()

    yield make
    for each in made:
        each.close()


def poll(acceptor, until, seconds=5.0):
    found = []
    end = time.monotonic() + seconds
    while not until(found) and time.monotonic() < end:
        found += acceptor.poll(0.02)
    return found


def test_a_silent_client_blocks_no_other_and_is_dropped_in_time(acceptor, monkeypatch):
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_SECONDS", 0.2)
    server, address = acceptor()
    with socket.create_connection(address) as silent:
        poll(server, lambda _: server.waiting() == 1)
        with socket.create_connection(address) as member:
            member.setblocking(False)
            client = ClientHandshake(SECRET, Purpose.DATA, CLAIM)
            (found,) = poll(server, lambda found: advance(member, client) and found)
            assert (found.claim, found.address) == (CLAIM, "127.0.0.1")
            found.socket.close()
        poll(server, lambda _: not server.waiting())
        assert server.waiting() == 0
        silent.settimeout(1)
        while silent.recv(100):
            pass


def test_the_oldest_of_too_many_unauthenticated_clients_are_dropped(acceptor):
    server, address = acceptor(limit=8)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(30)]
        kept = set()

        def are_accepted(_):
            kept.add(server.waiting())
            silent[-1].setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return bool(silent[-1].recv(100))

        poll(server, are_accepted)
        assert server.waiting() == max(kept) == 8
        silent[0].settimeout(2)
        assert len(silent[0].recv(100)) == 27 and silent[0].recv(100) == b""


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"[" * 1024, "é".encode() * 100, b"\0"])
def test_garbage_closes_its_own_connection_at_its_first_wrong_byte(acceptor, said):
    server, address = acceptor()
    with socket.create_connection(address) as intruder, socket.create_connection(address):
        poll(server, lambda _: server.waiting() == 2)
        intruder.sendall(said)
        poll(server, lambda _: server.waiting() == 1)
        assert server.waiting() == 1


def test_a_wrong_secret_is_reported_with_its_address(acceptor):
    reported = []
    server, address = acceptor(on_wrong_secret=reported.append)
    with socket.create_connection(address) as intruder:
        intruder.setblocking(False)
        client = ClientHandshake(b"wrong", Purpose.DATA, CLAIM)

        def is_rejected(_):
            try:
                advance(intruder, client)
            except WrongSecret as error:
                return "rejected this rank's secret" in str(error)

        poll(server, is_rejected)
    assert reported == ["127.0.0.1"]
    assert server.waiting() == 0


def test_other_users_are_rejected_on_unix_sockets(monkeypatch):
    server = Acceptor(SECRET, Purpose.DATA)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0ring_plugins/test/{os.urandom(8).hex()}")
    listener.listen()
    server.add(listener)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX) as intruder:
        intruder.connect(listener.getsockname())
        server.poll(1)
        assert server.waiting() == 0
        assert intruder.recv(10) == b""
        monkeypatch.undo()
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(listener.getsockname())
            server.poll(1)
            assert server.waiting() == 1
    server.close()


def test_strangers_cannot_have_the_table_of_connections_read_again_and_again(acceptor, monkeypatch):
    reads = []
    read = sockets._read
    monkeypatch.setattr(sockets, "_read", lambda *of: reads.append(1) or read(*of))
    monkeypatch.setattr(acceptor_module, "_IDENTIFY_PAUSE", 1e9)
    server, address = acceptor(are_own=sockets.are_same_user)

    def connect(number):
        clients = {}
        for _ in range(number):
            connected = stack.enter_context(socket.create_connection(address))
            connected.setblocking(False)
            clients[connected] = ClientHandshake(SECRET, Purpose.DATA, CLAIM)
        return poll(server, lambda _: all(advance(*client) for client in clients.items()))

    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(address))
        poll(server, lambda _: server.waiting() == 20)
        assert not reads  # before the handshake
        found = connect(1)
        assert (len(found), len(reads)) == (1, 1)
        assert not connect(30)
        assert len(reads) == 1  # the pause after the first read is long here
        server._identify_at = 0.0
        found += server.poll()
        assert (len(found), len(reads)) == (31, 2)
        for one in found:
            one.socket.close()


def test_strangers_who_come_in_great_numbers_do_not_push_out_a_rank(acceptor, monkeypatch):
    """All that have come are looked at then, though others were looked at just before."""
    monkeypatch.setattr(acceptor_module, "_IDENTIFY_PAUSE", 1e9)
    strangers = set()
    server, address = acceptor(are_own=lambda clients: [one.getpeername() not in strangers for one in clients], limit=8)
    with contextlib.ExitStack() as stack:

        def connect():
            connected = stack.enter_context(socket.create_connection(address))
            connected.setblocking(False)
            client = ClientHandshake(SECRET, Purpose.DATA, CLAIM)
            return connected.getsockname(), poll(server, lambda _: advance(connected, client))

        assert len(connect()[1]) == 1  # and now is the pause
        mine, found = connect()
        for _ in range(20):
            who, others = connect()
            strangers.add(who)
            found += others
        assert mine in [one.socket.getpeername() for one in found]
        for one in found:
            one.socket.close()


def test_an_acceptor_out_of_files_pauses_and_resumes(acceptor):
    server, address = acceptor()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(address) as member:
        kept = os.dup(0)
        os.close(kept)
        resource.setrlimit(resource.RLIMIT_NOFILE, (kept, hard))
        try:
            began, spent, polls = time.monotonic(), time.process_time(), 0
            while time.monotonic() - began < 0.3:
                assert server.poll(0.1) == []
                polls += 1
            assert polls < 10 and time.process_time() - spent < 0.2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client = ClientHandshake(SECRET, Purpose.DATA, CLAIM)
        member.setblocking(False)
        (found,) = poll(server, lambda found: advance(member, client) and found)
        found.socket.close()


# Messages ---------------------------------------------------------------------------------------------
