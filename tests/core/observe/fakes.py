"""A control channel that delivers only what the test passes to it."""

import time


class FakeChannel:
    """Keeps the messages that a service sends, and passes it messages from others.

    Attributes:
        sent: receiver, kind and body of each message.
        connected: ranks that are connected.
    """

    def __init__(self, rank=0, size=2):
        self.rank, self.size, self.leader = rank, size, 0
        self.sent, self.connected = [], []
        self.joined = None
        self._handlers = {}

    def on(self, kind, handler, droppable=False):
        self._handlers[kind] = handler

    def tell(self, rank, kind, body=None, droppable=False):
        self.sent.append((rank, kind, body))

    def on_joined(self, handler):
        self.joined = handler

    def receive(self, sender, kind, body):
        self._handlers[kind](sender, body)

    def flush(self, seconds):
        return True

    def poll(self, seconds):
        time.sleep(seconds)

    def wake(self):
        pass

    def take(self):
        """The messages since the last call."""
        sent, self.sent = self.sent, []
        return sent
