"""`Timeline`: record what all ranks do, from a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ring_plugins.core.observe.timeline import TimelineAggregator
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.world import current, is_initialized

#: Seconds that the end of a timeline may take.
_PATIENCE = 5.0


class Timeline:
    """Records a timeline of all ranks while it is open; all ranks use it, rank 0 writes.

        with Timeline("traces"):
            ...  # some steps

    Args:
        directory: where rank 0 puts `timeline.json`.

    Raises:
        OSError: on rank 0, where it cannot write there.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def start(self) -> None:
        """Record from now on."""
        desk = self._desk()
        if desk is not None:
            desk.start(self._directory)
        if self._is_watched():
            _wait_until(lambda: recorder.on)

    def stop(self) -> Path | None:
        """Stop, and return the file's path on rank 0, None elsewhere."""
        desk = self._desk()
        if desk is None:
            # Rank 0 says when it ends; what this rank does after its own end is not to be in the timeline.
            _wait_until(lambda: not recorder.on)
            return None
        desk.stop()
        _wait_until(lambda: desk.is_complete)
        return desk.finish()

    def __enter__(self) -> Timeline:  # noqa: PYI034 - Self needs Python 3.11; nobody inherits
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._desk() is not None:  # a rank that failed does not wait for rank 0 before it says so
            self.stop()

    @staticmethod
    def _is_watched() -> bool:
        return is_initialized() and current().observers is not None

    @classmethod
    def _desk(cls) -> TimelineAggregator | None:
        observers = current().observers if cls._is_watched() else None
        return observers.timeline if observers is not None else None


def _wait_until(reached: Callable[[], bool]) -> None:
    """Give rank 0's word time to arrive; a timeline is never worth more than a few seconds of waiting."""
    end = time.monotonic() + _PATIENCE
    while not reached() and time.monotonic() < end:
        time.sleep(0.01)
