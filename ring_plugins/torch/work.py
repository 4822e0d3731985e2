"""`torch.distributed.Work` for a running operation: `wait`, `is_completed` and a future.

`RingWork` runs on the host. `GpuWork` is queued on a GPU: waiting for it makes the current stream wait, not the host.
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
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.api import Work as CoreWork
from ring_plugins.core.collectives.background import BackgroundWork
from ring_plugins.torch import device

if TYPE_CHECKING:
    from ring_plugins.core.collectives.executor import SerialExecutor
    from ring_plugins.core.gpu.communicator import DeviceCommunicator

    Executor = Communicator | SerialExecutor

_NO_TIMEOUT = timedelta(0)
#: Seconds between polls in `GpuWork.wait(timeout)`: a GPU cannot wake the host.
_POLL_SECONDS = 0.0005


class RingWork(dist.Work):
    """An operation that another thread runs, or that is done.

    Args:
        description: the operation, for errors.
        outputs: the tensors that will hold the result; the value of the future.
        source: rank in the group that a receive is from; -1 for everything else.
    """

    def __init__(self, description: str, outputs: list[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._description = description
        self._outputs = outputs
        self._source = source
        #: What another thread runs; None if the operation was done from the start.
        self._core: BackgroundWork[None] | None = None
        self._lock = threading.Lock()
        self._future: Any = None

    def run_on(self, executor: Executor, function: Callable[[], None]) -> RingWork:
        """Run `function` on an executor's thread, after everything that was started there before; returns itself."""
        core = executor.start(self._description, called_here(function))
        assert isinstance(core, BackgroundWork)
        self._core = core
        return self

    # torch.distributed calls these names.

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the result is there; raise the operation's own error if it failed.

        An exception that interrupts the wait breaks the communicator, on all ranks.

        Raises:
            TimeoutExceeded: the operation did not complete within `timeout` (zero: no extra limit).
        """
        core = self._core
        if core is None:
            return True
        if timeout > _NO_TIMEOUT:
            try:
                core.come_first()
                core.finished.wait(timeout.total_seconds())
            except BaseException as error:
                core.interrupt(error)
                raise
            if not core.done():
                raise self._timeout_error(timeout)
        core.wait()  # so that the core can detect deadlocks
        return True

    def _timeout_error(self, timeout: timedelta) -> TimeoutExceeded:
        return TimeoutExceeded(
            f"{self._description} was not complete after wait(timeout={timeout}); it is still running. "
            "Have all ranks called it?"
        )

    def is_completed(self) -> bool:
        """Whether the operation ended, with an error or without."""
        return self._core is None or self._core.done()

    def is_success(self) -> bool:
        """Whether the operation ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The operation's error, or None."""
        return self._core.error if self._core is not None else None

    def result(self) -> list[torch.Tensor]:
        """The output tensors, once they are complete."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def source_rank(self) -> int:
        """The rank in the group that a receive is from; -1 for everything else."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A torch future whose value is the list of output tensors. Made on demand, since most callers only wait.

        On failure the future holds the error's text: torch's C++ waits on these futures too, and would take an
        exception object that was set from Python for a result (torch/futures/__init__.py, `set_exception`).
        """
        with self._lock:
            if self._future is not None:
                return self._future
            trigger = self._new_trigger()
            future = self._future = trigger.then(self._value)
            complete = functools.partial(self._complete, trigger)
            # The thread that runs the operation holds its queue while callbacks run.
            is_complete = self._core is None or not self._core.when_done(complete)
        if is_complete:
            complete()
        return future

    def _new_trigger(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def _complete(self, trigger: torch.futures.Future[Any]) -> None:
        trigger.set_result(None)

    def _value(self, _: Any) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._outputs


class GpuWork(RingWork):
    """An operation that is queued on a GPU: a collective at once, a message once another thread has connected its ends.

    Args:
        description, outputs, source: as `RingWork`.
        index: the GPU.
    """

    def __init__(self, description: str, outputs: list[torch.Tensor], index: int, source: int = -1) -> None:
        super().__init__(description, outputs, source)
        self._index = index
        self._communicator: DeviceCommunicator | None = None
        self._queued: CoreWork[None] | None = None

    def set_queued(self, communicator: DeviceCommunicator, queued: CoreWork[None]) -> GpuWork:
        """Set the communicator's handle, once it is queued on that communicator's stream; returns itself."""
        self._communicator, self._queued = communicator, queued
        return self

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Make this thread's later work on the GPU wait for the result.

        The host waits only until the operation is queued and, if a `timeout` is given, until the GPU is done.

        Raises:
            TimeoutExceeded: the GPU was not done within `timeout` (zero: no extra limit).
        """
        end = time.monotonic() + timeout.total_seconds()
        super().wait(timeout)
        assert self._queued is not None
        while timeout > _NO_TIMEOUT and not self._queued.done():
            if time.monotonic() > end:
                raise self._timeout_error(timeout)
            time.sleep(_POLL_SECONDS)
        self._queued.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done with it, or it failed."""
        return super().is_completed() and (self._queued is None or self._queued.done())

    def _new_trigger(self) -> torch.futures.Future[Any]:
        return device.future_on_gpu(self._index)

    def _complete(self, trigger: torch.futures.Future[Any]) -> None:
        if self._communicator is None:
            trigger.set_result(None)
        else:
            device.complete(trigger, self._outputs, self._communicator)
