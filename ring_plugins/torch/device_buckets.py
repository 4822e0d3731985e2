"""The memory of buckets on a GPU: allocated by torch, and rounded to 16 bits by torch where compression is on.

Between hosts the core rounds numbers as it sends them. NCCL cannot, so GPUs reduce a rounded copy. NCCL sums what it
sends, so it cannot send 8 bits with a common exponent either: they would be rounded again in each sum, and overflow.
Gradients of GPUs go through memory of the host for that, and all is as on CPUs from there: ranks of a host sum in
shared memory, hosts send 8 bits. What that costs is little beside a network for which 8 bits pay: copies to the host
take a hundredth of the time that the same bytes take at 1 Gbit/s. Considered and left: that NCCL sums inside a host, of
which only one rank copies. It takes two more communicators, and gains where a host has many GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.base.errors import RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Bucket, FusionPlan
from ring_plugins.torch import device as of_device
from ring_plugins.torch.device import index_of, is_capturing, is_on_gpu, memory_of, streams


class DeviceBuckets:
    """The buckets of a plan in the memory of a GPU; collective if that is NCCL's (`core.gpu.registered`).

    Args:
        plan: of the buckets.
        device: torch's name of the GPU, None for its current one.
        registered_by: the communicator that allocates the memory; None for torch.

    Attributes:
        plan, memories: as `BucketMemory` has them.
        tensors: each bucket as a 1-d tensor.
    """

    def __init__(
        self, plan: FusionPlan, device: torch.device | None, registered_by: DeviceCommunicator | None = None
    ) -> None:
        self.plan = plan
        registered = registered_by.allocate_registered(plan.nbytes) if registered_by is not None else None
        if registered is None:
            flat = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
        else:
            flat = of_device.tensor_over(registered).zero_()
        parts = torch.split(flat, [bucket.nbytes for bucket in plan.buckets])
        self.tensors = [
            part.view(getattr(torch, bucket.dtype)) for bucket, part in zip(plan.buckets, parts, strict=True)
        ]
        self.memories = [memory_of(tensor) for tensor in self.tensors]

    def release(self) -> None:
        """Nothing to do: the memory is free with its last view, after our communicator's use of it."""


class HalfBuckets:
    """16-bit copies of `DeviceBuckets` and of the direct gradients, reduced in their place.

    Gradients are scaled down before they are rounded and summed, so float16 overflows only where the average does.

    Args:
        plan: of the buckets.
        tensors: each bucket as a 1-d tensor.
        compression: the type to round to, and whether to add the rounding error to the next step.
    """

    def __init__(self, plan: FusionPlan, tensors: Sequence[torch.Tensor], compression: Compression) -> None:
        self.plan = plan
        self._tensors, self._compression = tensors, compression
        self._dtype: torch.dtype = getattr(torch, compression.dtype)
        self._halves = [self._half_of(tensor) for tensor in tensors]
        self.memories = [memory_of(half) for half in self._halves]
        #: (rounded, exact) tensors of the current pass.
        self._packed: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Rounding errors, by bucket and place in it.
        self._errors: dict[tuple[int, int], torch.Tensor] = {}

    def _half_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer of half the size, or the tensor itself where compression does not apply to its type."""
        if not self._compression.applies_to(str(tensor.dtype).removeprefix("torch.")):
            return tensor
        return torch.zeros(tensor.numel(), dtype=self._dtype, device=tensor.device)

    @torch.no_grad()
    def pack(self, bucket: Bucket, direct: Sequence[torch.Tensor]) -> list[Memory]:
        """Round a bucket that was just filled, and its direct gradients; return the memory of the latter."""
        flat = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in direct]
        halves = [self._halves[bucket.index], *(self._half_of(tensor) for tensor in flat)]
        for place, (half, exact) in enumerate(zip(halves, [self._tensors[bucket.index], *flat], strict=True)):
            if half is exact:
                continue
            if self._compression.error_feedback:
                error = self._errors.get((bucket.index, place))
                values = exact if error is None else exact + error
                half.copy_(values)
                self._errors[bucket.index, place] = (values - half).nan_to_num_(0, 0, 0)
            else:
                half.copy_(exact)
            self._packed.append((half, exact))
        return [memory_of(half) for half in halves[1:]]

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the averages to the gradients."""
        packed, self._packed = self._packed, []
        for half, exact in packed:
            exact.copy_(half)

    def forget_errors(self) -> None:
        """Drop the pass that is packed, and the rounding errors that would be added to the next."""
        self._packed.clear()
        self._errors.clear()

    def release(self) -> None:
        """Nothing to do: torch frees the memory with its last view."""

    def catch_up(self) -> None:
        """Nothing to do: a `DeviceCommunicator`'s streams do."""


class HostedBuckets:
    """Buckets on a GPU that are reduced in memory of the host; as `HalfBuckets` to who fills them.

    Args:
        plan: of the buckets.
        reduced: each bucket as a 1-d tensor in memory of the host.
        device: the GPU.

    Attributes:
        tensors: each bucket as a 1-d tensor on the GPU.
    """

    def __init__(self, plan: FusionPlan, reduced: Sequence[torch.Tensor], device: torch.device) -> None:
        self.plan, self._reduced = plan, reduced
        self.tensors = [torch.zeros_like(one, device=device) for one in reduced]
        self._streams = streams(device.index or 0)

    def catch_up(self) -> None:
        """Make the current stream wait for all gradients."""
        if is_capturing():
            raise RingError(
                "a CUDA graph is being captured, and compression in 8 bits goes through memory of the host, which no "
                'graph contains. Use compression="bf16", or do not capture.'
            )
        self._streams.catch_up()

    def pack(self, bucket: Bucket, direct: Sequence[torch.Tensor]) -> list[Memory]:
        """Copy a bucket that was just filled to the host; there are no direct gradients."""
        self._reduced[bucket.index].copy_(self.tensors[bucket.index])  # waits for the GPU
        return []

    def unpack(self) -> None:
        """Copy the averages to the GPU."""
        for tensor, reduced in zip(self.tensors, self._reduced, strict=True):
            tensor.copy_(reduced)

    def forget_errors(self) -> None:
        """Nothing to do: the reducer's codecs have them."""


def through_host(
    parameters: Sequence[torch.Tensor], communicator: Communicator[Any], compression: Compression | None
) -> int | None:
    """The GPU whose gradients are reduced in memory of the host, which alone is rounded so; None without one."""
    if isinstance(communicator, DeviceCommunicator) or compression is None or not compression.needs_host:
        return None
    return next((index_of(one) for one in parameters if is_on_gpu(one)), None)
