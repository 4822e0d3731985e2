"""A member may die at any point of any operation: it has then happened for all survivors, or for none and is repeated.

`on_mortal_ranks` runs the ranks as threads, of which one stops for ever at a chosen barrier.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MembersLost, PeerFailed
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.fingerprint import fingerprint
from ring_plugins.core.collectives.recovery import JobRecovery, Recovery, repeated
from ring_plugins.core.collectives.shm_group import SMALL_BYTES, STAGING_BYTES
from ring_plugins.core.control.wait import Wait
from tests.core.collectives.mortal_ranks import on_mortal_ranks

#: Multiples of this have exact averages over 1, 2, 3 and 4 ranks.
UNIT = 12.0


def memory(rank, count):
    return HostMemory(np.full(count, UNIT * 2**rank, np.float32), "float32")


def average(ranks):
    return np.float32(UNIT * sum(2**rank for rank in ranks) / len(ranks))


def dying(rank, number, how):
    """A `Rank.dies` for the rank's next barriers, counted from 1."""
    first = rank.barriers
    return lambda at: how if at - first == number else None


def operations(one, other, buffer, rank):
    """One of each kind; returns what this rank has of each."""
    small, staged = memory(rank, 10), memory(rank, STAGING_BYTES // 4 * 2 + 5)
    mapped = HostMemory(buffer.array.view(np.float32), "float32")
    mapped.array[:] = UNIT * 2**rank
    one.all_reduce(small, Op.AVERAGE)
    other.barrier()
    one.all_reduce(mapped, Op.AVERAGE)
    objects = other.all_gather_object(rank)
    one.all_reduce(staged, Op.AVERAGE)
    told = HostMemory(np.full(5, rank if one.ranks[one.rank] == 1 else -1), "int64")
    one.broadcast(told, one.ranks.index(1))
    item = other.broadcast_object(f"of rank {rank}", other.ranks.index(1))
    return [*(set(m.array.tolist()) for m in (small, mapped, staged)), objects, told.array.tolist(), item]


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["before", "in"])
def test_every_operation_counts_the_same_ranks_for_all_survivors_wherever_a_member_dies(monkeypatch, victim, how):
    number, died = 0, True
    while died:
        number += 1

        def run(rank, number=number):
            one, other = rank.communicator("one"), rank.communicator("other")
            buffer = one.allocate(4 * SMALL_BYTES)
            rank.communicator("a third that rests")
            if rank.rank == victim:
                rank.dies = dying(rank, number, how)
            found = operations(one, other, buffer, rank.rank)
            return found, one.ranks, one.rank, one.size, other.ranks, rank.view

        results = on_mortal_ranks(monkeypatch, 4, run)
        died = results[victim] is None
        survivors = [result for rank, result in enumerate(results) if rank != victim]
        assert all(result[0] == survivors[0][0] for result in survivors)
        small, mapped, staged, objects, told, item = survivors[0][0]
        everyone, left = {average(range(4))}, {average(set(range(4)) - {victim})}
        for values in (small, mapped, staged):
            assert values in (everyone, left)
        order = [values == left for values in (small, mapped, staged)]
        assert order == sorted(order)  # once it is gone, it stays so
        assert objects in ([0, 1, 2, 3], [rank for rank in range(4) if rank != victim])
        assert told == [1] * 5 and item == "of rank 1"
        if left == {small.pop()}:
            ranks = tuple(rank for rank in range(4) if rank != victim)
            for place, (_, one, rank, size, other, view) in enumerate(survivors):
                assert one == other == view == ranks and (rank, size) == (place, 3)
    assert number > 12  # the last run is one in which it lives


def test_all_but_one_may_die_one_after_another(monkeypatch):
    def run(rank):
        one = rank.communicator("one")
        sums = []
        for step in range(4):
            if rank.rank == step and step < 3:
                rank.dies = dying(rank, 2, "before")
            for _ in range(2):
                term = memory(rank.rank, 20_000)
                one.all_reduce(term, Op.AVERAGE)
            sums.append(set(term.array.tolist()))
        return sums, one.rank, one.size

    *gone, (sums, rank, size) = on_mortal_ranks(monkeypatch, 4, run)
    assert gone == [None] * 3 and (rank, size) == (0, 1)
    assert sums == [{average(range(first, 4))} for first in (1, 2, 3, 3)]


def test_two_may_die_at_once_also_the_one_that_would_decide(monkeypatch):
    def run(rank):
        one = rank.communicator("one")
        if rank.rank in (0, 2):
            rank.dies = dying(rank, 1, "before" if rank.rank == 0 else "in")
        term = memory(rank.rank, 10)
        one.all_reduce(term, Op.AVERAGE)
        one.barrier()
        return set(term.array.tolist()), one.ranks

    results = on_mortal_ranks(monkeypatch, 4, run)
    assert results[1] == results[3] == ({average([1, 3])}, (1, 3))


def test_a_rank_that_dies_while_the_others_agree_is_lost_next(monkeypatch):
    def run(rank):
        one = rank.communicator("one")
        if rank.rank == 2:
            rank.dies = dying(rank, 1, "before")
        if rank.rank == 0:  # decides, and dies before it does anything else
            agree = rank.mesh.agree
            rank.mesh.agree = lambda wait: (agree(wait), rank.die())
        term = memory(rank.rank, 10)
        one.all_reduce(term, Op.AVERAGE)
        return set(term.array.tolist()), one.ranks

    results = on_mortal_ranks(monkeypatch, 4, run)
    assert results[1] == results[3] == ({average([1, 3])}, (1, 3))


