"""The handshake: unauthenticated clients can do no harm."""

import os
import random
import socket
import time

import pytest

from ring_plugins.core.net import auth
from ring_plugins.core.net.auth import (
    Claim,
    ClientHandshake,
    Disconnected,
    Purpose,
    Rejected,
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


def test_both_prove_themselves_in_three_messages_of_fixed_size():
    client, server = both()
    said, answered = exchange(client, server)
    assert is_over(client) and is_over(server)
    assert client.rejection is None and server.rejection is None
    assert server.claim == CLAIM
    assert (len(said), len(answered)) == (75, 27 + 44)


def test_a_wrong_secret_is_rejected_on_both_sides_and_learns_nothing():
    client, server = both(secret=b"another")
    _, answered = exchange(client, server)
    assert isinstance(server.rejection, WrongSecret) and isinstance(client.rejection, WrongSecret)
    assert answered[-32:] == bytes(32)  # zeros in place of a proof


def test_a_claim_that_is_not_expected_is_rejected_with_a_proof():
    client, server = both(expects=lambda claim: claim.rank != 3)
    exchange(client, server)
    assert isinstance(client.rejection, Rejected) and not isinstance(client.rejection, WrongSecret)


def test_a_handshake_of_another_purpose_is_rejected():
    client, server = both(purpose=Purpose.CONTROL)
    with pytest.raises(Disconnected, match="another part of ring_plugins"):
        exchange(client, server)


def test_a_server_that_does_not_know_the_secret_is_detected():
    client, server = both()
    client.feed(server.outgoing)
    client.feed(auth._HEADER.pack(auth.MAGIC, auth.VERSION, Purpose.DATA, 3) + b"\0" + os.urandom(32))
    assert isinstance(client.rejection, WrongSecret)


def test_a_replayed_response_is_rejected():
    client, server = both()
    said, _ = exchange(client, server)
    _, again = both()
    again.feed(said)
    assert isinstance(again.rejection, WrongSecret)


def test_a_changed_claim_or_nonce_breaks_the_proof():
    for at in range(11, 75):
        client, server = both()
        client.feed(server.outgoing)
        response = bytearray(client.outgoing)
        response[at] ^= 1
        server.feed(bytes(response))
        assert isinstance(server.rejection, WrongSecret), at


def test_a_proof_cannot_be_reflected_to_its_author():
    """An attacker with two connections to a rank sends the rank its own proof."""
    _, server = both()
    client = ClientHandshake(SECRET, Purpose.DATA, CLAIM)
    client.feed(server.outgoing)
    response = client.outgoing
    client.feed(auth._HEADER.pack(auth.MAGIC, auth.VERSION, Purpose.DATA, 3) + b"\0" + response[-32:])
    assert isinstance(client.rejection, WrongSecret)


def test_another_release_is_named():
    client, server = both()
    challenge = bytearray(server.outgoing)
    challenge[8] = 9
    with pytest.raises(Disconnected, match="version 9 of the handshake and this process version 1"):
        client.feed(bytes(challenge))


def test_20_000_random_inputs_end_in_disconnected_or_a_rejection():
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
            assert handshake.missing or isinstance(handshake.rejection, WrongSecret)


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
