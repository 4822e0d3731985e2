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

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from typing_extensions import Self

import ring_plugins.core.functions as ring
from ring_plugins.core.base.errors import ArgumentError, PeerFailed, RingError, StepSkipped, name_ranks
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.control.wait import hindrances
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.observe.consistency import Checks
from ring_plugins.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from ring_plugins.torch.device import for_other_gpus
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
    is_closed: bool
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
        ArgumentError: there is neither an optimizer nor an averager among `parts`, or something else.
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
        told: list[tuple[list[int], bool]] = []  # by averager: world ranks that came last, and whether others waited
        for averager in self._averagers:
            members = averager.communicator
            by_rank = members.all_gather_object(waited, "join") if members.size > 1 else [waited]
            ranks = [rank for rank, one in zip(members.ranks, by_rank, strict=True) if one == min(by_rank)]
            told.append((ranks, max(by_rank) > 0))
        self.last = _present(told[0][0])
        for averager, (came_last, have_waited) in zip(self._averagers, told, strict=True):
            if have_waited:
                self._get_state(averager, came_last)
        with contextlib.suppress(PeerFailed):  # it may have been lost once all had its state
            self.last = _present(told[0][0])
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
            averager = self._averagers[number]
            sharded = [one for one in self._parts if getattr(one, "averager", None) is averager and is_sharded(one)]
            try:
                for part in sharded:
                    part.give_up_step()
                steps = averager.steps
                while not take_part(averager, weight):
                    waited[number] += 1
                    if averager.steps > steps:  # else the pass was skipped
                        for part in sharded:
                            if share_step(averager, part.optimizer, has_ended=True):
                                part.optimizer.step()
                    steps = averager.steps
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

    def _get_state(self, averager: Averager, came_last: list[int]) -> None:
        """Give all ranks of an averager what one of these world ranks has, which have equal states."""
        checks, group = averager.checks, averager.group
        ours = checks.updates.count, averager.catch_up()
        updates, passes = ring.broadcast_object(ours, _present(came_last), group=group)
        checks.updates.set(updates)
        averager.catch_up(passes)
        broadcast_parameters(averager.named_parameters, _present(came_last), group=group)
        for part, owner in zip(self._parts, self._owners, strict=True):
            if owner is not averager:
                continue
            if isinstance(part, Optimizer) and is_sharded(part):
                options = for_other_gpus(own := _options_of(part))
                told = ring.broadcast_object(options, _present(came_last), group=group)
                _set_options(part, own if told is options else told)
            elif isinstance(part, Optimizer):
                broadcast_optimizer_state(part, _present(came_last), group=group)
            elif hasattr(part, "load_state_dict"):
                state, root = part.state_dict(), _present(came_last)
                is_mine = ring.rank() == root
                state = ring.broadcast_object(for_other_gpus(state), root, group=group)
                if not is_mine:
                    part.load_state_dict(state)


def _present(came_last: list[int]) -> int:
    """The lowest of some world ranks that is left, as the ranks are numbered now: a loss renumbers those above it.

    Raises:
        PeerFailed: none is left.
    """
    for rank in came_last:
        if rank in current().world_ranks:
            return current().world_ranks.index(rank)
    raise PeerFailed(
        f"{name_ranks(came_last)} came last in join() and is lost, and with it the weights of the last steps. Continue "
        "from a checkpoint.",
        came_last[0],
    )


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
    if averager.is_closed:
        raise RingError(
            f"{averager.communicator.name}: this rank waits in join() for averages of the others, and its averager or "
            "optimizer has been closed. Close it behind the block, and leave closed ones out of join()."
        )
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


def share_step(averager: Averager, optimizer: Optimizer | None, has_ended: bool = False) -> bool:
    """Give ranks that have run out of data the gradients and options of a step; collective, before a sharded step.

    Args:
        averager: whose last pass some ranks had run out in.
        optimizer: to be stepped; None if the script makes no step of that pass.
        has_ended: whether this rank is one of them.

    Returns:
        Whether there is a step.
    """
    communicator = averager.communicator
    gradients = [parameter.grad for _, parameter in averager.named_parameters]
    ours = None if has_ended or optimizer is None else for_other_gpus((_options_of(optimizer), gradients))
    told = communicator.all_gather_object(ours, "a sharded step in join()")
    found = next((one for one in told if one is not None), None)
    if found is not None and ours is None and optimizer is not None:
        options, gradients = found
        _set_options(optimizer, options)
        for (_, parameter), gradient in zip(averager.named_parameters, gradients, strict=True):
            parameter.grad = gradient
    return found is not None


def some_wait(averager: Averager) -> bool:
    """Whether some ranks had run out of data in the last pass, and others had not."""
    return 0 < averager.ended < 1 - 0.5 / averager.communicator.size


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _set_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        group.update(values)


def _drop_gradients(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    for _, parameter in named:
        parameter.grad = None
