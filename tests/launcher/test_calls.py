"""A driver and its ranks, with threads as ranks."""

import contextlib
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.core.base.errors import LaunchError, TimeoutExceeded
from ring_plugins.core.net import acceptor
from ring_plugins.core.net.auth import Claim, ClientHandshake, Purpose, authenticate
from ring_plugins.core.net.frames import FrameSocket
from ring_plugins.launcher import outcomes
from ring_plugins.launcher.calls import Driver, connect_to_driver
from ring_plugins.launcher.outcomes import Outcome


def no_trouble():
    return None


def rank_of(driver, rank, key=None):
    """A rank that answers its call with it."""
    with contextlib.closing(connect_to_driver("127.0.0.1", driver.port, key or driver.key, rank)) as connection:
        packed = connection.receive_call()
        connection.report(Outcome(rank, packed + bytes([rank])))
        connection.wait_for_end()


def stay(driver, rank):
    """A rank that takes its call and never answers."""
    with contextlib.closing(connect_to_driver("127.0.0.1", driver.port, driver.key, rank)) as connection:
        connection.receive_call()
        connection.wait_for_end()


def by_hand(driver, rank, *messages):
    """A rank that sends these messages after the handshake, and ends."""
    connected = socket.create_connection(("127.0.0.1", driver.port))
    authenticate(connected, ClientHandshake(driver.key, Purpose.LAUNCHER, Claim(rank)))
    frames = FrameSocket(connected, Purpose.LAUNCHER)
    for message in messages:
        frames.send(message)
    frames.flush(60)
    frames.receive(60)
    frames.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(20) as threads:
        yield threads


def test_every_rank_gets_the_call_and_reports(pool):
    with Driver() as driver:
        ranks = [pool.submit(rank_of, driver, rank) for rank in range(8)]
        call = os.urandom(3_000_000)
        found = driver.outcomes(call, 8, no_trouble, 60)
    assert {outcome.rank: outcome.result[-1] for outcome in found} == {rank: rank for rank in range(8)}
    assert all(outcome.result[:-1] == call for outcome in found)
    for rank in ranks:
        rank.result(60)


def test_the_driver_says_which_ranks_have_not_been_started_yet(pool, monkeypatch, capsys):
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.2)
    with Driver() as driver:
        ranks = [pool.submit(rank_of, driver, 0)]

        def trouble():
            said.append(capsys.readouterr().err)
            if len(ranks) == 1 and "waiting for rank 1" in said[-1]:
                ranks.append(pool.submit(rank_of, driver, 1))

        said = []
        driver.outcomes(b"call", 2, trouble, 60)
    assert (
        f"ring_plugins: 1 of 2 ranks have come (1 from {socket.gethostname()}), waiting for rank 1 to be started, after"
        in "".join(said)
    )
    for rank in ranks:
        rank.result(60)


def test_silent_clients_block_nobody(pool, monkeypatch):
    with Driver() as driver, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", driver.port)))
        monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 600.0)  # the silent ones stay, however slow this machine is
        rank = pool.submit(rank_of, driver, 0)
        assert len(driver.outcomes(b"call", 1, no_trouble, 60)) == 1
    rank.result(60)


def test_a_rank_that_takes_nothing_blocks_no_other(pool, monkeypatch):
    with Driver() as driver:
        stopped = threading.Event()

        def stop():
            connected = socket.create_connection(("127.0.0.1", driver.port))
            authenticate(connected, ClientHandshake(driver.key, Purpose.LAUNCHER, Claim(1)))
            stopped.wait(60)
            connected.close()

        def time_passes_once_the_other_has_reported():
            said = {rank for rank, connection in driver._connections.items() if connection.has_reported}
            if said == {0} and len(driver._connections) == 2:
                monkeypatch.setattr(outcomes.time, "monotonic", lambda: now() + 60)

        now = time.monotonic
        monkeypatch.setattr(outcomes, "time", SimpleNamespace(monotonic=now))
        pool.submit(stop)
        pool.submit(rank_of, driver, 0)
        with pytest.raises(TimeoutExceeded, match="rank 1 of 2 did not finish"):
            driver.outcomes(os.urandom(30_000_000), 2, time_passes_once_the_other_has_reported, 60)
        stopped.set()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, pickle.dumps((0, "host"))])
