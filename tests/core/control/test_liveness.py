"""How ranks of one host see each other end: forked children stand for other ranks."""

import contextlib
import fcntl
import os
import signal

import pytest

from ring_plugins.core.base.facts import Facts
from ring_plugins.core.control.liveness import Liveness, LocalPeers


@contextlib.contextmanager
def peer(behave):
    """Another rank as `LocalPeers` of this process, and a function that lets it run `behave`."""
    to_child, go = os.pipe()
    from_child, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = Liveness.create(1)
        os.write(tell, f"{own.address[1]} {own.address[2]}".encode())
        os.read(to_child, 1)
        behave(own)
        os.close(tell)  # says that it is done
        os.read(to_child, 1)
        os._exit(0)
    os.close(tell)
    fd, nbytes = map(int, os.read(from_child, 100).split())
    own = Liveness.create(0)

    def proceed():
        os.write(go, b"x")
        os.read(from_child, 1)

    try:
        yield LocalPeers(own, [Liveness.open((pid, fd, nbytes), 1)], "host1"), proceed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for end in (to_child, go, from_child):
            os.close(end)


def found(peers):
    """What the memory of the other ranks shows."""
    facts = Facts()
    peers.look(facts)
    return facts


def test_a_rank_that_runs_is_alive():
    with peer(lambda own: None) as (peers, _):
        assert found(peers).failure is None
        assert not (found(peers).departed or peers.has_lost_a_process())


def test_peers_read_the_address_of_a_rank_also_when_it_is_gone():
    def behave(own):
        own.announce("here")
        os.kill(os.getpid(), signal.SIGKILL)

    with peer(behave) as (peers, proceed):
        proceed()
        assert peers.others[1].announced == "here"


def test_a_job_that_goes_on_has_a_lost_rank_and_no_failure():
    with peer(lambda own: os.kill(os.getpid(), signal.SIGKILL)) as (peers, proceed):
        peers.may_be_lost = True
        proceed()
        assert found(peers).failure is None and peers.lost() == {1}
        peers.forget([1])
        assert not peers.lost()


def test_a_killed_rank_is_noticed_at_once_with_its_host_and_process():
    with peer(lambda own: os.kill(os.getpid(), signal.SIGKILL)) as (peers, proceed):
        proceed()
        pid = peers.others[1].pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie counts as gone
        failure = found(peers).failure
        assert failure is not None and failure.rank == 1
        assert f"rank 1 (process {pid} on host1) died without reporting an error" in str(failure)
        assert str(failure).endswith("crashed in native code, or called os._exit.")
        assert peers.has_lost_a_process()


def test_a_stopped_rank_is_not_lost():
    with peer(lambda own: None) as (peers, _):
        os.kill(peers.others[1].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, peers.others[1].pid, os.WSTOPPED | os.WNOWAIT)
        assert not peers.others[1].is_lost() and not peers.others[1].has_died()


def test_a_rank_that_was_seen_dead_stays_so_while_another_peer_has_its_lock(monkeypatch):
    with peer(lambda own: os.kill(os.getpid(), signal.SIGKILL)) as (peers, proceed):
        proceed()
        os.waitid(os.P_PID, peers.others[1].pid, os.WEXITED | os.WNOWAIT)
        assert peers.others[1].is_lost()

        def taken(*_):
            raise BlockingIOError

        monkeypatch.setattr(fcntl, "lockf", taken)
        assert peers.others[1].is_lost()


def test_a_rank_that_fails_reports_the_root_cause_once():
    def fail(own):
        own.fail(3, "rank 3 failed: ä" + "x" * 10_000)
        own.fail(1, "a consequence")
        own.leave()

    with peer(fail) as (peers, proceed):
        proceed()
        failure = found(peers).failure
        assert failure is not None and failure.rank == 3
        assert str(failure).startswith("rank 3 failed: ä") and "consequence" not in str(failure)


def test_a_rank_that_leaves_with_a_status_is_no_failure_and_no_lost_process():
    with peer(lambda own: (own.note_exit(3), own.leave())) as (peers, proceed):
        proceed()
        facts = found(peers)
        first = facts.departed[1]
        peers.look(facts)
        assert facts.departed == {1: first} and facts.exit_statuses == {1: 3}
        assert facts.failure is None and not peers.others[1].has_died()
        pid = peers.others[1].pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert peers.others[1].has_died() and not peers.has_lost_a_process()


@pytest.mark.parametrize("end", [lambda own: own.leave(), lambda own: own.fail(0, "first")])
def test_only_the_first_end_counts(end):
    own = Liveness.create(0)
    end(own)
    state = own.state
    own.leave()
    own.fail(0, "second")
    assert own.state == state
