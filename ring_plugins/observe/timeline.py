"""`Timeline`: record what all ranks do for some steps of a script."""

from __future__ import annotations

from pathlib import Path

from ring_plugins.core.base.threads import until
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.world import current_observers

#: Seconds to wait for a timeline to start or end; no script should wait longer for one.
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
        self._is_recording, observers = True, current_observers()
        if observers is None:
            return
        if observers.timeline is not None:
            observers.timeline.start(self._directory)
        else:
            observers.spans.hold()
        until(lambda: recorder.on, _PATIENCE)

    def stop(self) -> Path | None:
        """Stop recording; return the file's path on rank 0, None on other ranks.

        Does nothing unless this timeline is recording: RING_TIMELINE's recording of a whole job goes on.
        """
        if not self._is_recording:
            return None
        self._is_recording, observers = False, current_observers()
        if observers is None:
            return None
        if (aggregator := observers.timeline) is None:
            # Rank 0 switches the recording off. Waiting for that keeps what this rank does next out of the timeline.
            observers.spans.release()
            until(lambda: not recorder.on, _PATIENCE)
            return None
        aggregator.stop()
        until(lambda: aggregator.is_complete, _PATIENCE)
        return aggregator.finish()

    def __enter__(self) -> Timeline:  # noqa: PYI034 - Self needs Python 3.11; nobody inherits
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        observers = current_observers()
        is_rank_0 = observers is not None and observers.timeline is not None
        if kind is None or is_rank_0:  # a rank that failed reports that without waiting for rank 0
            self.stop()
