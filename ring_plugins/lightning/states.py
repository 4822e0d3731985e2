"""Bringing rank 0's buffers to every rank, before every training step: few bytes in many tensors."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Small buffers travel together; large ones need no second copy of all of them.
_COALESCED_BYTES = 64 * 1024 * 1024


def broadcast_buffers(module: nn.Module) -> None:
    """Give every rank the buffers of rank 0: running statistics of batch norm, code books, queues."""
    is_root = dist.get_rank() == 0
    with torch.no_grad():
        for bucket in _buckets(module.buffers()):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.broadcast(flat, src=0)
            if not is_root:
                parts = torch.split(flat, [tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [part.view_as(own) for part, own in zip(parts, bucket, strict=True)])


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one dtype each, a limited number of bytes at a time, in the same order on every rank."""
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    open_bytes: dict[torch.dtype, int] = {}
    for tensor in (buffer.detach() for buffer in tensors):
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            continue
        bucket = open_buckets.setdefault(tensor.dtype, [])
        if bucket and open_bytes[tensor.dtype] + size > _COALESCED_BYTES:
            yield bucket
            bucket = open_buckets[tensor.dtype] = []
            open_bytes[tensor.dtype] = 0
        bucket.append(tensor)
        open_bytes[tensor.dtype] = open_bytes.get(tensor.dtype, 0) + size
    yield from open_buckets.values()
