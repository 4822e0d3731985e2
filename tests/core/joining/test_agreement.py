"""What a joiner and the members make for each other, with one member that has no communicators."""

import pytest

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.control.liveness import Liveness, LocalPeers
from ring_plugins.core.control.mesh_admission import NotAdmitted
from ring_plugins.core.control.rounds import OFFERS, READY
from ring_plugins.core.joining.agreement import go_on, prepare


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
