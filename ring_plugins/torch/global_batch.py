"""Steps whose samples are the job's: how many there are, and which, does not depend on the number of ranks.

**Problem.** With a batch per rank, a job that loses a rank takes smaller steps from then on, and one that grows takes
larger ones, with a learning rate that was chosen for neither. Its ranks also draw other samples than before. So two
runs of one script differ as soon as their ranks do.

**Idea.** The unit of work is a *micro-batch*: a batch of the loader, numbered by its place in the epoch's one order of
the samples. A step has as many of them as make the global batch, whoever computes them. The ranks that are there take
turns: with 4 micro-batches 4 ranks make one pass each, 2 make two, 3 make two, one and one. Passes but the last
accumulate, and the last is averaged while backward runs, as always. A rank without a micro-batch takes part with zeros.
EasyScale (Li et al., SC 2023) calls such units virtual workers.

**A rank that is lost in a step** takes its micro-batches with it. The others average without it, notice that, drop
that average, and compute the whole step once more among themselves. So no step is made of fewer samples. Whether ranks
were lost in a pass is the same on all that are left: the pass was repeated by all, or by none
(core/collectives/recovery.py). To compute only what is missing would save part of one step for each loss, and need to
know whose gradients are in.

**Randomness** belongs to the micro-batch, too: torch's generator is seeded for each, so dropout draws the same numbers
wherever a micro-batch is computed.

**Exact** averages (`exact_averages`) also have the same bits; sums in another order differ in the last ones.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.world import current
from ring_plugins.torch import sync_batch_norm
from ring_plugins.torch.exact_averages import ExactAverages, average_exactly
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.loaders import ElasticSampler
from ring_plugins.torch.order import order_of, with_index

T = TypeVar("T")

_NO_SYNC_BATCH_NORM = (
    "SyncBatchNorm needs all ranks in each forward, and the passes of a step of GlobalBatches are divided among the "
    "ranks, of which some have more than others. Use BatchNorm, whose statistics are those of a micro-batch whatever "
    "the number of ranks, or GroupNorm or LayerNorm."
)


class GlobalBatches(Generic[T]):
    """Steps of one epoch after the other that have the same samples, whatever the number of ranks is meanwhile.

        steps = GlobalBatches(loader, optimizer, global_batch_size=256)
        state = TrainingState(model=model, optimizer=optimizer, steps=steps, epoch=0)
        for state.epoch in range(state.epoch, 10):
            for step in steps:
                for x, y in step:
                    loss(model(x), y).backward()
                optimizer.step()
                state.commit()

    The inner loop goes through this rank's part of the step, in batches of `loader`: call `backward` once for each, of
    a loss that is the mean over the batch. Behind it `p.grad` is the mean over the step's samples on all ranks. Neither
    scale the loss nor clear gradients: each step begins without any. If a rank is lost in the step, the others go
    through their parts of all of it once more, so count there nothing that must not be counted twice.

    Batches come in the order of the loader's sampler, which is that of the whole job: give it no sampler that divides
    samples among ranks. Before each batch torch's generator is seeded anew from `seed`, the epoch and the batch's
    number, so that dropout, and what the loader draws without workers, are the same wherever it is computed. So it is
    behind the inner loop.

    It has a `state_dict`, by which `TrainingState` and checkpoints go on with the next step, on any number of ranks.
    Save it behind `optimizer.step()`.

    Args:
        loader: a `DataLoader` of a dataset with a length. Its `batch_size` samples are computed at a time; the last
            batch of an epoch may have fewer. Its `drop_last` says whether an incomplete last step is left out.
        optimizers: all `DistributedOptimizer`s and `GradientAverager`s of the loop, with one pass per step.
        global_batch_size: samples of a step, on all ranks together: a multiple of the loader's `batch_size`.
        exact: whether gradients are added up in the order of the batches, so that the averages have the same bits on
            any number of ranks. It takes longer, and more memory: see docs/batch_size.md.
        seed: of the order and of torch's generator; equal on all ranks.

    Raises:
        ArgumentError: on all ranks, if the loader or the optimizers do not fit.
        MismatchError: in the first backward or at the end of a step, on all ranks: their orders of the samples, places
            in them, or arguments differ.
    """

    def __init__(
        self, loader: DataLoader[T], *optimizers: Any, global_batch_size: int, exact: bool = False, seed: int = 0
    ) -> None:
        with rejections_told(current().communicator, "GlobalBatches"):
            self._averagers = [_averager_of(one) for one in optimizers]
            _check(loader, global_batch_size, self._averagers)
        self.loader, self.global_batch_size, self.exact, self.seed = loader, global_batch_size, exact, seed
        self._epoch = self._samples = 0
        self._is_loaded = False
        #: Of this epoch, once it is known.
        self._order: tuple[int, list[int]] | None = None
        self._plan = _Plan()
        self._divided: DataLoader[T] = with_index(loader, self._plan)
        self._batches: Iterator[T] = iter(())  # for this rank of so many, from the step with this first sample
        self._batches_for: tuple[int, int, int] | None = None
        #: Whether a script was seen to keep the gradients of several passes.
        self._accumulates = False
        self._place = _Place()
        for averager in self._averagers:
            averager.checks.list.append(self._place)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return (self._end() + self.global_batch_size - 1) // self.global_batch_size

    def __iter__(self) -> Iterator[Step[T]]:
        """The rest of this epoch, or else the next one.

        Behind `load_state_dict` the rest may be no step: then the checkpoint is of an epoch's last one, and so is all
        that counts epochs beside this.
        """
        if self._samples >= self._end() and not self._is_loaded:
            self._epoch, self._samples = self._epoch + 1, 0
        self._is_loaded = False
        while (first := self._samples) < self._end():
            step = Step(self, first, min(first + self.global_batch_size, self._end()))
            skipped = self._skipped()
            yield step
            if not step.is_done and self._skipped() == skipped:
                self._reject_part_of(step)
            self._samples = max(self._samples, step.end)  # also of one that all ranks skipped
        self._epoch, self._samples = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples have been in steps."""
        return {"epoch": self._epoch, "samples": self._samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind these samples."""
        self._epoch, self._samples = state["epoch"], state["samples"]
        self._is_loaded, self._batches_for = True, None

    def _end(self) -> int:
        """Where the last step of this epoch ends, in samples."""
        if self._order is None or self._order[0] != self._epoch:
            self._order = self._epoch, job_order(self.loader.sampler, self.seed, self._epoch)
            self._place.take_order(self._order[1])
        count = len(self._order[1])
        return count - count % self.global_batch_size if self.loader.drop_last else count

    def _skipped(self) -> int:
        return sum(averager.skipped_steps for averager in self._averagers)

    def _reject_part_of(self, step: Step[T]) -> None:
        error = RingError(
            f"rank {self._communicator.rank} has left the loop over a step of GlobalBatches before its end, so the "
            f"gradients of samples {step.first} to {step.end - 1} of epoch {self._epoch} are incomplete. Let the inner "
            "loop, `for batch in step`, run to its end on all ranks."
        )
        self._communicator.interrupt("a step of GlobalBatches", error)
        raise error

    @property
    def _communicator(self) -> Communicator[Any]:
        return self._averagers[0].communicator

    # For `Step` ---------------------------------------------------------------------------------------

    def _divide(self, step: Step[T]) -> list[int]:
        """The numbers of this rank's micro-batches in a step: a smaller one is the first."""
        rank, size = self._communicator.rank, self._communicator.size
        if self._batches_for != (rank, size, step.first):
            assert self._order is not None
            order = self._order[1][: self._end()]
            self._plan.divide(order, self._batch_size, self.global_batch_size, rank, size, step.first)
            self._batches = iter(self._divided)
        self._batches_for = None  # until all of these have been taken
        return _numbers(rank, size, step.first, step.end, self._batch_size)

    @property
    def _batch_size(self) -> int:
        assert self.loader.batch_size is not None
        return self.loader.batch_size

    def _seed(self, number: int, of: str = "batch") -> None:
        seed = zlib.crc32(repr((self.seed, self._epoch, of, number)).encode())
        # `torch.manual_seed` notes a stack for each kind of device that is not in use, for milliseconds, and keeps it.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)


class Step(Generic[T]):
    """A step of `GlobalBatches`: iterate over this rank's batches.

    Attributes:
        first, end: the places of its samples in the epoch's order.
        is_done: whether the gradients are averages.
        times: how often it was begun: once more after each loss of a rank in it.
    """

    def __init__(self, owner: GlobalBatches[T], first: int, end: int) -> None:
        self._owner, self.first, self.end = owner, first, end
        self.is_done, self.times = False, 0

    @property
    def samples(self) -> int:
        """How many samples it has, on all ranks together."""
        return self.end - self.first

    def __iter__(self) -> Iterator[T]:
        owner = self._owner
        sync_batch_norm.refusal = _NO_SYNC_BATCH_NORM
        try:
            while not self.is_done:
                self.times += 1
                self.is_done = yield from self._attempt()
        finally:
            sync_batch_norm.refusal = ""
        owner._samples = self.end
        owner._seed(self.end, "end")

    def _attempt(self) -> Generator[T, None, bool]:
        """Go through this rank's batches; returns whether the gradients are averages of all."""
        owner, averagers, losses = self._owner, self._owner._averagers, _losses()
        _drop_gradients(averagers)
        size, full = owner._communicator.size, owner._batch_size
        owner._place.take(owner._epoch, self.first, self.end, full)
        exact = [ExactAverages(averager) for averager in averagers] if owner.exact else []
        reduced = [averager.steps for averager in averagers]
        numbers = owner._divide(self)
        for number in numbers:
            samples = min(self.end - number, full)
            # The first step with several passes averages behind them, to see that the script adds gradients up.
            is_averaged = number == numbers[-1] and samples == full and not exact
            is_averaged &= owner._accumulates or len(numbers) == 1
            owner._seed(number)
            batch = next(owner._batches)
            is_watched = not is_averaged and not exact and not owner._accumulates
            with contextlib.ExitStack() as block:
                for averager in averagers if not is_averaged else ():
                    block.enter_context(averager.no_sync())
                before = [_Kept(one, block) for one in averagers if is_watched]
                yield batch
            del batch
            if exact:
                for one in exact:
                    one.take(number, samples / full)
            elif not is_averaged:
                if not all(one.is_kept() for one in before):
                    self._reject_cleared()
                if samples < full:
                    _scale(averagers, samples / full)
        owner._accumulates |= len(numbers) > 1
        owner._batches_for = owner._communicator.rank, size, self.end
        weight = self.samples / full
        if exact:
            return losses == _losses() and average_exactly(exact, self._by_rank(size), weight)
        for averager, before_step in zip(averagers, reduced, strict=True):
            if averager.steps == before_step:
                averager.finish()
        if losses != _losses():
            return False
        if size != weight:
            _scale(averagers, size / weight)
        return True

    def _by_rank(self, size: int) -> list[list[int]]:
        """The micro-batches of each of so many ranks."""
        return [_numbers(rank, size, self.first, self.end, self._owner._batch_size) for rank in range(size)]

    def _reject_cleared(self) -> None:
        error = RingError(
            f"rank {self._owner._communicator.rank} has cleared gradients between two batches of a step of "
            "GlobalBatches, which are to add up. Call zero_grad() in front of the inner loop, `for batch in "
            "step`, or not at all: each step begins without gradients."
        )
        self._owner._communicator.interrupt("a step of GlobalBatches", error)
        raise error


class _Kept:
    """Whether a pass adds to a gradient, which may also be cleared in place.

    Args:
        averager: of which the first dense gradient is looked at, if there is any.
        block: in which the pass runs.
    """

    def __init__(self, averager: GradientAverager, block: contextlib.ExitStack) -> None:
        self._parameter: torch.nn.Parameter | None = None
        for _, parameter in averager.named_parameters:
            if parameter.requires_grad and (found := parameter.grad) is not None and found.layout is torch.strided:
                self._parameter, self._before = parameter, found.detach().clone()
                self._added = torch.zeros_like(found)
                block.callback(parameter.register_hook(self._add).remove)  # type: ignore[no-untyped-call]
                break

    def _add(self, gradient: torch.Tensor) -> None:
        self._added = self._added + gradient.detach()

    def is_kept(self) -> bool:
        """Whether it is more than what the pass has added."""
        if self._parameter is None or (found := self._parameter.grad) is None:
            return self._parameter is None
        whole = self._before + self._added
        return torch.allclose(found, whole, equal_nan=True) or not torch.allclose(found, self._added, equal_nan=True)


def _numbers(rank: int, size: int, first: int, end: int, batch_size: int) -> list[int]:
    """The micro-batches that a rank of so many computes in a step, by their first samples; a smaller one comes first.

    Args:
        rank, size: of the ranks that are there.
        first, end: the step's samples.
        batch_size: of a micro-batch.
    """
    own = list(range(first + rank * batch_size, end, size * batch_size))
    return own[-1:] + own[:-1] if own and own[-1] + batch_size > end else own


class _Plan:
    """A batch sampler: the rest of an epoch, as it is divided among some ranks."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._batch_size = self._step = 1
        self._rank, self._size, self._first = 0, 1, 0

    def divide(self, order: list[int], batch_size: int, step: int, rank: int, size: int, first: int) -> None:
        """Begin with the step at the first sample of this order, in steps of so many, for one of so many ranks."""
        self._order, self._batch_size, self._step = order, batch_size, step
        self._rank, self._size, self._first = rank, size, first

    def _steps(self) -> Iterator[list[int]]:
        count = len(self._order)
        for first in range(self._first, count, self._step):
            yield _numbers(self._rank, self._size, first, min(first + self._step, count), self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order, step = self._order, self._step
        for numbers in self._steps():
            for number in numbers:
                end = min(number + self._batch_size, number - number % step + step)
                yield order[number:end]

    def __len__(self) -> int:
        return sum(map(len, self._steps()))


class _Place:
    """What ranks compare along with the gradients of a step: its place in the data, and the order of these.

    Attributes:
        number: see `observe.consistency.Check`.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._order = 0
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
        told = communicator.all_gather_object(self._told, "places of GlobalBatches")
        if any(one != told[0] for one in told):
            by_rank = dict(zip(communicator.ranks, told, strict=True))
            raise MismatchError(
                f"the ranks' steps of GlobalBatches do not have the same samples: {by_rank}. If only `order` (a "
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


def _check(loader: Any, global_batch_size: Any, averagers: Sequence[GradientAverager]) -> None:
    """Check the arguments of `GlobalBatches`."""
    if not averagers:
        raise ArgumentError("GlobalBatches needs the DistributedOptimizers or GradientAveragers of the loop.")
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise ArgumentError(f"global_batch_size={global_batch_size!r} is not a positive number of samples.")
    rank = current().communicator.rank
    if not isinstance(loader, DataLoader):
        raise ArgumentError(
            f"loader={type(loader).__name__} on rank {rank} is not a torch DataLoader, so GlobalBatches cannot divide "
            "its samples. Make a DataLoader of the dataset."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"global_batch_size={global_batch_size} on rank {rank} with a {type(loader.dataset).__name__}, an "
            "IterableDataset, whose samples have no numbers by which ranks could divide them. Use a dataset with "
            "__len__ and __getitem__, or ranks with a loader each."
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ArgumentError(
            f"the loader of rank {rank} has a batch sampler of its own ({type(loader.batch_sampler).__name__}), and "
            "GlobalBatches needs batches of one size: give the DataLoader batch_size= and sampler=."
        )
    if isinstance(loader.sampler, (DistributedSampler, ElasticSampler)) or hasattr(loader.sampler, "num_replicas"):
        raise ArgumentError(
            f"the loader of rank {rank} has a {type(loader.sampler).__name__}, which divides samples among the ranks, "
            "as GlobalBatches does: leave it out (shuffle=True)."
        )
    if rest := global_batch_size % loader.batch_size:
        fitting = [size for size in (global_batch_size - rest, global_batch_size - rest + loader.batch_size) if size]
        raise ArgumentError(
            f"global_batch_size={global_batch_size} on rank {rank} is no multiple of the loader's batch_size="
            f"{loader.batch_size}, of which each pass is one: take {' or '.join(map(str, fitting))}, or another "
            "batch_size."
        )


def _averager_of(part: Any) -> GradientAverager:
    averager = getattr(part, "averager", part)
    if not isinstance(averager, GradientAverager):
        raise ArgumentError(
            f"GlobalBatches was given a {type(part).__name__}: pass DistributedOptimizers and GradientAveragers."
        )
    if averager.sums:
        raise ArgumentError("GlobalBatches needs averages of gradients, and this optimizer has op=Sum.")
    if averager.passes_per_step != 1:
        raise ArgumentError(
            f"backward_passes_per_step={averager.passes_per_step} and GlobalBatches both say how many passes a step "
            "has: leave it out, and multiply global_batch_size by it."
        )
    if averager.group is not None:
        raise ArgumentError("GlobalBatches divides a step among all ranks, and this optimizer averages in a group.")
    return averager


def _losses() -> int:
    """After how many losses of ranks the job has gone on."""
    return current().elastic.recovery.recoveries


def _drop_gradients(averagers: Sequence[GradientAverager]) -> None:
    for averager in averagers:
        for _, parameter in averager.named_parameters:
            parameter.grad = None
        averager.forget_gradients()


@torch.no_grad()
def _scale(averagers: Sequence[GradientAverager], factor: float) -> None:
    for averager in averagers:
        for _, parameter in averager.named_parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
