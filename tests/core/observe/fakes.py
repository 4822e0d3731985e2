"""A control channel that delivers nothing by itself."""


class FakeChannel:
    """Keeps what a service tells others, and hands it messages from them.

    Attributes:
        told: receiver, kind and body of each message.
        connected: ranks that are connected.
    """

    def __init__(self, rank=0, size=2):
        self.rank, self.size = rank, size
        self.told, self.connected = [], []
        self.on_joined = None
        self._handlers = {}

    def on(self, kind, handler):
        self._handlers[kind] = handler

    def tell(self, rank, kind, body=None, droppable=False):
        self.told.append((rank, kind, body))

    def receive(self, sender, kind, body):
        self._handlers[kind](sender, body)

    def flush(self, seconds):
        return True

    def take(self):
        """The messages since the last call."""
        told, self.told = self.told, []
        return told
