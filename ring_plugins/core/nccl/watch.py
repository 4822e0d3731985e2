"""No GPU waits for a peer that is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ring_plugins.core.collectives.device import DeviceCommunicator
from ring_plugins.core.failure import Watch


class DeviceWatch:
    """A service of the guard: looks after what the GPUs were given.

    Args:
        watch: what becomes of the other ranks.
        communicators: those of this process.
    """

    def __init__(self, watch: Watch, communicators: Callable[[], Sequence[DeviceCommunicator]]) -> None:
        self._watch, self._communicators = watch, communicators

    def tick(self, now: float) -> None:
        communicators = self._communicators()
        failure = self._watch.failure() if communicators else None
        for communicator in communicators:
            if failure is None:
                communicator.watch([rank for rank in communicator.ranks if self._watch.has_ended(rank)])
            else:
                communicator.abort(failure)  # a kernel that waits for a dead peer would never end

    def close(self) -> None:
        pass
