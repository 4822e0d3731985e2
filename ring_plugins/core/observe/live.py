"""What each rank of a running job does now, for `ring top` and for Prometheus.

While somebody watches, the rank with the lowest number asks all ranks once a second (`request_vitals`), and each
answers with its steps, waits and memory (`report_vitals`). Nobody asks otherwise, and a step costs nothing more.
`ring top` reaches that rank through a socket of the same user and host (core/net/local_service.py), says nothing, and
gets a line of JSON a second. With RING_METRICS the same numbers are served over HTTP (core/observe/metrics.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Members
from ring_plugins.core.control.channel import EVERYONE, Body, Channel
from ring_plugins.core.control.wait import long_waits
from ring_plugins.core.net.local_service import LocalService
from ring_plugins.core.observe.metrics import End, serve
from ring_plugins.core.trace.steps import StepClock

SERVICE = "top"
#: Seconds between two questions, until a rank that has not answered counts as silent, and until the address of
#: RING_METRICS is tried again: a rank that has just left may have it still.
_EVERY, _SILENT, _AGAIN = 1.0, 5.0, 5.0
#: Bytes of a page of this process's memory.
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Vitals:
    """A service of every rank: says what this rank does when it is asked.

    Args:
        channel: between the ranks.
        steps: those of this process.
    """

    def __init__(self, channel: Channel, steps: StepClock) -> None:
        self._channel, self._steps = channel, steps
        self._before = (time.monotonic(), 0, 0.0, 0.0)
        channel.on("request_vitals", self._answer, droppable=True)

    def tick(self, now: float) -> None:
        """Do nothing: a rank only answers."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _answer(self, sender: int, body: Body) -> None:
        self._channel.tell(sender, "report_vitals", self._look(), droppable=True)

    def _look(self) -> Body:
        """Steps so far; seconds of a step, and shares of the time, since the last look; bytes; what is waited for."""
        steps = self._steps
        now = (time.monotonic(), steps.count, steps.waiting, steps.moving)
        (seconds, count, waiting, moving), self._before = (
            (after - before for after, before in zip(now, self._before, strict=True)),
            now,
        )
        waits = sorted([*long_waits.values()], key=lambda wait: wait.since)
        last = steps.ended[-1] if steps.ended else None
        return {
            "steps": steps.count,
            "step_seconds": seconds / count if count else None,
            "waiting": min(1.0, waiting / seconds) if seconds else 0.0,
            "moving": min(1.0, moving / seconds) if seconds else 0.0,
            "step_bytes": last[-1] if last is not None else 0,
            "compression": steps.compression,
            "memory_bytes": _memory(),
            "waits_in": waits[0].what if waits else None,
            "waits_for": list(waits[0].missing) if waits else [],
            "waits_seconds": round(now[0] - waits[0].since, 1) if waits else 0.0,
        }


def _memory() -> int:
    """Bytes of this process that are in memory."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


class LiveView:
    """A service of every rank that may be the lowest: shows all ranks to whoever watches.

    Args:
        channel: between the ranks.
        members: of the job.
    """

    def __init__(self, channel: Channel, members: Members) -> None:
        self._channel, self._members = channel, members
        self._service: LocalService | None = None
        self._answers: dict[int, tuple[float, Body]] = {}
        self._began, self._next = time.monotonic(), 0.0
        self._end_metrics: End | None = None
        self._serve_at, self._has_warned = 0.0, False
        channel.on("report_vitals", self._note, droppable=True)

    def tick(self, now: float) -> None:
        if self._channel.rank != min(self._members.ranks):
            return
        if self._service is None:
            self._service = LocalService(SERVICE, 0)
        if self._end_metrics is None and now >= self._serve_at and (address := config.METRICS.get()):
            self._serve_at = now + _AGAIN
            self._end_metrics = serve(address, self.snapshot, self._warn)
        for number, _ in self._service.poll():
            self._service.hang_up(number)  # nobody has anything to say here
        if now < self._next or not ([*self._service] or self._end_metrics):
            return
        self._next = now + _EVERY
        if [*self._service] and self._answers:
            line = json.dumps(self.snapshot())
            for number in self._service:
                self._service.send(number, line)
        self._channel.tell(EVERYONE, "request_vitals", droppable=True)
        self._channel.tell(self._channel.rank, "request_vitals", {})

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
        if self._end_metrics is not None:
            self._end_metrics()

    def detach_after_fork(self) -> None:
        """In a forked child: whoever watches, or comes when this process has ended, must not wait for the child."""
        if self._service is not None:
            self._service.abandon()
        if self._end_metrics is not None:
            self._end_metrics(is_forked=True)

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            logger.warning(text)
        self._has_warned = True

    def _note(self, sender: int, body: Body) -> None:
        self._answers[sender] = time.monotonic(), body

    def snapshot(self) -> dict[str, Any]:
        """The job and its ranks, in numbers that scripts see; for any thread."""
        now, members = time.monotonic(), self._members
        number = {world: rank for rank, world in enumerate(members.ranks)}
        rows = []
        for rank, world in enumerate(members.ranks):
            member, (at, vitals) = members.known[world], self._answers.get(world, (0.0, {}))
            shown = {**vitals, "waits_for": [number[one] for one in vitals.get("waits_for", []) if one in number]}
            rows.append({"rank": rank, "host": member.host, "pid": member.pid, "answers": now - at < _SILENT} | shown)
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": " ".join(sys.argv),
            "pid": os.getpid(),
            "seconds": round(now - self._began, 1),
            "ranks": len(members.ranks),
            "ranks_at_start": members.shards,
            "changes": members.view,
            "lost": sorted(set(members.known) - set(members.ranks)),
            "rows": rows,
        }
