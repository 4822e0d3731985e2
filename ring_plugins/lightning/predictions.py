"""What `Trainer.predict` returns: nothing of a sample twice, and, if asked for, the predictions of all ranks.

They come in the order of the data (`RingStrategy(gather_predictions=...)`). Rank r of n has predicted the samples r,
r + n, r + 2n... of what the loader draws (`shares`). So the batches are taken apart into samples, put in order, and put
together to batches of the loader's size, as one process would have made them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

import ring_plugins.core.functions as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.lightning.shares import is_empty
from ring_plugins.torch.loaders import samplers_of


def gathered(
    predictions: Sequence[Any], sizes: Sequence[int], batch_size: int, group: Group | None = None
) -> list[Any]:
    """The batches of all ranks in the order of the data, on all ranks; collective.

    Args:
        predictions: of this rank, by batch.
        sizes: how many samples each of these batches has, and perhaps others behind them.
        batch_size: of the loader.
        group: whose ranks take part.

    Raises:
        ArgumentError: on all ranks, if a prediction does not have one part for each sample.
    """
    pairs = list(zip(predictions, sizes, strict=False))
    kinds = ring.all_gather_object([_kind_of(*pair) for pair in pairs], group=group)
    are_lists = {kind for some in kinds for kind in some} in ({"parts"}, {"parts", "either"})
    samples: list[Any] | str = []
    try:
        samples = [one for pair in pairs for one in (map(Part, pair[0]) if are_lists else taken_apart(*pair))]
    except ValueError as error:
        samples = str(error)
    by_rank = ring.all_gather_object(samples, group=group)
    if wrong := [f"rank {rank}: {found}" for rank, found in enumerate(by_rank) if isinstance(found, str)]:
        raise ArgumentError(
            "gather_predictions needs what predict_step returns to have a part for each sample of the batch "
            f"({wrong[0]}). Return tensors, lists, tuples or dicts of that length, or leave gather_predictions out."
        )
    missing = object()
    rounds = itertools.zip_longest(*by_rank, fillvalue=missing)
    ordered = [one for some in rounds for one in some if one is not missing]
    return [put_together(ordered[i : i + batch_size]) for i in range(0, len(ordered), batch_size)]


class Part(NamedTuple):
    """What a list has for one sample."""

    value: Any


def _kind_of(batch: Any, size: int) -> str:
    """What a list of predictions has: "parts" of samples, "columns", or "either"; a tensor of rows is a column."""
    if not isinstance(batch, list) or len(batch) != size:
        return "columns"
    return "either" if all(isinstance(one, Tensor) and one.dim() and len(one) == size for one in batch) else "parts"


def taken_apart(batch: Any, size: int) -> list[Any]:
    """A batch as samples.

    Raises:
        ValueError: it is none.
    """
    if isinstance(batch, Tensor) and batch.dim() and len(batch) == size:
        return list(batch.detach().cpu().unbind())
    if isinstance(batch, Mapping):
        parts = {key: taken_apart(value, size) for key, value in batch.items()}
        return [{key: values[i] for key, values in parts.items()} for i in range(size)]
    if (
        isinstance(batch, list)
        and len(batch) == size
        and not any(isinstance(one, Tensor) and one.dim() for one in batch)
    ):
        return batch
    if isinstance(batch, (list, tuple)):
        columns = [taken_apart(value, size) for value in batch]
        return [tuple(column[i] for column in columns) for i in range(size)]
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else ""
    raise ValueError(f"a {type(batch).__name__}{shape} for {size} samples")


def put_together(samples: Sequence[Any]) -> Any:
    """Samples as a batch."""
    first = samples[0]
    if isinstance(first, Part):
        return [one.value for one in samples]
    if isinstance(first, Tensor):
        return torch.stack(list(samples))
    if isinstance(first, dict):
        return {key: put_together([one[key] for one in samples]) for key in first}
    if isinstance(first, tuple):
        return tuple(put_together(column) for column in zip(*samples, strict=True))
    return list(samples)


class Predictions:
    """Lets ``Trainer.predict`` return the predictions of all ranks, and none of a rank for which there is no sample.

    Lightning runs no hook on a rank whose loader is empty, so such a rank has the first sample, and leaves it out.

    Args:
        trainer: the Trainer, in ``Strategy.setup``.
        gathers: whether it returns those of all ranks; with "rank 0" on rank 0 only.
        group: whose ranks predict, by default all.
    """

    def __init__(self, trainer: Any, gathers: bool | Literal["rank 0"], group: Group | None) -> None:
        self._gathers, self._group = gathers, group
        self._loop = trainer.predict_loop
        self._run, self._step = self._loop.run, self._loop._predict_step
        self._loop.run, self._loop._predict_step = self._run_and_gather, self._predict

    def close(self) -> None:
        """Leave the loop as it was."""
        for name in ("run", "_predict_step"):
            vars(self._loop).pop(name, None)

    def _predict(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any = None) -> None:
        if not is_empty(self._loop._combined_loader.flattened[dataloader_idx]):
            self._step(batch, batch_idx, dataloader_idx, dataloader_iter)
        elif dataloader_iter is not None:
            next(dataloader_iter)

    def _run_and_gather(self) -> Any:
        own = self._run()
        if not self._gathers or not self._loop.return_predictions or own is None:
            return own
        loaders = self._loop._combined_loader.flattened
        pairs = zip(self._loop._predictions, loaders, strict=True)
        found = [gathered(some, _sizes(loader), loader.batch_sampler.batch_size, self._group) for some, loader in pairs]
        if self._gathers == "rank 0" and communicator_of(self._group).rank:
            return None
        return found[0] if len(found) == 1 else found


def _sizes(loader: Any) -> list[int]:
    """How many samples each batch had that this rank has taken from a loader, as Lightning has noted.

    Raises:
        ArgumentError: nobody knows which samples of the data these were.
    """
    batches = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)
    if batches is None or not any(isinstance(one, DistributedSampler) for one in samplers_of(loader)):
        raise ArgumentError(
            "gather_predictions needs to know which samples a rank has predicted, which nobody does of a loader of an "
            "IterableDataset, or with use_distributed_sampler=False. Use a DataLoader of a dataset with a length, or "
            "leave gather_predictions out."
        )
    return [len(batch) for batch in batches]
