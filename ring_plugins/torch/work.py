"""`torch.distributed.Work` for a running operation: `wait`, `is_completed` and a future.

`RingWork` runs on the host, in whichever thread. `GpuWork` and `GpuMessageWork` are queued on a GPU: waiting for them
makes the current stream wait, not the host.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ring_plugins.core.base.errors import TimeoutExceeded
from ring_plugins.core.base.places import called_here
from ring_plugins.core.base.threads import HelperThread, wait_for_event
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.api import Work as CoreWork
from ring_plugins.core.collectives.background import BackgroundWork
from ring_plugins.core.trace.recorder import recorder
from ring_plugins.core.trace.steps import steps
from ring_plugins.torch import device

if TYPE_CHECKING:
    from ring_plugins.core.collectives.message_request import Message
    from ring_plugins.core.collectives.messages import MessageGroup
    from ring_plugins.core.gpu.communicator import DeviceCommunicator

_NO_TIMEOUT = timedelta(0)
#: Seconds between polls in `GpuWork.wait(timeout)`: a GPU cannot wake the host.
_POLL_SECONDS = 0.0005
#: Seconds for which an interrupted wait lets another thread store a message that has just arrived.
_STORE_SECONDS = 1.0


class RingWork(dist.Work):
    """An operation that is done, or that another thread will finish.

    Args:
        description: the operation, for errors.
        outputs: the tensors that will hold the result; the value of the future.
    """

    def __init__(self, description: str, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._description = description
        self._outputs = outputs
        self._error: BaseException | None = None
        self._core: CoreWork[None] | None = None
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._trigger: torch.futures.Future[Any] | None = None
        self._future: Any = None

    @classmethod
    def done(cls, description: str, outputs: list[torch.Tensor]) -> RingWork:
        """A work that is complete already."""
        work = cls(description, outputs)
        work._finished.set()
        return work

    @classmethod
    def start(
        cls, communicator: Communicator, description: str, outputs: list[torch.Tensor], function: Callable[[], None]
    ) -> RingWork:
        """Run `function` on the communicator's thread, after everything that was started there before."""
        work = cls(description, outputs)
        work._core = communicator.start(description, called_here(lambda: work._run(function)))
        return work

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.finish(self._error)

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the work, with an error or without; what is attached to its future is called on another thread."""
        with self._lock:
            self._error = error
            self._finished.set()
            trigger = None if isinstance(self._core, BackgroundWork) else self._trigger
        if trigger is not None:  # what is attached to it may wait for what this thread does next
            HelperThread(self._complete, "ring:callbacks", (trigger,)).start()

    # torch.distributed calls these names.

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the result is there; raise the operation's own error if it failed.

        Raises:
            TimeoutExceeded: the operation did not complete within `timeout` (zero: no extra limit).
        """
        try:
            if timeout > _NO_TIMEOUT:
                if isinstance(self._core, BackgroundWork):
                    self._core.come_first()
                self._finished.wait(timeout.total_seconds())
            elif self._core is not None:
                self._core.wait()  # so that the core can detect deadlocks
            else:
                wait_for_event(self._finished)
        except BaseException as error:
            if not self._finished.is_set():
                self.interrupt(error)
            raise
        if not self._finished.is_set():
            raise self._timeout_error(timeout)
        if self._error is not None:
            raise self._error
        return True

    def interrupt(self, cause: BaseException) -> None:
        """Break the communicator, on all ranks: an exception ended a wait for this work while it was under way."""
        if isinstance(self._core, BackgroundWork):
            self._core.interrupt(cause)

    def _timeout_error(self, timeout: timedelta) -> TimeoutExceeded:
        return TimeoutExceeded(
            f"{self._description} was not complete after wait(timeout={timeout}); it is still running. "
            "Have all ranks called it?"
        )

    def is_completed(self) -> bool:
        """Whether the operation ended, with an error or without."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Whether the operation ended without an error."""
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The operation's error, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors, once they are complete."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def source_rank(self) -> int:
        """Return -1: only a receive has a source rank (`MessageWork`)."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A torch future whose value is the list of output tensors. Made on demand, since most callers only wait.

        On failure the future holds the error's text: torch's C++ waits on these futures too, and would take an
        exception object that was set from Python for a result (torch/futures/__init__.py, `set_exception`).
        """
        with self._lock:
            if self._future is None:
                self._trigger = self._new_trigger()
                self._future = self._trigger.then(self._value)
                is_complete = self._finished.is_set()
                if isinstance(self._core, BackgroundWork):  # its thread holds the queue while callbacks run
                    is_complete = not self._core.when_done(functools.partial(self._complete, self._trigger))
            else:
                is_complete = False
        if is_complete and self._trigger is not None:
            self._complete(self._trigger)
        return self._future

    def _new_trigger(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _complete(self, trigger: torch.futures.Future[Any]) -> None:
        trigger.set_result(None)

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs


class MessageWork(RingWork):
    """A message between CPUs.

    Args:
        description, outputs: as `RingWork`.
        messages: of the process group.

    Attributes:
        message: the core's message, set once it is started.
    """

    def __init__(self, description: str, outputs: list[torch.Tensor], messages: MessageGroup) -> None:
        super().__init__(description, outputs)
        self._messages = messages
        self.message: Message | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the message is sent or received; raise its error if it failed.

        Raises:
            TimeoutExceeded: it did not complete within `timeout` (zero: no extra limit).
        """
        message = self.message
        if message is not None and not self._finished.is_set():
            message.blocked_since = began = time.monotonic()
            try:
                try:
                    self._messages.wait(message, timeout.total_seconds() or None)
                except BaseException as error:
                    self.interrupt(error)
                    raise
                return super().wait(timeout)
            finally:
                message.blocked_since = 0.0
                ended = time.monotonic()
                steps.add_blocked_time(ended - began, 0.0)
                if recorder.on:
                    recorder.record("call", message.name(), int(began * 1e9), int(ended * 1e9))
        return super().wait(timeout)

    def interrupt(self, cause: BaseException) -> None:
        """Let go of the tensor: an exception ended a wait for this message, and the script may use the tensor again."""
        message = self.message
        if message is not None and not self._finished.is_set():
            self._messages.interrupt(message, cause)
            if message.done:
                self._finished.wait(_STORE_SECONDS)

    def source_rank(self) -> int:
        """Return the sender's rank in the group; for a receive from any rank, known once it is complete."""
        return self.message.source if self.message is not None else -1

    _source_rank = source_rank


class GpuWork(RingWork):
    """A collective that is queued on a GPU.

    Args:
        communicator: on whose stream it is queued.
        description, outputs: as `RingWork`.
        queued: the communicator's handle.
    """

    def __init__(
        self,
        communicator: DeviceCommunicator,
        description: str,
        outputs: list[torch.Tensor],
        queued: CoreWork[None],
    ) -> None:
        super().__init__(description, outputs)
        self._communicator, self._queued = communicator, queued

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Make this thread's later work on the GPU wait for the result. The host waits only if a `timeout` is given.

        Raises:
            TimeoutExceeded: the GPU was not done within `timeout` (zero: no extra limit).
        """
        if timeout > _NO_TIMEOUT:
            end = time.monotonic() + timeout.total_seconds()
            while not self._queued.done():
                if time.monotonic() > end:
                    raise self._timeout_error(timeout)
                time.sleep(_POLL_SECONDS)
        self._queued.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done with it."""
        return self._queued.done()

    is_success = is_completed

    def get_future(self) -> Any:
        """A torch future whose value is the list of output tensors; it knows the GPU's streams.

        Made on demand: torch pickles the tensors to find their storages, and most callers only wait.
        """
        with self._lock:
            if self._future is None:
                self._future = device.future_on_gpu(self._communicator.device)
                device.complete(self._future, self._outputs, self._communicator)
        return self._future


class GpuMessageWork(RingWork):
    """A message that another thread queues on a GPU once sender and receiver are connected.

    Args:
        description, outputs: as `RingWork`.
        index: the GPU.
    """

    def __init__(self, description: str, outputs: list[torch.Tensor], index: int) -> None:
        super().__init__(description, outputs)
        self._index = index
        self._communicator: DeviceCommunicator | None = None
        self._queued: CoreWork[None] | None = None

    def set_queued(self, communicator: DeviceCommunicator, queued: CoreWork[None]) -> None:
        """Set the communicator's handle, before `finish`."""
        self._communicator, self._queued = communicator, queued

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Make this thread's later work on the GPU wait for the message. The host waits only until it is queued.

        Raises:
            TimeoutExceeded: it was not queued within `timeout` (zero: no extra limit).
        """
        super().wait(timeout)
        assert self._queued is not None
        self._queued.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done with it, or it failed."""
        return self._finished.is_set() and (self._queued is None or self._queued.done())

    def is_success(self) -> bool:
        """Whether the GPU is done with it."""
        return self._error is None and self.is_completed()

    def _new_trigger(self) -> torch.futures.Future[Any]:
        return device.future_on_gpu(self._index)

    def _complete(self, trigger: torch.futures.Future[Any]) -> None:
        if self._communicator is None:
            trigger.set_result(None)
        else:
            device.complete(trigger, None, self._communicator)
