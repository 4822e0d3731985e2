"""Warns if a plain loop calls `broadcast_parameters` and then never averages gradients."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ring_plugins.core.base.log import logger
from ring_plugins.core.world import World, current

#: Optimizer steps within which the ranks should have communicated. Several, since gradients may be accumulated.
_STEPS = 20

_watched: weakref.WeakSet[World] = weakref.WeakSet()
#: Of the hook of the last world, at most.
_handles: list[RemovableHandle] = []


def expect_averaging() -> None:
    """Warn on rank 0, once per job, if no rank communicates during the next optimizer steps.

    `broadcast_parameters` calls this: a script that uses it means to train one model. Whatever averages the gradients,
    `DistributedOptimizer` or the script's own all-reduce, takes part in some operation.
    """
    world = current()
    if world.topology.size == 1 or world.topology.rank != 0 or world in _watched:
        return
    _watched.add(world)
    watched, before, steps = weakref.ref(world), _operations(world), 0
    is_over = False

    def after_step(*_: Any) -> None:
        nonlocal steps, is_over
        if is_over:
            return
        steps += 1
        world = watched()
        is_silent = world is not None and _operations(world) == before
        if is_silent and steps < _STEPS:
            return
        is_over = True  # not handle.remove(): torch iterates over its hooks at this moment
        if is_silent:
            logger.warning(
                f"{_STEPS} steps after broadcast_parameters no gradient has been averaged: each rank trains by itself, "
                "from equal weights. Wrap the optimizer in ring_plugins.torch.DistributedOptimizer."
            )

    for handle in _handles:
        handle.remove()
    _handles[:] = [register_optimizer_step_post_hook(after_step)]


def _operations(world: World) -> list[tuple[str, int]]:
    """Name and operation count of every communicator in use."""
    return [(activity.communicator, activity.number) for activity in world.activities()]
