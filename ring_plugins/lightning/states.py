"""Bringing rank 0's buffers to every rank, when they are about to matter."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# Small buffers travel together; large ones need no second copy of all of them.
_COALESCED_BYTES = 64 * 1024 * 1024


class BufferBroadcast:
    """Gives every rank the buffers that rank 0 has: running statistics, code books, queues.

    ``DistributedDataParallel`` renews all of them before each forward. The running statistics of batch norm, which are
    most buffers there are, are not read by a forward in training; so they are only renewed before evaluation and at the
    end, with the same outcome.

    Args:
        module: Its buffers as they are now; ones that are registered later are left alone, as by DDP.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [(owner, name) for owner in module.modules() for name in owner._buffers]

    def before_training_step(self) -> None:
        """Renew what a forward in training may read."""
        _broadcast(self._tensors(lambda owner: isinstance(owner, _NormBase) and owner.training))

    def everything(self) -> None:
        """Renew all buffers."""
        _broadcast(self._tensors(lambda _: False))

    def _tensors(self, is_left_out: Callable[[nn.Module], bool]) -> Iterator[Tensor]:
        seen: set[int] = set()
        for owner, name in self._owners:
            tensor = owner._buffers.get(name)
            if tensor is not None and id(tensor) not in seen and not is_left_out(owner):
                seen.add(id(tensor))
                yield tensor.detach()


def _broadcast(tensors: Iterable[Tensor]) -> None:
    is_root = dist.get_rank() == 0
    with torch.no_grad():
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.broadcast(flat, src=0)
            if not is_root:
                parts = torch.split(flat, [tensor.numel() for tensor in bucket])
                torch._foreach_copy_(bucket, [part.view_as(own) for part, own in zip(parts, bucket, strict=True)])


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Tensors of one dtype each, a limited number of bytes at a time, in the same order on every rank."""
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    open_bytes: dict[torch.dtype, int] = {}
    for tensor in tensors:
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
