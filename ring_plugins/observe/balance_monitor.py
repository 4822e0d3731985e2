"""`BalanceMonitor`: where the time of training steps goes, as figures to log and as a page at the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from ring_plugins.core.base.member import Members
from ring_plugins.core.base.threads import until
from ring_plugins.core.observe.step_breakdown import StepBreakdown, report_interval
from ring_plugins.core.trace.steps import steps
from ring_plugins.core.world import current, current_observers

if TYPE_CHECKING:
    from rich.console import Group

#: Seconds that rank 0 waits for the other ranks' last steps, at the end and while training.
_AT_END, _WHILE_TRAINING = 3.0, 0.5
#: Ranks that the page shows one by one.
_SHOWN = 12


class BalanceMonitor:
    """Measures where the time of training steps goes: computing, waiting for the slowest rank, moving bytes.

    Use it as a context manager around your own loop, on all ranks; rank 0 has the figures and prints the page:

        with BalanceMonitor() as balance:
            for step, batch in enumerate(data):
                ...
                if step % 100 == 0:
                    log(balance.figures())

    A step is one averaging of all gradients. The monitor itself costs nothing: steps are always measured.

    Args:
        summary: whether rank 0 prints a page at the end.
    """

    def __init__(self, summary: bool = True) -> None:
        self._summary = summary
        self._began: StepBreakdown | None = None
        self._read: StepBreakdown | None = None

    def start(self) -> None:
        """Count from here."""
        self._began = self._read = self._total()

    def figures(self, wait: bool = False) -> dict[str, float]:
        """The steps since the last call, for a logger.

        Args:
            wait: whether rank 0 waits half a second for steps that other ranks have not reported yet; all ranks must
                call it then. Ranks report every second or so.

        Returns:
            On rank 0 "ring/computing_ms", "ring/waiting_ms" and "ring/moving_ms", milliseconds per step averaged over
            the ranks, "ring/slowest_rank", the rank that arrived last most often, and "ring/slowest_share", the
            fraction of steps in which it did. Empty on other ranks, and if no step was completed.
        """
        if wait:
            self._collect(_WHILE_TRAINING)
        total = self._total()
        if total is None or self._read is None:
            return {}
        since, self._read = total - self._read, total
        if since.steps == 0:
            return {}
        computing, waiting, moving = since.mean
        slowest = int(since.slowest.argmax())
        return {
            "ring/computing_ms": computing * 1e3,
            "ring/waiting_ms": waiting * 1e3,
            "ring/moving_ms": moving * 1e3,
            "ring/slowest_rank": float(slowest),
            "ring/slowest_share": float(since.slowest[slowest] / since.steps),
        }

    def finish(self) -> StepBreakdown | None:
        """Print the page on rank 0 and return the breakdown since `start`; None on other ranks. All ranks call it."""
        self._collect(_AT_END)
        total = self._total()
        if total is None or self._began is None:
            return None
        breakdown = total - self._began
        observers = current_observers()
        if self._summary and breakdown.steps and observers is not None:
            from rich.console import Console

            console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 100)
            console.print(page(breakdown, observers.members))
        return breakdown

    @staticmethod
    def _collect(patience: float) -> None:
        """Send this rank's last steps, and on rank 0 wait for the others'."""
        observers = current_observers()
        if observers is None:
            return
        observers.steps.flush()
        aggregator, last = observers.all_steps, steps.count - 1
        if aggregator is None:
            return
        interval = report_interval(current().topology.size)
        until(lambda: aggregator.last + interval > last, patience)

    def __enter__(self) -> BalanceMonitor:  # noqa: PYI034 - Self needs Python 3.11; nobody inherits
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()

    @staticmethod
    def _total() -> StepBreakdown | None:
        observers = current_observers()
        return observers.all_steps.total if observers is not None and observers.all_steps is not None else None


def page(breakdown: StepBreakdown, members: Members) -> Group:
    """The page that `BalanceMonitor.finish` prints, for a rich console."""
    from rich.console import Group
    from rich.table import Table

    computing, waiting, moving = breakdown.mean
    step = max(computing + waiting + moving, 1e-9)
    headline = (
        f"{breakdown.steps} steps of {step * 1e3:.3g} ms with {breakdown.nbytes / 1e6:.3g} MB of gradients: "
        f"{computing / step:.0%} computing, {waiting / step:.0%} waiting for the slowest, "
        f"{moving / step:.0%} moving bytes"
    )
    table = Table(caption="ms per step; bytes moved while backward computes cost nothing and are not counted")
    for name, justify in (("rank", "right"), ("host", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("computing", "waiting", "moving", "slowest in"):
        table.add_column(name, justify="right")
    order = sorted(members.known, key=lambda rank: breakdown.seconds[rank, 1])
    shown = sorted(order) if len(order) <= _SHOWN else order[:_SHOWN]
    for rank in shown:
        times = [f"{seconds * 1e3 / breakdown.steps:.2f}" for seconds in breakdown.seconds[rank]]
        share = f"{breakdown.slowest[rank] / breakdown.steps:.0%}"
        table.add_row(str(rank), members.known[rank].host, *times, share)
    if len(order) > len(shown):
        rest = breakdown.seconds[order[_SHOWN:]].mean(axis=0) * 1e3 / breakdown.steps
        table.add_row(f"{len(order) - _SHOWN} more", "", *(f"{value:.2f}" for value in rest), "")
    return Group(headline, table)
