"""Bootstrap without MPI, with threads as ranks: errors name missing and unexpected ranks."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import time

import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.interfaces import own_addresses
from ring_plugins.core.net import acceptor, sockets
from ring_plugins.core.net.acceptor import Acceptor
from ring_plugins.core.net.auth import Claim, ClientHandshake, Disconnected, Purpose, authenticate
from ring_plugins.core.net.frames import FrameSocket, reach, to_json
from ring_plugins.core.rendezvous import bootstrap, record


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "1")


def meet(size, *others, secret="", at="127.0.0.1"):
    """The outcome of rank 0 and of each of `others`, functions of the port: a Bootstrap, or the text of an error."""
    listener = socket.create_server((at, 0))
    port = listener.getsockname()[1]

    def outcome(function):
        try:
            return function()
        except LaunchError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(others) + 1) as pool:
        futures = [pool.submit(outcome, lambda: bootstrap.serve(listener, size, secret))]
        futures += [pool.submit(outcome, lambda other=other: other(port)) for other in others]
        return [future.result() for future in futures]


def rank(number, size, secret=""):
    return lambda port: bootstrap.join(number, size, "127.0.0.1", port, secret)


def intruder(*said):
    def connect(port):
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as connected:
            for part in said:
                connected.sendall(part)
            connected.settimeout(5)
            while connected.recv(100):
                pass

    return connect


def member_that_sends(said, secret=""):
    """An authenticated client, as anyone can be without RING_SECRET, that sends nonsense."""

    def connect(port):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as connected:
            authenticate(connected, ClientHandshake(secret.encode(), Purpose.BOOTSTRAP, Claim(1)))
            frames = FrameSocket(connected, Purpose.BOOTSTRAP)
            frames.send(said)
            frames.flush(1)
            connected.settimeout(5)
            while connected.recv(100):
                pass

    return connect


def later(other, seconds):
    def wait(port):
        time.sleep(seconds)
        return other(port)

    return wait


def test_all_ranks_meet_and_intruders_do_not_disturb():
    intruders = [intruder(b"GET / HTTP/1.1\r\n\r\n" * 10), intruder(b"[" * 1024), intruder(b"\xff" * 4096)]
    *ranks, _, _, _ = meet(3, later(rank(2, 3, "word"), 0.1), rank(1, 3, "word"), *intruders, secret="word")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for round_ in range(3):
            items = list(pool.map(lambda one, n=round_: one.gather([one.rank, n, "x" * 100_000 * one.rank]), ranks))
            assert items == [[[rank, round_, "x" * 100_000 * rank] for rank in range(3)]] * 3
    for one in ranks:
        one.close()


def test_silent_connections_do_not_delay_the_start(monkeypatch):
    """They may be silent for an hour; a start that waited for one would run into this test's limit."""
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 3600.0)
    with contextlib.ExitStack() as stack:

        def silent(port):
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        *ranks, _ = meet(2, later(rank(1, 2, "word"), 0.3), silent, secret="word")
        for one in ranks:
            one.close()


@pytest.mark.usefixtures("patience")
def test_missing_ranks_are_named():
    at_0, at_2 = meet(4, rank(2, 4))
    assert at_0.startswith(f"ranks 1, 3 of 4 did not connect to rank 0 on {socket.gethostname()}, port ")
    assert at_2 == at_0


def test_a_wrong_secret_ends_the_rank_that_has_it_and_not_the_start(capsys):
    wrong = rank(1, 2, "wrong")
    at_0, at_wrong, again, at_1 = meet(2, wrong, wrong, later(rank(1, 2, "right"), 0.3), secret="right")
    for said in (at_wrong, again):
        assert "rank 0 rejected this rank's secret: set RING_SECRET alike on all ranks" in said
    assert capsys.readouterr().err.count("refused a connection from 127.0.0.1 that does not know this job's") == 1
    assert [at_0.rank, at_1.rank] == [0, 1]
    for one in (at_0, at_1):
        one.close()


@pytest.mark.usefixtures("patience")
def test_rank_0_mentions_rejected_connections_while_it_waits(capsys, monkeypatch):
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.3)
    at_0, _, _ = meet(2, rank(1, 2, "wrong"), rank(1, 2, ""), secret="right")
    expected = "rejected 2 connections with another secret, the last from 127.0.0.1 (is RING_SECRET the same on all"
    assert expected in at_0
    said = capsys.readouterr().err
    assert "rank 1 to connect to port" in said and expected in said
    assert f"1 of 2 ranks have come (1 from {socket.gethostname()}), waiting for rank 1 to connect" in said


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("said", [b"", b"[" * 60_000, b"{}", b'["join", 1]', b'["join", {"size": "x"}]', b'["gather"]'])
def test_without_a_secret_an_unknown_message_ends_its_own_connection_only(said):
    at_0, _, at_1 = meet(2, member_that_sends(said), later(rank(1, 2), 0.2))
    assert at_1.rank == 1
    for one in (at_0, at_1):
        one.close()


