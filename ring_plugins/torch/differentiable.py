"""Collectives that pass gradients between ranks: for losses over the batches of all ranks (contrastive losses, batch
statistics) and for layers that are split among ranks.

**What is differentiated.** The sum of all ranks' losses. The gradient of `x` on one rank therefore has a term from
every rank that used `x`: where the forward sums, the backward sums gradients; where the forward gathers, the backward
reduces and scatters, and so on. A `DistributedOptimizer` then averages the gradients of parameters, as for any other
loss. Every backward is built from these same functions, so second derivatives work too.

**Order.** Collectives must run in the same order on all ranks, but autograd decides the order of a backward. Among the
nodes that are ready it runs the one that was created last, so on one device the collectives of a backward run in the
reverse order of the forward, whatever lies between them. The order may still differ if ranks use different results, or
if nodes on a GPU and on the CPU race. So every collective has a number, the same on all ranks. A backward compares the
numbers before it sends a gradient, and raises a `MismatchError` instead of mixing up two collectives. A group counts
its own, since ranks of other groups have had others; the backward of its collectives is in the group.

Considered and rejected: chaining all collectives by an additional tensor, as mpi4jax's tokens do. That would force an
order, but also connect the graphs of different losses, so that one backward would run into the graph of another and
free it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ring_plugins.core import functions
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import check_splits, rows_of
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.torch.tensors import check_dense

_Call = Callable[[torch.Tensor], torch.Tensor]

#: How many of these collectives have run forward, by communicator.
_calls: weakref.WeakKeyDictionary[Communicator[Any], int] = weakref.WeakKeyDictionary()


@functions.all_or_none
def all_reduce(x: torch.Tensor, op: Op = Op.AVERAGE, *, group: Group | None = None) -> torch.Tensor:
    """Combine `x` of all ranks; the gradient of the sum, or average, is the sum, or average, of the ranks' gradients.

    While gradients are enabled the result requires one, also if `x` does not, so that all ranks have the same graph.
    Use a result in the loss of all ranks or of none.

    Args:
        x: of equal shape and dtype on all ranks, floating point or complex.
        op: SUM or AVERAGE.
        group: whose ranks take part, forward and backward, by default all; only these call.

    Raises:
        ArgumentError: another `op`, `x` is not a dense tensor of numbers that can have gradients, or this rank is not
            in the group.
        MismatchError: ranks gave different shapes, dtypes or ops; in backward, ranks used different results.
    """
    _check_op(op, "all_reduce")
    return _apply(
        "all_reduce",
        x,
        lambda x: functions.all_reduce(x, op, group=group),
        lambda gradient: all_reduce(gradient, op, group=group),
        group,
    )


@functions.all_or_none
def all_gather(x: torch.Tensor, *, group: Group | None = None) -> torch.Tensor:
    """Concatenate `x` of all ranks along the first dimension; a row's gradient sums all ranks' gradients of it.

    Args:
        x: all dimensions but the first, and the dtype, must be equal on all ranks; a 0-d `x` counts as one row.
        group: as in `all_reduce`.

    Raises:
        ArgumentError, MismatchError: as `all_reduce`.
    """
    check_dense(x, "x")
    rows: list[int] = []
    shape = x.shape

    def forward(x: torch.Tensor) -> torch.Tensor:
        own = x.shape[0] if x.dim() else 1
        rows[:] = _members(group).all_gather_object(own, "ring_plugins.torch.all_gather")
        return torch.as_tensor(functions.all_gather(x, group=group), device=x.device)

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        terms = all_to_all(gradient, rows, group=group)  # every rank's gradient of this rank's rows
        return terms.view(len(rows), *shape).sum(0)

    return _apply("all_gather", x, forward, backward, group)


@functions.all_or_none
def reduce_scatter(x: torch.Tensor, op: Op = Op.AVERAGE, *, group: Group | None = None) -> torch.Tensor:
    """Combine `x` of all ranks and give each rank a part of the rows; the gradient gathers the gradients of the parts.

    Args:
        x: of at least one dimension, as for `all_reduce`. The first parts are one row longer where it does not divide.
        op: SUM or AVERAGE.
        group: as in `all_reduce`.

    Raises:
        ArgumentError, MismatchError: as `all_reduce`.
    """
    _check_op(op, "reduce_scatter")
    share = 1 if op is Op.SUM else 1 / _members(group).size
    return _apply(
        "reduce_scatter",
        x,
        lambda x: functions.reduce_scatter(x, op, group=group),
        lambda gradient: all_gather(gradient, group=group) * share,
        group,
    )


@functions.all_or_none
def broadcast(x: torch.Tensor, root: int = 0, *, group: Group | None = None) -> torch.Tensor:
    """Return the root's `x` on every rank; its gradient is the sum of the ranks' gradients, the others' are zeros.

    Args:
        x: of equal shape and dtype on all ranks; only the root's values are used.
        root: a rank of the job, also with `group`.
        group: as in `all_reduce`.

    Raises:
        ArgumentError, MismatchError: as `all_reduce`.
    """

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        total = all_reduce(gradient, Op.SUM, group=group)
        if functions.rank() == root:
            return total
        # Not zeros_like: the graph of a second derivative must contain this collective on all ranks.
        return total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)

    return _apply("broadcast", x, lambda x: functions.broadcast(x, root, group=group), backward, group)


@functions.all_or_none
def all_to_all(x: torch.Tensor, splits: Sequence[int] | None = None, *, group: Group | None = None) -> torch.Tensor:
    """Send part i of `x` to rank i and receive a part from every rank; gradients go back the same way.

    Args:
        x: of at least one dimension; dtype and trailing dimensions equal on all ranks.
        splits: how many rows go to each rank; equal parts by default.
        group: as in `all_reduce`.

    Raises:
        ArgumentError: as `all_reduce`, or `splits` do not add up.
        MismatchError: as `all_reduce`.
    """
    check_dense(x, "x")
    sent = check_splits(splits, rows_of(x.shape, "all_to_all"), _members(group).size)
    received: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        communicator = _members(group)
        by_rank = communicator.all_gather_object(sent, "ring_plugins.torch.all_to_all")
        received[:] = [theirs[communicator.rank] for theirs in by_rank]
        return torch.as_tensor(functions.all_to_all(x, sent, group=group), device=x.device)

    return _apply("all_to_all", x, forward, lambda gradient: all_to_all(gradient, received, group=group), group)


def _check_op(op: Op, name: str) -> None:
    if op not in (Op.SUM, Op.AVERAGE):
        raise ArgumentError(
            f"op={op} has no gradient here, only SUM and AVERAGE have. Call ring_plugins.{name}(x.detach(), op)."
        )


def _members(group: Group | None) -> Communicator[Any]:
    return (current() if group is None else group).communicator


def _apply(name: str, x: torch.Tensor, forward: _Call, backward: _Call, group: Group | None) -> torch.Tensor:
    current().refuse_to_recover(f"ring_plugins.torch.{name}, which passes gradients between ranks,")
    check_dense(x, "x")
    if not (x.is_floating_point() or x.is_complex()):
        raise ArgumentError(f"x of {name} is {x.dtype}, which has no gradient; call ring_plugins.{name} instead.")
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()
    result: torch.Tensor = _Collective.apply(x, name, forward, backward, _members(group))  # type: ignore[no-untyped-call]
    return result


class _Collective(torch.autograd.Function):
    """A collective whose backward is `backward`, made of the functions above."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, name: str, forward: _Call, backward: _Call, members: Communicator[Any]
    ) -> torch.Tensor:
        result = forward(x.detach())
        number = _calls[members] = _calls.get(members, 0) + 1  # only after success: one rank may have been refused
        context.name, context.number, context.call, context.members = name, number, backward, members
        return result

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        members = context.members
        if members.size > 1:
            by_rank = members.all_gather_object((context.name, context.number), "backward")
            if len(set(by_rank)) > 1:
                said = zip(members.ranks, by_rank, strict=True)
                calls = ", ".join(f"rank {rank}: {name} (number {n})" for rank, (name, n) in said)
                raise MismatchError(
                    f"the ranks are in the backward of different collectives of ring_plugins.torch: {calls}. Use the "
                    "result of every collective in the loss of all ranks, if need be multiplied by zero."
                )
        return context.call(gradients[0].contiguous()), None, None, None, None
