"""What an ordinary step does not meet: lost averagers, shared parameters, parameters that come or are replaced.

An averager has to know, at the first gradient of each backward, whether another averager has taken its parameters,
whether parameters were registered or replaced, whether ranks train other parameters, whether averaging has failed.
Whatever notices one of these calls `note`, which counts. An averager that has looked at all of them once, and found
nothing, compares one number from then on.

**Owners.** If a parameter had two averagers, one would read the gradient while the other averages it in place. An
averager claims the parameters that it trains when it makes buckets for them. The claim ends with `close()`, or when the
averager is gone. Hooks hold averagers weakly, so an averager that nobody refers to is gone at once, or when Python's
garbage collector finds it, which happens at a different time on each rank.

`optimizer = DistributedOptimizer(...)`, run twice, creates the newer averager while the older is still referenced. So a
conflict is no error yet. It becomes one when the newer averager is first used and the older is, after a garbage
collection, still alive on some rank. Until then the hooks of the older do nothing.

**Registrations.** Walking through a model of thousands of parameters at every step would take milliseconds. Instead,
torch calls hooks whenever any module gets a parameter or a submodule, so an unchanged count means an unchanged model.

**An averager that nobody refers to any more** averages nothing, and says so when its parameters are trained on: when an
optimizer steps on gradients that came since, or when a second backward finds other values of a parameter. A gradient
alone is no error: a script may look at gradients when training is over.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from ring_plugins.core.base.errors import RingError, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.job import World
from ring_plugins.core.world import current, is_initialized

_numbers = itertools.count(1)
#: Of the last change in this process; no two changes have the same.
last = 0


def note() -> None:
    """Note a change, of whatever kind; all averagers look again."""
    global last
    last = next(_numbers)  # also in several threads: who reads the last one has missed none


# Owners ---------------------------------------------------------------------------------------------

_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
_order = itertools.count()


class Claim:
    """The parameters that one averager trains.

    Args:
        name: of the averager, for error texts.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._names: dict[int, str] = {}  # by identity: a parameter lives as long as an averager that trains it
        self._order = -1
        #: Whether a newer claim to some of these parameters has been made.
        self.is_superseded = False
        #: Whether, on some rank, an older averager had one of the parameters.
        self.is_contested = False

    def take(self, parameters: Iterable[tuple[str, Any]], communicator: Communicator[Any]) -> None:
        """Claim these parameters too, on all ranks; this claim is then newer than all others. Collective."""
        self._names.update((id(parameter), name) for name, parameter in parameters)
        self._order = next(_order)
        _claims.add(self)
        for claim in self.older():
            claim.is_superseded = True
        note()
        conflict = self.conflict(self.older())
        self.is_contested = any(communicator.all_gather_object(conflict, "buckets"))

    def settle(self, communicator: Communicator[Any]) -> None:
        """Take over from older averagers of these parameters if they are gone on all ranks; collective if contested.

        Raises:
            RingError: on all ranks, if one of them is still in use on any.
        """
        if self.is_contested:
            conflict = self.conflict(still_there(self.older()))
            conflicts = communicator.all_gather_object(conflict, "owner of gradients")
            if any(conflicts):
                raise rejection(conflicts, communicator.ranks)
            self.is_contested = False

    def drop(self) -> None:
        """Give all parameters up."""
        self._names.clear()
        _claims.discard(self)
        note()

    def has(self, parameter: Any) -> bool:
        """Whether it is to this parameter, too."""
        return id(parameter) in self._names

    @property
    def is_dropped(self) -> bool:
        """Whether it has no parameters any more."""
        return not self._names

    def older(self) -> list[Claim]:
        """Older claims to some of these parameters."""
        return [claim for claim in self._rivals() if claim._order < self._order]

    def newer(self) -> list[Claim]:
        """Newer claims to some of these parameters."""
        return [claim for claim in self._rivals() if claim._order > self._order]

    @property
    def has_others(self) -> bool:
        """Whether there are claims besides this one, which has parameters."""
        return len(_claims) > 1

    def _rivals(self) -> list[Claim]:
        if len(_claims) < 2:
            return []
        return [
            claim for claim in list(_claims) if claim is not self and not claim._names.keys().isdisjoint(self._names)
        ]

    def conflict(self, rivals: Sequence[Claim]) -> str | None:
        """What this and the first of the rivals share, as text; None without rivals."""
        if not rivals:
            return None
        rival = rivals[0]
        shared = [name for parameter, name in self._names.items() if parameter in rival._names]
        more = f" and {len(shared) - 1} more parameter{'s' * (len(shared) > 2)}" if len(shared) > 1 else ""
        return f"{rival.name} and {self.name} both average {shared[0]}{more}"


