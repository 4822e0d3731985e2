"""Runs many checks in one launch; each becomes a test of its own that reads `Result.values(name)`."""

import traceback
from collections.abc import Callable, Iterable

from tests.worker import report


def run(checks: Iterable[Callable[[], None]]) -> None:
    """Run checks in order and report "ok" for each. The first that fails is reported with its traceback, and raises."""
    for check in checks:
        try:
            check()
        except Exception:
            report(check.__name__, traceback.format_exc())
            raise
        report(check.__name__, "ok")
