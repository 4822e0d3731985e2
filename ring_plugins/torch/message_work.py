"""A message between GPUs as torch.distributed knows it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from ring_plugins.core.collectives.device import DeviceCommunicator
from ring_plugins.core.collectives.work import Work as CoreWork
from ring_plugins.torch import device
from ring_plugins.torch.work import RingWork


class MessageWork(RingWork):
    """A message that another thread queues on a GPU, as soon as both ends have met.

    Args:
        description, outputs: as `RingWork`.
        index: the GPU.
    """

    def __init__(self, description: str, outputs: list[torch.Tensor], index: int) -> None:
        super().__init__(description, outputs)
        self._index = index
        self._communicator: DeviceCommunicator | None = None
        self._queued: CoreWork[None] | None = None

    def is_queued(self, communicator: DeviceCommunicator, queued: CoreWork[None]) -> None:
        """It is on the GPU's stream; `finish` comes next."""
        self._communicator, self._queued = communicator, queued

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let what this thread queues next come after it; waits on the host only until it is on the GPU's stream.

        Raises:
            TimeoutExceeded: it was not there within `timeout` (zero: no limit of its own).
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

    def _fire(self, trigger: torch.futures.Future[Any]) -> None:
        if self._communicator is None:
            trigger.set_result(None)
        else:
            device.complete(trigger, None, self._communicator)
