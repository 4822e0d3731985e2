"""The handshake: unauthenticated clients can do no harm."""

import contextlib
import os
import random
import resource
import socket
import time

import pytest

from ring_plugins.core.net import auth
from ring_plugins.core.net.auth import (
    Acceptor,
    Claim,
    ClientHandshake,
    Disconnected,
    Purpose,
    Refused,
    ServerHandshake,
    WrongSecret,
    advance,
    authenticate,
)

SECRET = b"a secret"
CLAIM = Claim(3, 0, 1 << 40)


def both(secret=SECRET, purpose=Purpose.DATA, claim=CLAIM, expects=lambda claim: True):
    """A client's and a server's state machine, the server's of purpose DATA."""
    return ClientHandshake(secret, purpose, claim), ServerHandshake(SECRET, Purpose.DATA, expects)


def exchange(client, server):
    """Move bytes between them until nothing moves; returns what each has sent."""
    sent = {client: b"", server: b""}
    while server.outgoing or client.outgoing:
        for sender, receiver in ((server, client), (client, server)):
            data, sender.outgoing = sender.outgoing, b""
            sent[sender] += data
            for byte in data:  # singly, as a slow network may deliver them
                receiver.feed(bytes([byte]))
    return sent[client], sent[server]


def is_over(handshake):
    return not handshake.missing and not handshake.outgoing


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


def test_both_prove_themselves_in_three_messages_of_fixed_size():
    client, server = both()
    said, answered = exchange(client, server)
    assert is_over(client) and is_over(server)
    assert client.refusal is None and server.refusal is None
    assert server.claim == CLAIM
    assert (len(said), len(answered)) == (75, 27 + 44)


def test_a_wrong_secret_is_refused_on_both_sides_and_learns_nothing():
    client, server = both(secret=b"another")
    _, answered = exchange(client, server)
    assert isinstance(server.refusal, WrongSecret) and isinstance(client.refusal, WrongSecret)
    assert answered[-32:] == bytes(32)  # zeros in place of a proof


def test_a_claim_that_is_not_expected_is_refused_with_a_proof():
    client, server = both(expects=lambda claim: claim.rank != 3)
    exchange(client, server)
    assert isinstance(client.refusal, Refused) and not isinstance(client.refusal, WrongSecret)


def test_a_handshake_of_another_purpose_is_rejected():
    client, server = both(purpose=Purpose.CONTROL)
    with pytest.raises(Disconnected, match="another part of ring_plugins"):
        exchange(client, server)


def test_a_server_that_does_not_know_the_secret_is_detected():
    client, server = both()
    client.feed(server.outgoing)
    client.feed(auth._HEADER.pack(auth.MAGIC, auth.VERSION, Purpose.DATA, 3) + b"\0" + os.urandom(32))
    assert isinstance(client.refusal, WrongSecret)


def test_a_replayed_response_is_rejected():
    client, server = both()
    said, _ = exchange(client, server)
    _, again = both()
    again.feed(said)
    assert isinstance(again.refusal, WrongSecret)


def test_a_changed_claim_or_nonce_breaks_the_proof():
    for at in range(11, 75):
        client, server = both()
        client.feed(server.outgoing)
        response = bytearray(client.outgoing)
        response[at] ^= 1
        server.feed(bytes(response))
        assert isinstance(server.refusal, WrongSecret), at


def test_a_proof_cannot_be_reflected_to_its_author():
    """An attacker with two connections to a rank sends the rank its own proof."""
    _, server = both()
    client = ClientHandshake(SECRET, Purpose.DATA, CLAIM)
    client.feed(server.outgoing)
    response = client.outgoing
    client.feed(auth._HEADER.pack(auth.MAGIC, auth.VERSION, Purpose.DATA, 3) + b"\0" + response[-32:])
    assert isinstance(client.refusal, WrongSecret)


def test_another_release_is_named():
    client, server = both()
    challenge = bytearray(server.outgoing)
    challenge[8] = 9
    with pytest.raises(Disconnected, match="version 9 of the handshake and this process version 1"):
        client.feed(bytes(challenge))


def test_20_000_random_inputs_end_in_disconnected_or_a_refusal():
    chance = random.Random(12)
    client, server = both()
    client.feed(server.outgoing)
    valid, challenge = client.outgoing, server.outgoing
    for _ in range(10_000):
        for make, seed in (
            (lambda: ServerHandshake(SECRET, Purpose.DATA, lambda claim: True), valid),
            (lambda: ClientHandshake(SECRET, Purpose.DATA, CLAIM), challenge),
        ):
            handshake = make()
            data = bytearray(seed if chance.random() < 0.7 else chance.randbytes(len(seed)))
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            data = data[: chance.randrange(len(data) + 1)]
            try:
                while data and handshake.missing:
                    count = min(chance.randrange(1, 80), handshake.missing)
                    handshake.feed(bytes(data[:count]))
                    del data[:count]
            except Disconnected:
                continue
            assert handshake.missing or isinstance(handshake.refusal, WrongSecret)


def test_no_byte_after_the_handshake_is_read():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        client, server = both()
        advance(there, server)
        advance(here, client)
        here.sendall(b"data")
        assert advance(there, server)
        there.sendall(b"more")
        assert advance(here, client)
        assert (there.recv(100), here.recv(100)) == (b"data", b"more")


def test_the_goodbye_of_a_client_that_leaves_before_the_result_is_read():
    for make in (socket.socketpair, _tcp_pair):
        here, there = make()
        with there:
            here.setblocking(False)
            there.setblocking(False)
            client, server = both()
            advance(there, server)
            end = time.monotonic() + 60
            while not client.has_proved and time.monotonic() < end:
                advance(here, client)
            here.sendall(b"goodbye")
            here.close()
            time.sleep(0.01)
            assert advance(there, server)
            assert there.recv(100) == b"goodbye"


def _tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]


def test_waiting_for_a_silent_server_times_out():
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        authenticate(here, ClientHandshake(SECRET, Purpose.DATA, CLAIM), 0.05)


def test_a_truncated_handshake_is_a_closed_connection():
    for count in (0, 1, 11, 26, 27):
        here, there = socket.socketpair()
        with here, there:
            _, server = both()
            there.sendall(server.outgoing[:count])
            there.shutdown(socket.SHUT_WR)
            with pytest.raises(Disconnected, match="it closed the connection"):
                authenticate(here, ClientHandshake(SECRET, Purpose.DATA, CLAIM), 5)


def test_a_silent_client_blocks_no_other_and_is_dropped_in_time(acceptor, monkeypatch):
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", 0.2)
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

        def is_refused(_):
            try:
                advance(intruder, client)
            except WrongSecret as error:
                return "refused this rank's secret" in str(error)

        poll(server, is_refused)
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
            assert polls < 10 and time.process_time() - spent < 0.1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client = ClientHandshake(SECRET, Purpose.DATA, CLAIM)
        member.setblocking(False)
        (found,) = poll(server, lambda found: advance(member, client) and found)
        found.socket.close()


# Messages ---------------------------------------------------------------------------------------------
