"""Which samples each step of a global batch has, and which rank computes them.

A step has micro-batches, which are batches of the loader, numbered by their first samples in the epoch's one order
(`global_batch`). They are dealt to the ranks that are there. Each of these computes its part of the step in passes, and
what it loads is drawn by a batch sampler of our own, so that a loader's workers fetch ahead. Only when ranks have
changed, the rest of the epoch is dealt again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.world import current
from ring_plugins.torch.loaders import ElasticSampler
from ring_plugins.torch.order import makes_batches, order_of, with_index

T = TypeVar("T")


class Pass(NamedTuple):
    """A pass of a rank.

    Attributes:
        number: its first sample.
        counts: whether the step has it; else it only keeps other ranks company.
    """

    number: int
    counts: bool = True


def passes_of(rank: int, size: int, first: int, end: int, batch_size: int, is_even: bool = False) -> list[Pass]:
    """The passes of a rank in a step; what a full one does not weigh comes first.

    Args:
        rank, size: of the ranks that are there.
        first, end: the step's samples.
        batch_size: of a micro-batch.
        is_even: whether all ranks have equally many, of which some may not count.
    """
    numbers = list(range(first + rank * batch_size, end, size * batch_size))
    if numbers and numbers[-1] + batch_size > end:
        numbers = numbers[-1:] + numbers[:-1]
    count = -(-(end - first) // batch_size)
    missing = -(-count // size) - len(numbers) if is_even else 0
    return [Pass(first + rank % count * batch_size, False)] * missing + [Pass(number) for number in numbers]


class StepPlan(Generic[T]):
    """The steps of one epoch after the other.

    Args:
        loader: a `DataLoader` of a dataset with a length.
        global_batch_size: samples of a step, a multiple of the loader's `batch_size`.
        seed: of the order and of torch's generator.
        caller: whose argument the loader is, for errors.
        is_even: see `passes_of`.

    Attributes:
        batches: what is loaded of this rank's passes, from those that `divide` has returned on.
        epoch, samples: the place: how many samples of the epoch have been in steps.
        place: what ranks compare.

    Raises:
        ArgumentError: the loader cannot be divided.
    """

    def __init__(
        self, loader: DataLoader[T], global_batch_size: int, seed: int, caller: str, is_even: bool = False
    ) -> None:
        _check(loader, global_batch_size, caller)
        assert loader.batch_size is not None
        self.loader, self.global_batch_size, self.batch_size = loader, global_batch_size, loader.batch_size
        self.seed, self._is_even = seed, is_even
        self.epoch = self.samples = 0
        #: Of this epoch, once it is known.
        self._order: tuple[int, list[int]] | None = None
        self._sampler = _Sampler(self.batch_size, global_batch_size, is_even)
        self._divided: DataLoader[T] = with_index(loader, self._sampler)
        self.batches: Iterator[T] = iter(())
        #: For this rank of so many, from the step with this first sample.
        self._batches_for: tuple[int, int, int] | None = None
        self.place = _Place(caller)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return (self.end() + self.global_batch_size - 1) // self.global_batch_size

    def order(self) -> list[int]:
        """The samples of this epoch in the order of the job."""
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, job_order(self.loader.sampler, self.seed, self.epoch)
            self.place.take_order(self._order[1])
        return self._order[1]

    def end(self) -> int:
        """Where the last step of this epoch ends, in samples."""
        count = len(self.order())
        return count - count % self.global_batch_size if self.loader.drop_last else count

    def begin_at(self, epoch: int, samples: int) -> None:
        """Go on behind these samples."""
        self.epoch, self.samples, self._batches_for = epoch, samples, None

    def has_samples_of(self, other: StepPlan[Any]) -> bool:
        """Whether this is made anew of the samples of another plan, in the same order."""
        if self.seed != other.seed or self.loader.dataset is not other.loader.dataset:
            return False
        own, its = self.loader.sampler, other.loader.sampler
        return own is its or (type(own) is type(its) and _indices(own) == _indices(its))

    def divide(self, first: int, end: int, rank: int, size: int) -> list[Pass]:
        """The passes of a rank of so many in a step, of which `batches` has the data next."""
        if self._batches_for != (rank, size, first):
            self._sampler.divide(self.order()[: self.end()], rank, size, first)
            self.batches = iter(self._divided)
        self._batches_for = None  # until all of these have been taken
        return passes_of(rank, size, first, end, self.batch_size, self._is_even)

    def taken(self, end: int, rank: int, size: int) -> None:
        """Note that the data of all passes has been taken of a step that ends there."""
        self._batches_for = rank, size, end

    def by_rank(self, first: int, end: int, size: int) -> list[list[Pass]]:
        """The passes of each of so many ranks in a step."""
        return [passes_of(rank, size, first, end, self.batch_size, self._is_even) for rank in range(size)]

    def draw_by(self, number: int, of: str = "batch") -> None:
        """Seed torch's generator for a micro-batch, or for what is behind so many samples."""
        seed = zlib.crc32(repr((self.seed, self.epoch, of, number)).encode())
        # `torch.manual_seed` notes a stack for each kind of device that is not in use, for milliseconds, and keeps it.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)


