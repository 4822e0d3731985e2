"""Parameters that an optimizer updates beside a `DistributedOptimizer`, without averages.

**Problem.** A script with two optimizers, as for a GAN, may wrap only one. The other steps with each rank's own
gradients, so the ranks train different discriminators, and one generator against all of them. The comparison after the
first step sees only the wrapped optimizer's parameters.

**Idea.** torch calls a global hook after each optimizer's step, which counts. After 2, 4, 8... steps of a wrapped
optimizer the ranks compare the parameters of all others that have stepped since the last time, and, once, all that its
`named_parameters` names beyond its own. Differences are reported, not the second optimizer: the script may well average
its gradients in another way.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ring_plugins.core.collectives.api import Communicator
from ring_plugins.observe.drift import differing_weights, is_check_wanted, membership_changes
from ring_plugins.torch.drift import parameter_checksums
from ring_plugins.torch.ownership import is_claimed


class _Steps:
    """Counts the steps of all optimizers of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def count(self, optimizer: Optimizer, *_: Any) -> None:
        """Note that an optimizer has made a step."""
        if not torch.compiler.is_compiling():
            with self._lock:
                self._counts[optimizer] = self._counts.get(optimizer, 0) + 1

    def so_far(self) -> list[tuple[Optimizer, int]]:
        """The optimizers that live, in the order of their first step, and how many they have made."""
        with self._lock:
            return list(self._counts.items())


@functools.cache
def _steps() -> _Steps:
    """The process's counts; they begin with the first call."""
    steps = _Steps()
    register_optimizer_step_post_hook(steps.count)
    return steps


class OtherOptimizers:
    """Compares what other optimizers update, for one wrapped optimizer. All ranks make it, and call it together."""

    def __init__(self) -> None:
        self._updates, self._view, self._is_told = 0, membership_changes(), False
        self._counted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary(_steps().so_far())

    def compare(self, updates: int, names: Mapping[nn.Parameter, str], communicator: Communicator[Any]) -> str:
        """Compare if the wrapped optimizer has made 2, 4, 8... updates. Collective.

        Args:
            updates: how many it has made, equal on all ranks.
            names: as `named_parameters` gave them.
            communicator: of all ranks.

        Returns:
            What differs, once; "" if nothing does.
        """
        if self._view != (view := membership_changes()):
            self._view, self._is_told = view, False
            self._stepped()  # ranks that have joined have not seen earlier steps
        before, self._updates = self._updates, updates
        if self._is_told or updates in (before, 0, 1) or updates & (updates - 1) or not is_check_wanted():
            return ""
        found = self._compare(names, communicator)
        self._is_told = bool(found)
        return found

    def _stepped(self) -> list[tuple[nn.Parameter, str]]:
        """What no averager has and other optimizers have updated since the last call, with the optimizer's class."""
        so_far = _steps().so_far()
        active = [optimizer for optimizer, count in so_far if count != self._counted.get(optimizer)]
        self._counted = weakref.WeakKeyDictionary(so_far)
        return [
            (one, type(optimizer).__name__)
            for optimizer in _outermost(active)
            for one in _parameters(optimizer)
            # Other tensors are slices, or inputs that an attack looks for, which are each rank's own.
            if isinstance(one, nn.Parameter) and not is_claimed(one)
        ]

    def _compare(self, names: Mapping[nn.Parameter, str], communicator: Communicator[Any]) -> str:
        stepped = self._stepped()
        kinds = dict.fromkeys(kind for _, kind in stepped)
        compared = {one: name for one, name in names.items() if not is_claimed(one)} if self._updates == 2 else {}
        for number, (one, kind) in enumerate(stepped):
            compared.setdefault(one, names.get(one, f"parameter {number} of another optimizer ({kind})"))
        named: Iterable[tuple[str, torch.Tensor]] = [(name, one) for one, name in compared.items()]
        found = differing_weights(lambda: parameter_checksums(named), f"after {self._updates} steps", communicator)
        if not found:
            return ""
        steps = f", and {' and '.join(kinds)} stepped on each rank's own" if kinds else ""
        return (
            f"{found} Their gradients are not averaged: no DistributedOptimizer has them{steps}. Wrap every "
            "optimizer in ring_plugins.torch.DistributedOptimizer, and call broadcast_parameters(model) for the whole "
            "model. If they differ on purpose, RING_WEIGHT_CHECK=0 switches this comparison off."
        )


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _outermost(optimizers: list[Optimizer]) -> list[Optimizer]:
    """Those without optimizers inside others, such as those of a ZeroRedundancyOptimizer.

    These have another part of the parameters on each rank, and update them for the other ranks, too. An optimizer is
    inside another if that one has all of its parameters and finished its step later.
    """
    ids = [{id(one) for one in _parameters(optimizer)} for optimizer in optimizers]
    return [
        optimizer
        for number, optimizer in enumerate(optimizers)
        if not any(ids[number] <= others for others in ids[number + 1 :])
    ]
