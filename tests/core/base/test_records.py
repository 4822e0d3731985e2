"""What another process sends while the job starts is read field by field, and whoever sends something else is named."""

import pytest

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.member import Cores, Member
from ring_plugins.core.base.records import read_each, read_port
from ring_plugins.core.collectives.host import _read_offer
from ring_plugins.core.members.introduction import Introduction
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.net.network_choice import own_interfaces, read_interfaces
from ring_plugins.core.net.tcp import open_transport
from tests.launch import run_ranks

MEMBER = list(Member(0, 0, "host", 4711, "domain", cores=list(Cores("kernel", "container", "0-3,8", None))))
INTRODUCTION = [MEMBER, None, False, list(FailurePolicy(False, 0)), 0]
INTERFACES = list(own_interfaces(0))
OFFER = [0, "node", [1, 2, 3], 4]
GARBAGE = [None, 7, 1.5, "x", "abcdef", [], {}, {"a": 1}, [-1] * 4, [None] * 6, [[]] * 13]


def member(**changed):
    return list(Member(*MEMBER)._replace(**changed))


def introduction(**changed):
    return list(Introduction(*INTRODUCTION)._replace(**changed))


def with_interface(address, prefix):
    return [0, "host", [["lo", address, prefix, 0, True]], "", "", "kernel"]


@pytest.mark.parametrize(
    ("read", "right", "wrong"),
    [
        (read_interfaces, INTERFACES, [with_interface("127.0.0.1\n", 8), with_interface("127.0.0.1", 99)]),
        (read_interfaces, INTERFACES, [["0", *INTERFACES[1:]]]),
        (_read_offer, OFFER, [[0, "node", [1, 2], 4], [0, "node", [1, 2, "3"], 4], [0, None, None, 4]]),
        (Member.read, MEMBER, [member(liveness=[1]), member(cores="x"), member(pid="1"), member(addresses=[5])]),
        (Member.read, MEMBER, [member(cores=["k", "c", "x", None]), member(cores=["k", "c", "0", "1"])]),
        (
            Introduction.read,
            INTRODUCTION,
            [introduction(policy=[]), introduction(policy=[1])],
        ),
        (Introduction.read, INTRODUCTION, [introduction(member=member(pid="1")), introduction(server=[])]),
        (read_port, 1, [0, -1, 1 << 16, "80"]),
    ],
)
def test_a_rank_that_sends_something_else_is_named(read, right, wrong):
    assert len(read_each([right, right], read)) == 2
    for one in [*GARBAGE[: 1 if read is read_port else None], *wrong]:
        with pytest.raises(LaunchError, match=r"rank 1 sent what no rank sends while the job starts .*RING_SECRET"):
            read_each([right, one], read)


def test_ports_of_ranks_are_checked_before_they_are_used():
    for wrong in (None, [], [0, ""], [1 << 16, ""], ["x", ""]):
        with pytest.raises(LaunchError, match="rank 1 sent what no rank sends"):
            open_transport(0, ["a", "b"], ["127.0.0.1"] * 2, lambda own, wrong=wrong: [own, wrong])


SENDS = """
import os
import ring_plugins as ring
from ring_plugins.core.rendezvous.bootstrap import _OtherRank
from tests.worker import report

gather, sent = _OtherRank.gather, []


def send_instead(self, payload):
    sent.append(payload)
    return gather(self, None if len(sent) == 3 else payload)


if os.environ["RANK"] == "1":
    _OtherRank.gather = send_instead
try:
    ring.init()
except ring.RingError as error:
    report("error", str(error), rank=int(os.environ["RANK"]))
"""


def test_all_ranks_of_a_job_name_the_one():
    result = run_ranks(SENDS, 3, "exported")
    assert all("rank 1 sent what no rank sends while the job starts (TypeError)" in s for s in result.values("error"))
