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

`step_plan` says which samples these are. `Steps` makes averages of their gradients, in the loop of a script
(`GlobalBatches`) or in that of a Trainer (`lightning.global_batch`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.world import current
from ring_plugins.torch import sync_batch_norm
from ring_plugins.torch.exact_averages import ExactAverages, average_exactly
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.step_plan import Pass, StepPlan

T = TypeVar("T")

#: By the first averager of `GlobalBatches`, its last plans: one of each set of samples, of so many sets.
_plans = weakref.WeakKeyDictionary[GradientAverager, list[StepPlan[Any]]]()
_SETS = 4

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

    Made anew for the same optimizer and samples, as in each epoch of a loop, it goes on where the last one was: with
    the rest of its epoch if a `break` has left some, else with the next. The same samples are those of the same loader,
    or of one with the same dataset, a sampler of the same type and indices, and the same seed. With another optimizer,
    as for a second training of a model, it begins with epoch 0.

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
            averagers = [_averager_of(one, exact) for one in optimizers]
            if not averagers:
                raise ArgumentError("GlobalBatches needs the DistributedOptimizers or GradientAveragers of the loop.")
            self._plan = StepPlan(loader, global_batch_size, seed, "GlobalBatches")
        self._go_on(averagers)
        self._steps = Steps(self._plan, averagers, exact)
        self._is_loaded = False

    def _go_on(self, averagers: Sequence[GradientAverager]) -> None:
        plans = _plans.setdefault(averagers[0], [])
        earlier = next((plan for plan in plans if self._plan.has_samples_of(plan)), None)
        if earlier is not None:
            self._plan.begin_at(earlier.epoch, earlier.samples)
            plans.remove(earlier)
            for averager in averagers:
                if earlier.place in (checks := averager.checks.list):
                    checks.remove(earlier.place)
        plans[:] = [*plans, self._plan][-_SETS:]

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Step[T]]:
        """The rest of this epoch, or else the next one.

        Behind `load_state_dict` the rest may be no step: then the checkpoint is of an epoch's last one, and so is all
        that counts epochs beside this.
        """
        plan = self._plan
        if plan.samples >= plan.end() and not self._is_loaded:
            plan.epoch, plan.samples = plan.epoch + 1, 0
        self._is_loaded = False
        while (step := self._steps.next()) is not None:
            skipped = self._steps.skipped
            yield step
            if not step.is_done and self._steps.skipped == skipped:
                self._reject_part_of(step)
            plan.samples = max(plan.samples, step.end)  # also of one that all ranks skipped
        plan.epoch, plan.samples = plan.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples have been in steps."""
        return {"epoch": self._plan.epoch, "samples": self._plan.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind these samples."""
        self._plan.begin_at(state["epoch"], state["samples"])
        self._is_loaded = True

    def _reject_part_of(self, step: Step[T]) -> None:
        communicator = self._steps.communicator
        error = RingError(
            f"rank {communicator.rank} has left the loop over a step of GlobalBatches before its end, so the "
            f"gradients of samples {step.first} to {step.end - 1} of epoch {self._plan.epoch} are incomplete. Let the "
            "inner loop, `for batch in step`, run to its end on all ranks."
        )
        communicator.interrupt("a step of GlobalBatches", error)
        raise error


class Steps(Generic[T]):
    """Makes the gradients of a plan's steps averages.

    Args:
        plan: says which samples these are.
        averagers: of all gradients.
        exact: see `GlobalBatches`.
        accumulates: whether gradients are known to add up.
    """

    def __init__(
        self, plan: StepPlan[T], averagers: Sequence[GradientAverager], exact: bool, accumulates: bool = False
    ) -> None:
        self.plan, self.averagers, self.exact, self.accumulates = plan, averagers, exact, accumulates
        for averager in averagers:
            averager.checks.list.append(plan.place)

    def close(self) -> None:
        """Let the averagers no longer compare the places of these steps."""
        for averager in self.averagers:
            averager.checks.list.remove(self.plan.place)

    def next(self) -> Step[T] | None:
        """The step at which the plan is; None behind the last one of the epoch."""
        first, end = self.plan.samples, self.plan.end()
        return Step(self, first, min(first + self.plan.global_batch_size, end)) if first < end else None

    @property
    def communicator(self) -> Communicator[Any]:
        """Of all ranks."""
        return self.averagers[0].communicator

    @property
    def skipped(self) -> int:
        """Steps that all ranks have skipped."""
        return sum(averager.skipped_steps for averager in self.averagers)


