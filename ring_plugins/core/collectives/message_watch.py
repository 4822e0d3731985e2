"""Pending messages that cannot complete any more, and the reason of each.

A message ends with an error when the failure detector knows that the other end failed or left, when the connection to
it was lost and nobody tells why, or when it has waited for `RING_TIMEOUT`. Messages that wait for long are published
for stall reports and deadlock detection.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import PeerFailed, TimeoutExceeded, name_ranks
from ring_plugins.core.collectives.message_receiver import Receiver
from ring_plugins.core.collectives.message_request import Message
from ring_plugins.core.collectives.message_sender import Sender
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import LONG, REASON, LongWait, long_waits

#: Seconds after which a pending message is looked at.
_YOUNG = 0.02
#: Long waits that are published.
_PUBLISHED = 16


class Watch:
    """Finds the reasons why pending messages cannot complete.

    Args:
        rank: of this process in the job.
        failure_detector: knows which ranks have failed or left; None in tests.
        sender, receiver: know which connections there are.
        lost: ranks whose connections are lost, with when and why.
    """

    def __init__(
        self,
        rank: int,
        failure_detector: FailureDetector | None,
        sender: Sender,
        receiver: Receiver,
        lost: Mapping[int, tuple[float, str]],
    ) -> None:
        self._rank, self._failure_detector = rank, failure_detector
        self._sender, self._receiver, self._lost = sender, receiver, lost
        self._timeout = config.TIMEOUT.get()

    def doubtful(self, pending: Iterable[Message], now: float) -> list[Message]:
        """Pending messages that may never arrive. There may be ten thousand, so a look at one must cost little."""
        detector = self._failure_detector
        old = [message for message in pending if now - message.since > _YOUNG]
        if detector is not None and (detector.failure() is not None or detector.deadlocks):
            return old
        gone: dict[int, bool] = {}
        found = []
        for message in old:
            rank = -1 if message.peer is None else message.group.ranks[message.peer]
            if rank not in gone:
                has_left = detector is not None and rank >= 0 and detector.has_left(rank)
                gone[rank] = rank < 0 or rank in self._lost or has_left
            if gone[rank] or now - message.since > self._timeout:
                found.append(message)
        return found

    def check(self, message: Message, now: float) -> None:
        """Raise the reason why a message cannot complete, if there is one."""
        missing, detector = message.missing(), self._failure_detector
        if detector is not None:
            # What a rank sent before it left is read first. A receive from any rank fails once all have left.
            waits = message.verb == "receive" and self._receiver.is_connected(missing)
            gone = not waits and (len(missing) == 1 or all(map(detector.has_left, missing)))
            detector.check(message.name(), missing if gone else [], message.what())
        waited = now - message.since
        lost = self._lost.get(missing[0]) if len(missing) == 1 else None
        if lost is not None and now - max(lost[0], message.since) > REASON:
            raise PeerFailed(
                f"rank {self._rank} lost its connection to rank {missing[0]} ({lost[1]}) and waits for it in "
                f"{message.name()}. The rank or its host has ended; look for the error that it printed.",
                missing[0],
            )
        if waited > self._timeout:
            problem = self._sender.problem(missing[0]) if message.verb == "send" else ""
            why = f" ({problem})" if problem else ""
            raise TimeoutExceeded(
                f"{message.name()}: {message.verb} timed out after waiting {self._timeout:g} s for "
                f"{name_ranks(message.missing())}{why}; set RING_TIMEOUT to wait longer."
            )

    def publish(self, pending: Iterable[Message], now: float) -> None:
        """Put the longest waits into `long_waits`, from which stall reports and deadlock detection are made."""
        long = (message for message in pending if now - message.since > LONG)
        for message in heapq.nsmallest(_PUBLISHED, long, key=lambda message: message.since):
            missing = tuple(message.missing())
            # Of a receive from any rank nobody knows whom it waits for: it is part of no deadlock.
            blocked = message.blocked_since if message.blocked_since and len(missing) == 1 else now
            name = message.name()
            long_waits[message] = LongWait(name, message.what(), 0, "", missing, message.since, blocked)
