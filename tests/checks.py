"""Runs many checks in one launch; each becomes a test of its own that reads `Result.values(name)`."""

import traceback
from collections.abc import Callable, Iterable

from tests.worker import report


def run(checks: Iterable[Callable[[], None]], turn: str = "") -> None:
    """Run checks in order and report "ok" for each. The first that fails is reported with its traceback, and raises.

    Args:
        checks: functions, whose names are those of the reports.
        turn: added to the names, where they run once more.
    """
    for check in checks:
        try:
            check()
        except Exception:
            report(check.__name__ + turn, traceback.format_exc())
            raise
        report(check.__name__ + turn, "ok")
