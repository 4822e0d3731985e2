"""Where the time of steps goes, and which rank is slow."""

import numpy as np
import pytest

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.observe.step_breakdown import StepAggregator, StepBreakdown, StepReporter, advice
from ring_plugins.core.trace.steps import StepClock
from tests.core.observe.fakes import FakeChannel


def breakdown(computing, waiting, moving, steps=100, slowest=(5, 95), nbytes=25e6):
    rows = np.array([[computing, waiting, moving]] * 2) * 1e-3 * steps
    return StepBreakdown(steps, rows, np.array(slowest), nbytes)


ONE_HOST = Members(0, [Member(0, 0, "a", 1, "a"), Member(1, 1, "a", 2, "a")])
TWO_HOSTS = Members(0, [Member(0, 0, "a", 1, "a"), Member(1, 1, "b", 2, "b")])


def test_advice_has_numbers_and_is_given_only_where_much_is_lost():
    assert advice(breakdown(90, 5, 5), TWO_HOSTS) == ""
    network = advice(breakdown(60, 0, 40), TWO_HOSTS)
    assert "40% of the time (40 ms of 100 ms per step) was spent moving 25 MB" in network
    assert (
        "A network 6.0 times as fast, or a batch 6.0 times as large on each rank, would bring that to about 10%"
        in network
    )
    assert "network" not in advice(breakdown(60, 0, 40), ONE_HOST)
    straggler = advice(breakdown(60, 30, 10), TWO_HOSTS)
    assert "30% of the time" in straggler
    assert "That was rank 1 on b in 95% of them" in straggler


def rows(first, last, waiting, moving=10):
    return {"rows": [(number, 1000, waiting, moving) for number in range(first, last)], "nbytes": 8}


def aggregator(members):
    channel, said = FakeChannel(size=len(members.known)), []
    return channel, StepAggregator(channel, members, said.append), said


def test_advice_names_the_larger_loss():
    assert "the slowest rank" in advice(breakdown(20, 50, 30), TWO_HOSTS)
    assert "moving" in advice(breakdown(20, 30, 50), TWO_HOSTS)


def test_advice_is_given_once_and_skips_the_first_steps():
    channel, steps, said = aggregator(TWO_HOSTS)
    for first, last, moving in ((0, 50, 10_000), (50, 149, 667), (149, 150, 667), (150, 400, 10_000)):
        for rank in (0, 1):
            channel.receive(rank, "report_steps", rows(first, last, 0, moving))
        steps.tick(0.0)
        assert len(said) == (last >= 150)
    assert said[0].startswith("in the last 100 steps 40% of the time (0.667 ms of 1.67 ms per step) was spent moving")


def test_gpus_that_wait_longer_than_the_last_one_wait_for_it():
    channel, steps, _ = aggregator(TWO_HOSTS)
    for rank, moving in ((0, 700), (1, 100)):
        channel.receive(rank, "report_steps", rows(0, 10, 0, moving) | {"on_gpu": True})
    steps.tick(0.0)
    assert steps.total.seconds == pytest.approx(np.array([[0.01, 0.006, 0.001], [0.01, 0.0, 0.001]]))
    assert steps.total.slowest.tolist() == [0, 10]


def test_only_steps_that_all_ranks_reported_are_counted():
    channel, steps, _ = aggregator(Members(0, [*TWO_HOSTS.known.values(), Member(2, 2, "c", 3, "c")]))
    channel.receive(0, "report_steps", rows(0, 200, 50))
    channel.receive(1, "report_steps", rows(0, 150, 5))
    steps.tick(0.0)
    assert steps.last == -1
    channel.receive(2, "report_steps", rows(0, 100, 70))
    steps.tick(0.0)
    assert (steps.last, steps.total.steps) == (99, 100)
    channel.receive(2, "report_steps", rows(120, 160, 0))  # 100 to 119 were lost
    steps.tick(0.0)
    assert (steps.last, steps.total.steps) == (149, 130)
    assert steps.total.slowest.tolist() == [0, 100, 30]
    assert steps.total.seconds[0].tolist() == pytest.approx([0.13, 130 * 50e-6, 130 * 10e-6])


@pytest.mark.parametrize(("size", "interval"), [(2, 1), (64, 1), (65, 2), (1000, 16)])
def test_large_jobs_report_some_steps_only(size, interval):
    channel, clock = FakeChannel(rank=1, size=size), StepClock()
    clock.ended.extend((float(number), number, 0.0, 0.0, 0.0, 8) for number in range(33))
    StepReporter(channel, clock).close()
    ((rank, kind, body),) = channel.take()
    assert (rank, kind) == (0, "report_steps")
    assert [row[0] for row in body["rows"]] == [number for number in range(1, 33) if number % interval == 0]