class Step(Generic[T]):
    """A step: iterate over this rank's batches.

    Attributes:
        first, end: the places of its samples in the epoch's order.
        is_done: whether the gradients are averages.
        times: how often it was begun: once more after each loss of a rank in it.
        by_rank: the passes of all ranks, since it was begun.
        index: of the pass whose batch the loop has.
    """

    def __init__(self, owner: Steps[T], first: int, end: int) -> None:
        self._owner, self.first, self.end = owner, first, end
        self.is_done, self.times, self.index = False, 0, 0
        self.by_rank: list[list[Pass]] = []
        self._peeked: tuple[tuple[int, int], list[Pass], T] | None = None

    @property
    def samples(self) -> int:
        """How many samples it has, on all ranks together."""
        return self.end - self.first

    def samples_of(self, one: Pass) -> int:
        """How many samples a pass has that count."""
        return min(self.end - one.number, self._owner.plan.batch_size) if one.counts else 0

    def peek(self) -> T:
        """The first batch of this rank, which the loop gets, too, unless the ranks change until then."""
        plan, place = self._owner.plan, self._place()
        passes = plan.divide(self.first, self.end, *place)
        plan.draw_by(passes[0].number)
        batch = next(plan.batches)
        self._peeked = place, passes, batch
        return batch

    def _place(self) -> tuple[int, int]:
        return self._owner.communicator.rank, self._owner.communicator.size

    def __iter__(self) -> Generator[T, None, None]:
        plan = self._owner.plan
        sync_batch_norm.refusal = _NO_SYNC_BATCH_NORM
        try:
            while not self.is_done:
                self.times += 1
                self.is_done = yield from self._attempt()
        finally:
            sync_batch_norm.refusal = ""
        plan.samples = self.end
        plan.draw_by(self.end, "end")

    def _attempt(self) -> Generator[T, None, bool]:
        """Go through this rank's batches; returns whether the gradients are averages of all."""
        owner, averagers, losses = self._owner, self._owner.averagers, _losses()
        plan, full = owner.plan, owner.plan.batch_size
        _drop_gradients(averagers)
        rank, size = place = self._place()
        plan.place.take(plan.epoch, self.first, self.end, full)
        exact = [ExactAverages(averager) for averager in averagers] if owner.exact else []
        reduced = [averager.steps for averager in averagers]
        peeked, self._peeked = self._peeked, None
        peeked = peeked if peeked is not None and peeked[0] == place else None
        passes = peeked[1] if peeked is not None else plan.divide(self.first, self.end, rank, size)
        self.by_rank = plan.by_rank(self.first, self.end, size)
        for self.index, one in enumerate(passes):
            samples = self.samples_of(one)
            # The first step with several passes averages behind them, to see that the script adds gradients up.
            is_averaged = self.index == len(passes) - 1 and samples == full and not exact
            is_averaged &= owner.accumulates or len(passes) == 1
            plan.draw_by(one.number)
            batch, peeked = next(plan.batches) if peeked is None else peeked[2], None
            is_watched = not is_averaged and not exact and not owner.accumulates
            with contextlib.ExitStack() as block:
                for averager in averagers if not is_averaged else ():
                    block.enter_context(averager.no_sync())
                before = [_Kept(one, block) for one in averagers if is_watched]
                yield batch
            del batch
            if not samples:
                _drop_gradients(averagers)
            elif exact:
                for part in exact:
                    part.take(one.number, samples / full)
            elif not is_averaged:
                self._add_up(before, samples / full)
        owner.accumulates |= len(passes) > 1
        plan.taken(self.end, rank, size)
        weight = self.samples / full
        if exact:
            numbers = [[one.number for one in of_rank if one.counts] for of_rank in self.by_rank]
            return losses == _losses() and average_exactly(exact, numbers, weight)
        for averager, before_step in zip(averagers, reduced, strict=True):
            if averager.steps == before_step:
                averager.finish()
        if losses != _losses():
            return False
        if size != weight:
            _scale(averagers, size / weight)
        return True

    def _add_up(self, before: list[_Kept], weight: float) -> None:
        """Check that gradients were added to those before, and weigh them; a pass that has less weight comes first."""
        if all(one.is_kept() for one in before):
            if weight < 1:
                _scale(self._owner.averagers, weight)
            return
        communicator = self._owner.communicator
        error = RingError(
            f"rank {communicator.rank} has cleared gradients between two batches of a step of GlobalBatches, which are "
            "to add up. Call zero_grad() in front of the inner loop, `for batch in step`, or not at all: each step "
            "begins without gradients."
        )
        communicator.interrupt("a step of GlobalBatches", error)
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


def _averager_of(part: Any, exact: bool) -> GradientAverager:
    averager = getattr(part, "averager", part)
    if not isinstance(averager, GradientAverager):
        raise ArgumentError(
            f"GlobalBatches was given a {type(part).__name__}: pass DistributedOptimizers and GradientAveragers."
        )
    if averager.sums:
        raise ArgumentError("GlobalBatches needs averages of gradients, and this optimizer has op=Sum.")
    if exact and averager.compression is not None:
        raise ArgumentError(
            f"compression={averager.compression!r} of an optimizer has no effect with GlobalBatches(exact=True), which "
            "sends gradients as they are: leave compression out, or exact."
        )
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
