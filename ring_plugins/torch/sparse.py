"""Sparse gradients: their rows are gathered from all ranks instead of reduced in buckets."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.torch.device import memory_of


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The weights of embeddings that were built with `sparse=True`."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {cast(nn.Parameter, m.weight) for m in embeddings if m.sparse}


def average_sparse(parameter: nn.Parameter, communicator: Communicator[Any]) -> None:
    """Make `parameter.grad` the sparse average over all ranks; collective.

    A rank without a gradient contributes no rows; if no rank has one it stays None. A dense gradient becomes a sparse
    one of all its rows.
    """
    gradient = parameter.grad
    if gradient is not None:
        gradient = gradient.detach()
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
    own = (0, None) if gradient is None else (gradient._nnz(), gradient.sparse_dim())
    by_rank = communicator.all_gather_object(own, "sparse gradients average")
    counts = [rows for rows, _ in by_rank]
    dimensions = {sparse_dim for _, sparse_dim in by_rank if sparse_dim is not None}
    if not dimensions:
        return
    if len(dimensions) > 1:
        raise MismatchError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} has {sorted(dimensions)} sparse dimensions "
            "on different ranks. Compute it in the same way on all ranks, or use sparse='densify'."
        )
    sparse_dim = dimensions.pop()
    trailing = parameter.shape[sparse_dim:]
    if gradient is None:
        indices = torch.empty((0, sparse_dim), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *trailing), dtype=parameter.dtype, device=parameter.device)
    else:
        indices, values = gradient.indices().t().contiguous(), gradient.values().contiguous()
    total = sum(counts)
    all_indices = torch.empty((total, sparse_dim), dtype=torch.int64, device=parameter.device)
    all_values = torch.empty((total, *trailing), dtype=parameter.dtype, device=parameter.device)
    communicator.all_gather(_flat(indices), _flat(all_indices), [n * sparse_dim for n in counts])
    row = trailing.numel()
    communicator.all_gather(_flat(values), _flat(all_values), [n * row for n in counts])
    averaged = all_values / communicator.size
    summed = torch.sparse_coo_tensor(all_indices.t(), averaged, parameter.shape, check_invariants=False)
    parameter.grad = summed.coalesce()


def average_mixed(
    parameter: nn.Parameter, absent: torch.Tensor | None, is_dense_somewhere: bool, communicator: Communicator[Any]
) -> None:
    """Average a gradient that is sparse on some ranks, and perhaps dense on others; it is sparse then. Collective.

    Args:
        parameter: whose.
        absent: the average of the dense gradients, on a rank that has none itself.
        is_dense_somewhere: whether there are any.
        communicator: of all ranks.
    """
    dense = parameter.grad if absent is None else absent
    if absent is None:
        parameter.grad = None  # it has no rows to add
    average_sparse(parameter, communicator)
    if is_dense_somewhere and dense is not None and parameter.grad is not None:
        rows = dense.detach().to_sparse(parameter.grad.sparse_dim())
        parameter.grad = (parameter.grad + rows).coalesce()


def _flat(tensor: torch.Tensor) -> Memory:
    return memory_of(tensor.view(-1))