def is_claimed(parameter: Any) -> bool:
    """Whether some averager trains a parameter."""
    return any(claim.has(parameter) for claim in list(_claims))


def still_there(rivals: Sequence[Claim]) -> list[Claim]:
    """Collect garbage, and return the claims that are left: those whose averagers are still referenced."""
    if rivals:
        gc.collect()
    return [claim for claim in rivals if not claim.is_dropped]


def rejection(conflicts: Sequence[str | None], ranks: Sequence[int]) -> RingError:
    """The error for parameters with two averagers.

    Args:
        conflicts: by rank, what `Claim.conflict` says there.
        ranks: the ranks' numbers.
    """
    where = [rank for rank, conflict in zip(ranks, conflicts, strict=True) if conflict]
    first = next(conflict for conflict in conflicts if conflict)
    return RingError(
        f"{first} ({name_ranks(where)}). A parameter has one averager: give all parameters to one optimizer, or "
        "close() the averager that is no longer needed, or drop the last reference to it."
    )


# Averagers that are gone -----------------------------------------------------------------------------

#: By identity, parameters that got gradients when their averager was gone: with its name, and what they summed up to.
dropped: dict[int, tuple[weakref.ref[torch.Tensor], str, float]] = {}


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
        known = dropped.get(id(parameter))
        if known is not None and known[0]() is parameter and value != known[2] and not math.isnan(value):
            raise _dropped_error(self._name)
        dropped[id(parameter)] = weakref.ref(parameter), self._name, value


def reject_dropped(optimizer: Optimizer) -> None:
    """Raise RingError if an optimizer steps on gradients that nobody has averaged, since their averager is gone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference, name, _ = dropped.get(id(parameter), (None, "", 0.0))
            if reference is not None and reference() is parameter and is_initialized():
                raise _dropped_error(name)


def _dropped_error(name: str) -> RingError:
    return RingError(
        f"{name}: what averaged the gradients of these parameters (a GradientAverager or DistributedOptimizer) was "
        "dropped, since nothing refers to it any more, and they are trained on without averages, so each rank would "
        "train a model of its own. Keep a reference to it as long as you train (step by what "
        "DistributedOptimizer returns), or close() it before, if each rank is to go on alone."
    )


# Registrations --------------------------------------------------------------------------------------

#: How many parameters and submodules have been registered with any module of this process so far.
registrations = 0


class Replaced:
    """An averager's parameter that a script has replaced in a module, which need not be the model that it trains.

    Args:
        old: the parameter, which requires a gradient.
        new: what came instead, nothing if it is gone.

    Attributes:
        is_used: whether a gradient of the old one has come since.
        old: a weak reference to it.
        hook: by which it notes that.
    """

    def __init__(self, old: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
        self.is_used = False
        self.old, self._new = weakref.ref(old), [weakref.ref(one) for one in new]
        # Comes before the hooks that average.
        self.hook: Any = old.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, gradient: torch.Tensor) -> None:
        self.is_used = True

    def new(self) -> list[torch.Tensor]:
        """What came instead and is still there."""
        return [one for reference in self._new if (one := reference()) is not None]


#: By identity, an averager's parameters that scripts have replaced.
replaced: dict[int, Replaced] = {}


def _note_registration(module: nn.Module, name: str, value: Any) -> None:
    global registrations
    registrations += 1
    note()
    before = vars(module).get("_parameters", {}).get(name)
    before = vars(module).get("_modules", {}).get(name) if before is None else before
    if before is value or (before is None and not replaced):
        return
    new, old = _tensors(value), _tensors(before)
    for one in itertools.chain(new, old):
        if (known := replaced.pop(id(one), None)) is not None:
            known.hook.remove()
    for one in old:
        if one.requires_grad and is_claimed(one) and all(one is not other for other in new):
            replaced[id(one)] = Replaced(one, new)


def _tensors(registered: Any) -> list[torch.Tensor]:
    if isinstance(registered, nn.Module):
        return list(registered.parameters())
    return [] if registered is None else [registered]


register_module_parameter_registration_hook(_note_registration)
register_module_module_registration_hook(_note_registration)
