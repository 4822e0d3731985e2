"""How far this host's clock is from rank 0's.

As in Cristian, "Probabilistic clock synchronization" (1989): of many questions what time it is, the answer that came
back fastest was read closest to the middle between question and answer, at most half that time off.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns

from ring_plugins.core.control.channel import Body, Channel

_FIRST, _KEPT = 8, 16
_SOON, _LATER = 0.05, 5.0


class ClockOffset:
    """Asks rank 0 for the time; on rank 0 answers.

    Args:
        channel: between the ranks.
        same: whether this process reads the same clock as rank 0, being on its host.

    Attributes:
        uncertainty: nanoseconds by which `offset` may be wrong; 0 where the clock is the same.
    """

    def __init__(self, channel: Channel, same: bool) -> None:
        self._channel, self._same = channel, same
        self._answers: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # how long it took, offset
        self._asked, self._next = 0, 0.0
        channel.on("what time", lambda sender, body: channel.tell(sender, "time", {**body, "time": monotonic_ns()}))
        channel.on("time", self._note)

    @property
    def is_known(self) -> bool:
        return self._same or len(self._answers) >= _FIRST // 2

    @property
    def offset(self) -> int:
        """Nanoseconds to add to `time.monotonic_ns` here to have it as on rank 0."""
        return 0 if self._same or not self._answers else min(self._answers)[1]

    @property
    def uncertainty(self) -> int:
        return 0 if self._same or not self._answers else min(self._answers)[0] // 2

    def ask(self, now: float) -> None:
        """Ask again where it is time to; called often."""
        if not self._same and now >= self._next:
            self._asked += 1
            self._next = now + (_SOON if self._asked < _FIRST else _LATER)
            self._channel.tell(0, "what time", {"asked": monotonic_ns()}, droppable=True)

    def _note(self, sender: int, body: Body) -> None:
        now = monotonic_ns()
        self._answers.append((now - body["asked"], body["time"] - (body["asked"] + now) // 2))
