"""Notices ranks of one job that train by themselves: torch's optimizers step there, and nothing communicates.

Every rank's loss looks right then. There are two cases. A library that looks for the other processes by itself has
found none, although `init` connected them: training ends at its second step, on every rank, with the order that works.
Or a plain loop averages nothing, which may be meant: rank 0 warns after some steps.

`init` starts the watch once torch is loaded, `broadcast_parameters` starts it again, and the first sign of
communication ends it.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.observe.unused import other_connections
from ring_plugins.core.world import World, current, is_initialized, on_joined
from ring_plugins.import_watch import ImportWatch, has_finished

#: Optimizer steps within which the ranks should have communicated. Several, since gradients may be accumulated.
_STEPS = 20
#: Packages that count processes by themselves, with what lets them find the ranks. The first that takes part in a step
#: is named.
_LIBRARIES = {
    "transformers": "Call ring_plugins.init() before TrainingArguments(...), and on CPUs pass use_cpu=True to that",
    "accelerate": "Call ring_plugins.init() before Accelerator(...), and on CPUs pass cpu=True to that",
    **dict.fromkeys(
        ("lightning", "pytorch_lightning", "lightning_fabric"),
        "Import ring_plugins.lightning, and pass strategy='ring' to the Trainer or to Fabric",
    ),
}
#: Of the hook of the last world, at most.
_handles: list[Any] = []


def register() -> None:
    """Have `init` watch torch's optimizers, and know of ranks that another library has connected."""
    on_joined(_watch_once_loaded)
    other_connections.append(_is_connected_otherwise)


def _watch_once_loaded() -> None:
    if current().topology.size == 1:
        return
    if has_finished("torch"):
        expect_averaging()
    else:
        sys.meta_path.insert(0, ImportWatch(["torch"], lambda _: expect_averaging()))


def expect_averaging() -> None:
    """Notice if no rank communicates during the next optimizer steps.

    Raises:
        LaunchError: later, in such a step, if a library takes it that trains on several processes where it finds them.
    """
    if not is_initialized() or current().topology.size == 1 or not config.WEIGHT_CHECK.get():
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    for handle in _handles:
        handle.remove()
    _handles[:] = [register_optimizer_step_post_hook(_Watch(current()).after_step)]


class _Watch:
    """Counts the steps of a job's optimizers until it is certain whether anything communicates."""

    def __init__(self, world: World) -> None:
        self._world, self._steps, self._is_over = weakref.ref(world), 0, False
        self._before: list[tuple[str, int]] = []

    def after_step(self, *_: Any) -> None:
        """A hook of torch; it is not removed when all is known, since torch iterates over its hooks at this moment."""
        if self._is_over:
            return
        self._steps += 1
        world = self._world()
        operations = _operations(world) if world is not None and world.is_mine() else []
        if self._steps == 1:
            self._before = operations
        if world is None or operations != self._before:
            self._is_over = True
        elif self._steps == 2 and _accelerate_is_alone():  # it may have connected the ranks, and not use that
            self._name(world, operations)
        elif self._steps > 1 and _is_connected_otherwise():
            self._is_over = True
        elif self._steps == _STEPS or (self._steps == 2 and not operations):
            self._name(world, operations)

    def _name(self, world: World, operations: list[tuple[str, int]]) -> None:
        """Say what is wrong.

        Raises:
            LaunchError: a library that looks for processes by itself has found none.
        """
        own = world.topology
        library = next((name for name in _LIBRARIES if name in _packages_of_callers()), None)
        self._is_over = library is not None or self._steps == _STEPS
        if library is not None:
            raise LaunchError(
                f"rank {own.rank} of {own.size} trains by itself: {library} has found no other process, and has taken "
                f"{self._steps} steps without communicating. {_LIBRARIES[library]}. If each rank is to train a model "
                f"of its own, set {config.WEIGHT_CHECK.name}=0."
            )
        if self._is_over and own.rank == 0 and operations:  # else core/observe/unused.py names the job
            logger.warning(
                f"no gradient has been averaged in {_STEPS} steps of an optimizer: each rank trains by itself. Wrap "
                "the optimizer in ring_plugins.torch.DistributedOptimizer. If each rank is to train a model of its "
                f"own, set {config.WEIGHT_CHECK.name}=0."
            )


def _operations(world: World) -> list[tuple[str, int]]:
    """Name and operation count of every communicator in use."""
    return [(activity.communicator, activity.number) for activity in world.activities()]


def _is_connected_otherwise() -> bool:
    """Whether a library has connected the ranks with something that is not ours, and whose operations we do not see."""
    dist: Any = sys.modules.get("torch.distributed") if has_finished("torch") else None  # else a thread may import it
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_world_size() > 1 and dist.get_backend() != "ring")
    if has_finished("tensorflow"):
        # TensorFlow 2.21, python/eager/context.py: set by strategies for several workers; there is no public name.
        context = sys.modules["tensorflow.python.eager.context"].context_safe()
        if getattr(context, "_collective_ops_server_def", None) is not None:
            return True
    return has_finished("jax") and bool(sys.modules["jax"].distributed.is_initialized())


def _accelerate_is_alone() -> bool:
    """Whether Accelerate takes the step, and believes that there is one process."""
    accelerate: Any = sys.modules.get("accelerate") if "accelerate" in _packages_of_callers() else None
    return accelerate is not None and accelerate.PartialState().num_processes == 1


def _packages_of_callers() -> set[str]:
    """The top-level packages whose functions run at this moment, in this thread."""
    return {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in traceback.walk_stack(None)}
