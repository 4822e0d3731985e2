"""A running collective as torch.distributed knows it: `Work` with `wait`, `is_completed` and a future."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ring_plugins.core.base.errors import TimeoutExceeded
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.api import Work as CoreWork
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch import device

_NO_TIMEOUT = timedelta(0)


class RingWork(dist.Work):
    """A collective that is done, or that another thread will finish.

    Args:
        description: the operation, for errors.
        outputs: the tensors that hold the result once it is there; what the future gives.
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
        """A work that was complete before anybody could wait for it."""
        work = cls(description, outputs)
        work._finished.set()
        return work

    @classmethod
    def start(
        cls, communicator: Communicator, description: str, outputs: list[torch.Tensor], function: Callable[[], None]
    ) -> RingWork:
        """Run `function` on the communicator's thread, after all started there before."""
        work = cls(description, outputs)
        work._core = communicator.start(description, lambda: work.run(function))
        return work

    def run(self, function: Callable[[], None]) -> None:
        """Run the operation itself, in the thread that calls; its error goes to whoever waits, and is raised here."""
        try:
            function()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.finish(self._error)

    def finish(self, error: BaseException | None = None) -> None:
        """The operation ended, with an error or without."""
        with self._lock:
            self._error = error
            self._finished.set()
            trigger = self._trigger
        if trigger is not None:
            self._fire(trigger)

    # torch.distributed calls these names.

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the result is there; raise the operation's own error if it failed.

        Raises:
            TimeoutExceeded: not within `timeout` (zero: no limit of its own).
        """
        if timeout > _NO_TIMEOUT:
            if not self._finished.wait(timeout.total_seconds()):
                raise TimeoutExceeded(
                    f"{self._description} was not complete after wait(timeout={timeout}); it is still under way. "
                    "Have all ranks called it?"
                )
        elif self._core is not None:
            self._core.wait()  # its way of waiting lets the core notice ranks that wait for each other
        else:
            self._finished.wait()
        if self._error is not None:
            raise self._error
        return True

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
        """The output tensors."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Only receives from any source have one, and those are not offered."""
        return -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A torch future with the list of output tensors as its value; made on demand, most callers only wait.

        On failure the future holds the error's text: torch's C++ waits on these futures too, and an exception
        object set from Python would look like a result to it (torch/futures/__init__.py, `set_exception`).
        """
        with self._lock:
            if self._future is None:
                self._trigger = self._new_trigger()
                self._future = self._trigger.then(self._value)
                fire = self._finished.is_set()
            else:
                fire = False
        if fire and self._trigger is not None:
            self._fire(self._trigger)
        return self._future

    def _new_trigger(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _fire(self, trigger: torch.futures.Future[Any]) -> None:
        trigger.set_result(None)

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs


class DeviceRingWork(RingWork):
    """A collective that is queued on a GPU: to wait for it is to let the current stream wait.

    Args:
        communicator: on whose stream it is.
        description, outputs: as `RingWork`.
        queued: what the communicator knows it by.
    """

    def __init__(
        self,
        communicator: DeviceCommunicator,
        description: str,
        outputs: list[torch.Tensor],
        queued: CoreWork[None],
    ) -> None:
        super().__init__(description, outputs)
        self._queued = queued
        self._future = device.future_on_gpu(communicator.device)
        device.complete(self._future, outputs, communicator)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Let what this thread queues next come after it. Only a `timeout` waits on the host, for as long.

        Raises:
            TimeoutExceeded: not within `timeout` (zero: no limit of its own).
        """
        if timeout > _NO_TIMEOUT:
            end = time.monotonic() + timeout.total_seconds()
            while not self._queued.done():
                if time.monotonic() > end:
                    raise TimeoutExceeded(
                        f"{self._description} was not complete after wait(timeout={timeout}); it is still under way. "
                        "Have all ranks called it?"
                    )
                time.sleep(0.0005)
        self._queued.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done with it."""
        return self._queued.done()

    is_success = is_completed

    def get_future(self) -> Any:
        """A torch future with the list of output tensors; it knows the GPU's streams."""
        return self._future
