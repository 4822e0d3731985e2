"""When the GPU waits for too long: nobody may call for minutes while it does."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ring_plugins.core.collectives.stream_queue import Queued
from ring_plugins.core.errors import PeerLeft, TimeoutExceeded
from ring_plugins.core.waiting import seconds_from_environment

#: Seconds in which the GPU may still finish what a rank that has ended in order had sent before.
_LAST_WORDS = 2.0


class Overdue:
    """Looks now and then at the oldest thing that a communicator's GPU has not finished.

    Args:
        name: of the communicator, for texts.
        rank: of this process in the job.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._timeout = seconds_from_environment("RING_TIMEOUT", 1800.0)
        self._waits_for_gone_since = 0.0

    def check(self, oldest: Queued | None, gone: Sequence[int]) -> None:
        """Raise where there is no point in waiting any longer.

        Args:
            oldest: unfinished work, None if there is none.
            gone: members (world ranks) whose processes have ended in order, so that nothing more will come from them.

        Raises:
            PeerLeft: what they sent before has had time to arrive.
            TimeoutExceeded: it takes longer than RING_TIMEOUT.
        """
        now = time.monotonic()
        if not gone or oldest is None:
            self._waits_for_gone_since = 0.0
        elif not self._waits_for_gone_since:
            self._waits_for_gone_since = now
        elif now - self._waits_for_gone_since > _LAST_WORDS:
            raise PeerLeft(
                f"rank {gone[0]} has ended its part of the job, and the GPU of rank {self._rank} waits for it in "
                f"{self._name}: {oldest.text}. Usually the ranks took different numbers of steps: give every "
                "rank the same number of batches.",
                gone[0],
            )
        if oldest is not None and now - oldest.since > self._timeout:
            raise TimeoutExceeded(
                f"{self._name}: the GPU has not finished {oldest.text} for {self._timeout:g} s. "
                "A rank did not call it, or computes for that long; set RING_TIMEOUT to wait longer."
            )
