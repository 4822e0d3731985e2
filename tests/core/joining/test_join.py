"""Processes join a job on several hosts: where members find a loss there, and when a joiner gives up."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.liveness import Liveness, LocalPeers
from ring_plugins.core.control.mesh_admission import NotAdmitted
from ring_plugins.core.control.rounds import OFFERS, READY
from ring_plugins.core.joining import join as joining
from ring_plugins.core.joining.join import go_on, prepare
from ring_plugins.core.rendezvous.slots import OwnSlot

JOINER = Member(9, 1, "host1", 4711, "host1", "node", "127.0.0.1", 1, (4711, 5, 100))


@pytest.mark.parametrize(("waiting", "where"), [([], []), ([JOINER], ["here"])])
def test_a_loss_is_found_where_the_members_find_it_that_have_the_result(monkeypatch, waiting, where):
    """If nobody waits, they go on to their next operation: until then, all see the ranks from before."""
    found = []
    monkeypatch.setattr(joining, "_waiting_here", lambda world: [])
    elastic = SimpleNamespace(
        mesh=SimpleNamespace(pending=[2]), pending=frozenset(), agree=lambda: found.append("here")
    )
    members = SimpleNamespace(shards=3, taken_slots={0, 2})
    peers = SimpleNamespace(own=Liveness.create(0))
    communicator = SimpleNamespace(all_gather_object=lambda own, purpose: [own, waiting, []])
    world = SimpleNamespace(elastic=elastic, members=members, communicator=communicator, local_peers=peers)
    monkeypatch.setattr(joining, "current", lambda: world)
    assert joining.admit("here", lost=True, added=False) == ()
    assert found == where


def test_one_that_has_just_joined_and_is_alone_lets_another_join_and_then_hears_that_the_state_is_lost(monkeypatch):
    """`transfer_state` says so on both."""
    waiting = [[], [JOINER]]
    monkeypatch.setattr(joining, "_waiting_here", lambda world: [])
    monkeypatch.setattr(joining, "_admit_one", lambda world, joiner, _: not world.world_ranks.append(joiner.rank))
    world: Any = SimpleNamespace(
        elastic=SimpleNamespace(mesh=SimpleNamespace(pending=None), pending=frozenset()),
        members=SimpleNamespace(shards=3, taken_slots={2}),
        communicator=SimpleNamespace(all_gather_object=lambda own, purpose: [own, waiting.pop()]),
        local_peers=SimpleNamespace(own=Liveness.create(0)),
        world_rank=8,
        world_ranks=[8],
    )
    assert joining._admit_all(world, joining._JoinBarrier("here", True, False, [8])) == (8, 9)


def test_a_joiner_that_counts_as_lost_ends_since_it_could_never_join(monkeypatch):
    """Its supervisor starts another process then, which has another number."""

    def is_rejected(*_):
        raise NotAdmitted("it is lost")

    candidate = SimpleNamespace(is_lost=True, withdraw=lambda view: None)
    monkeypatch.setattr(joining, "Candidate", lambda rank, listener, peers: candidate)
    monkeypatch.setattr(joining, "_wait_for_invitation", lambda *_: (1, {}))
    monkeypatch.setattr(joining, "_join_at", is_rejected)
    world = SimpleNamespace(
        world_rank=9,
        shard=(1, 3),
        own_slot=SimpleNamespace(wait_to_join=lambda own: None),
        listener=SimpleNamespace(address="127.0.0.1", port=1),
        channel=SimpleNamespace(peers=None),
        local_peers=SimpleNamespace(own=SimpleNamespace(address=(1, 2, 3), announce=lambda text: None)),
        members=SimpleNamespace(here=JOINER),
    )
    monkeypatch.setattr(joining, "current", lambda: world)
    with pytest.raises(PeerFailed, match=r"this process \(process \d+ on host1\).* for 6 s, and count it"):
        joining.join("here", "let it join")


class Caller:
    """A `Candidate` that nobody calls."""

    def called(self):
        return None


def test_it_says_what_it_waits_for_and_waits_until_no_member_is_left(monkeypatch):
    """It begins to say so after some seconds."""
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.0)
    said, found = [], []
    monkeypatch.setattr(progress_line.logger, "info", said.append)
    memory, member = np.zeros(OwnSlot.nbytes(2), np.uint8), Liveness.create(0)
    monkeypatch.setattr(Liveness, "has_died", lambda one: False)  # this process has the lock
    OwnSlot(memory, 0, has_supervisor=False).take_part(Member(0, liveness=member.address))
    world: Any = SimpleNamespace(
        own_slot=OwnSlot(memory, 1, has_supervisor=False), elastic=SimpleNamespace(is_added=False), shard=(1, 2)
    )
    wait = lambda: found.append(joining._wait_for_invitation(world, Caller(), "finish the epoch"))  # noqa: E731
    thread = threading.Thread(target=wait)
    thread.start()
    while not said and thread.is_alive():
        time.sleep(0.01)
    assert "takes the place of rank 1, waits for rank 0 to finish the epoch, after 0 s." in said[0]
    assert not found
    member.leave()
    thread.join(20)
    assert found == [None]


def test_it_says_for_whom_it_waits_and_what_they_have_to_do():
    members, until = [Liveness.create(rank) for rank in (0, 2)], "call TrainingState.commit()"
    assert joining._what_it_waits_for(members, until) == "ranks 0, 2 to call TrainingState.commit()"
    with members[0].ready_to_admit():
        assert joining._what_it_waits_for(members, until) == "rank 2 to call TrainingState.commit(), as rank 0 has"
        with members[1].ready_to_admit():
            assert joining._what_it_waits_for(members, until) == "ranks 0, 2 to let it join"
    assert joining._what_it_waits_for([], until) == "the other ranks to call TrainingState.commit()"


class Elastic:
    """Keeps who has joined."""

    def __init__(self):
        self.pending, self.joined = frozenset({5}), []

    def follow_joined(self, joined):
        self.joined += joined


class World:
    """What of a member's world an agreement asks for."""

    world_rank, is_joining, made, secret = 0, False, 3, b"hush"
    failure_detector = None

    def __init__(self, own):
        self.members, self.elastic, self.local_peers = Members(0, [own]), Elastic(), None
        self.join_info = []

    def recovering_communicators(self):
        return {}

    def write_join_info(self):
        self.join_info.append(self.members.told_of_slots())


