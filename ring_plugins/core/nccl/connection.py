"""One NCCL communicator of this process, from the meeting of its members to their parting."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.errors import DeviceError, RingError
from ring_plugins.core.nccl.calls import SUCCESS, Nccl
from ring_plugins.core.nccl.driver import Driver
from ring_plugins.core.nccl.meeting import connect, others
from ring_plugins.core.operations import Op
from ring_plugins.core.waiting import Wait

#: Seconds that a communicator which is no longer needed waits for the peers to be done with it too.
_FAREWELL = 10.0


class NcclConnection:
    """What calls of NCCL need: its communicator, the stream, and what to do when NCCL is not through at once.

    It may be used by one thread at a time.

    Args:
        name: for texts, equal on all members.
        device: this rank's GPU, as the process numbers them.
        host: a communicator among the same ranks, for meeting.
        wait: how to wait on the host.
        nccl, driver: of this process.
        stream: what it is used on.

    Raises:
        MismatchError, DeviceError, TimeoutExceeded: the ranks cannot be connected; see `core.nccl.meeting`.
    """

    def __init__(
        self, name: str, device: int, host: Communicator, wait: Wait, nccl: Nccl, driver: Driver, stream: int
    ) -> None:
        self._name, self._device, self._host = name, device, host
        self._wait, self._nccl, self._driver = wait, nccl, driver
        self._communicator: ctypes.c_void_p | None = connect(name, device, host, nccl, driver, wait)
        self._stream = stream

    @property
    def is_open(self) -> bool:
        """Whether it was neither aborted nor closed."""
        return self._communicator is not None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of NCCL's on the stream, with all but its last two arguments."""
        self._nccl.call(name, *arguments, self._communicator, self._stream, communicator=self._communicator)

    def reduction(self, dtype: str, op: Op) -> tuple[int, int, int]:
        """See `Nccl.reduction`."""
        return self._nccl.reduction(dtype, op)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Let the calls made inside run as one; they are on the stream when this ends.

        Args:
            what: they are, for texts.
        """
        self._nccl.call("ncclGroupStart")
        try:
            yield
        except BaseException:
            with contextlib.suppress(DeviceError):
                self._nccl.call("ncclGroupEnd")  # NCCL counts them by thread
            raise
        self._nccl.call("ncclGroupEnd", communicator=self._communicator)
        self._settle(what)

    def _settle(self, what: str) -> None:
        """NCCL's thread queues the kernels; until it has, there is nothing that an event could stand behind."""
        communicator = self._communicator
        assert communicator is not None
        self._wait.until(
            lambda: self._nccl.state(communicator) == SUCCESS,
            lambda: others(self._host),
            lambda: f"{self._name}: {what} by NCCL",
        )

    def check(self) -> None:
        """Raise DeviceError if NCCL noticed a failure while nobody called it."""
        if self._communicator is not None:
            self._nccl.state(self._communicator)

    def abort(self) -> None:
        """Let kernels that wait for peers end. Their results are of no use."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with contextlib.suppress(DeviceError), self._driver.current(self._device):
                self._nccl.call("ncclCommAbort", communicator)

    def part(self) -> None:
        """Everyone flushes what is still to be sent, then lets go; not for longer than a farewell should take."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        end = time.monotonic() + _FAREWELL

        def flushed() -> bool:
            return self._nccl.state(communicator) == SUCCESS or time.monotonic() > end

        with contextlib.suppress(RingError), self._driver.current(self._device):
            try:
                self._nccl.call("ncclCommFinalize", communicator, communicator=communicator)
                self._wait.until(flushed, list, lambda: f"{self._name}: parting")
                late = time.monotonic() > end
                self._nccl.call("ncclCommAbort" if late else "ncclCommDestroy", communicator)
            except RingError:
                self._nccl.call("ncclCommAbort", communicator)

    def forget(self) -> None:
        """Drop it without a word to NCCL, in a process that was forked from its owner."""
        self._communicator = None
