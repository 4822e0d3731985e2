"""A send or receive under way: what MPI calls a request, and the errors that name it.

Both ends name a message alike (`Message.name`), so that the errors and stall reports of two ranks can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ring_plugins.core.base.errors import MismatchError, PeerFailed
from ring_plugins.core.base.types import Bytes
from ring_plugins.core.collectives.fingerprint import mismatch

#: In place of an element type: an end that rejected its arguments says so with an empty message of this type.
REJECTED_CALL = "rejected arguments"


class Group(Protocol):
    """The ranks among which messages are matched: what MPI calls a communicator.

    Attributes:
        context: number of the group, equal on all members and used by no other group.
        name: for errors.
        ranks: world ranks of the members.
        rank: position of this process in the group.
    """

    context: int
    name: str
    ranks: tuple[int, ...]
    rank: int


class Message:
    """A send or receive under way.

    Args:
        verb: "send" or "receive".
        group: that it belongs to.
        peer: position of the other end in the group, None for a receive from whichever member sends first.
        tag: the caller's.
        dtype: name of the element type.
        data: to send or to fill.
        finished: called once, with the error or None; any thread.

    Attributes:
        source: position of the sender, once a receive is matched.
        done: whether `finished` is about to be called or has been.
        blocked_since: since when a caller waits for it, 0 while none does.
    """

    def __init__(
        self,
        verb: str,
        group: Group,
        peer: int | None,
        tag: int,
        dtype: str,
        data: Bytes,
        finished: Callable[[BaseException | None], None],
    ) -> None:
        self.verb, self.group, self.peer, self.tag, self.dtype = verb, group, peer, tag, dtype
        self.data = memoryview(data)
        self.source = -1 if peer is None else peer
        self.since, self.blocked_since = time.monotonic(), 0.0
        self.done = False
        self.error: BaseException | None = None
        self.finished = finished

    def name(self) -> str:
        """The channel, which both ends name alike."""
        peer = "any rank" if self.peer is None else str(self.peer)
        ends = (str(self.group.rank), peer) if self.verb == "send" else (peer, str(self.group.rank))
        return f"{self.group.name}, {' to '.join(ends)}, tag {self.tag}"

    def what(self) -> str:
        """The operation, which both ends name alike: one that sends does not wait in another one than its receiver."""
        return f"send and recv in {self.name()}"

    def missing(self) -> list[int]:
        """World ranks that it waits for."""
        if self.peer is not None:
            return [self.group.ranks[self.peer]]
        return [rank for position, rank in enumerate(self.group.ranks) if position != self.group.rank]

    def matches(self, sender: int) -> bool:
        """Whether this rank of the job is the other end; any rank may send a message with the group's number."""
        return sender in self.group.ranks if self.peer is None else self.group.ranks[self.peer] == sender

    def text(self) -> str:
        return f"{self.verb}({len(self.data)} bytes of {self.dtype})"

    def closed_by(self, rank: int) -> PeerFailed:
        """The error for a message whose other end closed the group."""
        own = self.group.ranks[self.group.rank]
        return PeerFailed(
            f"rank {rank} closed {self.group.name} before {self.name()} was complete: rank {own} waits in "
            f"{self.text()}, and rank {rank} had not called the other end.",
            rank,
        )

    def rejected_by(self, rank: int, theirs: str) -> BaseException:
        """The error for a message whose other end has another size or type."""
        own = self.group.ranks[self.group.rank]
        if REJECTED_CALL in theirs and self.dtype != REJECTED_CALL:
            return MismatchError(
                f"rank {rank} rejected the arguments of its end of {self.name()}, and its own error says why. "
                f"Rank {own} waits in {self.text()}."
            )
        return mismatch(self.name(), {own: self.text(), rank: theirs})
