"""Balance for users: figures to log while a job trains, and a page at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ring_plugins.core.control.failure_detector import Peer
from ring_plugins.core.observe.balance import Balance, stride
from ring_plugins.core.trace.steps import steps
from ring_plugins.core.world import current, is_initialized

if TYPE_CHECKING:
    from rich.console import Group

#: Seconds in which the other ranks' last steps arrive, at the end and while training.
_PATIENCE, _MOMENT = 3.0, 0.5
#: Ranks that a summary shows one by one.
_SHOWN = 12


class BalanceMonitor:
    """Tells where the time of training steps goes: computing, waiting for the slowest rank, moving bytes.

    As a context manager around a loop of one's own; all ranks use it, rank 0 speaks:

        with BalanceMonitor() as balance:
            for step, batch in enumerate(data):
                ...
                if step % 100 == 0:
                    log(balance.figures())

    A step is one averaging of all gradients. It costs nothing beyond what is measured always.

    Args:
        summary: whether rank 0 prints a page at the end.
    """

    def __init__(self, summary: bool = True) -> None:
        self._summary = summary
        self._began: Balance | None = None
        self._read: Balance | None = None

    def start(self) -> None:
        """Count from here."""
        self._began = self._read = self._total()

    def figures(self, wait: bool = False) -> dict[str, float]:
        """What happened since the last call, for a logger.

        Args:
            wait: whether rank 0 waits a moment for what the others have not reported yet; all ranks must call then.
                Reports come every second or so.

        Returns:
            On rank 0 "ring/computing_ms", "ring/waiting_ms" and "ring/moving_ms", milliseconds a step averaged over the
            ranks, "ring/slowest_rank", who came last most often, and "ring/slowest_share", in which part of the steps.
            Nothing on other ranks, and where no step was completed since.
        """
        if wait:
            self._collect(_MOMENT)
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

    def finish(self) -> Balance | None:
        """The balance since `start`, on rank 0, which prints it; None elsewhere. All ranks call it."""
        self._collect(_PATIENCE)
        total = self._total()
        if total is None or self._began is None:
            return None
        balance = total - self._began
        observers = current().observers
        if self._summary and balance.steps and observers is not None:
            _print(balance, observers.membership)
        return balance

    @staticmethod
    def _collect(patience: float) -> None:
        """Send this rank's last steps, and on rank 0 wait for the others'."""
        observers = current().observers if is_initialized() else None
        if observers is None:
            return
        observers.reports.hurry()
        desk, last = observers.balance, steps.count - 1
        end = time.monotonic() + patience
        while desk is not None and desk.last + stride(current().topology.size) <= last and time.monotonic() < end:
            time.sleep(0.005)

    def __enter__(self) -> BalanceMonitor:  # noqa: PYI034 - Self needs Python 3.11; nobody inherits
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()

    def _total(self) -> Balance | None:
        observers = current().observers if is_initialized() else None
        return observers.balance.total if observers is not None and observers.balance is not None else None


def _print(balance: Balance, membership: Sequence[Peer]) -> None:
    from rich.console import Console

    Console(file=sys.stderr, width=None if sys.stderr.isatty() else 100).print(page(balance, membership))


def page(balance: Balance, membership: Sequence[Peer]) -> Group:
    """What `BalanceMonitor.finish` prints, for a console of rich's."""
    from rich.console import Group
    from rich.table import Table

    computing, waiting, moving = balance.mean
    step = max(computing + waiting + moving, 1e-9)
    headline = (
        f"{balance.steps} steps of {step * 1e3:.3g} ms with {balance.nbytes / 1e6:.3g} MB of gradients: "
        f"{computing / step:.0%} computing, {waiting / step:.0%} waiting for the slowest, "
        f"{moving / step:.0%} moving bytes"
    )
    made = Table(caption="ms a step; what is moved while backward computes costs nothing and is not counted")
    for name, justify in (("rank", "right"), ("host", "left")):
        made.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("computing", "waiting", "moving", "slowest in"):
        made.add_column(name, justify="right")
    order = sorted(range(len(membership)), key=lambda rank: balance.seconds[rank, 1])
    shown = sorted(order) if len(order) <= _SHOWN else order[:_SHOWN]
    for rank in shown:
        times = [f"{seconds * 1e3 / balance.steps:.2f}" for seconds in balance.seconds[rank]]
        share = f"{balance.slowest[rank] / balance.steps:.0%}"
        made.add_row(str(rank), membership[rank].host, *times, share)
    if len(order) > len(shown):
        rest = balance.seconds[order[_SHOWN:]].mean(axis=0) * 1e3 / balance.steps
        made.add_row(f"{len(order) - _SHOWN} more", "", *(f"{value:.2f}" for value in rest), "")
    return Group(headline, made)
