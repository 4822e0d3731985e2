"""A process group's communicators, and how an operation runs on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from ring_plugins.core.collectives.device import DeviceCommunicator
from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.torch.device import index_of, is_on_gpu
from ring_plugins.torch.named_group import NamedGroup
from ring_plugins.torch.point_to_point import PointToPoint
from ring_plugins.torch.work import DeviceRingWork, RingWork


class CommunicatingGroup(NamedGroup):
    """A process group with communicators of its own, one for each kind of memory.

    Args:
        store: shared by the members, under a prefix that no other group uses.
        communicator: among the members, in group order; used by nobody else, closed with the group.
        point_to_point: messages between pairs of members.
        connect: makes a communicator for a GPU, given its index; all members call it in their first collective on
            tensors of GPUs.
    """

    def __init__(
        self,
        store: Store,
        communicator: Communicator,
        point_to_point: PointToPoint,
        connect: Callable[[int], DeviceCommunicator],
    ) -> None:
        super().__init__(store, communicator.rank, communicator.size)
        self._communicator = communicator
        self._connect = connect
        self._on_gpus: dict[int, DeviceCommunicator] = {}
        self._point_to_point = point_to_point

    def _begin(
        self,
        description: str,
        outputs: list[torch.Tensor],
        function: Callable[[Communicator[Any]], None],
        opts: Any,
        inputs: Sequence[torch.Tensor] = (),
    ) -> RingWork:
        """Run now where the caller would only wait, else on the communicator's thread; on a GPU queue it."""
        described = f"{description} in process group {self._name or 'default'!r}"
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        on_gpu = next((tensor for tensor in (*outputs, *inputs) if is_on_gpu(tensor)), None)
        if on_gpu is not None:
            device = self._on_gpu(index_of(on_gpu))
            queued = DeviceRingWork(device, described, outputs, device.start(described, lambda: function(device)))
            if waits:
                queued.wait()
            return queued
        if waits:
            function(self._communicator)
            return RingWork.done(described, outputs)
        return RingWork.start(self._communicator, described, outputs, lambda: function(self._communicator))

    def _on_gpu(self, index: int) -> DeviceCommunicator:
        if index not in self._on_gpus:
            self._on_gpus[index] = self._connect(index)
        return self._on_gpus[index]

    def wait_for_gpus(self) -> None:
        """Return when the GPUs have done all that they were given by this group."""
        for communicator in self._on_gpus.values():
            communicator.synchronize()

    def shutdown(self) -> None:
        """Let go of the communicators; `destroy_process_group` calls this on every rank."""
        self._point_to_point.close()
        for communicator in self._on_gpus.values():
            communicator.close()
        self._communicator.close()

    abort = shutdown
