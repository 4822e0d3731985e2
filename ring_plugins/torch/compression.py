"""Gradients in 16 bits between GPUs: torch rounds them there, since NCCL does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.gradients.fusion import Bucket, FusionPlan
from ring_plugins.torch.device import memory_of


class HalfBuckets:
    """What travels in place of buckets in device memory, and of the large gradients beside them.

    NCCL's average scales numbers down before it adds them, so that float16 overflows only where the average does.

    Args:
        plan: of the buckets.
        wholes: each bucket as a tensor.
        compression: what to round to, and whether to add what that loses to the next step.
    """

    def __init__(self, plan: FusionPlan, wholes: Sequence[torch.Tensor], compression: Compression) -> None:
        self.plan = plan
        self._wholes, self._compression = wholes, compression
        self._dtype: torch.dtype = getattr(torch, compression.dtype)
        halves = [self._half_of(whole) for whole in wholes]
        self.memories = [memory_of(half) for half in halves]
        #: (what is sent, what it stands for) of the buckets in this pass.
        self._halves: list[torch.Tensor] = halves
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lost: dict[tuple[int, int], torch.Tensor] = {}

    def _half_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory to send `tensor` from: half the size, or the tensor itself where nothing is gained."""
        if not self._compression.applies_to(str(tensor.dtype).removeprefix("torch.")):
            return tensor
        return torch.zeros(tensor.numel(), dtype=self._dtype, device=tensor.device)

    @torch.no_grad()
    def pack(self, bucket: Bucket, direct: Sequence[torch.Tensor]) -> list[Memory]:
        """Round a bucket that was just filled, and its direct gradients; the memory of the latter."""
        flat = [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in direct]
        halves = [self._halves[bucket.index], *(self._half_of(tensor) for tensor in flat)]
        for place, (half, whole) in enumerate(zip(halves, [self._wholes[bucket.index], *flat], strict=True)):
            if half is whole:
                continue
            if self._compression.feedback:
                lost = self._lost.get((bucket.index, place))
                values = whole if lost is None else whole + lost
                half.copy_(values)
                self._lost[bucket.index, place] = (values - half).nan_to_num_(0, 0, 0)
            else:
                half.copy_(whole)
            self._sent.append((half, whole))
        return [memory_of(half) for half in halves[1:]]

    @torch.no_grad()
    def unpack(self) -> None:
        """The averages have arrived: put them where the gradients are."""
        sent, self._sent = self._sent, []
        for half, whole in sent:
            whole.copy_(half)

    def release(self) -> None:
        """Nothing to do: torch frees it with its last view."""
