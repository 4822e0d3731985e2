"""Whose fault a slow step is."""

import io
import threading
import time

import numpy as np
import pytest
from rich.console import Console

from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.control import ControlServer
from ring_plugins.core.control.failure_detector import Peer
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.observe.balance import Advice, Balance, BalanceAggregator, advice, stride
from ring_plugins.core.trace.steps import StepClock, steps
from ring_plugins.observe.balance_monitor import page
from tests.launch import run_ranks

TORCH = """
import os, time
import ring_plugins as ring
ring.init(ranks=int(os.environ["TEST_RANKS"]))
import torch
from ring_plugins.torch import BalanceMonitor, DistributedOptimizer
from tests.worker import report

torch.set_num_threads(1)
model = torch.nn.Linear(300, 300)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters())
with BalanceMonitor() as monitor:
    for step in range(220):
        if ring.rank() == 1:
            time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.ones(4, 300)).sum().backward()
        optimizer.step()
    time.sleep(1.5)
    report("figures", monitor.figures())
balance = monitor.finish()
if balance is not None:
    report("steps", balance.steps)
    report("seconds", balance.seconds)
    report("slowest", balance.slowest)
"""


def test_the_slow_rank_is_found_while_training_and_in_the_summary():
    result = run_ranks(TORCH, 2, timeout=120)
    figures = result.reports[0]["figures"]
    assert result.reports[1]["figures"] == {}
    assert figures["ring/slowest_rank"] == 1
    assert figures["ring/slowest_share"] > 0.5
    assert result.reports[0]["steps"] == 219
    seconds = np.array(result.reports[0]["seconds"])
    # What rank 1 slept, rank 0 waited; bytes took neither of them as long.
    assert seconds[1, 0] - seconds[0, 0] > 1.0
    assert seconds[0, 1] - seconds[1, 1] > 1.0
    assert sum(result.reports[0]["slowest"]) == 219
    assert "waiting for the slowest" in result.output
    assert "slowest in" in result.output
    assert "went into waiting for the slowest rank. That was rank 1 on" in result.output


def test_a_step_is_what_lies_between_two_ends():
    clock = StepClock()
    clock.add_blocked_time(1.0, 0.5)
    clock.end_step(8)  # nobody knows when this one began
    clock.add_blocked_time(seconds=0.004, waiting=0.003)
    clock.add_blocked_time(seconds=0.001, waiting=0.0)
    clock.end_step(8)
    (step,) = clock.take()
    assert (step.number, step.nbytes) == (1, 8)
    assert step.waiting == pytest.approx(0.003)
    assert step.moving == pytest.approx(0.002)


def test_what_others_cost_while_the_script_computes_is_not_counted():
    """The communication thread has waited for a member long before the script stands still for it."""
    wait = Wait("gradients", None)
    operations = SerialExecutor("gradients", wait)
    everyone = threading.Event()
    before = steps.waiting, steps.moving
    work = operations.start("bucket 0", lambda: wait.until(everyone.is_set, list, lambda: "", arrival=True))
    time.sleep(0.3)  # the script computes
    threading.Timer(0.1, everyone.set).start()
    began = time.monotonic()
    work.wait()
    stood_still = time.monotonic() - began
    operations.close()
    waiting, moving = steps.waiting - before[0], steps.moving - before[1]
    assert 0 < waiting <= stood_still
    assert wait.waited_for_arrival >= waiting + 0.2
    assert waiting + moving <= stood_still


def balance(computing, waiting, moving, steps=100, slowest=(5, 95), nbytes=25e6):
    rows = np.array([[computing, waiting, moving]] * 2) * 1e-3 * steps
    return Balance(steps, rows, np.array(slowest), nbytes)


ONE_HOST = [Peer("a", 1, "a"), Peer("a", 2, "a")]
TWO_HOSTS = [Peer("a", 1, "a"), Peer("b", 2, "b")]


def test_advice_has_numbers_and_is_given_only_where_much_is_lost():
    assert advice(balance(90, 5, 5), TWO_HOSTS) == ""
    network = advice(balance(60, 0, 40), TWO_HOSTS)
    assert "40% of the time (40 ms of 100 ms a step) went into moving 25 MB" in network
    assert (
        "A network 6.0 times as fast, or a batch 6.0 times as large on each rank, would bring that to about 10%"
        in network
    )
    assert "network" not in advice(balance(60, 0, 40), ONE_HOST)
    straggler = advice(balance(60, 30, 10), TWO_HOSTS)
    assert "30% of the time" in straggler
    assert "That was rank 1 on b in 95% of them" in straggler


def test_advice_is_given_once_and_not_on_the_first_steps():
    said = []
    look = Advice(TWO_HOSTS, said.append).look
    slow_start, later = balance(60, 0, 400, steps=10), balance(60, 0, 40, steps=111)
    look(slow_start)
    assert said == []
    look(Balance(121, slow_start.seconds + later.seconds, slow_start.slowest + later.slowest, 25e6))
    look(Balance(300, slow_start.seconds + 3 * later.seconds, slow_start.slowest, 25e6))
    assert len(said) == 1
    assert "40% of the time" in said[0]


def test_a_page_is_a_page_with_a_thousand_ranks():
    ranks = 1000
    seconds = np.full((ranks, 3), 0.5)
    seconds[77, 1] = 0.0
    slowest = np.zeros(ranks, np.int64)
    slowest[77] = 100
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(page(Balance(100, seconds, slowest, 1e6), [Peer(f"h{r}", r, "") for r in range(ranks)]))
    text = console.export_text()
    assert "h77" in text
    assert "988 more" in text
    assert len(text.splitlines()) < 25
    assert stride(ranks) == 16


def test_only_steps_that_all_ranks_reported_are_counted():
    hub = ControlServer(3)
    desk = BalanceAggregator(hub, lambda total: None)
    row = lambda number, waiting: [number, 1000, waiting, 10]  # noqa: E731
    desk._note(0, {"rows": [row(n, 50) for n in range(200)], "nbytes": 8})
    desk._note(1, {"rows": [row(n, 5) for n in range(150)], "nbytes": 8})
    desk.tick(0.0)
    assert desk.last == -1
    desk._note(2, {"rows": [row(n, 70) for n in range(100)], "nbytes": 8})
    desk.tick(0.0)
    assert (desk.last, desk.total.steps) == (99, 100)
    desk._note(2, {"rows": [row(n, 0) for n in range(120, 160)], "nbytes": 8})  # 100 to 119 were lost
    desk.tick(0.0)
    assert (desk.last, desk.total.steps) == (149, 130)
    assert desk.total.slowest.tolist() == [0, 100, 30]
    assert desk.total.seconds[0].tolist() == pytest.approx([0.13, 130 * 50e-6, 130 * 10e-6])
    hub.abandon()