def test_nobody_can_send_much_before_it_has_joined():
    at_0, _, at_1 = meet(2, member_that_sends(b" " * 100_000), later(rank(1, 2), 0.2))
    for one in (at_0, at_1):
        one.close()


@pytest.mark.usefixtures("patience")
def test_ranks_that_do_not_fit_learn_why(monkeypatch):
    assert "was started for a job of 3 ranks, rank 0 for one of 2" in meet(2, rank(1, 3))[1]
    assert "two processes claim to be rank 1" in meet(3, rank(1, 3), rank(1, 3))[0]
    assert "claims to be rank 5 of 2" in meet(2, rank(5, 2))[1]
    theirs = iter([{"ring_plugins": "9.9", "Python": "3.11", "numpy": "1"}])
    ours = record.own_versions()
    monkeypatch.setattr(bootstrap, "own_versions", lambda: next(theirs, ours))
    said = meet(2, rank(1, 2))
    assert said[0] == said[1]
    assert f"ring_plugins is {ours['ring_plugins']} on rank 0" in said[0] and "but 9.9 on rank 1 on " in said[0]


EVIL = "h\x1b]0;title\x07\x1b[2J\nring_plugins: all ranks are up, run this\u202e" + "x" * 9999


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("versions", [record.own_versions(), {"ring_plugins": EVIL}])
@pytest.mark.parametrize("size", [2, 9])
def test_what_a_stranger_says_is_shown_as_what_it_is(capsys, monkeypatch, size, versions):
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.2)
    said = member_that_sends(to_json(["join", {"size": size, "host": EVIL, "versions": versions}]))
    (at_0, _) = meet(3 if size == 2 and versions == record.own_versions() else 2, said)
    for text in (at_0, *capsys.readouterr().err.splitlines()):
        assert text.isprintable() and len(text) < 1500
    assert r"h\x1b]0;title\x07\x1b[2J\nring_plugins: all" in at_0


def test_what_a_stranger_says_in_the_place_of_rank_0_is_shown_as_what_it_is():
    for message in (["abort", EVIL], ["gathered", [EVIL, [{"host": EVIL}]]]):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            frames = FrameSocket(theirs, Purpose.BOOTSTRAP)
            frames.send(to_json(message))
            frames.flush(1)
            try:
                text = str(bootstrap._answer(FrameSocket(ours, Purpose.BOOTSTRAP), "rank 0"))
            except LaunchError as error:
                text = str(error)
                assert len(text) < 5000
            assert text.isprintable() and "ring_plugins: all ranks" in text


def test_names_of_hosts_are_without_control_characters_on_all_ranks(monkeypatch):
    ranks = meet(2, rank(1, 2))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda one: one.gather(["host\x1b[2J", one.rank, {"x": "\r\n"}]), ranks))
    assert found == [[[r"host\x1b[2J", rank, {"x": r"\r\n"}] for rank in range(2)]] * 2
    for one in ranks:
        one.close()


def test_a_rank_that_ends_while_the_ranks_start_is_named_to_all():
    at_0, at_1, at_2 = meet(3, rank(1, 3), rank(2, 3))
    at_2.close()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(at_1.gather, 1)
        with pytest.raises(LaunchError, match="rank 2 on .* ended while the ranks were starting up"):
            at_0.gather(0)
        with pytest.raises(LaunchError, match="rank 2 on .* ended while the ranks were starting up"):
            waits.result()
    at_0.close()
    at_1.close()


def test_the_end_of_rank_0_is_named():
    at_0, at_1 = meet(2, rank(1, 2))
    at_0.close()
    with pytest.raises(LaunchError, match=r"rank 1 on .* lost rank 0 on 127.0.0.1 while starting up"):
        at_1.gather(1)
    at_1.close()


@pytest.mark.usefixtures("patience")
def test_an_unreachable_rank_0_is_explained():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"could not reach rank 0: 127.0.0.1:{port} refuses connections"):
            bootstrap.join(1, 2, "127.0.0.1", port, "")
    with socket.create_server(("127.0.0.1", 0)) as other, concurrent.futures.ThreadPoolExecutor() as pool:
        joining = pool.submit(bootstrap.join, 1, 2, "127.0.0.1", other.getsockname()[1], "")
        other.settimeout(0.1)
        while not joining.done():
            with contextlib.suppress(OSError), other.accept()[0] as connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")
        with pytest.raises(LaunchError, match=r"does not answer as rank 0 of a ring_plugins job \(it does not speak"):
            joining.result()
    assert "resolves to 127.0.1.1 here" in unreachable_as("127.0.1.1", ConnectionRefusedError())
    assert "no answer from there:5: the host is down, or a firewall" in unreachable_as("10.0.0.1", TimeoutError())