def test_nothing_from_an_unauthenticated_client_is_unpickled(pool, said, monkeypatch):
    def loads(data):
        raise AssertionError(data)

    with Driver() as driver, socket.create_connection(("127.0.0.1", driver.port)) as intruder:
        intruder.sendall(said)
        monkeypatch.setattr("ring_plugins.launcher.calls.pickle.loads", loads)
        with pytest.raises(TimeoutExceeded):
            driver.outcomes(b"call", 1, no_trouble, 0.3)


def test_a_rank_with_a_wrong_key_learns_why(pool):
    with Driver() as driver:
        wrong = pool.submit(rank_of, driver, 0, b"x" * 32)
        right = pool.submit(lambda: (wrong.exception(60), rank_of(driver, 0)))
        assert len(driver.outcomes(b"call", 1, no_trouble, 60)) == 1
        with pytest.raises(
            LaunchError, match="rank 0 on .* was rejected by the driver at .*it rejected this rank's secret"
        ):
            wrong.result(60)
    right.result(60)


def test_a_second_process_of_a_rank_is_rejected(pool):
    with Driver() as driver:
        first = pool.submit(stay, driver, 0)
        seconds = []

        def trouble():
            if driver._connections and not seconds:
                seconds.append(pool.submit(rank_of, driver, 0))
            return "the second is over" if seconds and seconds[0].done() else None

        with pytest.raises(LaunchError, match="1 of 2 ranks were never started: the second is over"):
            driver.outcomes(b"call", 2, trouble, 60)
        (second,) = seconds
        with pytest.raises(LaunchError, match="it does not expect this rank"):
            second.result(60)
    first.result(60)


def test_a_rank_that_ends_without_an_outcome_has_failed(pool):
    with Driver() as driver:
        pool.submit(by_hand, driver, 0, b"host7")
        (outcome,) = driver.outcomes(b"call", 1, no_trouble, 60)
    assert (outcome.failure.host, outcome.failure.summary) == (
        "host7",
        "its process or the task around it was ended",
    )


@pytest.mark.parametrize("said", [b"", b"no pickle", pickle.dumps(3), pickle.dumps(Outcome(5))])
def test_an_outcome_that_cannot_be_read_is_a_failure_of_its_rank(pool, said):
    with Driver() as driver:
        pool.submit(by_hand, driver, 0, b"host7", said)
        (outcome,) = driver.outcomes(b"call", 1, no_trouble, 60)
    assert outcome.rank == 0 and "its outcome cannot be read" in outcome.failure.summary


def test_ranks_that_were_never_started_are_counted(pool):
    with Driver() as driver:
        pool.submit(stay, driver, 0)
        with pytest.raises(LaunchError, match=r"2 of 3 ranks were never started: ring run ended"):
            driver.outcomes(b"", 3, lambda: "ring run ended" if driver._connections else None, 60)


def test_the_end_of_the_driver_is_noticed(pool):
    with Driver() as driver:
        waits = pool.submit(rank_of, driver, 0)
        driver.outcomes(b"call", 1, no_trouble, 60)
        assert not waits.done()
    waits.result(60)
    with pytest.raises(LaunchError, match="cannot reach the driver"):
        connect_to_driver("127.0.0.1", driver.port, driver.key, 0)


def test_the_name_of_a_host_has_no_control_characters(pool):
    with Driver() as driver:
        pool.submit(by_hand, driver, 0, b"host\x1b[2J\nring_plugins: all is well")
        (outcome,) = driver.outcomes(b"call", 1, no_trouble, 60)
    assert outcome.failure.host == r"host\x1b[2J\nring_plugins: all is well"
