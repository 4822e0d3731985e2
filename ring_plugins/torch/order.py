"""The order of an epoch is the job's: how ranks divide it, and where it goes on after an interruption.

**Problem.** A job that is started again from a checkpoint in the middle of an epoch should read the rest of it: no
sample twice, none never, also with another number of ranks. torch's loaders know nothing of that, and a sampler knows
only its own rank's part.

**Idea.** All ranks go through one order, which follows from a seed, and of n ranks rank r takes every n-th draw. So
what the ranks have consumed after equally many batches is the beginning of that order, and one number says how far it
goes. A checkpoint has this number, and that from which the order was drawn (`positions`). Then any number of ranks can
divide what is left, by the same rule (`rest`).

A loader goes on there by a sampler whose next iteration is another one (`Resumed`). So its workers, its class and its
later epochs are as always.

torchdata's `StatefulDataLoader` keeps the state of every rank's loader and workers instead, which goes beyond data with
an index, but needs the same number of ranks and another loader.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

T = TypeVar("T")
#: What an epoch's order is drawn by: the seed plus the epoch, or a state of torch's random numbers.
DrawnBy = int | torch.Tensor | None


def shuffled(length: int, seed: int) -> list[int]:
    """The order in which torch's `DistributedSampler` shuffles data of a length, whose ranks take every n-th.

    Args:
        seed: its seed plus the epoch.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(length, generator=generator, device="cpu").tolist()


def order_of(sampler: Any, drawn_by: DrawnBy) -> list[Any]:
    """All that a sampler draws in an epoch, the same on all ranks.

    Args:
        sampler: has heard of the epoch, if it has a `set_epoch`. A batch sampler draws batches.
        drawn_by: the seed plus the epoch; or a state of torch's random numbers, which go on from there; or None: these
            are as they are.
    """
    if isinstance(drawn_by, int) and is_permutation(sampler):
        return shuffled(len(sampler), drawn_by)
    if not isinstance(drawn_by, int):
        if drawn_by is not None:
            torch.set_rng_state(drawn_by.cpu())
        return list(itertools.islice(sampler, length_of(sampler)))  # a sampler with a length may go on for ever
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(drawn_by)
        return list(sampler)


def is_permutation(sampler: Any) -> bool:
    """Whether a sampler is torch's or torchdata's that shuffles, and draws each sample once."""
    is_random = type(sampler) is RandomSampler or (is_torchdatas(sampler) and type(sampler).__name__ == "RandomSampler")
    return is_random and not sampler.replacement and sampler._num_samples is None


def is_torchdatas(sampler: Any) -> bool:
    """Whether it is one of those that a `StatefulDataLoader` makes in place of torch's."""
    return type(sampler).__module__ == "torchdata.stateful_dataloader.sampler"


def makes_batches(batches: Any, draws: Any) -> bool:
    """Whether a batch sampler does no more than to put together what a sampler draws, as torch's and torchdata's."""
    return (type(batches) is BatchSampler or is_torchdatas(batches)) and batches.sampler is draws


def rest(order: Sequence[T], consumed: int, rank: int, size: int, unit: int = 1) -> list[T]:
    """What a rank reads of the order that is left.

    Args:
        order: of the whole job.
        consumed: how much of it all ranks together have read.
        rank, size: which of how many ranks this is now.
        unit: so many draws stay together: with the size of a batch, ranks take every n-th batch.
    """
    starts = range(consumed + rank * unit, len(order), size * unit)
    return [one for start in starts for one in order[start : start + unit]]


