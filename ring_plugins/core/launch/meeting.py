"""Where processes that were started on one host meet: a shared segment whose file they inherit."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from typing import Any

import numpy as np

from ring_plugins.core.errors import LaunchError
from ring_plugins.core.shared_memory import Segment, publish
from ring_plugins.core.waiting import seconds_from_environment

VARIABLE = "RING_GROWN"
_SLOT = 8192


def invitation(segment: Segment, rank: int, size: int, parent: int) -> dict[str, str]:
    """The environment of a process that is to be `rank`, and inherits the segment's file.

    Args:
        segment: of `Meeting.nbytes(size)` bytes.
        rank, size: of the process and of the job.
        parent: process id of the parent that the rank must have, or 0 where the first of its descendants counts.
    """
    # LOCAL_RANK is what Lightning's rank_zero_only reads at import.
    return {VARIABLE: f"{segment.fd}:{rank}:{size}:{parent}", "LOCAL_RANK": str(rank)}


class Meeting:
    """A segment with a slot a rank and parity, where ranks leave payloads for each other."""

    def __init__(self, segment: Segment, rank: int, size: int, children: list[subprocess.Popen[bytes]]) -> None:
        self.segment, self.rank, self.size, self.children = segment, rank, size, children
        self._round = 0

    @staticmethod
    def nbytes(size: int) -> int:
        return 2 * size * _SLOT

    def gather(self, payload: Any) -> list[Any]:
        """Everyone's payload (JSON) in rank order.

        Raises:
            LaunchError: a rank ended before it came here, or did not come within RING_START_TIMEOUT seconds.
        """
        self._round += 1
        data = json.dumps(payload).encode()
        if len(data) > _SLOT - 16:
            raise LaunchError(f"start-up record of rank {self.rank} is {len(data)} bytes, more than {_SLOT - 16}.")
        words, text = self._slot(self.rank)
        text[: len(data)] = np.frombuffer(data, np.uint8)
        words[1] = len(data)
        publish()
        words[0] = self._round
        end = time.monotonic() + seconds_from_environment("RING_START_TIMEOUT", 300.0)
        while missing := [r for r in range(self.size) if self._slot(r)[0][0] < self._round]:
            self._check_children(missing)
            if time.monotonic() > end:
                raise LaunchError(
                    f"rank {self.rank} waited for ranks {missing} to reach init() until RING_START_TIMEOUT."
                )
            time.sleep(0.001)
        return [json.loads(bytes(text[: words[1]])) for words, text in map(self._slot, range(self.size))]

    def has_arrived(self, rank: int) -> bool:
        """Whether a rank has ever come here."""
        words = self.segment.array[2 * rank * _SLOT : (2 * rank + 2) * _SLOT : _SLOT]
        return bool(words.any())

    def _slot(self, rank: int) -> tuple[Any, Any]:
        start = (2 * rank + self._round % 2) * _SLOT
        slot = self.segment.array[start : start + _SLOT]
        return slot[:16].view(np.int64), slot[16:]

    def _check_children(self, missing: list[int]) -> None:
        for rank, child in enumerate(self.children, start=1):
            if rank in missing and child.poll() is not None:
                raise LaunchError(
                    f"rank {rank} ended ({ending(child.returncode)}) before it reached ring_plugins.init(); "
                    "its own output says why. All ranks run the same script from its start."
                )


def ending(code: int) -> str:
    """How a process ended, from the `returncode` of its Popen."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"
