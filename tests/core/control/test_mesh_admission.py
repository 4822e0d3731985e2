"""A process joins ranks of several hosts, or all find that it does not: with threads in the place of processes."""

import os
import signal
import socket
import threading
import time

import pytest

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control import mesh_admission
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.mesh_admission import Candidate, MeshAdmission, NotAdmitted, begin_together
from ring_plugins.core.control.rounds import CALL, OFFERS, READY
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.net.listener import Listener
from tests.core.collectives.mortal_ranks import Mortal
from tests.core.control.test_mesh import agreed, at_once, kill, meshes, until

__all__ = ["meshes"]
#: The job grows by the joiner.
NEW, SLOT = 9, 4


@pytest.fixture
def joiner():
    listener = Listener("127.0.0.1")
    peer = Member(NEW, SLOT, "host9", 109, "host9", address="127.0.0.1", port=listener.port)
    listener.open(NEW, [peer], "a secret", accepts_all=True)
    channel = Channel(NEW, 4)
    yield Candidate(NEW, listener, channel.peers), listener, peer, channel
    channel.close()
    listener.close()


def admit(mesh, listener, joiner, at=lambda rank, number: None):
    """A member's part, as core/joining/join.py has it; `at` a round it may raise `NotAdmitted`."""
    peer = joiner[2]
    listener.add(peer)
    admission, joining, told = MeshAdmission(mesh, NEW, 0, mesh.members.view + 1, Wait("ring", None)), [], {}
    try:
        with mesh.admitting(peer):
            at(mesh.rank, CALL)
            admission.call(listener, {"members": list(mesh.members.ranks)})
            at(mesh.rank, OFFERS)
            told = admission.gather(OFFERS, {"from": mesh.rank})
            at(mesh.rank, READY)
            admission.gather(READY, {})
            joining = [NEW]
    except NotAdmitted:
        pass
    assert mesh.agree(Wait("ring", None), joining=joining) is not None
    if NEW not in mesh.joined:
        admission.give_up(listener)
        return None
    mesh.note_joined(NEW)
    return sorted(told)


def join(joiner, at=lambda rank, number: None):
    """The joiner's part in one attempt; returns its mesh."""
    candidate, _, own, channel = joiner
    assert until(lambda: candidate.called() is not None)
    view, call = candidate.called()
    members = call["members"]
    try:
        candidate.gather(view, CALL, members)
        at(NEW, OFFERS)
        assert sorted(candidate.gather(view, OFFERS, members, {"from": NEW})) == [*members, NEW]
        at(NEW, READY)
        candidate.gather(view, READY, members, {})
        decision = candidate.decision(view, members)
    except NotAdmitted:
        candidate.withdraw(view)
        return None
    peers = [Member(rank, rank, f"host{rank}", 100 + rank, f"host{rank}", address="127.0.0.1") for rank in members]
    known = Members(NEW, [*peers, own])
    known.follow(decision.members, view)
    mesh = Mesh(known, channel, None, 2, decision.committed)
    mesh.go_on_from(candidate.backlog, decision)
    return mesh


def attempt(meshes, joiner, at=lambda rank, number: None):
    """What all find."""
    is_called = threading.Event()

    def once_called(rank, number):
        if rank == NEW:
            is_called.set()
        elif number == OFFERS:  # or else the attempt may be over before the joiner has looked
            until(lambda: is_called.is_set() or joiner[0].is_lost)
        at(rank, number)

    members = [lambda one=one: admit(*one, joiner, once_called) for one in meshes]
    return at_once([*members, lambda: join(joiner, once_called)])


def test_a_process_joins_and_takes_part_in_the_next_agreement(meshes, joiner):
    for mesh, _ in meshes:
        mesh.committed = 7
    *found, mesh = attempt(meshes, joiner)
    assert found == [[0, 1, 2, 3, NEW]] * 4
    everyone = [*meshes, (mesh, joiner[1])]
    assert [(one.members.ranks, one.members.view, one.committed) for one, _ in everyone] == [
        ((0, 1, 2, 3, NEW), 1, 7)
    ] * 5
    kill(*meshes[0])
    left = everyone[1:]
    assert all(until(one.interrupts) for one, _ in left)
    assert agreed(left) == [[0]] * 4 and mesh.members.ranks == (1, 2, 3, NEW)
    mesh.close()


