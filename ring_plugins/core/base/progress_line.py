"""One line about a slow start: which ranks have come, and which have not.

A job starts when its last rank arrives. On a cluster that may take minutes, or never happen. After a few seconds the
process that knows which ranks are missing shows them: on a terminal in one line that is updated in place, elsewhere in
messages, ever more rarely and only if something has changed.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.log import logger, writes_to_standard_error

#: Seconds until the first line, and between two updates on a terminal.
FIRST_SECONDS, _UPDATE = 5.0, 0.5


class ProgressLine:
    """Shows the progress of one wait. Leaving the context removes the line from the terminal.

    Args:
        began: when the wait began, as `time.monotonic` counts; now by default.
        first: seconds until the first line, FIRST_SECONDS by default.
    """

    def __init__(self, began: float | None = None, first: float | None = None) -> None:
        self._began = time.monotonic() if began is None else began
        self._next = FIRST_SECONDS if first is None else first
        self._said = ""
        self._is_shown = False

    def __enter__(self) -> ProgressLine:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the line from the terminal."""
        if self._is_shown:
            self._is_shown = False
            self._write("")

    def show(self, text: Callable[[], str]) -> None:
        """Show `text()`, without a full stop, if it is time for it; call this often."""
        waited = time.monotonic() - self._began
        if waited < self._next:
            return
        if writes_to_standard_error() and _is_terminal():
            self._next = waited + _UPDATE
            self._is_shown = True
            self._write(f"ring_plugins: {text()} ({waited:.0f} s)")
            return
        self._next *= 2
        said = text()
        if said != self._said:
            self._said = said
            logger.info(f"{said}, after {waited:.0f} s.")

    def _write(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        shown = text if len(text) <= width else f"{text[: width - 3]}..."
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r{shown}\x1b[K")
            sys.stderr.flush()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no standard error, or a closed one
        return False


def arrivals(came: Mapping[int, str], size: int, doing: str = "") -> str:
    """Return, for example, "3 of 8 ranks have come (2 from host1, 1 from host2), waiting for ranks 3, 4".

    Args:
        came: rank -> name of its host, "" where all are on this host.
        size: of the job.
        doing: what the missing ranks have yet to do, such as " to reach init()".
    """
    missing = [rank for rank in range(size) if rank not in came]
    if not missing:
        return f"all {size} ranks have come{hosts_of(came)}"
    return f"{len(came)} of {size} ranks have come{hosts_of(came)}, waiting for {name_ranks(missing)}{doing}"


def hosts_of(came: Mapping[int, str], most: int = 8) -> str:
    """Return " (2 from host1, 1 from host2)", "" if there is only this host."""
    counts = Counter(host for host in came.values() if host)
    listed = ", ".join(f"{count} from {host}" for host, count in counts.most_common(most))
    more = f" and {len(counts) - most} more hosts" if len(counts) > most else ""
    return f" ({listed}{more})" if counts else ""
