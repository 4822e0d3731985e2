"""What collectives of a process group do with tensors, once torch's ways of passing them are behind us.

Each function checks its tensors at once and returns what is left to do: a function of a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.torch.arguments import operation
from ring_plugins.torch.device import memory_of
from ring_plugins.torch.tensors import EqualParts, Target, Targets, flat_sources

Exchange = Callable[[Communicator[Any]], None]


def gather_all(pairs: Sequence[tuple[torch.Tensor, Targets | EqualParts]], group: dist.ProcessGroup) -> Exchange:
    """Everyone's tensor on every rank.

    Args:
        pairs: this rank's flat tensor, and where everyone's go.
        group: whose members do this.
    """
    rank = group.rank()
    for source, targets in pairs:
        if targets.counts[rank] != source.numel() or targets.flat.dtype != source.dtype:
            raise ArgumentError(
                f"all_gather on rank {rank}: the input has {source.numel()} elements of {source.dtype}, the "
                f"output for rank {rank} has {targets.counts[rank]} of {targets.flat.dtype}."
            )

    def run(communicator: Communicator[Any]) -> None:
        for source, targets in pairs:
            communicator.all_gather(memory_of(source), targets.memory, targets.counts)
            targets.store()

    return run


def reduce_and_scatter(
    triples: Sequence[tuple[torch.Tensor, torch.Tensor, list[int]]], reduction: Any, group: dist.ProcessGroup
) -> Exchange:
    """Everyone's tensors combined, a part to each rank.

    Args:
        triples: this rank's output, its whole flat input, and the elements that each rank gets.
        reduction: torch's.
        group: whose members do this.
    """
    rank, steps = group.rank(), []
    for output, full, counts in triples:
        if counts[rank] != output.numel() or sum(counts) != full.numel() or output.dtype != full.dtype:
            raise ArgumentError(
                f"reduce_scatter on rank {rank}: the input has {full.numel()} elements of {full.dtype}, the "
                f"outputs {sum(counts)}, of which this rank's {output.numel()} of {output.dtype}."
            )
        steps.append((Target(output, "output"), full, counts, operation(reduction, full)))

    def run(communicator: Communicator[Any]) -> None:
        for target, full, counts, op in steps:
            communicator.reduce_scatter(memory_of(full), target.memory, counts, op)
            target.store()

    return run


def swap(
    description: str,
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup,
    send_counts: list[int] | None = None,
    out_counts: list[int] | None = None,
) -> Exchange:
    """All to all. Counts default to one tensor a rank; no tensors mean nothing to or from anyone."""
    rank, nothing = group.rank(), [0] * group.size()
    any_tensor = (outputs or inputs)[0]
    dtype = any_tensor.dtype
    empty = torch.empty(0, dtype=dtype, device=any_tensor.device)
    source = flat_sources(inputs, "input") if inputs else empty
    targets = Targets(outputs, "output") if outputs else None
    if source.dtype != dtype:
        raise ArgumentError(f"{description} on rank {rank}: input is {source.dtype}, output is {dtype}.")
    sent = send_counts or ([tensor.numel() for tensor in inputs] if inputs else nothing)
    received = out_counts or (targets.counts if targets else nothing)

    def run(communicator: Communicator[Any]) -> None:
        memory = targets.memory if targets else memory_of(empty)
        communicator.all_to_all(memory_of(source), sent, memory, received)
        if targets:
            targets.store()

    return run
