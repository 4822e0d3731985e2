"""An optimizer of which every rank keeps and computes 1/n: ZeRO stage 1.

**How a step goes.** Gradients are averaged as always, so `p.grad` holds whole averages: clipping, `GradScaler`,
accumulation and anything that reads gradients work as they do without sharding, and compute the same on all ranks.
`step` then lets the wrapped optimizer see this rank's slice instead of the parameters (`parameter_slices`): for the
time of its own `step`, its parameter groups hold the slice's tensors, and its state is the slice's. So no second
optimizer has to be constructed, options are read where schedulers write them, and hooks, fused and foreach variants
work. At the end the slices of all ranks are gathered.

**State.** Between steps the wrapped optimizer's `state` is empty; each rank keeps that of its slice here. `state_dict`
gathers all slices into the ordinary format, which any number of ranks, or torch alone, can load.

**Safety.** Before an update, ranks compare which parameters have gradients, and the options of the groups; before the
first one, their weights too, since slices of different models would be patched together otherwise. An exception on one
rank breaks the communicator, so that no rank waits for a slice that does not come.

PyTorch's ZeroRedundancyOptimizer and fairscale's OSS give whole parameters to ranks, which balances badly, and
construct a second optimizer, whose options have to be kept equal to the first one's. DeepSpeed flattens parameters and
gradients into new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current, is_initialized
from ring_plugins.torch.hooks import before_use
from ring_plugins.torch.sliced_updates import UPDATES, CopiedState, SlicedUpdates
from ring_plugins.torch.wrapped_optimizer import WrappedOptimizer

#: How an optimizer is sharded: False not at all; True in slices, if it is known to treat each element on its own;
#: "slices" in slices whatever it is; "tensors" a whole tensor on one rank.
Shard = bool | Literal["slices", "tensors"]

#: torch's optimizers that treat each element on its own.
ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
#: Optimizers whose update of a tensor depends on other tensors, by lower-case name.
_GLOBAL = ("lbfgs", "dadapt", "prodigy")


def shard_optimizer(
    optimizer: Optimizer,
    shard: Shard,
    named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
    group: Group | None = None,
) -> Optimizer:
    """Shard an optimizer among all ranks, or those of a group; one rank alone gets the optimizer back.

    Arguments as `ShardedOptimizer`.

    Raises:
        ArgumentError, MismatchError: as there.
    """
    if shard is False:
        if isinstance(optimizer, ShardedOptimizer):
            raise ArgumentError("this optimizer holds the state of a sharded one; pass shard=True, as before.")
        return optimizer
    is_alone = not is_initialized() or (current().topology.size if group is None else group.size) == 1
    if is_alone and not isinstance(optimizer, ShardedOptimizer):
        check_shardable(optimizer, shard)
        return optimizer
    return ShardedOptimizer(optimizer, named_parameters, shard, group)


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether an optimizer, or the one that it wraps, is sharded."""
    return isinstance(optimizer, ShardedOptimizer) or isinstance(
        getattr(optimizer, "optimizer", None), ShardedOptimizer
    )


