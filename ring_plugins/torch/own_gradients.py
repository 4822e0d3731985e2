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
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ring_plugins.core.base.errors import RingError

if TYPE_CHECKING:
    from ring_plugins.torch.gradients import GradientAverager

_watched: list[weakref.ref[OwnGradients]] = []


class OwnGradients:
    """What one averager knows of gradients that are not averaged.

    Attributes:
        present: whether gradients have come since the last reduction.
        sees_steps: whether an optimizer that torch reports steps of updates the averager's parameters.
        counts_updates: whether these steps are the updates that ranks compare; if not, others count.
    """

    def __init__(self) -> None:
        self.present = self.sees_steps = False
        self.counts_updates = True
        self._averager: Callable[[], GradientAverager | None] = lambda: None
        self._task = -1
        self._noted: dict[int, int] = {}  # versions of the gradients after the last backward, by identity
        #: By optimizer, how many groups it had, and the averager's reductions at its last step; -1 if it has none of
        #: the averager's parameters.
        self._seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()

    def watch(self, averager: GradientAverager) -> None:
        """Look at the steps of all optimizers from now on."""
        self._averager = weakref.ref(averager)
        _watched.append(weakref.ref(self, _watched.remove))
        _register()

    def clear(self) -> None:
        """Note that all gradients are averages, or gone."""
        self.present = False
        self._noted = {}

    def come_in(self, task: int) -> None:
        """Note that gradients come in a backward that does not average them."""
        if task != self._task:
            self.present, self._task, self._noted = True, task, {}
            note = weakref.WeakMethod(self.note)
            Variable._execution_engine.queue_callback(lambda: None if (found := note()) is None else found())

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

    def before_step(self, optimizer: Optimizer) -> None:
        """Average what an optimizer is about to use, if it has to be."""
        averager = self._averager()
        if averager is None or averager.is_closed:
            return
        groups = len(optimizer.param_groups)
        known = self._seen.get(optimizer)
        if known is None or known[0] != groups:
            known = groups, 0 if self._updated_by(optimizer, averager) else -1
        if known[1] >= 0:
            wants = self.present or (known[1] == averager.steps and self._has_assigned(optimizer, averager))
            if wants and not averager.is_superseded:
                averager.average_before_step()
            averager.begin_step()
            self.sees_steps = True
            if self.counts_updates:
                averager.count_update()
            known = groups, averager.steps
        self._seen[optimizer] = known

    def _updated_by(self, optimizer: Optimizer, averager: GradientAverager) -> list[torch.Tensor]:
        """The averager's parameters that an optimizer updates."""
        own = {id(parameter) for _, parameter in averager.named_parameters}
        return [one for group in optimizer.param_groups for one in group["params"] if id(one) in own]

    def _has_assigned(self, optimizer: Optimizer, averager: GradientAverager) -> bool:
        """Whether there are gradients though nothing was reduced since the last step: the script has assigned them.

        Not on GPUs, where a graph that was captured may have reduced.
        """
        return averager.is_on_host and any(one.grad is not None for one in self._updated_by(optimizer, averager))


def before_step(optimizer: Optimizer) -> None:
    """Average what an optimizer is about to use, where a backward or the script left gradients that are not averaged.

    Raises:
        RingError: see `GradientAverager.average_before_step`.
    """
    for reference in _watched.copy():  # in the order in which the averagers were made, equal on all ranks
        if (own := reference()) is not None:
            own.before_step(optimizer)


def _gradients(averager: GradientAverager) -> list[torch.Tensor]:
    return [gradient for _, one in averager.named_parameters if (gradient := one.grad) is not None]


def _version(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else gradient._version


def changed_before_average(name: str) -> RingError:
    """The error for gradients that were clipped, say, while they were a rank's own."""
    return RingError(
        f"{name}: gradients of this rank were changed in place (clipped, or unscaled by a GradScaler) before they were "
        "averaged, since no backward after the last step() has averaged them: they came in no_sync(), or in fewer "
        "passes than passes_per_step. Call optimizer.synchronize(), or GradientAverager.finish(), after the last "
        "backward of such a step. If each rank is to change its own gradients, assign new ones: p.grad = p.grad * x."
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


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook. A closure computes gradients, so with one the look comes after each of its calls."""
    if not _watched or torch.compiler.is_compiling():
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        before_step(optimizer)
        return None

    def evaluate(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        before_step(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}
