"""`import ring_plugins.horovod.torch as hvd`: what scripts use of `horovod.torch`.

Three things differ. Gradients are averaged when `backward()` returns, so `optimizer.synchronize()` has nothing to do.
Operations match by their order, not by name; names are compared. In `allreduce` of a tensor that requires a gradient,
only Average and Sum pass one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from ring_plugins.core.base.install import missing

try:
    import torch
except ImportError as error:
    raise missing("ring_plugins.horovod.torch", "PyTorch", error, "torch") from error

import ring_plugins.torch
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod import basics
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    check_averages,
    check_compression,
    check_process_set,
)
from ring_plugins.horovod.basics import refuse_join as join
from ring_plugins.horovod.torch import collectives
from ring_plugins.horovod.torch.collectives import *  # noqa: F403 - all its public functions are Horovod's
from ring_plugins.horovod.torch.collectives import poll, synchronize
from ring_plugins.other_names import no_attribute
from ring_plugins.torch.optimizer import DistributedOptimizer as _DistributedOptimizer

__all__ = ["DistributedOptimizer", "broadcast_optimizer_state", "broadcast_parameters", "join", "poll", "synchronize"]
__all__ += basics.__all__ + collectives.__all__


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


class DistributedOptimizer(_DistributedOptimizer):
    """`ring_plugins.torch.DistributedOptimizer` with Horovod's arguments and methods.

    Args:
        optimizer, named_parameters, backward_passes_per_step: as there.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average`; no other reduction of gradients is supported.
        gradient_predivide_factor, num_groups, groups: have no effect; buckets are agreed on before the first step.
        sparse_as_dense: whether sparse gradients are made dense.
        process_set: all processes.
        options: further arguments of `ring_plugins.torch.DistributedOptimizer`.

    Raises:
        ArgumentError, MismatchError: as there, and for an unsupported argument.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
        op: Op = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = None,
        **options: Any,
    ) -> None:
        check_averages(op, gradient_predivide_factor)
        check_process_set(process_set)
        super().__init__(
            optimizer,
            named_parameters,
            compression=check_compression(compression),
            backward_passes_per_step=backward_passes_per_step,
            sparse="densify" if sparse_as_dense else "gather",
            **options,
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Average at the end of every so many backwards from now on. All ranks do it between the same steps."""
        self.averager.set_passes_per_step(passes)

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: a step after `synchronize()` averages nothing twice."""
        return contextlib.nullcontext()


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int) -> None:
    """Give all ranks the root's parameters, in place.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`; values that are not tensors do not change.
        root_rank: the rank whose values all ranks get.
    """
    named = params.items() if isinstance(params, Mapping) else params
    try:
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"params={type(params).__name__} holds no names and tensors; pass model.state_dict()."
        ) from error
    # What holds no tensors is told as that.
    ring_plugins.torch.broadcast_parameters(tensors or params, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the root's optimizer state and options; `model` is not needed."""
    ring_plugins.torch.broadcast_optimizer_state(optimizer, root_rank)


check_calls(globals(), __all__)
