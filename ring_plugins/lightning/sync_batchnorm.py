"""``Trainer(sync_batchnorm=True)`` where torch's own ``SyncBatchNorm`` refuses to work: on the CPU, in a group."""

import functools

from torch import nn

from ring_plugins.core.groups import Group
from ring_plugins.torch.sync_batch_norm import batch_norms_of, forward_over_ranks


class OwnSyncBatchNorm:
    """A Lightning ``LayerSync``: batch norm layers compute their statistics over the whole batch of all ranks.

    Args:
        group: The ranks, all by default.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group = group

    def apply(self, model: nn.Module) -> nn.Module:
        """Give every batch norm layer another forward."""
        for place, layer in batch_norms_of(model):
            layer.forward = functools.partial(forward_over_ranks, layer, place, self._group)  # type: ignore[method-assign]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give the layers their own forward back; parameters and buffers keep what was learned."""
        for _, layer in batch_norms_of(model):
            vars(layer).pop("forward", None)
        return model
