"""`Timeline`: record what all ranks do for some steps of a script."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ring_plugins.core.observe.timeline import TimelineAggregator, TimelineReporter
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.world import current, is_initialized

#: Seconds that the start or the end of a timeline may take.
_PATIENCE = 5.0


class Timeline:
    """Records a timeline of all ranks inside its context. All ranks enter it; rank 0 writes the file:

        with Timeline("traces"):
            ...  # some steps

    Args:
        directory: where rank 0 puts `timeline.json`.

    Raises:
        OSError: rank 0 cannot write there.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._is_recording = False

    def start(self) -> None:
        """Record from now on."""
        self._is_recording = True
        aggregator = self._aggregator()
        if aggregator is not None:
            aggregator.start(self._directory)
        elif (reporter := self._reporter()) is not None:
            reporter.hold()
        if is_initialized() and current().observers is not None:
            _wait_until(lambda: recorder.on)

    def stop(self) -> Path | None:
        """Stop recording; return the file's path on rank 0, None on other ranks.

        Does nothing unless this timeline is recording: RING_TIMELINE's recording of a whole job goes on.
        """
        if not self._is_recording:
            return None
        self._is_recording = False
        aggregator = self._aggregator()
        if aggregator is None:
            # Rank 0 switches the recording off. Waiting for that keeps what this rank does next out of the timeline.
            if (reporter := self._reporter()) is not None:
                reporter.release()
            _wait_until(lambda: not recorder.on)
            return None
        aggregator.stop()
        _wait_until(lambda: aggregator.is_complete)
        return aggregator.finish()

    def __enter__(self) -> Timeline:  # noqa: PYI034 - Self needs Python 3.11; nobody inherits
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._aggregator() is not None:  # a rank that failed reports that without waiting for rank 0
            self.stop()

    @staticmethod
    def _aggregator() -> TimelineAggregator | None:
        observers = current().observers if is_initialized() else None
        return observers.timeline if observers is not None else None

    @staticmethod
    def _reporter() -> TimelineReporter | None:
        observers = current().observers if is_initialized() else None
        return observers.spans if observers is not None else None


def _wait_until(reached: Callable[[], bool]) -> None:
    """Wait for a message from rank 0 to arrive, for a few seconds at most: a timeline is not worth more."""
    end = time.monotonic() + _PATIENCE
    while not reached() and time.monotonic() < end:
        time.sleep(0.01)
