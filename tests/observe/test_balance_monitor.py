"""BalanceMonitor in a training loop, and the page that it prints."""

import io

import numpy as np
import pytest
from rich.console import Console

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.observe.step_breakdown import StepBreakdown
from ring_plugins.observe.balance_monitor import BalanceMonitor, page
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
    while not (figures := monitor.figures()) and ring.rank() == 0:  # a call gives the steps since the last one
        time.sleep(0.05)
    report("figures", figures)
balance = monitor.finish()
if balance is not None:
    report("steps", balance.steps)
    report("seconds", balance.seconds)
    report("slowest", balance.slowest)
"""


@pytest.mark.slow
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
    assert "was spent waiting for the slowest rank. That was rank 1 on" in result.output


def test_the_page_of_a_thousand_ranks_fits_a_screen():
    ranks = 1000
    seconds = np.full((ranks, 3), 0.5)
    seconds[77, 1] = 0.0
    slowest = np.zeros(ranks, np.int64)
    slowest[77] = 100
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(
        page(StepBreakdown(100, seconds, slowest, 1e6), Members(0, [Member(r, r, f"h{r}", r) for r in range(ranks)]))
    )
    text = console.export_text()
    assert "h77" in text
    assert "988 more" in text
    assert len(text.splitlines()) < 25


def test_a_monitor_without_a_job_has_no_figures():
    with BalanceMonitor() as monitor:
        assert monitor.figures(wait=True) == {}
    assert monitor.finish() is None
