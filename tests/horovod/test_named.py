"""Operations that match by their names, and what goes on while a rank is in `hvd.join`, on real ranks."""

import re
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import PeerFailed, PeerLeft
from ring_plugins.core.control.named_calls import Match, NamedCalls, NameInUse
from ring_plugins.horovod import named
from ring_plugins.horovod.named import NamedOperations, NamedWork, _difference
from tests.launch import run_ranks


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([{"kind": "allreduce", "op": "SUM"}] * 2, None),
        (
            [{"kind": "allreduce", "op": "SUM"}, {"kind": "allreduce", "op": "MAX"}],
            r"rank 0: allreduce\(op=SUM\), rank 3",
        ),
        ([{"kind": "allreduce"}, {"refused": "ArgumentError: no"}], "rank 3 takes no part .*: ArgumentError: no"),
        ([{"kind": "allgather"}, None], r"since rank 3 is in hvd.join\(\)"),
        ([{"kind": "allreduce", "joins": True}, None], None),
    ],
)
def test_why_an_operation_cannot_take_place(calls, said):
    error = _difference(Match((0, 3), "x", calls))
    assert (error is None) == (said is None)
    assert said is None or re.search(said, str(error))


def test_a_name_is_in_use_until_the_script_has_waited_or_a_while_has_passed(monkeypatch):
    """Also where the others have called it at once: whether they have depends on when they are scheduled."""
    begun = []
    calls = SimpleNamespace(begin=lambda ranks, name, call, matched: begun.append(matched))
    ended = SimpleNamespace(done=lambda: True, wait=lambda: [1])
    group = SimpleNamespace(communicator=SimpleNamespace(start=lambda description, run: ended))
    operations = NamedOperations(None, calls, (0, 1))
    operations._group, operations._waiting = group, None
    call = {"kind": "allreduce"}

    def start():
        work = operations.start("x", call, lambda group: [1])
        begun[-1](Match((0, 1), "x", [call, call]))
        return work

    first = start()
    with pytest.raises(NameInUse, match="name='x' is in use"):
        start()
    assert first.wait() == [1]
    second = start()
    assert second.done()  # as `hvd.poll` asks
    third = start()
    monkeypatch.setattr(named, "_RESERVED", 0)
    assert start() is not third


def test_operations_whose_group_cannot_be_made_raise_why(monkeypatch):
    def refused(ranks, purpose):
        raise PeerFailed(1, "was killed")

    monkeypatch.setattr(named, "Group", refused)
    operations = NamedOperations(SimpleNamespace(world_ranks=(0, 1)), SimpleNamespace(begin=lambda *_: None), (0, 1))
    work = operations.start("x", {"kind": "allreduce"}, lambda group: [])
    operations._match(Match((0, 1), "x", [{"kind": "allreduce"}] * 2), work, lambda group: [])
    with pytest.raises(PeerFailed):
        work.wait()


def test_a_script_that_polls_learns_that_a_rank_is_gone():
    gone = []

    def check(_, missing, what):
        if set(missing) & set(gone):
            raise PeerLeft("has left", gone[0])

    channel = SimpleNamespace(rank=0, on=lambda *_, **__: None)
    calls = NamedCalls(channel, SimpleNamespace(check=check))
    work = NamedWork(calls, (0, 1), "x", "allreduce")
    assert not work.done()
    gone.append(1)
    assert work.done()  # `wait` would raise
    work.matched_at = 0.0
    assert not work.done()  # nobody is missing