def check_shardable(optimizer: Optimizer, shard: Shard) -> None:
    """Raise `ArgumentError` if the update cannot be divided among ranks in this way, or is not known to be."""
    if shard is not True and shard not in ("slices", "tensors"):  # 1 == True
        raise ArgumentError(f'shard={shard!r} must be False, True, "slices" or "tensors".')
    kind = type(optimizer)
    if any(name in kind.__name__.lower() for name in _GLOBAL):
        raise ArgumentError(
            f"{kind.__name__} cannot be sharded: its update of a tensor depends on others. Leave out shard."
        )
    is_known = getattr(torch.optim, kind.__name__, None) is kind and kind.__name__ in ELEMENTWISE
    if shard is True and not is_known:
        raise ArgumentError(
            f"shard=True cuts tensors into slices, which is right for updates that treat each element on its own; "
            f"{kind.__module__}.{kind.__qualname__} is not known to. If it does, pass shard='slices'. If it looks at "
            "whole tensors, such as their norms or rows, pass shard='tensors': each tensor is updated by one rank."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ArgumentError("an optimizer with differentiable=True cannot be sharded. Leave out shard.")


class ShardedOptimizer(WrappedOptimizer):
    """Makes each rank update a slice of the parameters and keep the state of that slice only.

    Its parameter groups are those of the wrapped optimizer. All ranks construct it together, with the same weights by
    the first step, and call `step`, `state_dict` and `add_param_group` together.

    Args:
        optimizer: to be sharded; its state is cut to this rank's slice. If it was sharded before, or is a copy of a
            sharded one, made by pickle or deepcopy, it continues with that state, on the same number of ranks.
        named_parameters: for names in error texts.
        shard: see `Shard`.
        group: whose ranks share it, by default all.

    Raises:
        ArgumentError: the optimizer cannot be sharded in this way, or parameters are on several devices or have gaps.
        MismatchError: the parameters differ among ranks.
    """

    # Lightning makes shallow copies of an optimizer's attributes, so these are never assigned again.
    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
        shard: Shard = True,
        group: Group | None = None,
    ) -> None:
        self._updates: Any
        before: Any = None
        if isinstance(optimizer, ShardedOptimizer):
            before, optimizer = optimizer._updates, optimizer.optimizer
        check_shardable(optimizer, shard)
        before = getattr(optimizer, UPDATES, before)
        copied = before.copied_state() if before is not None else []
        if before is not None:
            before.release()
        self.optimizer = optimizer
        names = {parameter: name for name, parameter in named_parameters}
        self._updates = SlicedUpdates(optimizer, names, whole_tensors=shard == "tensors", group=group)
        self._updates.adopt_copy(copied)

    @property  # type: ignore[misc]
    def state(self) -> Any:  # type: ignore[override]
        """By parameter, the state of this rank's slice of it; not to be changed."""
        return self._updates.state_by_parameter()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; collective.

        Args:
            closure: computes the loss and its gradients; called once, before the update.

        Returns:
            The closure's loss.

        Raises:
            MismatchError: ranks have gradients for different parameters, different options, or, before the first
                step, different weights. Nothing was changed then.
            RingError: another rank could not compute its update; the parameters are useless then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before_use(self)  # torch's hook sees slices instead of parameters
        self._updates.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; collective. All ranks add the same group in the same step."""
        self.optimizer.add_param_group(param_group)
        self._updates.take_parameters()

    def state_dict(self, to: int | None = None) -> dict[str, Any]:
        """Gather the state of all slices into the ordinary format of the wrapped optimizer; collective.

        Args:
            to: the rank that needs it; the others get {}. By default all ranks get the whole state.
        """
        gathered: dict[str, Any] = self._updates.state_dict(to)
        return gathered

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the ordinary format and keep this rank's slice of it; all ranks load the same."""
        self._updates.load_state_dict(state_dict)  # which a copy rejects

    def close(self) -> None:
        """Release the communicator; the optimizer cannot be used afterwards."""
        self._updates.close()

    # A copy has the wrapped optimizer and the state of one rank's slice; see `optimizer` above.

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "copied": self._updates.copied_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = state["optimizer"]
        self._updates = _NoUpdates(state["copied"])

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.optimizer!r})"


class _NoUpdates:
    """Takes the place of the updates in a copy, and rejects them."""

    def __init__(self, copied: list[CopiedState]) -> None:
        self._copied = copied

    def copied_state(self) -> list[CopiedState]:
        return self._copied

    def close(self) -> None:
        """Do nothing."""

    release = close

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RingError(
            "this sharded optimizer is a copy, made by pickle, torch.load or deepcopy, and is not connected to the "
            "other ranks. Shard it again: DistributedOptimizer(copy.optimizer, model.named_parameters(), shard=True)."
        )
