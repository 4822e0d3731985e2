"""What users read who pass arguments that a public function does not have, or of a wrong type."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import pytest

import ring_plugins as ring
from ring_plugins.core.base.arguments import check_calls, read_each, read_port
from ring_plugins.core.base.errors import ArgumentError, LaunchError, MismatchError
from ring_plugins.core.base.member import Cores, Member
from ring_plugins.core.collectives.host import _read_offer
from ring_plugins.core.members.introduction import Introduction
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.core.net.network_choice import own_interfaces, read_interfaces
from ring_plugins.core.net.tcp import open_transport
from tests.launch import run_ranks

N = TypeVar("N", bound=int)


def scale(x: float, op: Literal["sum", "mean"] = "mean", *, wait: bool = True, names: Iterable[str] | None = None):
    """As public functions are."""
    if op == "fail":
        raise MismatchError("of ours")
    return [name.upper() for name in names or ()] or x * 2.0 + 0 * len(op)


class Scaler:
    def __init__(self, factor: int, unit: Any = "", **more: object) -> None:
        self.factor = factor.bit_length() + 0 * len(unit)


@pytest.fixture
def checked():
    namespace = {"scale": scale, "Scaler": Scaler, "THREE": 3}
    original = Scaler.__init__
    check_calls(namespace, namespace)
    yield namespace
    globals()["scale"], Scaler.__init__ = namespace["scale"].__wrapped__, original


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((1.0,), {"average": True}, "scale() has no argument average=True: pass op=SUM for a sum, or nothing for an a"),
        (
            (1.0,),
            {"async_op": 1},
            "scale() has no argument async_op=1: pass wait=False, which returns a Work, instead.",
        ),
        ((1.0,), {"name": "x"}, "scale() has no argument name='x': pass names instead. It takes x, op, wait, names."),
        ((1.0,), {"group": ...}, "scale() has no argument group=<builtins.ellipsis>: all ranks take part; collectives"),
        ((), {}, "scale(): missing a required argument: 'x'. It takes x, op, wait, names."),
        ((1.0, "sum", 3), {}, "scale(): too many positional arguments."),
        ((None,), {}, "scale() got x=None, but takes float there."),
        ((1.0, None), {}, "scale() got op=None, but takes Literal['sum', 'mean'] there."),
        ((1.0,), {"names": [1]}, "scale() got names=<builtins.list>, but takes Iterable[str] | None there."),
    ],
)
def test_a_call_that_cannot_be_is_explained(checked, args, options, text):
    with pytest.raises(ArgumentError) as found:
        checked["scale"](*args, **options)
    assert str(found.value).startswith(text)


def test_other_errors_and_results_stay_as_they_are(checked):
    assert checked["scale"](1) == 2 and checked["scale"](1.0, names=["a"]) == ["A"] and checked["THREE"] == 3
    with pytest.raises(MismatchError, match="of ours"):
        checked["scale"](1.0, "fail")
    with pytest.raises(AttributeError, match="upper"):  # the first is right; further ones are not looked at
        checked["scale"](1.0, names=["a", 3])
    assert pickle.loads(pickle.dumps(checked["scale"])) is checked["scale"]


def test_classes_are_checked_as_well_as_what_derives_from_them(checked):
    class Derived(Scaler):
        def __init__(self, **options):
            super().__init__(**options)

    assert Scaler(3).factor == Derived(factor=3, other=1).factor == 2
    for call, text in (
        (Scaler, r"Scaler\(\): missing a required argument: 'factor'. It takes factor, unit, more."),
        (lambda: Scaler("3"), r"Scaler\(\) got factor='3', but takes int there."),
        (Derived, "missing a required argument"),
        (lambda: Scaler(other=2), r"Scaler\(\): missing a required argument: 'factor'"),  # which takes any others
        (lambda: Scaler("3", 4), r"Scaler\(\) got factor='3', but takes int there."),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
    with pytest.raises(TypeError, match="has no len"):  # which may be anything, as far as the hint says
        Scaler(3, 4)


def test_of_a_type_variable_the_bound_counts():
    def doubled(x: N) -> N:
        return x.real * 2

    namespace = {"doubled": doubled}
    check_calls(namespace, namespace)
    with pytest.raises(ArgumentError, match=r"doubled\(\) got x='a', but takes N there"):
        namespace["doubled"]("a")


def test_public_functions_are_checked():
    ring.init()
    for call, text in (
        (lambda: ring.all_reduce(1.0, average=True), r"all_reduce\(\) has no argument average=True: pass op=SUM for a"),
        (lambda: ring.broadcast(1.0, root_rank=0), r"broadcast\(\) has no argument root_rank=0: pass root instead"),
        (lambda: ring.init(np=2), r"init\(\) has no argument np=2: pass ranks instead"),
        (lambda: ring.run(print, num_proc=2), r"run\(\) has no argument num_proc=2: pass ranks instead"),
        (lambda: ring.rank(0), r"rank\(\): too many positional arguments. It takes no arguments."),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
    ring.shutdown()


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
