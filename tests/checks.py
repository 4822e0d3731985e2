"""What every rank of one launch checks, one after the other; its test looks at each as `Result.values(name)`."""

import traceback
from collections.abc import Callable, Iterable

from tests.worker import report


def run(checks: Iterable[Callable[[], None]]) -> None:
    """Report "ok" for each, or how it failed, with which this rank ends and tells the others."""
    for check in checks:
        try:
            check()
        except Exception:
            report(check.__name__, traceback.format_exc())
            raise
        report(check.__name__, "ok")
