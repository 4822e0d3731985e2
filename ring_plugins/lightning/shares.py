"""Which samples each rank reads of a Trainer's DataLoaders: every n-th, in the loader's own order.

**Problem.** Lightning gives each rank a ``DistributedSampler``. For training it shuffles, whatever the loader does, and
shuffles what a sampler of the script's has ordered. For validation and tests it repeats samples until the ranks have
equally many, and metrics count these again.

**Here** only a loader that shuffles is shuffled, as by Lightning, with the epoch's seed. All others keep their order:
of n ranks, rank r reads the samples r, r + n, r + 2n... that the sampler draws, or such batches of a batch sampler of
the script's own. Nothing is repeated. A sampler that draws random numbers of torch draws equal ones on all ranks.

In an evaluation, ranks may so have one batch more than others, and a step may call collectives. A rank without it runs
its last batch again, and nothing of that counts (`uneven`); so does a rank without any sample.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import ring_plugins.core.functions as ring
from ring_plugins.core import world
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.lightning.uneven import kept, weigh_logs
from ring_plugins.observe.same_samples import tell_if_same
from ring_plugins.torch.loaders import checksum_of, samplers_of
from ring_plugins.torch.order import EveryNth, division_of, index_sampler, is_permutation, makes_batches, with_index


class Shares:
    """Gives each rank its share of the loaders of a Trainer.

    Args:
        strategy: its strategy.
        trainer: the Trainer, in ``Strategy.setup``.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy, self._connector = strategy, trainer._data_connector
        self._prepare, self._resolve = self._connector._prepare_dataloader, self._connector._resolve_sampler
        self._connector._prepare_dataloader = self._prepare_loader
        self._connector._resolve_sampler = self._sampler_for

    def close(self) -> None:
        """Leave the Trainer as it was."""
        for name in ("_prepare_dataloader", "_resolve_sampler"):
            vars(self._connector).pop(name, None)

    def _divides(self, loader: Any) -> bool:
        return isinstance(loader, DataLoader) and self._connector._requires_distributed_sampler(loader)

    def _prepare_loader(self, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        if self._strategy._global_batch is not None and mode.value == "train":
            return self._strategy._global_batch.loader(dataloader, _seed())
        if not self._strategy.is_distributed and mode.value == "train":
            # It draws as before, but its order can be known, to go on in its middle (`resume`).
            alone = {"num_replicas": 1, "rank": 0, "seed": None, "may_be_empty": True}
            return with_every_nth(self._prepare(dataloader, shuffle=shuffle, mode=mode), **alone)
        if self._divides(dataloader) and mode.value != "predict":
            batches = dataloader.batch_sampler
            if any(hasattr(one, "num_replicas") for one in (batches, *samplers_of(dataloader))):
                return dataloader  # which divides by itself
            is_torchs = makes_batches(batches, dataloader.sampler)
            if batches is not None and not is_torchs and hasattr(batches, "__len__"):
                return with_index(dataloader, self._every_nth(batches, mode))
        return self._prepare(dataloader, shuffle=shuffle, mode=mode)

    def _sampler_for(self, dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        sampler = dataloader.sampler
        shuffles = is_permutation(sampler)
        keeps = type(sampler) is RandomSampler and shuffles and mode is not None and mode.value == "train"
        if not self._divides(dataloader) or keeps or not hasattr(sampler, "__len__"):
            return self._resolve(dataloader, shuffle=shuffle, mode=mode)
        return self._every_nth(sampler, mode, getattr(dataloader, "drop_last", False))

    def _every_nth(self, sampler: Any, mode: Any, drops: bool = False) -> EveryNth:
        seed, kind = _seed(), "" if mode is None else mode.value
        is_training = kind == "train"
        # A rank whose only batch of an evaluation was dropped would have none to run again.
        pads = world.current().replaces or (not self._strategy._joins if is_training else drops)
        pads &= kind != "predict"
        ranks = self._strategy.distributed_sampler_kwargs
        return EveryNth(sampler, **ranks, seed=seed, pads=pads, may_be_empty=is_training)


def _seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def tell_if_undivided(loader: Any, batch: Any, group: Group | None) -> None:
    """Warn where a loader that is not divided here has given ranks the same batch, their first one. Collective.

    Args:
        loader: the Trainer's combined one.
        batch: of this rank; None if it has none.
        group: of the ranks that train together.
    """
    communicator = communicator_of(group)
    place = (communicator.rank, communicator.size)
    divisions = [division_of(one) for one in loader.flattened]
    samplers = [one and one.sampler for one in divisions]
    divided = [(getattr(one, "rank", -1), getattr(one, "num_replicas", -1)) == place for one in samplers]
    if all(communicator.all_gather_object(all(divided), "comparison of samples")):
        return  # equal batches are equal data then, such as ones
    tell_if_same(checksum_of(batch), communicator)


def with_every_nth(loader: Any, **options: Any) -> Any:
    """A loader that divides what its sampler draws, or, if it has a batch sampler of its own, whole batches.

    Args:
        loader: stays as it is if it divides itself, or if nobody knows how much it draws.
        options: of `EveryNth`.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    index, draws = index_sampler(loader), loader.sampler
    is_torchs = makes_batches(index, draws)
    divides = any(hasattr(one, "num_replicas") for one in (index, *samplers_of(loader)))
    if divides or not hasattr(draws if is_torchs else index, "__len__"):
        return loader
    share = EveryNth(draws if is_torchs else index, **options)
    return with_index(loader, BatchSampler(share, index.batch_size, index.drop_last) if is_torchs else share)


class EvenEvaluation:
    """Lets ranks with fewer batches of an evaluation run their last one again, which does not count.

    Args:
        loop: that evaluates.
        module: the Trainer's.
        group: the ranks that evaluate together, all by default.

    Attributes:
        ran_out: whether this rank runs a batch again.
        weight: the factor of what a step logs, in the mean over ranks.
        is_logging: whether a value that is being reduced is a batch's.
    """

    def __init__(self, loop: Any, module: torch.nn.Module, group: Group | None = None) -> None:
        self._loop, self._module, self._group = loop, module, group
        self.ran_out, self.weight, self.is_logging = False, 1.0, False
        self._setup_data, self._reset = loop.setup_data, loop.reset
        self._by_rank, self._own = list[Sequence[float]](), list[float]()
        loop.setup_data, loop.reset = self._set_up_data, self._reset_loop

    def close(self) -> None:
        """Leave the loop as it was."""
        for name in ("setup_data", "reset"):
            vars(self._loop).pop(name, None)
        vars(self._loop._results).pop("update_metrics", None)

    def _set_up_data(self) -> None:
        before = self._loop._combined_loader
        self._setup_data()
        loaders = self._loop._combined_loader
        if loaders is not before and loaders is not None:
            pairs = zip(loaders.flattened, self._loop._max_batches, strict=True)
            self._own = [0 if is_empty(loader) else most for loader, most in pairs]
            if not self._loop._is_sequential:  # an item has a batch of each loader
                self._own = [min(self._own) if loaders._mode == "min_size" else max(self._own)]
            self._by_rank = ring.all_gather_object(self._own, group=self._group)

    def _reset_loop(self) -> None:
        self._reset()
        self.ran_out, fetcher = False, self._loop._data_fetcher
        trainer, sizes = self._loop.trainer, list(zip(*self._by_rank, strict=True))
        limit = trainer.num_sanity_val_steps if trainer.sanity_checking else float("inf")
        longest = [min(max(counts), limit) for counts in sizes]
        own = [min(count, limit) for count in self._own]
        differ = any(len(set(counts)) > 1 for counts in sizes)
        takes_iterator = type(fetcher).__name__.startswith("_DataLoaderIter")
        if differ and not takes_iterator and max(longest) < float("inf"):
            self._sizes = sizes
            self._loop._data_fetcher = _Even(fetcher, own, longest, self._begin)

    def _begin(self, repeats: bool, loader: int = 0, number: int = -1) -> None:
        """Note whether the batch of this number of a loader is repeated; without a number, there is none any more."""
        results = self._loop._results
        vars(results).pop("update_metrics", None)
        counting = sum(count > number for count in self._sizes[loader])
        self.ran_out, self.weight = repeats, 0.0 if repeats else len(self._sizes[loader]) / counting
        if self.weight != 1:
            weigh_logs(results, self)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the script's; one that does not count leaves metrics and buffers as they were."""
        if not self.ran_out:
            yield
            return
        with kept(self._module):
            yield


class _Even:
    """Lightning's fetcher of batches, with those that a rank runs again behind a loader's last one.

    Args:
        fetcher: Lightning's.
        own, longest: by loader, how many batches of this rank count, and how many the rank has that has most.
        begin: is told before each batch whether it is repeated, its loader and its number; behind the last one, False.
    """

    def __init__(
        self, fetcher: Any, own: Sequence[float], longest: Sequence[float], begin: Callable[..., None]
    ) -> None:
        vars(self).update(_fetcher=fetcher, _items=self._with_repeated(fetcher, own, longest, begin))
        vars(self).update(_left=sum(longest), done=False)

    @staticmethod
    def _with_repeated(
        fetcher: Any, own: Sequence[float], longest: Sequence[float], begin: Callable[..., None]
    ) -> Iterator[Any]:
        items = itertools.chain(_until_done(fetcher), [(None, 0, len(own))])
        loader = count = 0
        spare: Any = None
        for item in items:
            while loader < item[2]:  # the fetcher has come to the next one
                if spare is not None and count < longest[loader]:
                    begin(True, loader, count)
                    yield copy.deepcopy(spare), count, loader
                    count += 1
                else:
                    loader, count, spare = loader + 1, 0, None
            if loader < len(own) and own[loader] <= count + 1 and own[loader] < longest[loader]:
                spare = copy.deepcopy(item[0])
            if loader < len(own) and own[loader]:
                begin(False, loader, count)
                yield item
                count += 1
        begin(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_fetcher"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_fetcher"], name, value)

    def __next__(self) -> Any:
        item = next(vars(self)["_items"])
        vars(self)["_left"] -= 1
        vars(self)["done"] = vars(self)["_left"] <= 0
        return item


def _until_done(fetcher: Any) -> Iterator[Any]:
    while True:
        try:
            yield next(fetcher)
        except StopIteration:
            return


def is_empty(loader: Any) -> bool:
    """Whether this rank has no sample of a loader that is divided here."""
    return any(
        isinstance(one, EveryNth) and one.is_empty
        for one in (*samplers_of(loader), getattr(loader, "batch_sampler", 0))
    )