def test_too_few_ranks_end_the_job_and_the_error_names_who_died(monkeypatch):
    def run(rank):
        one = rank.communicator("one")
        if rank.rank == 1:
            rank.dies = dying(rank, 1, "before")
        with pytest.raises(PeerFailed, match=r"rank 1 .*died without.*cannot go on with 2 ranks: min_ranks=3") as first:
            one.barrier()
        with pytest.raises(PeerFailed, match="rank 1"):
            one.barrier()
        return type(first.value) is not MembersLost

    assert on_mortal_ranks(monkeypatch, 3, run, min_ranks=3) == [True, None, True]


def test_a_rank_that_fails_by_an_exception_ends_the_job(monkeypatch):
    def run(rank):
        one = rank.communicator("one")
        if rank.rank == 1:
            rank.peers.own.fail(1, "rank 1 failed: ValueError: no data")
            return True
        with pytest.raises(PeerFailed, match="no data"):
            one.barrier()
        return True

    assert on_mortal_ranks(monkeypatch, 3, run) == [True] * 3


def test_what_cannot_be_repeated_raises_and_the_next_operation_goes_on(monkeypatch):
    def run(rank):
        one = rank.communicator("one")
        if rank.rank == 0:
            rank.dies = dying(rank, 1, "before")
        with pytest.raises(MembersLost, match="rank 0"):
            one.broadcast_object("told", root=0)
        mine, out = memory(rank.rank, 2), HostMemory(np.empty(2 * one.size, np.float32), "float32")
        one.all_gather(mine, out, [2] * one.size)
        return out.array.tolist()

    expected = [UNIT * 2] * 2 + [UNIT * 4] * 2
    assert on_mortal_ranks(monkeypatch, 3, run) == [None, expected, expected]


def test_a_work_runs_in_the_calling_thread_and_a_function_of_several_operations_can_be_repeated(monkeypatch):
    def run(rank):
        one = rank.communicator("one")
        if rank.rank == 2:
            rank.dies = dying(rank, 2, "before")

        def gather():
            counts = one.all_gather_object(rank.rank + 1)
            out = HostMemory(np.empty(sum(counts), np.float32), "float32")
            one.all_gather(memory(rank.rank, rank.rank + 1), out, counts)
            return out.array.tolist()

        return one.start("gather", lambda: repeated(gather)).wait()

    expected = [UNIT] + [UNIT * 2] * 2
    assert on_mortal_ranks(monkeypatch, 3, run) == [expected, expected, None]


def test_a_loss_in_the_background_is_taken_over_where_the_script_waits(monkeypatch):
    def run(rank):
        one, other = rank.communicator("one"), rank.communicator("other")
        if rank.rank == 1:
            rank.dies = dying(rank, 2, "before")

        def averages(before):
            terms = [memory(rank.rank, 10) for _ in range(3)]
            works = [one.start("bucket", lambda term=term: one.all_reduce(term, Op.AVERAGE), True) for term in terms]
            while not all(work.done() for work in works):
                time.sleep(0.001)
            assert other.ranks == one.ranks == before
            one.wait_for(works)
            return [set(term.array.tolist()) for term in terms]

        with pytest.raises(MembersLost, match="rank 1"):
            averages((0, 1, 2))
        assert other.ranks == one.ranks == (0, 2)
        return averages((0, 2))

    again = [{average([0, 2])}] * 3
    assert on_mortal_ranks(monkeypatch, 3, run) == [again, None, again]


def test_what_was_started_is_given_up_if_the_script_finds_a_loss_elsewhere(monkeypatch):
    def run(rank):
        one, other = rank.communicator("one"), rank.communicator("other")
        if rank.rank == 1:
            rank.die()
        term, works = memory(rank.rank, 10), []
        if rank.rank == 0:  # ahead of rank 2, which starts this behind the barrier
            works.append(one.start("bucket", lambda: one.all_reduce(term, Op.AVERAGE), True))
        other.barrier()
        if rank.rank == 0:
            with pytest.raises(MembersLost):
                one.wait_for(works)
        one.wait_for([one.start("bucket", lambda: one.all_reduce(memory(rank.rank, 10), Op.AVERAGE), True)])
        return one.ranks

    assert on_mortal_ranks(monkeypatch, 3, run) == [(0, 2), None, (0, 2)]


def test_a_second_thread_is_rejected_while_the_first_is_in_a_collective(monkeypatch):
    rejected = threading.Event()

    def run(rank):
        one, other = rank.communicator("one"), rank.communicator("other")
        if rank.rank:
            rejected.wait(60)  # rank 0 waits for this one meanwhile
            one.barrier()
            return None
        waiting = threading.Event()
        first = threading.Thread(
            target=lambda: one.run_synchronously("bucket 0", lambda: (waiting.set(), one.barrier()))
        )
        first.start()
        waiting.wait(60)
        try:
            with pytest.raises(ArgumentError, match="other: barrier.* was called while another thread"):
                other.barrier()
        finally:
            rejected.set()
            first.join()
        return one.size

    assert on_mortal_ranks(monkeypatch, 2, run)[0] == 2


def test_no_operation_begins_while_it_is_known_that_members_are_lost():
    """They might all have arrived at its barriers before, in a view of which this rank has not heard."""
    lost, begun = [1], []
    job = JobRecovery(lambda wait: lost.clear())
    executor = SerialExecutor("one", Wait("one", None), None, Recovery(job, "one"))
    job.confirmations = SimpleNamespace(
        committed=0, pending=None, must_agree=lambda: bool(lost), members_lost=lambda: MembersLost("rank 1 died.", 1)
    )
    with pytest.raises(MembersLost, match="rank 1 died"):
        executor.run(fingerprint("barrier"), begun.append)
    assert not begun and not lost
    executor.run(fingerprint("barrier"), begun.append)
    assert begun
