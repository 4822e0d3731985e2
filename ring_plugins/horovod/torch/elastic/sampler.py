"""A sampler that divides the rest of an epoch anew among the ranks, each time an elastic training begins again."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ring_plugins.core.world import current


class ElasticSampler(Sampler[int]):
    """Divides the samples of an epoch that were not yet trained on among all ranks.

    Make it part of the `TorchState`, call `record_batch` after each batch and `set_epoch` at the end of each epoch.
    Once the ranks have changed, the state divides what is left of the epoch anew. All ranks have equally many samples:
    the first ones of the rest come twice if needed.

    Args:
        dataset: has a length, which does not change.
        shuffle: whether the order is random, another one in each epoch.
        seed: of the order, equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch, self.processed_num = 0, 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, of which nothing has been trained on; call it at the end of one."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has trained on a batch; `batch_idx` has no effect."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many samples of it were trained on."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another one stands, with the ranks of now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left of the epoch among the ranks of now."""
        topology = current().topology
        self.rank, self.num_replicas = topology.rank, topology.size
        order = torch.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + self.epoch))
        self.remaining_indices: list[int] = order[self.processed_num :].tolist()
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        rest = self.remaining_indices
        repeated = [rest[number % len(rest)] for number in range(len(rest), self.total_size)]
        return iter([*rest, *repeated][self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