class EveryNth(DistributedSampler[Any]):
    """What a sampler draws, or a batch sampler, divided among ranks; as Lightning's own kinds it has an epoch.

    Args:
        sampler: draws the same on all ranks, if they have equal seeds.
        num_replicas, rank: the ranks, and which of them this is.
        seed: of torch's random numbers while it draws; None: they are as they are, which only one rank can do.
        pads: whether samples are repeated until all ranks have equally many.
        may_be_empty: whether a rank for which there is nothing draws nothing.

    Attributes:
        is_empty: whether there is nothing for this rank, which then draws the first sample; that is not to count.
        checksum: of what all ranks together read in this epoch, if a sampler chose it.
        random: torch's random numbers with which this epoch was drawn, without a seed.
    """

    def __init__(
        self,
        sampler: Any,
        num_replicas: int,
        rank: int,
        seed: int | None = 0,
        pads: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        super().__init__(sampler, num_replicas, rank, shuffle=False, seed=seed or 0)
        self.sampler = self  # a loader's `batch_sampler.sampler` is what hears of epochs
        self.pads, self._may_be_empty, self._has_seed = pads, may_be_empty, seed is not None
        self.checksum = 0
        self.random: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        is_filled = self.pads or self._may_be_empty
        return not is_filled and 0 < len(self.dataset) <= self.rank  # type: ignore[arg-type]

    @property
    def drawn_by(self) -> DrawnBy:
        """What the order of this epoch was drawn by."""
        return self.seed + self.epoch if self._has_seed else self.random

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if not self._has_seed:
            self.random = torch.get_rng_state()
        order = order_of(self.dataset, self.seed + self.epoch if self._has_seed else None)
        self.checksum = checksum_of_order(self.dataset, order)
        if self.is_empty:
            return iter(order[:1])
        return iter(self._share(order, 0))

    def _share(self, order: list[Any], consumed: int) -> list[Any]:
        share = rest(order, consumed, self.rank, self.num_replicas)
        missing = -(-(len(order) - consumed) // self.num_replicas) - len(share) if self.pads else 0
        return share + (order[self.rank :: self.num_replicas] or order)[:missing]

    def __len__(self) -> int:
        count = len(self.dataset)  # type: ignore[arg-type]
        if self.is_empty:
            return 1
        return len(range(0 if self.pads else self.rank, count, self.num_replicas))


def checksum_of_order(sampler: Any, order: list[Any]) -> int:
    """What tells the order that a sampler has drawn from others; 0 for the samplers that torch's loaders make."""
    return 0 if type(sampler) in (SequentialSampler, RandomSampler) else zlib.crc32(repr(order).encode()) >> 1


# Where a loader is -----------------------------------------------------------------------------------


class Division(NamedTuple):
    """What divides the order of a loader among ranks.

    Attributes:
        sampler: that does it.
        unit: how many of its draws are a batch.
    """

    sampler: Any
    unit: int

    @property
    def whole(self) -> Any:
        """The sampler of the whole order."""
        if isinstance(self.sampler, EveryNth):
            return self.sampler.dataset
        if hasattr(self.sampler, "begin_at"):  # an `ElasticSampler`
            return self.sampler.whole
        return (RandomSampler if self.sampler.shuffle else SequentialSampler)(self.sampler.dataset)

    @property
    def drawn_by(self) -> DrawnBy:
        """What the order of this epoch is drawn by."""
        own: Any = self.sampler
        return (
            own.seed + own.epoch if isinstance(own, DistributedSampler) and type(own) is not EveryNth else own.drawn_by
        )

    def left(self, order: list[Any], consumed: int) -> list[Any]:
        """What this rank draws behind what all have consumed, with the same repetitions as in a whole epoch."""
        own: Any = self.sampler
        if isinstance(own, EveryNth):
            return own._share(order, consumed)
        count = len(order) - consumed
        if own.drop_last:
            order = order[: len(order) - count % own.num_replicas]
        else:
            order = order + list(itertools.islice(itertools.cycle(order), -count % own.num_replicas))
        return rest(order, consumed, own.rank, own.num_replicas)


def division_of(loader: Any) -> Division | None:
    """What divides a loader's order, if that is a sampler of which the whole order can be known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    index = index_sampler(loader)
    if _is_known(index):
        return Division(index, 1)
    is_plain = is_torchdatas(index) or type(index).__iter__ is BatchSampler.__iter__
    if isinstance(index, BatchSampler) and is_plain and _is_known(index.sampler):
        return Division(index.sampler, index.batch_size)
    return None


def _is_known(sampler: Any) -> bool:
    return (
        isinstance(sampler, EveryNth)
        or hasattr(sampler, "begin_at")
        or (isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__)
    )


def index_sampler(loader: DataLoader[Any]) -> Any:
    """What chooses a loader's batches, or, if it makes none, samples."""
    found: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return found.whole if isinstance(found, Resumed) else found


class Resumed:
    """A sampler, or a loader, whose next iteration is another one; everything else is its own.

    Args:
        whole: the sampler or loader.
        first: what the next iteration yields.
    """

    def __init__(self, whole: Any, first: Iterable[Any]) -> None:
        self.whole, self._first = whole, cast("Iterable[Any] | None", first)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["whole"], name)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that one of which nothing is asked does not count: loaders with workers make two.
        first, self._first = self._first, None
        yield from self.whole if first is None else first

    def __len__(self) -> int:
        return len(self.whole)


def with_index(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """A loader of the same class, whatever its arguments are, that draws batches, or samples, by another sampler."""
    fresh = copy.copy(loader)
    vars(fresh)["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    vars(fresh)["_iterator"] = None
    return fresh


def length_of(loader: Any) -> int | None:
    """How many batches a loader or sampler has; None if it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def position_of(loader: Any, batches: int, ranks: int, begun: int = 0) -> dict[str, Any]:
    """Where a loader is in its epoch, for a checkpoint.

    Args:
        batches: how many this rank has had of it since it began, or went on.
        ranks: of the job.
        begun: `begun` of the `Resumption` with which it went on.
    """
    division = division_of(loader)
    if division is None:
        return {"batches": begun + batches, "ranks": ranks}
    length = len(division.whole)
    if hasattr(division.sampler, "consumed"):
        consumed = division.sampler.consumed(batches * division.unit)
    else:
        consumed = begun + batches * division.unit * division.sampler.num_replicas
    consumed = min(consumed, length)
    checksum = getattr(division.sampler, "checksum", 0)
    return {"consumed": consumed, "length": length, "drawn_by": division.drawn_by, "checksum": checksum}


class Resumption(NamedTuple):
    """A loader that goes on.

    Attributes:
        loader: its next iteration begins there, and all later ones at the beginning.
        begun: what had been consumed there.
        batches: how many there are on the rank that has most; None if that is not known.
        own: how many there are on this rank; None if that is not known.
        draws: how many samples this rank draws in them, or batches of a batch sampler; None if that is not known.
        problem: why the rest is not exactly what was left, "" if it is.
    """

    loader: Any
    begun: int
    batches: int | None
    own: int | None
    draws: int | None
    problem: str


def resumed(loader: Any, position: Mapping[str, Any], ranks: int) -> Resumption:
    """Go on in the middle of an epoch.

    Args:
        loader: its samplers have heard of the epoch.
        position: of this loader, by `position_of`.
        ranks: of the job, now.
    """
    division = division_of(loader)
    if division is not None and "consumed" in position:
        return _divided(loader, division, position)
    kind = _kind_of(loader)
    if position.get("ranks") != ranks:
        told = position.get("ranks", "another number of")
        problem = (
            f"{kind} cannot be divided anew: the checkpoint is of {told} ranks, and these are {ranks}. The data begins "
            "anew, so samples are read twice. Resume with as many ranks, or use a dataset with a length, and a sampler "
            "that Lightning divides."
        )
        return Resumption(loader, 0, None, None, None, problem)
    skipped, problem = position["batches"], ""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        problem = (
            f"{kind} has no order that could be known, so its first {skipped} batches are loaded and dropped. If it "
            "does not yield the same in each run, samples are read twice: use a dataset with a length."
        )
        return Resumption(Resumed(loader, itertools.islice(loader, skipped, None)), skipped, None, None, None, problem)
    index = index_sampler(loader)
    if isinstance(loader.sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        problem = (
            f"the {type(loader.sampler).__name__} of {kind} draws another order in each run, so samples are read "
            "twice. Let the Trainer divide it among the ranks, which seeds it in each epoch."
        )
    first = itertools.islice(index, skipped, None)
    length = length_of(index)
    left = None if length is None else max(length - skipped, 0)
    return Resumption(with_index(loader, Resumed(index, first)), skipped, left, left, None, problem)


def _divided(loader: DataLoader[Any], division: Division, position: Mapping[str, Any]) -> Resumption:
    own, consumed, problem = division.sampler, position["consumed"], ""
    order = order_of(division.whole, position["drawn_by"])
    own.checksum = checksum_of_order(division.whole, order)
    if len(order) != position["length"] or own.checksum != position["checksum"]:
        problem = (
            f"{_kind_of(loader)} draws {len(order)} samples or batches in another order than the {position['length']} "
            "of which the checkpoint is, so some are read twice or never. Samplers need the same seed in each run."
        )
    index = index_sampler(loader)
    if hasattr(own, "begin_at"):
        own.begin_at(consumed)
        return Resumption(loader, consumed, None, None, None, problem)
    draws = division.left(order, consumed)
    is_batched = index is not own
    first: Iterable[Any] = BatchSampler(draws, division.unit, index.drop_last) if is_batched else draws
    most = len(order) - min(consumed, len(order))
    most = most // own.num_replicas if getattr(own, "drop_last", False) else -(-most // own.num_replicas)
    drops = is_batched and index.drop_last
    batches, mine = (n // division.unit if drops else -(-n // division.unit) for n in (most, len(draws)))
    return Resumption(with_index(loader, Resumed(index, first)), consumed, batches, mine, len(draws), problem)


def _kind_of(loader: Any) -> str:
    data = getattr(loader, "dataset", None)
    return f"a {type(loader).__name__}" + (f" of {type(data).__name__}" if data is not None else "")
