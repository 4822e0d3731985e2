"""No optimizer updates parameters by gradients that are only this rank's own.

**Problem.** Hooks see gradients come, and an optimizer reads `p.grad` without asking anybody. In between, gradients may
be a rank's own: the last passes only accumulated, as where an epoch ends with an odd number of batches, or all passes
ran in `no_sync()`; or the script assigned gradients that it computed without a backward. Ranks that step on such
gradients train different models from then on.

**Idea.** torch calls a global hook before every optimizer's step. Where gradients have come since the last reduction,
all ranks average once more. That is right whatever `p.grad` holds: averaging is linear, and the part that was averaged
before is equal on all ranks. Ranks that would pair such a reduction with one of another step raise, since their numbers
of updates differ (`compared_options`). Two things cannot be made right, and are errors. Inside a backward, other
gradients are still to come. And what a script has changed in place before the average, as clipping does, is not linear.

A `GradScaler` looks for overflows before it calls the optimizer, so the average has to come before that: on a rank's
own gradients one would skip its step while others make theirs. It has no hooks, so the method of its class that reads
gradients, for `unscale_` as for `step`, is wrapped.

**An averager that nobody refers to any more** averages nothing, and says so when its parameters are trained on: when an
optimizer steps on gradients that came since, or when a second backward finds other values of a parameter. A gradient
alone is no error: a script may look at gradients when training is over.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ring_plugins.core.base.errors import RingError
from ring_plugins.core.job import World
from ring_plugins.core.world import current, is_initialized
from ring_plugins.observe.consistency import Checks, listed
from ring_plugins.torch.changes import Claim
from ring_plugins.torch.wrapped_optimizer import WrappedOptimizer

_watched: list[weakref.ref[OwnGradients]] = []


class Averager(Protocol):
    """What is used of a `GradientAverager`."""

    claim: Claim
    is_closed: bool
    is_on_host: bool
    steps: int

    @property
    def checks(self) -> Checks: ...

    @property
    def named_parameters(self) -> Sequence[tuple[str, torch.Tensor]]: ...

    def average_before_step(self) -> None: ...

    def begin_step(self) -> None: ...


class OwnGradients:
    """What one averager knows of gradients that are not averaged.

    Args:
        averager: held weakly.

    Attributes:
        present: whether gradients have come since the last reduction.
        sees_steps: whether an optimizer that torch reports steps of updates the averager's parameters.
        counts_updates: whether these steps are the updates that ranks compare; if not, others count.
    """

    def __init__(self, averager: Averager) -> None:
        self.present = self.sees_steps = False
        self.counts_updates = True
        self._averager = weakref.ref(averager)
        self._task = -1
        self._noted: dict[int, int] = {}  # versions of the gradients after the last backward, by identity
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Look at the steps of all optimizers from now on."""
        _watched.append(weakref.ref(self, _watched.remove))
        _register()

    def clear(self) -> None:
        """Note that all gradients are averages, or gone."""
        self.present = False
        self._noted = {}

    def come_in(self, task: int) -> bool:
        """Note that gradients come in a backward that does not average them.

        Returns:
            Whether this is the first one.
        """
        if is_first := task != self._task:
            self.present, self._task, self._noted = True, task, {}
            Variable._execution_engine.queue_callback(self.note)
        return is_first

    def note(self) -> None:
        """Note how the gradients are at the end of a backward that does not average them."""
        if (averager := self._averager()) is not None:
            self._noted = {id(gradient): _version(gradient) for gradient in _gradients(averager)}

    @property
    def were_changed(self) -> bool:
        """Whether the script has written to gradients since they came."""
        averager = self._averager()
        return averager is not None and any(
            self._noted.get(id(gradient), version) != version
            for gradient in _gradients(averager)
            for version in (_version(gradient),)
        )

    def before_use(self, optimizer: Optimizer, is_step: bool) -> None:
        """Average the gradients of an optimizer that are about to be used, if they have to be.

        Args:
            optimizer: whose.
            is_step: whether it updates by them now; a `GradScaler` looks at them before.
        """
        averager = self._averager()
        if averager is None or averager.is_closed:
            return
        last, groups = self._steps.get(optimizer), len(optimizer.param_groups)
        if last is None or last.groups != groups:
            own = {id(parameter) for _, parameter in averager.named_parameters}
            updated = [one for group in optimizer.param_groups for one in group["params"] if id(one) in own]
            last = self._steps[optimizer] = _Step(groups, updated)
        if not last.updated:
            return
        # Where nothing was reduced, the script has assigned gradients. Not on GPUs, where a graph that was captured may
        # have reduced.
        is_assigned = last.reductions == averager.steps and averager.is_on_host and last.first != _first(last.updated)
        if (self.present or is_assigned) and not averager.claim.newer():
            averager.average_before_step()
        if not is_step:
            return
        averager.begin_step()
        self.sees_steps = True
        if self.counts_updates:
            averager.checks.updates.add()
        last.reductions, last.first = averager.steps, _first(last.updated)


