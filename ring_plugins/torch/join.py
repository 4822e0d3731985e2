"""Ranks with different numbers of batches train to the end of the longest.

**Problem.** Each pass averages the gradients of all ranks, so a rank that has run out of data leaves the others
waiting. To drop their last batches, or to repeat its own, changes what is trained on.

**Idea.** A rank that has run out takes part in the others' passes with zeros until all have run out. It tells so among
the control numbers of each pass (`gradient_buckets`), with the weight of its gradients: 0. The averages are divided by
the ranks' mean weight, so they are those of the ranks that came. A pass in which all ranks have data tells nothing, and
costs nothing.

**It does not update.** A script may clip its averages, or leave out a step, or change the learning rate in each; a rank
that waits here sees none of that. So it compares nothing meanwhile, and at the end gets the weights and the optimizer's
state of a rank that has come to its last batch later. A sharded optimizer needs all ranks in each step. There the
waiting ranks get the gradients and options with which the others step.

`torch.distributed.algorithms.Join` divides by all ranks or those that came, too; its ranks ask each other before every
pass who is there, also where all are, and it knows no clipping.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from typing_extensions import Self

import ring_plugins.core.functions as ring
from ring_plugins.core.base.errors import ArgumentError, StepSkipped
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.control.wait import hindrances
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.observe.consistency import Checks
from ring_plugins.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from ring_plugins.torch.hooks import OwnGradients
from ring_plugins.torch.sharded_optimizer import is_sharded

_WAITING = (
    "the script has run out of data and is in join(), where it takes part in averages of gradients only. Let no other "
    "collective depend on a rank's own number of batches: leave it out of the loop, or use RingStrategy."
)


class Averager(Protocol):
    """What this needs of a `GradientAverager`."""

    communicator: Communicator[Any]
    group: Group | None
    own: OwnGradients
    is_joined: bool
    ended: float
    steps: int

    @property
    def checks(self) -> Checks: ...

    @property
    def named_parameters(self) -> Any: ...

    def finish(self) -> None:
        """Reduce what is not reduced yet and wait for everything."""

    def catch_up(self, passes: int | None = None) -> int:
        """How many passes of a step have come."""


class join:  # noqa: N801 - a context, named as a function
    """Let ranks with different numbers of batches train to the end of the longest.

        with join(optimizer, scheduler):
            for x, y in loader:
                ...  # a step as always

    A rank that leaves the block waits in it, and takes part in the averages of the others with zeros, until all ranks
    have left it. Averages are those of the ranks that came. At the end all ranks have the weights, the optimizers and
    what else was given as they are on the rank that came last, and gradients of None, except those of passes that no
    step has used yet: these are averaged.

    Args:
        parts: every `DistributedOptimizer` and `GradientAverager` of the loop. Also what a step changes that has a
            `state_dict` and `load_state_dict`, such as a scheduler or `GradScaler`; and the optimizers of a
            `GradientAverager`. If averagers are of different groups, these go with the averager before them.
        batch_size: samples of a full batch, if `weighted` is used.
        passes: batches of a step, if `weighted` is used and gradients accumulate.

    Attributes:
        last: a rank that came last, the lowest of several, in the first averager's group; known behind the block.

    Raises:
        ArgumentError: there is neither an optimizer nor an averager among `parts`, or one of a group of ranks, or
            something else.
    """

    def __init__(self, *parts: Any, batch_size: int = 1, passes: int = 1) -> None:
        self._averagers: list[Averager] = []
        with rejections_told(current().communicator, "join"):
            self._take(parts)
        self._parts, self._full = parts, batch_size * passes
        self._owners: list[Averager] = []  # by part
        for part in parts:
            averager, before = getattr(part, "averager", part), self._owners[-1:] or self._averagers
            self._owners.append(averager if hasattr(averager, "catch_up") else before[0])
        self.last = 0

    def _take(self, parts: tuple[Any, ...]) -> None:
        """Note the averagers among `parts`, which must be what `join` can follow."""
        for part in parts:
            averager = getattr(part, "averager", part)
            if hasattr(averager, "catch_up"):
                self._averagers.append(averager)
            elif not hasattr(part, "load_state_dict"):
                raise ArgumentError(
                    f"join() was given a {type(part).__name__}: pass DistributedOptimizers, GradientAveragers, and "
                    "schedulers and the like, which have a state_dict."
                )
        if not self._averagers:
            raise ArgumentError(
                "join() needs what averages gradients: a ring_plugins.torch.DistributedOptimizer or GradientAverager."
            )
        if any(one.communicator.size > 1 and one.communicator.size != ring.size() for one in self._averagers):
            raise ArgumentError(
                "join() follows what all ranks average, and this is averaged in a group. Give the ranks of a "
                "group equally many batches."
            )

    def __enter__(self) -> Self:
        for averager in self._averagers:
            averager.is_joined = True
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            for averager in self._averagers:
                averager.is_joined, averager.checks.weight = False, 1.0

    def weighted(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """A batch's loss, scaled so that averages weigh samples alike, whatever batches they are in.

        Without it, the average of a step weighs ranks alike. If it is used, then for every batch of every rank.

        Args:
            loss: the mean over the batch.
            samples: how many there are.

        Returns:
            The loss to call `backward` of.
        """
        for averager in self._averagers:
            before = averager.checks.weight if averager.own.present else 0.0
            averager.checks.weight = before + samples / self._full
        return loss if samples == self._full else loss * (samples / self._full)

    def wait(self) -> int:
        """Take part in the others' averages until all ranks are here, and get their state; the block's end calls it.

        Returns:
            A rank that came last, the lowest of several.
        """
        hindrances[self] = _WAITING
        try:
            waited = self.follow()
        finally:
            del hindrances[self]
        return self.settle(waited)

    def settle(self, waited: int) -> int:
        """Get the state of a rank that came last; collective.

        Args:
            waited: how many passes of the others this rank has taken part in.

        Returns:
            That rank.
        """
        roots: list[int | None] = []  # by averager: whose state its ranks get, None if nobody has waited
        for averager in self._averagers:
            members, group = averager.communicator, averager.group
            by_rank = members.all_gather_object(waited, "join") if members.size > 1 else [waited]
            place = by_rank.index(min(by_rank))
            last = place if group is None else group.ranks[place]
            self.last = self.last if roots else last
            roots.append(last if max(by_rank) else None)
        for averager, root in zip(self._averagers, roots, strict=True):
            if root is not None:
                self._get_state(averager, root)
        return self.last

    def follow(self, weight: float = 0.0) -> int:
        """Take part in the passes of all averagers until all ranks do.

        Args:
            weight: of this rank's zeros in the averages; 1 as that of a rank with data, with Horovod's names.

        Returns:
            How many passes of the others there were.
        """
        waited = [0] * len(self._averagers)
        errors: list[BaseException] = []

        def follow(number: int) -> None:
            try:
                while not take_part(self._averagers[number], weight):
                    waited[number] += 1
                    for part in self._parts:
                        if getattr(part, "averager", None) is self._averagers[number] and is_sharded(part):
                            share_step(part.averager, part.optimizer, has_ended=True)
                            part.optimizer.step()
            except BaseException as error:
                errors.append(error)

        # Others may use their averagers in any order.
        threads = [HelperThread(follow, "ring:join", (i,)) for i in range(1, len(self._averagers))]
        for thread in threads:
            thread.start()
        follow(0)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return sum(waited)

    def _get_state(self, averager: Averager, root: int) -> None:
        """Give all ranks of an averager what one of them has."""
        checks, group = averager.checks, averager.group
        ours = checks.updates.count, averager.catch_up()
        updates, passes = ring.broadcast_object(ours, root, group=group)
        checks.updates.set(updates)
        averager.catch_up(passes)
        broadcast_parameters(averager.named_parameters, root, group=group)
        for part, owner in zip(self._parts, self._owners, strict=True):
            if owner is not averager:
                continue
            if isinstance(part, Optimizer) and is_sharded(part):
                _set_options(part, ring.broadcast_object(_options_of(part), root, group=group))
            elif isinstance(part, Optimizer):
                broadcast_optimizer_state(part, root, group=group)
            elif hasattr(part, "load_state_dict"):
                state = ring.broadcast_object(part.state_dict(), root, group=group)
                if ring.rank() != root:
                    part.load_state_dict(state)


def take_part(averager: Averager, weight: float = 0.0) -> bool:
    """Take part in the next pass of the others: with zeros, or with gradients of this rank that no pass has averaged.

    Args:
        averager: on a rank that has run out of data.
        weight: of the zeros in the averages.

    Returns:
        Whether all ranks have run out, so that this was the last pass.
    """
    if averager.communicator.size == 1:
        return True
    checks = averager.checks
    if not averager.own.present:
        _drop_gradients(averager.named_parameters)
        checks.weight = weight
    checks.has_ended = True
    try:
        averager.finish()
    except StepSkipped:
        return False
    finally:
        checks.has_ended, checks.weight = False, 1.0
    return averager.ended > 1 - 0.5 / averager.communicator.size


def share_step(averager: Averager, optimizer: Optimizer, has_ended: bool = False) -> None:
    """Give ranks that have run out of data the gradients and options of a step; collective, before a sharded step.

    Args:
        averager: whose last pass some ranks had run out in.
        optimizer: to be stepped.
        has_ended: whether this rank is one of them.
    """
    communicator = averager.communicator
    gradients = [parameter.grad for _, parameter in averager.named_parameters]
    ours = None if has_ended else (_options_of(optimizer), gradients)
    told = communicator.all_gather_object(ours, "a sharded step in join()")
    options, gradients = next(one for one in told if one is not None)
    if ours is None:
        _set_options(optimizer, options)
        for (_, parameter), gradient in zip(averager.named_parameters, gradients, strict=True):
            parameter.grad = gradient


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def _drop_gradients(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    for _, parameter in named:
        parameter.grad = None
