"""Broadcasts rank 0's buffers to every rank before they are read."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import ring_plugins as ring
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.groups import Group, communicator_of

# Small buffers travel together; large ones need no second copy of all of them.
_COALESCED_BYTES = 64 * 1024 * 1024


class BufferBroadcast:
    """Gives every rank the buffers of rank 0: running statistics, code books, queues.

    ``DistributedDataParallel`` broadcasts all of them before each forward. Most buffers are the running statistics of
    batch norm, which a forward in training does not read; those are broadcast only before evaluation and at the end,
    with the same outcome.

    Args:
        module: Its present buffers are broadcast; buffers registered later are left alone, as by DDP.
        group: The ranks that get them, of the first of these; all by default.
    """

    def __init__(self, module: nn.Module, group: Group | None = None) -> None:
        self._group = group
        self._owners = [(owner, name) for owner in module.modules() for name in owner._buffers]

    def before_training_step(self) -> None:
        """Broadcast what a forward in training may read."""
        if self._owners:
            _broadcast(self._tensors(lambda owner: isinstance(owner, _NormBase) and owner.training), self._group)

    def broadcast_all(self) -> None:
        """Broadcast all buffers."""
        _broadcast(self._tensors(lambda _: False), self._group)

    def _tensors(self, is_left_out: Callable[[nn.Module], bool]) -> Iterator[Tensor]:
        seen: set[int] = set()
        for owner, name in self._owners:
            tensor = owner._buffers.get(name)
            if tensor is not None and id(tensor) not in seen and not is_left_out(owner):
                seen.add(id(tensor))
                yield tensor.detach()


@purpose("broadcast of buffers")
def _broadcast(tensors: Iterable[Tensor], group: Group | None) -> None:
    """Overwrite tensors with rank 0's; if it is lost meanwhile, with those of the next rank 0."""
    for batch in _batches(tensors):

        def attempt(batch: list[Tensor] = batch) -> Tensor:
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            ring.broadcast(flat, 0 if group is None else group.ranks[0], out=flat, group=group)
            return flat

        with torch.no_grad():
            flat = repeated(attempt)
            if communicator_of(group).rank > 0:
                parts = torch.split(flat, [tensor.numel() for tensor in batch])
                torch._foreach_copy_(batch, [part.view_as(own) for part, own in zip(parts, batch, strict=True)])


def _batches(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Lists of tensors of one dtype, limited in bytes, the same on every rank."""
    batches: dict[torch.dtype, list[Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            continue
        batch = batches.setdefault(tensor.dtype, [])
        if batch and filled[tensor.dtype] + size > _COALESCED_BYTES:
            yield batch
            batch = batches[tensor.dtype] = []
            filled[tensor.dtype] = 0
        batch.append(tensor)
        filled[tensor.dtype] = filled.get(tensor.dtype, 0) + size
    yield from batches.values()