class _Step:
    """The last step of an optimizer.

    Attributes:
        groups: how many parameter groups it had.
        updated: the averager's parameters that it updates.
        reductions: the averager's so far.
        first: see `_first`.
    """

    __slots__ = ("first", "groups", "reductions", "updated")

    def __init__(self, groups: int, updated: list[torch.Tensor]) -> None:
        self.groups, self.updated, self.reductions = groups, updated, 0
        self.first: tuple[int, int] | None = None


def _first(parameters: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Identity and version of the first gradient that there is; None without any."""
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            return id(gradient), 0 if gradient.is_inference() else gradient._version
    return None


#: By identity, parameters that got gradients when their averager was gone: with its name, and what they summed up to.
_dropped: dict[int, tuple[weakref.ref[torch.Tensor], str, float]] = {}


class DroppedAverager:
    """What hooks leave behind of an averager that was dropped, and not closed.

    Args:
        name: of the averager.
        world: the job in which it averaged.
    """

    def __init__(self, name: str, world: World) -> None:
        self._name, self._world = name, weakref.ref(world)

    def note(self, parameter: torch.Tensor) -> None:
        """Note that a parameter got a gradient.

        Raises:
            RingError: it has another value than at the gradient before.
        """
        if not is_initialized() or self._world() is not current():
            return
        value = float(parameter.detach().double().sum())
        known = _dropped.get(id(parameter))
        if known is not None and known[0]() is parameter and value != known[2] and not math.isnan(value):
            raise _dropped_error(self._name)
        _dropped[id(parameter)] = weakref.ref(parameter), self._name, value


def forget_dropped(parameter: torch.Tensor) -> None:
    """Note that another averager has a parameter."""
    _dropped.pop(id(parameter), None)


def _reject_dropped(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference, name, _ = _dropped.get(id(parameter), (None, "", 0.0))
            if reference is not None and reference() is parameter and is_initialized():
                raise _dropped_error(name)


def _dropped_error(name: str) -> RingError:
    return RingError(
        f"{name}: what averaged the gradients of these parameters (a GradientAverager or DistributedOptimizer) was "
        "dropped, since nothing refers to it any more, and they are trained on without averages, so each rank would "
        "train a model of its own. Keep a reference to it as long as you train (step by what "
        "DistributedOptimizer returns), or close() it before, if each rank is "
        "to go on alone."
    )


def before_use(optimizer: Optimizer, is_step: bool = True) -> None:
    """Average gradients of an optimizer that are about to be used, if a backward or the script left some of this rank.

    Raises:
        RingError: see `GradientAverager.average_before_step`.
    """
    for reference in _watched.copy():  # in the order in which the averagers were made, equal on all ranks
        if (own := reference()) is not None:
            own.before_use(optimizer, is_step)


def _gradients(averager: Averager) -> list[torch.Tensor]:
    return [gradient for _, one in averager.named_parameters if (gradient := one.grad) is not None]


def _version(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else gradient._version


def changed_before_average(name: str) -> RingError:
    """The error for gradients that were clipped, say, while they were a rank's own."""
    return RingError(
        f"{name}: gradients of this rank were changed in place (clipped, say) before they were "
        "averaged, since no backward after the last step() has averaged them: they came in no_sync(), or in fewer "
        "passes than passes_per_step. Call optimizer.synchronize(), or GradientAverager.finish(), after the last "
        "backward of such a step. If each rank is to change its own gradients, assign new ones: p.grad = p.grad * x."
    )


def replaced_error(name: str, replaced: Sequence[str]) -> RingError:
    """The error for parameters that a script has replaced in its model, but not in the optimizer."""
    return RingError(
        f"{name}: {listed(replaced)} of the model had been replaced by another parameter, as by an assignment of a "
        "parameter or layer, or by load_state_dict(assign=True), and the optimizer has the old one, so the new one "
        "is neither averaged nor trained. Make the optimizer and DistributedOptimizer after that, give it the new one "
        "(add_param_group), freeze the new one, or copy values instead: p.data.copy_(x)."
    )


def step_inside_backward(name: str) -> RingError:
    """The error for a step that comes before its gradients are averaged."""
    return RingError(
        f"{name}: an optimizer's step() was called inside a backward, by a hook of a parameter, before that backward's "
        "gradients were averaged, so each rank would train a model of its own. Call step() and zero_grad() when "
        "backward() has returned. shard=True saves the memory of optimizer states instead."
    )


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_averages(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.synchronize()
        before_use(optimizer, is_step=False)
        return unscale(scaler, optimizer, *args, **kwargs)

    GradScaler._unscale_grads_ = unscale_averages  # type: ignore[assignment, method-assign, unused-ignore]


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook. A closure computes gradients, so with one the look comes after each of its calls."""
    if not (_watched or _dropped) or torch.compiler.is_compiling():
        return None
    if _dropped:
        _reject_dropped(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        before_use(optimizer)
        return None

    def evaluate(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        before_use(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}
