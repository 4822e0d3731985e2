"""The collectives that move different data to different ranks: all-gather, reduce-scatter and all-to-all.

Each function checks its tensors at once and returns the rest of the work, a function of a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.torch.device import memory_of
from ring_plugins.torch.tensors import Target, flat_sources, operation

Exchange = Callable[[Communicator[Any]], None]


def all_gather(triples: Sequence[tuple[torch.Tensor, Target, list[int]]], group: dist.ProcessGroup) -> Exchange:
    """Gather every rank's tensors on every rank.

    Args:
        triples: this rank's flat tensor, the target of all ranks' tensors, and the number of elements of each rank.
        group: the ranks.

    Raises:
        ArgumentError: a target has no place for this rank's tensor.
    """
    rank = group.rank()
    for source, target, counts in triples:
        if counts[rank] != source.numel() or target.flat.dtype != source.dtype:
            raise ArgumentError(
                f"all_gather on rank {rank}: the input has {source.numel()} elements of {source.dtype}, the "
                f"output for rank {rank} has {counts[rank]} of {target.flat.dtype}."
            )

    def run(communicator: Communicator[Any]) -> None:
        for source, target, counts in triples:
            communicator.all_gather(memory_of(source), target.memory, counts)
            target.store()

    return run


def reduce_scatter(
    triples: Sequence[tuple[torch.Tensor, torch.Tensor, list[int]]], reduction: Any, group: dist.ProcessGroup
) -> Exchange:
    """Reduce tensors over all ranks and leave one part of each result on each rank.

    Args:
        triples: this rank's output, its whole flat input, and the number of elements that each rank gets.
        reduction: torch's.
        group: the ranks.

    Raises:
        ArgumentError: the counts do not fit the tensors.
    """
    rank, steps = group.rank(), []
    for output, full, counts in triples:
        if counts[rank] != output.numel() or sum(counts) != full.numel() or output.dtype != full.dtype:
            raise ArgumentError(
                f"reduce_scatter on rank {rank}: the input has {full.numel()} elements of {full.dtype}, the "
                f"outputs {sum(counts)}, of which this rank's {output.numel()} of {output.dtype}."
            )
        steps.append((Target([output], "output"), full, counts, operation(reduction, full)))

    def run(communicator: Communicator[Any]) -> None:
        for target, full, counts, op in steps:
            communicator.reduce_scatter(memory_of(full), target.memory, counts, op)
            target.store()

    return run


def all_to_all(
    description: str,
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup,
    send_counts: list[int] | None = None,
    receive_counts: list[int] | None = None,
) -> Exchange:
    """Send a part of the inputs to every rank and receive a part of the outputs from every rank.

    Args:
        description: for errors.
        outputs, inputs: in rank order; an empty list exchanges nothing in that direction.
        group: the ranks.
        send_counts, receive_counts: elements for each rank; by default one tensor a rank.

    Raises:
        ArgumentError: inputs and outputs have different types.
    """
    rank, nothing = group.rank(), [0] * group.size()
    any_tensor = (outputs or inputs)[0]
    dtype = any_tensor.dtype
    empty = torch.empty(0, dtype=dtype, device=any_tensor.device)
    source = flat_sources(inputs, "input") if inputs else empty
    target = Target(outputs, "output") if outputs else None
    if source.dtype != dtype:
        raise ArgumentError(f"{description} on rank {rank}: input is {source.dtype}, output is {dtype}.")
    sent = send_counts or ([tensor.numel() for tensor in inputs] if inputs else nothing)
    received = receive_counts or (target.counts if target else nothing)

    def run(communicator: Communicator[Any]) -> None:
        memory = target.memory if target else memory_of(empty)
        communicator.all_to_all(memory_of(source), sent, memory, received)
        if target:
            target.store()

    return run
