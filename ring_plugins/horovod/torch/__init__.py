"""`import ring_plugins.horovod.torch as hvd`: what scripts use of `horovod.torch`.

Three things differ. Gradients are averaged when `backward()` returns, so `optimizer.synchronize()` has nothing to do.
Operations match by their order, not by name; names are compared. In `allreduce` of a tensor that requires a gradient,
only Average and Sum pass one.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
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
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.groups import Group
from ring_plugins.horovod import basics
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    Sum,
    check_compression,
    gradient_factor,
)
from ring_plugins.horovod.common.process_sets import group_of
from ring_plugins.horovod.torch import collectives, elastic
from ring_plugins.horovod.torch.collectives import *  # noqa: F403 - all its public functions are Horovod's
from ring_plugins.horovod.torch.collectives import poll, synchronize
from ring_plugins.horovod.torch.operations import follow_names, prepare_names
from ring_plugins.other_names import no_attribute
from ring_plugins.torch import SyncBatchNorm
from ring_plugins.torch.optimizer import DistributedOptimizer as _DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "join",
    "poll",
    "synchronize",
]
__all__ += ["Compressor", "FP16Compressor", "NoneCompressor", "SyncBatchNorm", "elastic"]
__all__ += basics.__all__ + collectives.__all__


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


def init(comm: Any = None, process_sets: Any = None) -> None:  # type: ignore[no-redef]
    """Join the job; see `ring_plugins.horovod.basics.init`."""
    basics.init(comm, process_sets)
    prepare_names()


#: Those in use, in the order of their construction.
_optimizers: list[weakref.ref[DistributedOptimizer]] = []


class DistributedOptimizer(_DistributedOptimizer):
    """`ring_plugins.torch.DistributedOptimizer` with Horovod's arguments and methods.

    Args:
        optimizer, named_parameters, backward_passes_per_step: as there.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average`, or `Sum` of the ranks' gradients.
        gradient_predivide_factor, num_groups, groups: have no effect; buckets are agreed on before the first step.
        sparse_as_dense: whether sparse gradients are made dense; those of SparseAdam, which takes no others, are not.
        process_set: whose gradients are averaged; a rank outside of it trains on its own.
        options: further arguments of `ring_plugins.torch.DistributedOptimizer`.

    Raises:
        ArgumentError, MismatchError: as there, and for an unsupported argument or two parameters of one name.
    """

    _remedy_at_first = (
        "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) and hvd.broadcast_optimizer_state(optimizer, "
        "root_rank=0) before the next step: from then on this is an error."
    )

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
        gradient_factor(op, gradient_predivide_factor, 1)
        self._was_synchronized, self._warns, group = False, True, group_of(process_set)
        self._among_all = group is None
        if group is not None and group.rank is None:
            group = Group([basics.rank()])  # outside of the set each rank trains on its own, as with Horovod
        super().__init__(
            optimizer,
            _of_distinct_names(named_parameters),
            compression=check_compression(compression),
            backward_passes_per_step=backward_passes_per_step,
            sparse="densify" if sparse_as_dense and not isinstance(optimizer, torch.optim.SparseAdam) else "gather",
            group=group,
            **options,
        )
        self.averager.sums = op is Sum
        _optimizers.append(weakref.ref(self, _optimizers.remove))

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """Names by parameter, which forks of Horovod's optimizer read."""
        return {parameter: name for name, parameter in self._named()}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Average at the end of every so many backwards from now on. All ranks do it between the same steps."""
        self.averager.set_passes_per_step(passes)

    def synchronize(self) -> None:
        """Average what is not averaged yet; for scripts that clip gradients before `step`."""
        super().synchronize()
        self._was_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let a step inside the block not warn: a step after `synchronize()` averages nothing twice."""
        self._warns = False
        try:
            yield
        finally:
            self._warns = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `ring_plugins.torch.DistributedOptimizer.step`; warns where Horovod's does."""
        if self._was_synchronized and self._warns:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "It averages nothing twice here, but it would with Horovod.",
                stacklevel=2,
            )
        self._was_synchronized = False
        return super().step(closure)

    def waits_in_join(self) -> bool:
        """Whether ranks in `hvd.join` take part in its averages."""
        averager = self.averager
        return not (averager.is_closed or averager.claim.is_superseded) and averager.is_on_host and self._among_all

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._was_synchronized, self._warns = False, True


def _of_distinct_names(named: Any) -> Any:
    """The pairs that a script gave, whose names tell their parameters apart."""
    if named is None:
        return None
    pairs = list(named)
    counts = Counter(pair[0] for pair in pairs if isinstance(pair, tuple))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ArgumentError(
            f"named_parameters has the name {twice[0]!r} of {counts[twice[0]]} parameters. Name the parameters of one "
            "module that holds all, such as torch.nn.ModuleDict, or put the model's name before each."
        )
    return pairs


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give all ranks the root's parameters, in place.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`; values that are not tensors
            do not change.
        root_rank: the rank whose values all ranks get.
    """
    named = params.items() if isinstance(params, Mapping) else params
    try:
        listed = [(str(i), one) if isinstance(one, torch.Tensor) else one for i, one in enumerate(named)]
        tensors = [(name, value) for name, value in listed if isinstance(value, torch.Tensor)]
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"params={type(params).__name__} holds no names and tensors; pass model.state_dict()."
        ) from error
    # What holds no tensors is told as that.
    ring_plugins.torch.broadcast_parameters(tensors or params, root_rank)


def join(device: Any = -1) -> int:  # type: ignore[no-redef]
    """Wait until all ranks have called it, as one that runs out of data before others.

    Meanwhile this rank counts as zeros in the averages of each `DistributedOptimizer` on the CPU, and of `allreduce`.
    At the end, weights and optimizers are those of a rank that came last.

    Args:
        device: number of the GPU for zeros in operations on GPUs; by default the one that was used last.

    Returns:
        The rank that came last.

    Raises:
        MismatchError: another rank is in an operation without a name, between hosts or on GPUs, or in averages of an
            optimizer on GPUs.
    """
    gc.collect()  # what the script has dropped is gone on all ranks then
    # A script that calls ring_plugins.init() has not begun it.
    follow_names(device if isinstance(device, int) else -1)
    optimizers = [one for ref in _optimizers if (one := ref()) is not None and one.waits_in_join()]
    if not optimizers:
        return basics.join(device)
    waiting = ring_plugins.torch.join(*optimizers)
    followed: Future[int] = Future()

    def follow() -> None:
        try:
            followed.set_result(waiting.follow(weight=1.0))
        except BaseException as error:
            followed.set_exception(error)

    HelperThread(follow, "ring:hvd.join").start()
    last = basics.join(device)
    waiting.settle(followed.result())
    return last


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the root's optimizer state and options; `model` is not needed.

    Parameters that have no gradients yet get zeros, as with Horovod, which some scripts read before the first step.
    """
    ring_plugins.torch.broadcast_optimizer_state(optimizer, root_rank)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None and not optimizer.state.get(parameter):
                parameter.grad = torch.zeros_like(parameter)


check_calls(globals(), __all__)