@pytest.fixture
def liveness():
    return Liveness.create(9)


def member(rank, slot, liveness=None):
    return Member(rank, slot, "host", 100 + rank, "domain", "domain", liveness=liveness)


def test_a_member_tells_of_the_job_and_goes_on_with_the_joiner(liveness):
    world, joiner, rounds = World(member(0, 0)), member(9, 1, liveness.address), []
    world.local_peers = LocalPeers(Liveness.create(0), [])

    def gather(number, payload):
        rounds.append(number)
        told = {"place": "here", "descriptors": {}}
        return {0: payload, 9: told} if number == OFFERS else {0: {}, 9: {}}

    agreement = prepare(world, [world.members.here], joiner, "here", gather)
    assert rounds == [OFFERS, READY] and agreement.told[0]["secret"] == "hush" and agreement.told[0]["pending"] == [5]
    world.members.add([joiner])
    go_on(world, agreement)
    assert world.elastic.joined == [9] and list(world.local_peers.others) == [9]
    assert world.members.past_shards == {1, 2} and len(world.join_info) == 1


def test_nobody_joins_whose_memory_is_gone_already():
    with pytest.raises(NotAdmitted, match="rank 0 "):
        prepare(World(member(0, 0)), [member(0, 0)], member(9, 1, (1, 2, 16384)), "here", lambda *_: {})