def unreachable_as(address, error):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 5))])
        return bootstrap.unreachable("there", 5, error)


def test_many_ranks_join_at_once_and_gather():
    size = 60
    ranks = meet(size, *(rank(number, size, "word") for number in range(1, size)), secret="word")
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        assert list(pool.map(lambda one: one.gather(one.rank), ranks)) == [list(range(size))] * size
    for one in ranks:
        one.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_of_the_host_neither_joins_nor_serves_a_job_without_a_secret(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "20")

    def as_another_user(function):
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                function()
            finally:
                os._exit(0)
        return pid

    joins = to_json(["join", {"size": 2, "host": "x", "versions": record.own_versions()}])
    "".encode("idna")  # imported here: another user may not read this Python's files

    def other_joins(port, host="127.0.0.1", source="127.0.0.1"):
        def connect(address):
            connecting = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            connecting.bind((source, 0))
            connecting.connect((host, address[1]))
            return connecting

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "create_connection", connect)
            pid = as_another_user(lambda: member_that_sends(joins)(port))
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    own = next(iter(own_addresses()), "127.0.0.3")
    for address in ("127.0.0.1", ""):  # where rank 0 listens
        for to in [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", own), ("::ffff:127.0.0.1", f"::ffff:{own}"), (own, own)]:
            if address == "" or to[0] != own:
                at_0, _, at_1 = meet(2, lambda port, to=to: other_joins(port, *to), later(rank(1, 2), 0.6), at=address)
                assert at_1.rank == 1
                for one in (at_0, at_1):
                    one.close()
    for secret in (b"", b"another"):  # with another, it says that this rank's is wrong
        listener = socket.create_server(("127.0.0.1", 0))

        def answer_everyone(listener=listener, secret=secret):
            acceptor = Acceptor(secret, Purpose.BOOTSTRAP)
            acceptor.add(listener)
            while True:
                acceptor.poll(1.0)

        pid = as_another_user(answer_everyone)
        port = listener.getsockname()[1]
        listener.close()
        try:
            with pytest.raises(Disconnected, match="another user's process listens there"):
                reach(lambda: [("127.0.0.1", port)], b"", Purpose.BOOTSTRAP, Claim(1), 0.5, check=bootstrap.check_user)  # noqa: B023
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_without_a_secret_ranks_of_a_host_do_not_meet_if_the_kernel_does_not_tell_whose_they_are(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "20")
    monkeypatch.setattr(sockets, "_TABLES", ("/proc/none",))
    for number, said in enumerate(meet(2, rank(1, 2))):
        assert said.startswith(f"rank {number} on {socket.gethostname()} cannot tell whether the process at the other")
        assert "/proc/none cannot be read (No such file or directory). Set RING_SECRET to the same random" in said
    monkeypatch.setenv("RING_SECRET", "a secret")
    for one in meet(2, rank(1, 2, "a secret"), secret="a secret"):
        one.close()


def test_whoever_listens_at_the_ipv6_address_of_localhost_is_not_taken_for_rank_0(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "20")
    with socket.socket(socket.AF_INET6) as stranger:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        try:
            stranger.bind(("::1", port))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        stranger.listen()
        resolve = socket.getaddrinfo

        def both(name, *of, **options):
            found = resolve("127.0.0.1" if name == "localhost" else name, *of, **options)
            six = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))]
            return six + found if name == "localhost" and socket.AF_INET not in (*of, *options.values()) else found

        monkeypatch.setattr(socket, "getaddrinfo", both)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            at_0 = pool.submit(bootstrap.serve, listener, 2, "")
            for one in (bootstrap.join(1, 2, "localhost", port, ""), at_0.result()):
                one.close()
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_rank_0_sends_many_similar_payloads_in_a_tenth_of_their_bytes():
    payloads = [[f"host{rank}.cluster.example.org", rank, ["eth0", "10.0.0.1", 25000]] for rank in range(1024)]
    packed = bootstrap._pack(["gathered", payloads])
    assert len(packed) < len(to_json(payloads)) / 6
    assert bootstrap._unpack(packed) == ["gathered", payloads]
    assert bootstrap._pack(["gathered", []]) == b'["gathered",[]]'


@pytest.mark.parametrize(
    "data", [b"z", b"zz", b"z" + bytes(50), bootstrap._ZLIB + b"\x78\x01 not deflate", b"", b"\xff"]
)
def test_what_is_not_a_message_of_rank_0_is_rejected(data):
    with pytest.raises(Disconnected):
        bootstrap._unpack(data)


def test_large_payloads_reach_every_rank():
    def talk(one):
        with contextlib.closing(one):
            return one.gather([one.rank, "x" * 30_000])

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(talk, meet(3, rank(1, 3), rank(2, 3))))
    assert found == [[[rank, "x" * 30_000] for rank in range(3)]] * 3
