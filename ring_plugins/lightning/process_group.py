"""torch.distributed over our communicators: its default group, and the collectives that a strategy offers on it.

torchmetrics, Lightning's SIGTERM check and `prepare_data` barrier, object collectives and users' own code call
torch.distributed without asking the strategy. With the default group on our communicators they need no special case,
and a rank that waits in any of them learns of a failed peer.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError, LaunchError, MismatchError, NotInitialized
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.collectives.validation import check_rank
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.job import World
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.core.world import current, is_initialized
from ring_plugins.torch import differentiable
from ring_plugins.torch.backend import register
from ring_plugins.torch.device import for_other_gpus
from ring_plugins.torch.rendezvous import store_from_world
from ring_plugins.torch.tensors import OPERATIONS

T = TypeVar("T")

BACKEND = "ring"

# The world or group over which this module initialized torch.distributed, which ends with `ring_plugins.shutdown()`.
_initialized_over: list[World | Group] = []

#: Lightning's names of reductions.
_NAMES = {
    "mean": Op.AVERAGE, "avg": Op.AVERAGE, "sum": Op.SUM, "min": Op.MIN, "max": Op.MAX, "product": Op.PRODUCT
}  # fmt: skip


def ensure_process_group(timeout: timedelta | None = None, group: Group | None = None) -> None:
    """Initialize torch.distributed over all ranks or a group, unless this module or the user has.

    Raises:
        LaunchError: If a process group exists that numbers the processes differently.
    """
    topology, ranks = current().topology, group or current()
    leave_process_group(ranks)
    if dist.is_initialized():
        places = [(topology.rank, topology.size), (ranks.communicator.rank, ranks.communicator.size)]
        if (dist.get_rank(), dist.get_world_size()) not in places:
            raise LaunchError(
                f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, ring_plugins"
                f" rank {topology.rank} of {topology.size}. Let RingStrategy initialize torch.distributed, or start the"
                " job with one launcher that both follow."
            )
        return
    register()
    timeout = default_pg_timeout if timeout is None else timeout
    # Our own store, not the launcher's: under torchrun MASTER_PORT belongs to the agent's
    # (TORCHELASTIC_USE_AGENT_STORE). Our backend could do without one, but ``new_group(backend="gloo")``, which
    # Lightning calls around `prepare_data`, cannot.
    store, rank, size = store_from_world(timeout, group)
    _initialized_over[:] = [ranks]
    # torch 2.13, distributed/distributed_c10d.py, `init_process_group`: installs a hook that holds back what the others
    # print, in order to begin each line with the rank. Ours names the rank already, and may end the job before torch
    # prints what it held back.
    hook = sys.excepthook
    try:
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)
    finally:
        sys.excepthook = hook


def leave_process_group(ranks: World | Group) -> None:
    """Destroy the default process group if this module has initialized it over others than these."""
    if _initialized_over and _initialized_over[0] is not ranks:
        destroy_process_group()


def destroy_process_group() -> None:
    """Destroy the default process group if it is on our backend."""
    _initialized_over.clear()
    if dist.is_initialized() and dist.get_backend() == BACKEND:
        dist.destroy_process_group()


def metrics_within(group: Group, module: torch.nn.Module) -> Callable[[], None]:
    """Let torchmetrics' metrics synchronize in a group, where the script's torch.distributed spans the job. Collective.

    Returns:
        What undoes it.
    """
    if not dist.is_initialized() or dist.get_world_size() == group.size:
        return lambda: None
    metrics: list[Any] = [
        one
        for one in module.modules()
        if any(kind.__module__.startswith("torchmetrics") for kind in type(one).__mro__)
        and getattr(one, "process_group", group) is None
    ]
    own = dist.new_group(list(group.ranks), use_local_synchronization=True)
    for metric in metrics:
        metric.process_group = own

    def undo() -> None:
        for metric in metrics:
            metric.process_group = None
        dist.destroy_process_group(own)

    return undo


# What strategies offer -----------------------------------------------------------------------------


def all_reduce(tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
    """Reduce `tensor` over all ranks of `group`.

    Args:
        tensor: Same shape and dtype on every rank. Modified in place, as Lightning documents, except for the mean of
            integers and bools.
        group: Of ring_plugins or torch.distributed; all ranks by default.
        reduce_op: "mean" (or "avg"), "sum", "min", "max", "product", or a ``torch.distributed.ReduceOp``.

    Returns:
        The reduced tensor. The mean of integers is of the default floating dtype: Lightning's own truncates it, which
        makes a weighted mean over batches of 2 and 3 samples come out a quarter too large.

    Raises:
        ArgumentError: If `reduce_op` is no such name.
    """
    op = _op_of(reduce_op)
    if op is Op.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
        return all_reduce(tensor.to(torch.int64), group, "sum") / _size(group)
    if group is None or isinstance(group, Group):
        ring.all_reduce(tensor.detach(), op, out=tensor.detach(), group=group)
        return tensor
    current().refuse_to_recover("reducing among the ranks of a group")
    if op is Op.AVERAGE and dist.get_backend(group) == "gloo":  # which has no average
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
        return tensor.div_(_size(group))
    dist.all_reduce(tensor, next(theirs for theirs, ours in OPERATIONS if ours is op), group=group)
    return tensor


def _size(group: Any) -> int:
    if group is None or isinstance(group, Group):
        return communicator_of(group).size
    return dist.get_world_size(group)


def reduced_if_all_had(tensor: Tensor, reduce_op: Any, size: int) -> Tensor:
    """What reducing a tensor over so many ranks would give if all had this one."""
    op = _op_of(reduce_op)
    if op is Op.SUM:
        return tensor * size
    return tensor**size if op is Op.PRODUCT else tensor


def _op_of(reduce_op: Any) -> Op:
    """Our name for a reduction.

    Raises:
        ArgumentError: If there is none.
    """
    known = [*_NAMES.items(), *OPERATIONS, (None, Op.SUM)]
    wanted = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    op = next((ours for theirs, ours in known if theirs == wanted), None)
    if op is None:
        raise ArgumentError(f"reduce_op={reduce_op!r} is not known. Choose one of: {', '.join(_NAMES)}.")
    return op


def all_gather(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor | list[Tensor]:
    """Every rank's `tensor`, stacked along a new first dimension; a list of them, in rank order, if sizes differ.

    Args:
        tensor: Same dtype and number of dimensions on every rank; in a group of torch.distributed that the script has
            made, same shape.
        group: Of ring_plugins or torch.distributed; all ranks by default.
        sync_grads: Whether the result can be differentiated back to every rank's `tensor`.

    Raises:
        NotInitialized: If the strategy has not set up its processes yet.
        MismatchError: If dtypes or numbers of dimensions differ.
    """
    if group is not None and _initialized_over and dist.is_initialized() and group is dist.group.WORLD:
        group = _initialized_over[0] if isinstance(_initialized_over[0], Group) else None  # Lightning's default
    if is_initialized() and current().recovers and (sync_grads or group is not None):
        current().refuse_to_recover("all_gather with sync_grads=True or a group")
    if not is_initialized():
        raise NotInitialized(
            "all_gather() was called before the strategy had set up its processes. Call it from a hook that runs inside"
            " fit(), validate(), test() or predict(); with Fabric, after fabric.launch()."
        )
    if group is None or isinstance(group, Group):
        gather = differentiable.all_gather if sync_grads else ring.all_gather
        row = tensor if sync_grads else tensor.detach()
        try:
            return torch.as_tensor(gather(row.unsqueeze(0), group=group), device=tensor.device)
        except MismatchError as error:
            if not error.is_known:
                raise
            return _gathered_of_other_sizes(tensor, group, sync_grads, error)
    from torch.distributed.nn.functional import all_gather as differentiable_all_gather

    tensor = tensor.contiguous()
    if sync_grads:
        return torch.stack(differentiable_all_gather(tensor, group))  # type: ignore[no-untyped-call]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.detach(), group=group)
    return torch.stack(gathered)


def _gathered_of_other_sizes(tensor: Tensor, group: Any, sync_grads: bool, error: MismatchError) -> list[Tensor]:
    # Through the CPU: what is pickled on a GPU lands on the GPU of that number, which is another rank's.
    # Cloned, as a view is pickled with all that it is a view of.
    own = (tensor.shape, tensor.dtype) if sync_grads else tensor.detach().cpu().clone()
    told: list[Any] = ring.all_gather_object(own, group=group)
    kinds = {(len(one[0]), one[1]) if sync_grads else (one.dim(), one.dtype) for one in told}
    if len(kinds) > 1:
        raise MismatchError(
            f"{error} This all_gather stacks tensors of one shape, and makes a list of those that differ in their "
            "sizes, but not in their dtype or number of dimensions."
        )
    if not sync_grads:
        return [one.to(tensor.device) for one in told]
    parts = torch.split(differentiable.all_gather(tensor.flatten(), group=group), [one.numel() for one, _ in told])
    return [part.view(shape) for part, (shape, _) in zip(parts, told, strict=True)]


def broadcast_object(item: T, src: int, group: Group | None = None) -> T:
    """The object of a rank, on all ranks; if that rank is lost meanwhile, of the lowest that is left.

    Args:
        item: Any. Its tensors on a GPU come to each rank's own.
        src: A rank of those that train together.
        group: These; all ranks by default.
    """
    place = check_rank(src, communicator_of(group), "src")
    source = Root(place if group is None else group.ranks[place])
    sent = for_other_gpus(item)

    def attempt() -> Any:
        communicator = communicator_of(group)
        return communicator.broadcast_object(sent, source.rank_in(communicator), purpose="strategy.broadcast")

    result: T = repeated(attempt)
    return item if result is sent else result
