"""Meeting without MPI, with threads as ranks: who is missing, and who does not belong, is named."""

import concurrent.futures
import socket

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.rendezvous import bootstrap as roll_call
from ring_plugins.core.rendezvous import record as versions
from ring_plugins.core.rendezvous.bootstrap import unreachable


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setenv("RING_START_TIMEOUT", "1")


def meet(size, *guests, secret=""):
    """What became of rank 0 and of each guest, a function of the port: a RollCall, or the text of an error."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def outcome(function):
        try:
            return function()
        except LaunchError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [pool.submit(outcome, lambda: roll_call.host(listener, size, secret))]
        calls += [pool.submit(outcome, lambda guest=guest: guest(port)) for guest in guests]
        return [call.result() for call in calls]


def guest(rank, size, secret=""):
    return lambda port: roll_call.join(rank, size, "127.0.0.1", port, secret)


def stranger(port):
    try:
        connection = socket.create_connection(("127.0.0.1", port))
    except ConnectionRefusedError:  # everyone else was quicker
        return
    with connection as connected:
        connected.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        connected.recv(10)


def test_everyone_meets_and_strangers_do_not_disturb():
    *calls, _ = meet(3, guest(2, 3, "word"), guest(1, 3, "word"), stranger, secret="word")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for round_ in range(3):
            items = list(pool.map(lambda call, n=round_: call.gather([call.rank, n, "x" * 100_000 * call.rank]), calls))
            assert items == [[[rank, round_, "x" * 100_000 * rank] for rank in range(3)]] * 3
    for call in calls:
        call.close()


@pytest.mark.usefixtures("patience")
def test_missing_ranks_are_named():
    at_0, at_2 = meet(4, guest(2, 4))
    assert at_0.startswith(f"ranks 1, 3 of 4 did not come to rank 0 on {socket.gethostname()}, port ")
    assert at_2 == at_0


@pytest.mark.usefixtures("patience")
def test_who_does_not_belong_is_told_why(monkeypatch):
    assert "rank 1 on " in meet(2, guest(1, 2, "wrong"), secret="right")[1]
    assert "was started for a job of 3 ranks, rank 0 for one of 2" in meet(2, guest(1, 3))[1]
    assert "two processes say they are rank 1" in meet(3, guest(1, 3), guest(1, 3))[0]
    theirs = iter([{"ring_plugins": "9.9", "Python": "3.11", "numpy": "1"}])
    ours = versions.own_versions()
    monkeypatch.setattr(roll_call, "own_versions", lambda: next(theirs, ours))
    said = meet(2, guest(1, 2))
    assert said[0] == said[1]
    assert f"ring_plugins is {ours['ring_plugins']} on rank 0" in said[0] and "but 9.9 on rank 1 on " in said[0]


@pytest.mark.usefixtures("patience")
def test_what_keeps_a_rank_from_rank_0_is_said():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"could not reach rank 0: 127.0.0.1:{port} refuses connections"):
            roll_call.join(1, 2, "127.0.0.1", port, "")
    assert "resolves to 127.0.1.1 here" in unreachable_as("127.0.1.1", ConnectionRefusedError())
    assert "no answer from there:5: the host is down, or a firewall" in unreachable_as("10.0.0.1", TimeoutError())


def unreachable_as(address, error):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 5))])
        return unreachable("there", 5, error)
