"""`import ring_plugins.horovod.torch as hvd`: what scripts use of `horovod.torch`.

Three things differ. Gradients are averaged when `backward()` returns, so `synchronize()` has nothing to do. Operations
match by their order, not by name; names are compared. In `allreduce` of a tensor that requires a gradient, only Average
and Sum pass one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ring_plugins.core.base.install import missing

try:
    import torch
except ImportError as error:
    raise missing("ring_plugins.horovod.torch", "PyTorch", error, "torch") from error

import ring_plugins as ring
import ring_plugins.torch as differentiable
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.functions import all_or_none
from ring_plugins.horovod import basics
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    check_averages,
    check_compression,
    check_name,
    check_process_set,
    op_of,
)
from ring_plugins.horovod.basics import refuse_join as join
from ring_plugins.other_names import no_attribute
from ring_plugins.torch.optimizer import DistributedOptimizer as _DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allreduce",
    "grouped_allreduce_",
    "join",
    "poll",
    "reducescatter",
    "synchronize",
]
__all__ += basics.__all__


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
    differentiable.broadcast_parameters(tensors, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the root's optimizer state and options; `model` is not needed."""
    differentiable.broadcast_optimizer_state(optimizer, root_rank)


class Handle:
    """An operation under way, for `poll` and `synchronize`."""

    def __init__(self, work: Any, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._work, self._finish = work, finish
        self._result: torch.Tensor | None = None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._result is not None or bool(self._work.done())

    def wait(self) -> torch.Tensor:
        """The result."""
        if self._result is None:
            self._result = self._finish(self._work.wait())
        return self._result


def poll(handle: Handle) -> bool:
    """Whether an operation is over."""
    return handle.done()


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for an operation and return its result."""
    return handle.wait()


@all_or_none
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin an all-reduce into a new tensor, which passes no gradient."""
    return _begin_allreduce(tensor.detach(), None, average, name, op, prescale_factor, postscale_factor, process_set)


@all_or_none
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin an all-reduce in place."""
    return _begin_allreduce(tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def _begin_allreduce(
    tensor: torch.Tensor,
    out: torch.Tensor | None,
    average: bool | None,
    name: str | None,
    op: Op | None,
    before: float,
    after: float,
    process_set: Any,
) -> Handle:
    """Begin `after` x reduction of (`before` x `tensor`), into `out` or a new tensor."""
    check_process_set(process_set)
    reduction = op_of(average, op)
    check_name("allreduce", name)
    if before != 1.0 and out is None:
        tensor = tensor * before
    elif before != 1.0:
        tensor.detach().mul_(before)
    values = tensor.detach()
    work = ring.all_reduce(values, reduction, out=None if out is None else values, wait=False)

    def finish(result: torch.Tensor) -> torch.Tensor:
        if after != 1.0:
            result.mul_(after)
        return result if out is None else out

    return Handle(work, finish)


@all_or_none
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Combine a tensor of all ranks. Where it requires a gradient, Average and Sum pass one.

    Args:
        tensor: of equal shape and dtype on all ranks.
        average: Horovod's older argument: False sums.
        name: compared among the ranks.
        compression: `Compression.fp16` sends floats in 16 bits.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: factors before and after.
        process_set: all processes.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_reduce`.
    """
    is_sent_in_half = check_compression(compression) and tensor.is_floating_point()
    sent = tensor.half() if is_sent_in_half else tensor
    if _needs_gradient(sent):
        check_process_set(process_set)
        reduction = op_of(average, op)
        check_name("allreduce", name)
        result = differentiable.all_reduce(sent * prescale_factor, reduction) * postscale_factor
    else:
        result = allreduce_async(sent, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return result.to(tensor.dtype)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Combine a tensor of all ranks in place."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


@all_or_none
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Combine several tensors of all ranks."""
    arguments = (average, None, compression, op, prescale_factor, postscale_factor, process_set)
    check_name("grouped_allreduce", name)
    return [allreduce(tensor, *arguments) for tensor in tensors]


@all_or_none
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Combine several tensors of all ranks in place."""
    check_name("grouped_allreduce", name)
    handles = [
        allreduce_async_(tensor, average, None, op, prescale_factor, postscale_factor, process_set)
        for tensor in tensors
    ]
    return [handle.wait() for handle in handles]


@all_or_none
def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks, whose first dimensions may differ."""
    check_process_set(process_set)
    check_name("allgather", name)
    return differentiable.all_gather(tensor) if _needs_gradient(tensor) else ring.all_gather(tensor.detach())


@all_or_none
def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin an `allgather`, which passes no gradient."""
    check_process_set(process_set)
    check_name("allgather", name)
    return Handle(ring.all_gather(tensor.detach(), wait=False), _as_it_is)


@all_or_none
def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The root's tensor, on every rank."""
    check_process_set(process_set)
    check_name("broadcast", name)
    if _needs_gradient(tensor):
        return differentiable.broadcast(tensor, root_rank)
    return torch.as_tensor(ring.broadcast(tensor.detach(), root_rank))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """Overwrite a tensor with the root's."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


@all_or_none
def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast`, which passes no gradient."""
    check_process_set(process_set)
    check_name("broadcast", name)
    return Handle(ring.broadcast(tensor.detach(), root_rank, wait=False), _as_it_is)


@all_or_none
def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin a `broadcast_`."""
    check_process_set(process_set)
    check_name("broadcast", name)
    values = tensor.detach()
    return Handle(ring.broadcast(values, root_rank, out=values, wait=False), lambda _: tensor)


@all_or_none
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some rows to each rank.

    Args:
        tensor: of at least one dimension.
        splits: how many rows each rank gets, in a list or tensor; equal parts by default.
        name: compared among the ranks.
        process_set: all processes.

    Returns:
        The rows that came, in rank order; with `splits` also how many came from each rank.
    """
    check_process_set(process_set)
    check_name("alltoall", name)
    sent = None if splits is None else [int(rows) for rows in splits]
    needs_gradient = _needs_gradient(tensor)
    rows = differentiable.all_to_all(tensor, sent) if needs_gradient else ring.all_to_all(tensor.detach(), sent)
    if sent is None:
        return torch.as_tensor(rows)
    return rows, ring.all_to_all(torch.tensor(sent, dtype=torch.int32))


@all_or_none
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine a tensor of all ranks and keep this rank's rows; the first ranks get one more if it does not divide."""
    check_process_set(process_set)
    check_name("reducescatter", name)
    is_sent_in_half = check_compression(compression) and tensor.is_floating_point()
    sent = tensor.half() if is_sent_in_half else tensor
    sent = sent * prescale_factor if prescale_factor != 1.0 else sent
    reduction = op_of(None, op)
    if _needs_gradient(sent):
        result = differentiable.reduce_scatter(sent, reduction)
    else:
        result = ring.reduce_scatter(sent.detach(), reduction)
    result = result * postscale_factor if postscale_factor != 1.0 else result
    return result.to(tensor.dtype)


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _as_it_is(result: torch.Tensor) -> torch.Tensor:
    return result
