"""Direct connections among ranks: how losses are seen on them, and agreements over them."""

import contextlib
import errno
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.liveness import LocalPeers
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.auth import Disconnected
from ring_plugins.core.net.listener import Listener


@pytest.fixture
def meshes():
    """Of four ranks, each as if on a host of its own."""
    listeners = [Listener("127.0.0.1") for _ in range(4)]
    peers = [
        Member(rank, rank, f"host{rank}", 100 + rank, f"host{rank}", address="127.0.0.1", port=listener.port)
        for rank, listener in enumerate(listeners)
    ]
    for rank, listener in enumerate(listeners):
        listener.open(rank, peers, "a secret")
    made = [Mesh(Members(rank, peers), Channel(rank, 4), None, 2) for rank in range(4)]
    both = list(zip(made, listeners, strict=True))
    at_once([lambda one=one: one[0].connect(one[1], Wait("ring", None)) for one in both])
    yield both
    for mesh, listener in both:
        leave(mesh)
        listener.close()


def at_once(functions):
    """What each returns, or raises."""
    results = {}

    def call(number):
        try:
            results[number] = functions[number]()
        except PeerFailed as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[number] for number in range(len(functions))]


def leave(mesh):
    """As a process does that ends normally."""
    mesh.close()
    mesh._channel.close()


def kill(mesh, listener):
    """As the kernel does: it closes all that the process had."""
    channel, mesh.is_excluded = mesh._channel, True
    listener.close()
    with mesh._lock:
        channel._closing_since = time.monotonic()  # its thread ends, and can say nothing more
        for frames in channel.peers._frames.values():
            with contextlib.suppress(OSError):
                frames.socket.shutdown(socket.SHUT_RDWR)


def until(happens):
    end = time.monotonic() + 5
    while not happens() and time.monotonic() < end:
        time.sleep(0.005)
    return happens()


def agreed(meshes):
    return at_once([lambda mesh=mesh: mesh.agree(Wait("ring", None)) for mesh, _ in meshes])


def test_all_notice_a_death_and_go_on_until_too_few_are_left(meshes):
    assert not any(mesh.interrupts() for mesh, _ in meshes)
    kill(*meshes[0])
    left = meshes[1:]
    assert all(until(mesh.interrupts) for mesh, _ in left)
    assert "rank 0 (process 100 on host0) died" in str(left[0][0].members_lost())
    left[1][0].committed = 1  # one of them has the confirmation that the others wait for
    assert agreed(left) == [None, [0], None]
    assert [(mesh.members.ranks, mesh.committed, mesh.members.view) for mesh, _ in left] == [
        ((0, 1, 2, 3), 1, 0), ((1, 2, 3), 1, 1), ((0, 1, 2, 3), 1, 0)
    ]  # fmt: skip
    assert [mesh.agree(Wait("ring", None)) for mesh, _ in (left[0], left[2])] == [[0], [0]]  # in the next operation
    assert not any(mesh.interrupts() for mesh, _ in left)
    kill(*meshes[3])
    kill(*meshes[1])
    (error,) = agreed([meshes[2]])
    assert "Training cannot go on with 1 rank: min_ranks=2." in str(error)


def test_a_rank_without_which_the_others_go_on_names_whom_it_could_not_reach(meshes):
    mesh = meshes[0][0]
    for decision, text in (
        (None, "rank 0 on host0 has heard nothing from the other ranks for 6 s: "),
        (object(), "the job goes on without rank 0 on host0, which could not reach the other ranks for 6 s."),
    ):
        assert str(mesh._exclusion(decision)).startswith(text)
    mesh.members.facts.silent |= {1, 2}
    assert "could not reach ranks 1, 2 on host1 and host2 for 6 s" in str(mesh._exclusion(object()))


def test_several_deaths_on_a_host_are_seen_at_once(meshes):
    """The thread finds the lock of one free, and so begins a ballot, which ends its look at one already known dead."""
    mesh, lost = meshes[2][0], list[int]()
    mesh._local_peers = LocalPeers(None, [
        SimpleNamespace(rank=rank, has_died=lambda rank=rank: rank in lost, is_lost=lambda rank=rank: rank in lost)
        for rank in (0, 1)
    ])  # fmt: skip
    kill(*meshes[0])
    kill(*meshes[1])
    assert until(lambda: len(mesh._dying) == 2)
    with mesh._lock:
        first, second = mesh._dying
        lost.append(second)
        mesh._look_at_locks()  # as the script's thread does while it waits
        mesh.consensus.arrive(1, 0)
        lost.append(first)
        mesh.look()
    assert agreed(meshes[2:]) == [[0, 1], [0, 1]]
    assert mesh._channel._thread.is_alive()
    assert [one.members.ranks for one, _ in meshes[2:]] == [(2, 3), (2, 3)]


