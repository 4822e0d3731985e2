"""Start all ranks equal: broadcast one rank's weights and optimizer state to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.functions import all_or_none, broadcast
from ring_plugins.core.groups import Group, communicator_of, root_in
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.core.world import current
from ring_plugins.observe.averaging_check import expect_averaging
from ring_plugins.torch import device
from ring_plugins.torch.device import index_of, is_on_gpu, known_bytes, streams
from ring_plugins.torch.sharded_optimizer import is_sharded
from ring_plugins.torch.tensor_memory import are_pairs, check_plain, is_dense
from ring_plugins.torch.tensors import Target


@all_or_none
def broadcast_parameters(
    parameters: nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    root: int = 0,
    *,
    group: Group | None = None,
) -> None:
    """Overwrite tensors in place with the root's; collective.

    Args:
        parameters: a module (its parameters and buffers), a state dict, or (name, tensor) pairs.
        root: the rank whose values are broadcast, of the job.
        group: whose ranks take part, by default all; only these call.

    Raises:
        ArgumentError: there are no tensors, other items, or tensors without memory of their own; or `root` or this rank
            is not in the group.
        MismatchError: names, shapes, dtypes or kinds of device differ among ranks; the text names the first that does.
    """
    if isinstance(parameters, torch.optim.Optimizer):
        raise ArgumentError(
            f"parameters={type(parameters).__name__} is an optimizer: pass the model, and call "
            "broadcast_optimizer_state(optimizer) too."
        )
    if isinstance(parameters, nn.Module):
        named = [*parameters.named_parameters(), *parameters.named_buffers()]
    else:
        if isinstance(parameters, torch.Tensor):
            raise ArgumentError(
                "parameters is one tensor: pass the model, or use ring_plugins.broadcast(x, root, out=x) for a tensor."
            )
        named = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
        if not named and not isinstance(parameters, Mapping):
            raise ArgumentError(
                "parameters is empty: what named_parameters() returned can be read only once. Pass the model, or its "
                "state_dict()."
            )
    if not are_pairs(named, torch.Tensor):
        raise ArgumentError(
            "parameters holds other items than names and tensors, as parameters() does: pass the model, its "
            "named_parameters() or its state_dict()."
        )
    for name, tensor in named:
        check_plain(tensor, name, is_written=True)
    if current().is_joining:  # it gets the others' weights with their state
        _connect_gpus([tensor for _, tensor in named])
        return
    members = communicator_of(group)
    source = _source(root, members)
    described = [(name, str(tensor.dtype), tuple(tensor.shape), tensor.device.type) for name, tensor in named]
    _check_equal(described, members)
    with torch.no_grad():
        _broadcast([tensor.detach() for _, tensor in named], source, group)
    expect_averaging(starts_equal=True)


@all_or_none
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0, *, group: Group | None = None) -> None:
    """Give every rank's optimizer the root's state and options; collective.

    Args:
        optimizer: may be a `DistributedOptimizer`; its state may be empty on any rank.
        root: the rank whose state is broadcast, of the job.
        group: as in `broadcast_parameters`.

    Raises:
        ArgumentError: the optimizer is sharded (load its state on all ranks), or `root` or this rank is not in the
            group.
    """
    if is_sharded(optimizer):
        raise ArgumentError(
            "a sharded optimizer has no whole state on any rank that could be broadcast; call load_state_dict() on all "
            "ranks, or broadcast_optimizer_state() before the optimizer is sharded."
        )
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentError(
            f"optimizer={type(optimizer).__name__} is no optimizer; for models, use broadcast_parameters."
        )
    communicator = communicator_of(group)
    source = _source(root, communicator)
    if communicator.size == 1 or current().is_joining:
        return
    state: Any = optimizer.state_dict() if source.is_here() else None
    for leaf in tree_leaves(state):
        if isinstance(leaf, torch.Tensor):
            check_plain(leaf, "a tensor of the optimizer's state")
    placeholders = tree_map_only(torch.Tensor, Placeholder, state)
    described = communicator.broadcast_object(placeholders, source.rank_in(communicator), "broadcast_optimizer_state")
    if not source.is_here():
        state = tree_map_only(Placeholder, Placeholder.empty, described)
    _broadcast([leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)], source, group)
    if not source.is_here():
        optimizer.load_state_dict(state)


class Placeholder:
    """Dtype, shape, strides and kind of device of a tensor.

    The strides belong to it since a fused optimizer walks through the memory of a weight and of its state side by side.
    If one lay there in another order, as in torch.channels_last, it would pair wrong elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.is_on_gpu = tensor.dtype, tuple(tensor.shape), is_on_gpu(tensor)
        #: Those of a contiguous tensor, if the tensor has gaps.
        self.strides = (tensor if is_dense(tensor) else torch.empty(self.shape, device="meta")).stride()

    def empty(self) -> torch.Tensor:
        """Uninitialized memory for such a tensor, on this rank's GPU if it is on the root's, else on the CPU."""
        own = device.own_device() if self.is_on_gpu else "cpu"  # whatever device the script has made the default
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=own)


def _source(root: int, members: Communicator[Any]) -> Root:
    root_in(root, members, current())
    return Root(root)


def _connect_gpus(tensors: list[torch.Tensor]) -> None:
    """In a process that joins, make the communicator that the members made to broadcast these."""
    if on_gpu := [index_of(tensor) for tensor in tensors if is_on_gpu(tensor)]:
        current().device_communicator(on_gpu[0], streams(on_gpu[0]))


@purpose("broadcast of weights and states")
def _broadcast(tensors: list[torch.Tensor], source: Root, group: Group | None) -> None:
    """Overwrite tensors with the source's; those on GPUs are broadcast in one NCCL group."""
    members = current() if group is None else group
    if members.communicator.size == 1:
        return
    targets = []
    for tensor in tensors:
        if is_on_gpu(tensor):
            targets.append(Target([tensor], "tensor", keep=True))
        else:
            plain = known_bytes(tensor)
            broadcast(plain, source.rank_in(current().communicator), out=plain, group=group)
    if targets:
        index = index_of(targets[0].flat)
        communicator = members.device_communicator(index, streams(index))
        with communicator.group():
            for target in targets:
                communicator.broadcast(cast(DeviceMemory, target.memory), source.rank_in(communicator))
        for target in targets:
            target.store()


def _check_equal(described: list[tuple[str, str, tuple[int, ...], str]], members: Communicator[Any]) -> None:
    """Compare name, dtype, shape and kind of device of every tensor among the members.

    A tensor that is on the CPU of one rank and on the GPU of another would be broadcast by two communicators, in each
    of which a rank waits for the other.
    """
    by_rank = members.all_gather_object(described, "broadcast_parameters")
    for other, theirs in zip(members.ranks, by_rank, strict=True):
        if theirs == by_rank[0]:
            continue
        for i in range(max(len(theirs), len(by_rank[0]))):
            first, second = (tensors[i] if i < len(tensors) else "no such tensor" for tensors in (by_rank[0], theirs))
            if first != second:
                raise MismatchError(
                    f"tensors to broadcast differ at number {i}: rank {members.ranks[0]} has {first}, rank {other} has "
                    f"{second}. "
                    "Build the same model on all ranks, on the same kind of device."
                )