SCRIPT = """
import numpy
import torch
import ring_plugins as ring
from tests.worker import report
ring.init(ranks=2)
import ring_plugins.horovod.torch as hvd

hvd.init()
rank = hvd.rank()

# Any order
names = ["a", "b", "c"][:: 1 - 2 * rank]
handles = {name: hvd.allreduce_async(torch.tensor([ord(name) - 97.0]), name=name, op=hvd.Sum) for name in names}
handles["gathered"] = hvd.allgather_async(torch.full((rank,), 5), name="g")
one = numpy.float32(1)  # factors and roots may be numpy's
handles["numpy"] = hvd.allreduce_async(torch.ones(1), name="f", prescale_factor=one, postscale_factor=one * 2)
handles["root"] = hvd.broadcast_async(torch.tensor([rank + 3.0]), numpy.int64(1), name="r")
in_place = torch.ones(2)
if rank:
    handles["blocking"] = hvd.allreduce_async_(in_place, name="one waits", op=hvd.Sum, prescale_factor=2.0)
else:
    hvd.allreduce_(in_place, name="one waits", op=hvd.Sum, prescale_factor=2.0)
report("any order", [hvd.synchronize(handles[name]).tolist() for name in ("a", "b", "c", "gathered", "numpy", "root")])
report("in place", [hvd.synchronize(handles["blocking"]).tolist() if rank else in_place.tolist(), in_place.tolist()])

# Errors concern the operation alone
refused = []
def refuse(function):
    try:
        function()
    except ring.RingError as error:
        refused.append([type(error).__name__, str(error)])
if rank == 0:
    first = hvd.allreduce_async(torch.ones(1), name="twice")
    refuse(lambda: hvd.allreduce_async(torch.ones(1), name="twice"))
hvd.barrier()
if rank == 1:
    refused.append([])
    first = hvd.allreduce_async(torch.ones(1), name="twice")
hvd.barrier()
refuse(lambda: hvd.allreduce(torch.ones(1 + rank), name="x"))
refuse(lambda: hvd.allreduce(torch.ones(1) if rank else 1.5, name="x"))
report("refused", refused)
report("next", [hvd.allreduce(torch.ones(1), name="x").tolist(), hvd.synchronize(first).tolist()])

# Ranks that have joined count as zeros
last, refused = [], []
for first in range(2):
    if rank != first:
        found = [
            hvd.allreduce(torch.tensor([6, -3])), hvd.allreduce(torch.ones(1), name="q"),
            *hvd.grouped_allreduce([torch.ones(1), torch.tensor([3])], op=hvd.Sum),
            hvd.allreduce_(torch.ones(2), op=hvd.Sum, prescale_factor=3.0),
            hvd.allreduce(torch.tensor([5.0]), postscale_factor=2.0),
        ]
        refuse(lambda: hvd.allgather(torch.ones(1)))
        refuse(lambda: hvd.broadcast(torch.ones(1), rank, name="b"))
        refuse(lambda: hvd.allreduce(torch.ones(1), op=hvd.Max))
    last.append(hvd.join())
report("zeros", [one.tolist() for one in found])
report("not while joined", refused)
report("last", last)
report("after", hvd.allreduce(torch.tensor([1.0 + rank])))
"""


def test_named_operations_and_join():
    result = run_ranks(SCRIPT, 2)
    for rank in range(2):
        assert result.values("any order")[rank] == [[0], [2], [4], [5], [2], [4]]
        assert result.values("in place")[rank] == [[4, 4], [4, 4]]
        assert result.values("next")[rank] == [[1], [1]]
        assert result.values("zeros")[rank] == [[3, -1], [0.5], [1], [3], [3, 3], [5]]
        texts = [text for _, text in result.values("not while joined")[rank]]
        assert len(texts) == 3 and all(f"since rank {1 - rank} is in hvd.join()" in text for text in texts)
        assert result.values("last")[rank] == [1, 0]
        assert result.values("after")[rank] == [1.5]
    by_rank = result.values("refused")
    assert by_rank[0][0][0] == "NameInUse" and by_rank[0][2][0] == "ArgumentError"
    assert [by_rank[rank][1][0] for rank in range(2)] == ["MismatchError"] * 2 and "differently" in by_rank[0][1][1]
    assert "rank 0 takes no part in the operation 'x': ArgumentError" in by_rank[1][2][1]


JOINED = """
import os

import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))  # instead of hvd.init(), which prepares for names
if ring.rank() == 0:
    report("named", hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="first", op=hvd.Sum)), 0)
report("last", hvd.join())
"""


@pytest.mark.slow
def test_a_rank_takes_part_after_join_although_it_has_named_nothing_before():
    result = run_ranks(JOINED, 2)
    assert result.values("named") == [[1, 1]] and result.values("last") == [0, 0]


WAITING = """
import time

import torch

import ring_plugins as ring
import ring_plugins.horovod.torch as hvd
from tests.worker import report

ring.init(ranks=3)
hvd.init()
rank, one = hvd.rank(), torch.ones(1)
if rank == 2:
    time.sleep(8)  # for which the others wait, in different operations
handles = {name: hvd.allreduce_async(one, name=name, op=hvd.Sum) for name in "ab"}
found = [hvd.synchronize(handles[name]).item() for name in ("ba" if rank else "ab")]
if rank == 2:
    time.sleep(8)
if rank != 1:
    found.append(hvd.allreduce(one, name="while one has joined", op=hvd.Sum).item())
hvd.join()
report("late", found)

some = hvd.add_process_set([0, 1])
if rank < 2:
    try:
        hvd.allreduce(one, name="ab"[rank], op=hvd.Sum, process_set=some)
    except ring.DeadlockError as error:
        report("deadlock", str(error))
hvd.barrier()
if rank < 2:
    report("again", [hvd.allreduce(one * 10, name=name, op=hvd.Sum, process_set=some).item() for name in "ab"])
"""


@pytest.mark.slow
def test_ranks_that_wait_for_a_late_one_are_in_no_deadlock_and_a_real_one_ends_its_calls():
    result = run_ranks(WAITING, 3)
    assert result.values("late") == [[3, 3, 2], [3, 3], [3, 3, 2]]
    for text in result.values("deadlock"):
        assert "allreduce(name='a')" in text and "allreduce(name='b')" in text and "in one order on all ranks" in text
    assert result.values("again") == [[20, 20]] * 2
