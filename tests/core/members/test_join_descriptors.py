"""What members and joiners tell each other before a join: how it is checked, and what follows from it."""

import json

import pytest

from ring_plugins.core.base.member import Member
from ring_plugins.core.control.liveness import Liveness
from ring_plugins.core.control.mesh_admission import NotAdmitted
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.members.join_descriptors import (
    DifferentScript,
    Invitation,
    descriptor_of,
    joiners_here,
    map_descriptors,
)

#: Two members and a joiner, which takes slot 1.
INVITATION = Invitation([Member(0, 0), Member(4, 1), Member(2, 2)], [4])


class Slots:
    def __init__(self, *waiting):
        self._waiting = waiting

    def waiting(self):
        return self._waiting


def test_ranks_are_in_the_order_of_slots():
    assert INVITATION.ranks == [0, 4, 2]


def test_a_process_that_waits_is_found_by_what_it_has_announced_under_the_process_that_the_kernel_knows(monkeypatch):
    monkeypatch.setattr(Liveness, "has_died", lambda _: False)  # a process is not kept from its own lock
    liveness = Liveness.create(4)
    waiting = Member(4, 1, liveness=liveness.address)
    gone = Member(5, 2, liveness=(liveness.address[0], 999_999, liveness.address[2]))
    assert joiners_here(Slots(waiting, gone)) == []  # neither has said where it listens
    entry = Member(9, 1, "host", pid=1, address="here", liveness=liveness.address)
    liveness.announce(json.dumps(entry))
    assert joiners_here(Slots(waiting, gone)) == [entry._replace(rank=4, pid=liveness.pid)]
    liveness.leave()
    assert joiners_here(Slots(waiting)) == []


class Groups:
    def __init__(self, buffers=(), layout=("", "")):
        self.key, self.own_buffers, self.layout = 6, [(1, 2, nbytes) for nbytes in buffers], layout


class Statistics:
    operations = 8


class Communicator:
    name, statistics = "gradients", Statistics()

    def __init__(self, **groups):
        self.groups = Groups(**groups)


def told(place="here", communicator=None, **more):
    found = {"place": place, "descriptors": {}, **more}
    if communicator is not None:
        found["descriptors"]["0"] = descriptor_of(communicator, None)
    return json.loads(json.dumps(found))


def compared(members, joiner, communicators=None, own=None):
    by_rank = {0: members, 2: members, 4: joiner}
    return map_descriptors(by_rank, INVITATION, communicators or {}, own or {}, 0, [0])


def test_without_communicators_of_its_own_a_process_maps_nothing():
    assert compared(told(), told()) == {}


def test_the_members_memory_is_mapped_where_all_have_the_same():
    segment, one = Segment.create(4096), Communicator()
    ((communicator, renewal),) = compared(
        told(communicator=one), told(communicator=one), {0: one}, {0: segment}
    ).items()
    assert communicator is one and renewal.segments == [segment]
    assert (renewal.parts, renewal.key, renewal.operations) == ([], 6, 8)


def test_buffers_that_differ_are_dropped_by_all_if_their_owner_can_make_them_anew():
    segment, layout = Segment.create(4096), ("float32", "4 + 4")
    one, other = Communicator(layout=layout), Communicator(buffers=[4096], layout=("float32", "8"))
    (renewal,) = compared(told(communicator=one), told(communicator=other), {0: one}, {0: segment}).values()
    assert renewal.parts is None
    unknown = Communicator(buffers=[4096])
    with pytest.raises(DifferentScript, match="It has made gradients"):
        compared(told(communicator=Communicator()), told(communicator=unknown))


def test_a_joiner_at_another_place_or_with_other_communicators_is_told_so():
    with pytest.raises(DifferentScript, match=r"another place \(there\) than the others \(here\)"):
        compared(told(), told(place="there"))
    with pytest.raises(DifferentScript, match="rank 4 cannot join"):
        compared(told(communicator=Communicator()), told())


def test_members_that_differ_let_nobody_join():
    by_rank = {0: told(communicator=Communicator(buffers=[8])), 2: told(communicator=Communicator()), 4: told()}
    with pytest.raises(NotAdmitted, match="ranks 0 and 2 do not have the same buffers") as found:
        map_descriptors(by_rank, INVITATION, {}, {}, 0, [0])
    assert not isinstance(found.value, DifferentScript)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", -1),
        ("key", True),
        ("operations", "8"),
        ("pages", [1, 2]),
        ("buffers", [[1, 2, 1 << 63]]),
        ("layout", []),
    ],
)
def test_what_nobody_understands_ends_the_attempt_and_nothing_else(name, value):
    joiner = told(communicator=Communicator())
    joiner["descriptors"]["0"][name] = value
    with pytest.raises(NotAdmitted, match="rank 4 has told what nobody understands"):
        compared(told(communicator=Communicator()), joiner)
    with pytest.raises(NotAdmitted, match="rank 4 has told"):
        compared(told(), {"place": "here"})
