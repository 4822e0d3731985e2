"""A Trainer that goes on when ranks are lost (`on_failure="continue"`): what follows the ranks that are left.

The step is repeated below, in backward (core/gradients/repetition), and Lightning asks the strategy for ranks whenever
it needs them. Three things remember:

- ``rank_zero_only`` has a number, by which loggers and checkpoints find out whether to write;
- data loaders have their samplers, so they are made anew for the next epoch;
- torch's process groups have a number of ranks for good, so there is none in such a job. What Lightning and
  torchmetrics use it for is done here, by collectives of ours, which are repeated when a rank is lost in them.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

import ring_plugins as ring
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.functions import all_or_none
from ring_plugins.core.members.changes import MembershipChange
from ring_plugins.core.world import current
from ring_plugins.lightning.environment import set_rank_zero
from ring_plugins.lightning.joining import MeetingPoint
from ring_plugins.lightning.loggers import take_over, take_versions, versions_of
from ring_plugins.torch.device import memory_of

T = TypeVar("T")


class LossFollower:
    """Lets a strategy and its Trainer follow the ranks that are left, from now on.

    Args:
        strategy: held weakly.
        trainer: its Trainer.
        module: whose metrics are to be gathered from the ranks that are left.
    """

    def __init__(self, strategy: Any, trainer: Any, module: nn.Module) -> None:
        self._strategy, self._trainer = weakref.ref(strategy), trainer
        self._reload_every = trainer.reload_dataloaders_every_n_epochs
        self._world = current()
        self._world.elastic.changes.add(self._follow)
        self._metrics = [_Gathered(metric) for metric in module.modules() if _is_metric(metric)]
        if not self._world.is_joining:
            take_versions(trainer.loggers, strategy.broadcast(versions_of(trainer.loggers)))
        is_replaced = self._world.replaces and trainer.state.fn == "fit"
        self._meeting_point = MeetingPoint(strategy, trainer) if is_replaced else None

    def _follow(self, change: MembershipChange) -> None:
        if change.rank > change.rank_before == 0:  # a process has taken the place of rank 0, whose loggers go on
            for logger in self._trainer.loggers:
                logger.finalize("success")
        if change.rank < change.rank_before or change.joined:
            for logger in self._trainer.loggers if change.rank == 0 else ():
                take_over(logger)
        set_rank_zero(change.rank)
        strategy = self._strategy()
        if strategy is not None:
            strategy.parallel_devices = strategy.parallel_devices[:1] * change.size
        if self._world.replaces:  # each keeps the share of its slot
            return
        # Lightning makes them anew where an epoch begins, with samplers for the ranks that there are then.
        self._trainer.reload_dataloaders_every_n_epochs = 1

    def close(self) -> None:
        """Undo everything."""
        self._world.elastic.changes.remove(self._follow)
        self._trainer.reload_dataloaders_every_n_epochs = self._reload_every
        for metric in self._metrics:
            metric.undo()
        self._metrics.clear()
        if self._meeting_point is not None:
            self._meeting_point.close()


# torchmetrics -------------------------------------------------------------------------------------


def _is_metric(module: nn.Module) -> bool:
    from torchmetrics import Metric  # Lightning requires it

    return isinstance(module, Metric) and module.dist_sync_fn is None


class _Gathered:
    """Lets a metric of torchmetrics gather its states by `_gather`."""

    def __init__(self, metric: Any) -> None:
        self._metric, self._is_distributed = metric, metric.distributed_available_fn
        metric.distributed_available_fn = _has_several_ranks
        metric.dist_sync_fn = _gather
        metric.sync = MethodType(_sync, metric)

    def undo(self) -> None:
        del self._metric.sync
        self._metric.dist_sync_fn = None
        self._metric.distributed_available_fn = self._is_distributed


def _has_several_ranks() -> bool:
    return ring.size() > 1 and not current().is_joining


def _gather(value: Tensor, group: Any = None) -> list[Tensor]:
    """As ``torchmetrics.utilities.distributed.gather_all_tensors``."""
    if group is not None:
        raise ArgumentError('a metric of a process group does not support on_failure="continue"; leave the group out.')
    return gather_tensors(value)


@all_or_none
def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks that are left, which may have different shapes."""
    return current().communicator.all_gather_object(tensor.detach(), "gather of tensors")


def _sync(metric: Any, *args: Any, **options: Any) -> None:
    """``Metric.sync``, again if a rank was lost in it: all states of a metric must be of the same ranks."""
    while True:
        view = current().elastic.view
        type(metric).sync(metric, *args, **options)
        if current().elastic.view == view or not metric._is_synced:
            return
        metric.unsync()


# What a strategy offers ---------------------------------------------------------------------------


def broadcast_object(item: T, src: int) -> T:
    """The object of a rank, on all ranks; if that rank is lost meanwhile, of the one that takes its number."""
    result: T = repeated(
        lambda: current().communicator.broadcast_object(item, min(src, ring.size() - 1), operation="strategy.broadcast")
    )
    return result


def broadcast_from_rank_0(parts: list[Tensor]) -> Tensor:
    """Rank 0's tensors, flat and one behind the other; if it is lost meanwhile, those of the next rank 0."""

    def attempt() -> Tensor:
        flat = torch.cat([part.reshape(-1) for part in parts])
        current().communicator.broadcast(cast("HostMemory", memory_of(flat)), 0)
        return flat

    return repeated(attempt)


def all_reduce(tensor: Tensor, op: ring.Op) -> Tensor:
    """Reduce a tensor in place; the mean of integers is a new one of the default floating dtype."""
    with torch.no_grad():
        if op is ring.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
            total = ring.all_reduce(tensor.to(torch.int64), ring.SUM)
            return torch.as_tensor(total / ring.size())
        ring.all_reduce(tensor.detach(), op, out=tensor.detach())
        return tensor


def reduced_if_all_had(tensor: Tensor, op: ring.Op, size: int) -> Tensor:
    """What reducing a tensor over so many ranks would give if all had this one."""
    if op is ring.SUM:
        return tensor * size
    return tensor**size if op is ring.PRODUCT else tensor


def all_gather(tensor: Tensor) -> Tensor:
    """Stack the tensors of all ranks that are left."""
    return torch.stack(gather_tensors(tensor))
