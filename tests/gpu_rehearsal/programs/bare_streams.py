"""Streams of the simulated driver for programs that need no framework."""

import contextlib
import threading

from ring_plugins.core.arrays.memory import DeviceMemory


class Streams:
    """The streams of a framework, reduced to what an all-reduce needs."""

    def __init__(self, caller: int) -> None:
        self._caller, self._local = caller, threading.local()

    def current(self) -> int:
        return getattr(self._local, "now", self._caller)

    @contextlib.contextmanager
    def using(self, stream: int):
        before, self._local.now = self.current(), stream
        try:
            yield
        finally:
            self._local.now = before

    def scale(self, memory: DeviceMemory, factor: float) -> None:
        raise NotImplementedError