def test_a_rank_that_leaves_is_not_lost(meshes):
    leave(meshes[2][0])
    others = [meshes[0], meshes[1], meshes[3]]
    assert all(until(lambda mesh=mesh: 2 in mesh.members.facts.left) for mesh, _ in others)
    assert not any(mesh.interrupts() for mesh, _ in others)


@pytest.mark.parametrize(
    "message",
    [
        b"not JSON",
        b"[1, 2, 3]",
        b'["agree", {"view": 1, "kind": "_step", "body": {}}]',
        b'["agree", {"view": 1, "kind": "prepare", "body": {"ballot": 1, "dead": ["x"]}}]',
        b'["agree", {"view": 1, "kind": "decided", "body": {"decision": [[0, 9], 0, [], []]}}]',
        b'["dead", {"rank": [1]}]',
    ],
)
def test_a_rank_that_sends_an_invalid_message_is_left_behind_and_told_so(message, meshes, caplog):
    sender = meshes[3][0]
    sender._channel.peers.send(0, message)
    assert until(meshes[0][0].interrupts), "the others do not notice"
    results = agreed(meshes)
    assert results[:3] == [[3]] * 3
    assert "this side ends" in str(results[3]) or "goes on without rank 3" in str(results[3])
    assert all(mesh._channel._thread.is_alive() for mesh, _ in meshes)
    assert "connection to rank 3 (process 103 on host3): it sent an invalid message" in caplog.text


def test_ranks_that_are_out_of_reach_are_left_behind(meshes):
    for mesh, _ in meshes[:3]:
        mesh.note_unreachable(3)
    assert until(meshes[3][0].interrupts)  # the others have hung up, and live
    results = agreed(meshes)
    assert results[:3] == [[3]] * 3
    assert "this side ends" in str(results[3]) and meshes[3][0].is_excluded
    assert 3 in meshes[0][0].members.facts.silent - meshes[0][0].members.facts.dead


def put_on_one_host(meshes, *ranks):
    for mesh, _ in meshes:
        for rank in ranks:
            mesh.members.add([mesh.members.known[rank]._replace(domain="one host")])


def test_ranks_of_a_host_are_left_behind_together_though_only_one_of_their_connections_has_ended(meshes):
    put_on_one_host(meshes, 2, 3)
    with meshes[0][0]._lock:
        meshes[0][0].note_end(3, Disconnected("no answer", errno.ETIMEDOUT))
    assert all(until(mesh.interrupts) for mesh, _ in meshes if mesh.rank != 1)
    results = agreed(meshes)
    assert results[:2] == [[2, 3]] * 2
    assert all(isinstance(result, PeerFailed) for result in results[2:]) and meshes[2][0].is_excluded


def test_a_rank_that_the_others_have_left_out_hears_of_it_from_them(meshes):
    """Though its own connections stand."""
    with meshes[0][0]._lock:
        meshes[0][0].consensus.note_silent(3)
    assert agreed(meshes[:3]) == [[3]] * 3
    left_out = meshes[3][0]
    assert until(left_out.interrupts) and left_out.must_agree() and not left_out.consensus.lost()
    assert "another rank has lost a rank" in str(left_out.members_lost())
    for _ in range(2):  # whatever its script does then
        assert "the job goes on without rank 3 on host3" in str(agreed(meshes[3:])[0])
        assert left_out.interrupts() and left_out.is_excluded
    assert not any(mesh.interrupts() for mesh, _ in meshes[:3])


def test_a_failure_of_a_rank_that_has_been_left_out_does_not_end_the_others(meshes):
    detectors, heard = [FailureDetector(mesh.members, None, mesh._channel) for mesh, _ in meshes], set()
    for detector, (mesh, _) in zip(detectors, meshes, strict=True):
        detector.go_on_with(mesh)
        mesh._channel.on("later", lambda sender, body, rank=mesh.rank: heard.add(rank), at_once=True)
    with meshes[0][0]._lock:
        meshes[0][0].consensus.note_silent(3)
    agreed(meshes[:3])
    detectors[3].fail(ValueError("different operations"))
    meshes[3][0]._channel.tell(EVERYONE, "later")
    assert until(lambda: heard >= {1, 2})
    assert [detector.failure() for detector in detectors[:3]] == [None] * 3
    detectors[2].fail(ValueError("no data"))
    assert until(detectors[0].failure) and "no data" in str(detectors[0].failure())


def test_too_few_may_be_left_after_normal_ends(meshes):
    """Whoever waits for those that have ended finds that."""
    for mesh, _ in meshes[1:]:
        leave(mesh)
    assert until(lambda: all(rank in meshes[0][0].members.facts.left for rank in (1, 2, 3)))
    assert agreed(meshes[:1]) == [[]]
