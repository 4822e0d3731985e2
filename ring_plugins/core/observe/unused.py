"""Notices a job whose ranks never communicate, so that each trains a model of its own.

A script that calls `init(ranks=4)` and then nothing else of this package runs four times, and every rank's loss looks
right. The calls that would average belong to a plugin, which such a script may never import. So the core itself looks
whether any communicator has been used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

#: Seconds within which a job should have communicated. Downloads and the first batch may take minutes.
_EXPECTED = 600.0
#: Only scripts that import one of these are taken to train. Others may want ranks and nothing else.
_FRAMEWORKS = ("torch", "tensorflow", "jax")
#: Functions that tell whether a library has connected the ranks by its own means; the package registers them.
other_connections: list[Callable[[], bool]] = []


class UnusedWatch:
    """A service of rank 0's monitor thread: warns once if no rank communicates, after a while or when the job ends.

    Args:
        size: of the job.
        is_used: whether this rank has taken part in any collective.
        has_failed: whether the job has failed, which explains it.
        warn: prints a line.
    """

    def __init__(
        self, size: int, is_used: Callable[[], bool], has_failed: Callable[[], bool], warn: Callable[[str], None]
    ) -> None:
        self._size, self._is_used, self._has_failed, self._warn = size, is_used, has_failed, warn
        self._began = time.monotonic()
        self._is_over = False

    def tick(self, now: float) -> None:
        self._is_over = self._is_over or any(is_connected() for is_connected in other_connections)
        if now - self._began > _EXPECTED:
            self._check(f"have not communicated in their first {_EXPECTED / 60:.0f} minutes")

    def close(self) -> None:
        self.tick(self._began)
        self._check("have ended without communicating")

    def _check(self, what: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._is_used() or self._has_failed() or not any(name in sys.modules for name in _FRAMEWORKS):
            return
        self._warn(
            f"the {self._size} ranks of this job {what}, so each has worked by itself. To train one model on all of "
            "them, use RingStrategy (Lightning), BroadcastCallback (Keras), or DistributedOptimizer and "
            "broadcast_parameters (a plain PyTorch loop)."
        )
