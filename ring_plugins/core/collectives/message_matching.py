"""Which receive gets which message: the two queues of an MPI library.

A receive that finds no message is posted; a message that finds no posted receive is unexpected. Each looks into the
other's queue first, by group, tag and sender, and takes the oldest that fits. So messages of one sender with one tag
are received in the order in which they were sent, and no receive waits behind another tag.

Queues that are empty are deleted: a program may use a new tag in every step.
"""

from __future__ import annotations

from typing import Any, TypeVar

from ring_plugins.core.collectives.message_request import Message
from ring_plugins.core.net.message_stream import Header, Incoming

T = TypeVar("T")


class Unexpected:
    """A message that no receive had been posted for when it arrived.

    Args:
        link: over which it came.
        header: that announced it.
        data: of an eager message, which may still be arriving; None for an offer.

    Attributes:
        is_whole: whether nothing of it is still arriving.
        receive: that was matched while data was still arriving.
    """

    def __init__(self, link: Incoming[Any], header: Header, data: bytearray | None) -> None:
        self.link, self.header, self.data = link, header, data
        self.is_whole = data is None
        self.receive: Message | None = None


class Matching:
    """The posted receives and unexpected messages of a process.

    Attributes:
        posted, unexpected: by context and tag, the oldest first.
    """

    def __init__(self) -> None:
        self.posted: dict[tuple[int, int], list[Message]] = {}
        self.unexpected: dict[tuple[int, int], list[Unexpected]] = {}

    def post(self, receive: Message) -> None:
        self.posted.setdefault((receive.group.context, receive.tag), []).append(receive)

    def add_unexpected(self, message: Unexpected) -> None:
        self.unexpected.setdefault((message.header.context, message.header.tag), []).append(message)

    def match_receive(self, receive: Message) -> Unexpected | None:
        """Take the oldest unexpected message for a new receive."""
        key = (receive.group.context, receive.tag)
        for message in self.unexpected.get(key, ()):
            if receive.matches(message.link.peer):
                _remove(self.unexpected, key, message)
                return message
        return None

    def match_message(self, sender: int, header: Header) -> Message | None:
        """Take the oldest posted receive for a message that arrives."""
        key = (header.context, header.tag)
        for receive in self.posted.get(key, ()):
            if receive.matches(sender):
                _remove(self.posted, key, receive)
                return receive
        return None

    def cancel(self, receive: Message) -> bool:
        """Take back a receive; returns whether it was still posted."""
        key = (receive.group.context, receive.tag)
        if receive not in self.posted.get(key, ()):
            return False
        _remove(self.posted, key, receive)
        return True

    def posted_in(self, context: int) -> list[Message]:
        return [receive for key, receives in self.posted.items() if key[0] == context for receive in receives]

    def close(self, context: int) -> list[Unexpected]:
        """Forget the receives of a group, and take all its unexpected messages."""
        for key in [key for key in self.posted if key[0] == context]:
            del self.posted[key]
        keys = [key for key in self.unexpected if key[0] == context]
        return [message for key in keys for message in self.unexpected.pop(key)]

    def lose(self, link: Incoming[Any]) -> None:
        """Forget what will not come because its connection is lost; a message that is here can still be received."""
        for key, messages in list(self.unexpected.items()):
            for message in [one for one in messages if one.link is link and (one.data is None or not one.is_whole)]:
                _remove(self.unexpected, key, message)


def _remove(queues: dict[tuple[int, int], list[T]], key: tuple[int, int], item: T) -> None:
    queues[key].remove(item)
    if not queues[key]:
        del queues[key]