class _Sampler:
    """A batch sampler: the rest of an epoch, as it is divided among some ranks."""

    def __init__(self, batch_size: int, step: int, is_even: bool) -> None:
        self._batch_size, self._step, self._is_even = batch_size, step, is_even
        self._order: list[int] = []
        self._rank, self._size, self._first = 0, 1, 0

    def divide(self, order: list[int], rank: int, size: int, first: int) -> None:
        """Begin with the step at the first sample of this order, for one of so many ranks."""
        self._order, self._rank, self._size, self._first = order, rank, size, first

    def _steps(self) -> Iterator[tuple[int, list[Pass]]]:
        count = len(self._order)
        for first in range(self._first, count, self._step):
            end = min(first + self._step, count)
            yield end, passes_of(self._rank, self._size, first, end, self._batch_size, self._is_even)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order
        for end, passes in self._steps():
            for number, _ in passes:
                yield order[number : min(number + self._batch_size, end)]

    def __len__(self) -> int:
        return sum(len(passes) for _, passes in self._steps())


class _Place:
    """What ranks compare along with the gradients of a step: its place in the data, and the order of these.

    Args:
        caller: see `StepPlan`.

    Attributes:
        number: see `observe.consistency.Check`.
    """

    def __init__(self, caller: str) -> None:
        self.number: int | None = None
        self._caller, self._order = caller, 0
        self._told: dict[str, int] = {}

    def take_order(self, order: Sequence[int]) -> None:
        """Compare this order from now on."""
        self._order = zlib.crc32(torch.tensor(order, dtype=torch.int64, device="cpu").numpy().tobytes())

    def take(self, epoch: int, first: int, end: int, batch_size: int) -> None:
        """Compare this place from now on."""
        self._told = {
            "epoch": epoch, "first sample": first, "end": end, "batch_size": batch_size, "order": self._order
        }  # fmt: skip
        self.number = zlib.crc32(repr(self._told).encode())

    def say(self, communicator: Communicator[Any]) -> None:
        """See `observe.consistency.Check`."""
        told = communicator.all_gather_object(self._told, "places of a global batch")
        if any(one != told[0] for one in told):
            by_rank = dict(zip(communicator.ranks, told, strict=True))
            raise MismatchError(
                f"the ranks' steps of {self._caller} do not have the same samples: {by_rank}. If only `order` (a "
                "checksum) differs, the loaders' datasets have different lengths, or their samplers draw by "
                "themselves: let a sampler draw by torch's generator, or by its seed and set_epoch(). Give all ranks "
                "the same arguments and the same state."
            )


def job_order(sampler: Any, seed: int, epoch: int) -> list[int]:
    """The samples of an epoch in the order of a loader's sampler, the same in every process that asks.

    Args:
        sampler: draws by torch's generator, or by one of its own; both are seeded for this. One with a `set_epoch` is
            told the epoch.
        seed: of the order of all epochs.
        epoch: which.
    """
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(seed + epoch)
    return list(map(int, order_of(sampler, seed + epoch)))


def _indices(sampler: Any) -> list[int] | None:
    return None if (indices := getattr(sampler, "indices", None)) is None else list(map(int, indices))


def _check(loader: Any, global_batch_size: Any, caller: str) -> None:
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise ArgumentError(f"global_batch_size={global_batch_size!r} is not a positive number of samples.")
    rank = current().communicator.rank
    if not isinstance(loader, DataLoader):
        raise ArgumentError(
            f"loader={type(loader).__name__} on rank {rank} is not a torch DataLoader, so {caller} cannot divide "
            "its samples. Make a DataLoader of the dataset."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"global_batch_size={global_batch_size} on rank {rank} with a {type(loader.dataset).__name__}, an "
            "IterableDataset, whose samples have no numbers by which ranks could divide them. Use a dataset with "
            "__len__ and __getitem__, or ranks with a loader each."
        )
    if loader.batch_size is None or not makes_batches(loader.batch_sampler, loader.sampler):
        raise ArgumentError(
            f"the loader of rank {rank} has a batch sampler of its own ({type(loader.batch_sampler).__name__}), and "
            f"{caller} needs batches of one size: give the DataLoader batch_size= and sampler=."
        )
    if isinstance(loader.sampler, (DistributedSampler, ElasticSampler)) or hasattr(loader.sampler, "num_replicas"):
        raise ArgumentError(
            f"the loader of rank {rank} has a {type(loader.sampler).__name__}, which divides samples among the ranks, "
            f"as {caller} does: leave it out (shuffle=True)."
        )
    if rest := global_batch_size % loader.batch_size:
        fitting = [size for size in (global_batch_size - rest, global_batch_size - rest + loader.batch_size) if size]
        raise ArgumentError(
            f"global_batch_size={global_batch_size} on rank {rank} is no multiple of the loader's batch_size="
            f"{loader.batch_size}, of which each pass is one: take {' or '.join(map(str, fitting))}, or another "
            "batch_size."
        )