def test_one_that_dies_once_it_has_joined_is_lost(meshes, joiner):
    *_, mesh = attempt(meshes, joiner)
    kill(mesh, joiner[1])
    assert all(until(one.interrupts) for one, _ in meshes)
    assert agreed(meshes) == [[NEW]] * 4
    assert not any(one.interrupts() for one, _ in meshes)


@pytest.mark.parametrize("who", [0, 3, NEW])
@pytest.mark.parametrize("number", [OFFERS, READY])
def test_nobody_joins_if_one_cannot_and_then_another_attempt_may(meshes, joiner, who, number):
    def fails(rank, now):
        if (rank, now) == (who, number):
            raise NotAdmitted("no memory")

    assert attempt(meshes, joiner, fails) == [None] * 5
    assert [(mesh.members.ranks, mesh.members.view) for mesh, _ in meshes] == [((0, 1, 2, 3), 1)] * 4
    *found, mesh = attempt(meshes, joiner)
    assert found == [[0, 1, 2, 3, NEW]] * 4 and mesh.members.view == 2
    mesh.close()


@pytest.mark.parametrize("number", [OFFERS, READY])
def test_if_a_member_dies_nobody_joins_and_it_is_lost(meshes, joiner, number):
    def dies(rank, now):
        if (rank, now) == (0, number):
            kill(*meshes[0])
            raise PeerFailed("the end of this process", 0)

    error, *found = attempt(meshes, joiner, dies)
    assert isinstance(error, PeerFailed) and found == [None] * 4
    assert all(until(lambda mesh=mesh: mesh.members.ranks == (1, 2, 3)) for mesh, _ in meshes[1:])
    assert not any(mesh.interrupts() for mesh, _ in meshes[1:])


@pytest.mark.parametrize(("host", "seconds"), [("host9", 0.3), ("host3", 1.5)])
def test_members_wait_for_a_joiner_that_does_not_answer_for_some_time_only(meshes, monkeypatch, host, seconds):
    """Those of other hosts as long as the network may be silent, too, if members of its host are to kill it then."""
    monkeypatch.setattr(mesh_admission, "_PATIENCE", 0.3)
    monkeypatch.setenv("RING_NETWORK_TIMEOUT", "1.5")
    last, began = meshes[3][0], time.monotonic()

    def is_told():
        until(lambda: last.trouble(1, None) is not None)
        seen.append(time.monotonic() - began)
        return last.agree(Wait("ring", None))

    seen = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, port = silent.getsockname()
        joiner = None, None, Member(NEW, SLOT, host, 109, host, address=address, port=port)
        found = at_once([*(lambda one=one: admit(*one, joiner) for one in meshes[:3]), is_told])
    assert found == [None, None, None, []] and seen[0] >= seconds
    assert [(mesh.members.ranks, mesh.members.view) for mesh, _ in meshes] == [((0, 1, 2, 3), 1)] * 4


def test_a_process_joins_that_has_not_heard_of_all_that_they_are_ready_but_of_the_decision(meshes, joiner):
    """As when the network between it and one of them is lost just then."""
    mesh, _ = meshes[3]
    tell = mesh.tell

    def tell_members(rank, body):
        for one in mesh.members.ranks if rank == EVERYONE and body.get("round") == READY else [rank]:
            tell(one, body)

    mesh.tell = tell_members
    *found, joined = attempt(meshes, joiner)
    assert found == [[0, 1, 2, 3, NEW]] * 4 and joined.members.ranks == (0, 1, 2, 3, NEW)
    joined.close()


def test_one_that_a_member_takes_for_lost_hears_that_it_can_never_join(meshes, joiner):
    """As when the network to it was lost in an attempt, and comes back."""
    mesh, candidate = meshes[2][0], joiner[0]
    mesh.consensus.note_silent(NEW)
    attempts = 0
    while not candidate.is_lost and attempts < 10:  # it may hear of the others' trouble first
        assert attempt(meshes, joiner) == [None] * 5
        attempts += 1
    assert candidate.is_lost
    assert [(mesh.members.ranks, mesh.members.view) for mesh, _ in meshes] == [((0, 1, 2, 3), attempts)] * 4


def test_one_that_has_joined_and_does_not_go_on_is_killed(monkeypatch):
    killed = []
    monkeypatch.setattr(mesh_admission, "_PATIENCE", 0.1)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    peers = [Mortal(rank) for rank in range(3)]
    peers[1].is_dead = True
    begin_together(peers, lambda: [0, 2])  # nobody waits for one that has died
    assert not killed
    begin_together(peers, lambda: [0])
    assert killed == [(peers[2].pid, signal.SIGKILL)]
