"""Who has closed which group: a receive must end when its sender can send no more.

Closing a group tells nobody, since most members never exchanged a message. A rank whose receive has waited for long
asks the sender to tell when it closes the group. The answer travels behind the sender's messages, so a receive that is
still posted when it comes has no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ring_plugins.core.collectives.message_request import Message
from ring_plugins.core.control.wait import LONG
from ring_plugins.core.net.message_stream import Kind


class ClosedGroups:
    """The groups that this process or a sender of its messages has closed.

    Args:
        tell: sends a header of a kind about a group to a rank.
    """

    def __init__(self, tell: Callable[[int, Kind, int], None]) -> None:
        self._tell = tell
        self._closed_here: set[int] = set()
        #: By context, ranks that want to know when this one closes the group.
        self._askers: dict[int, set[int]] = {}
        #: Groups and ranks that were asked the same, and those that have answered.
        self._asked: set[tuple[int, int]] = set()
        self._closed_by: set[tuple[int, int]] = set()

    def is_closed(self, context: int) -> bool:
        """Whether this process has closed the group."""
        return context in self._closed_here

    def close(self, context: int, *, tell: bool) -> None:
        """Close a group, and tell those who asked."""
        self._closed_here.add(context)
        for rank in self._askers.pop(context, ()) if tell else ():
            self._tell(rank, Kind.CLOSED, context)

    def answer(self, rank: int, context: int) -> None:
        """Tell a rank that asks, now or when this process closes the group."""
        if self.is_closed(context):
            self._tell(rank, Kind.CLOSED, context)
        else:
            self._askers.setdefault(context, set()).add(rank)

    def ask(self, pending: Iterable[Message], now: float) -> None:
        """Ask those for whom a receive has waited for long to tell when they close its group."""
        for message in list(pending):  # telling its rank may complete another one
            if message.verb == "receive" and message.peer is not None and now - message.since > LONG:
                question = message.group.context, message.group.ranks[message.peer]
                if question not in self._asked:
                    self._asked.add(question)
                    self._tell(question[1], Kind.ASK, question[0])

    def learn(self, sender: int, context: int) -> None:
        """A sender has closed a group: nothing of it follows."""
        self._closed_by.add((context, sender))

    def cannot_come(self, receive: Message) -> bool:
        """Whether all who could send the message of a receive have closed its group."""
        return all((receive.group.context, rank) in self._closed_by for rank in receive.missing())
