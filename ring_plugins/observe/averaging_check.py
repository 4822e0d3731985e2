"""Notices ranks of one job that train by themselves, since nothing averages; every rank's loss looks right then.

A script that calls `init(ranks=4)` and then nothing else of this package may use any framework, and no plugin of ours.
So a service of rank 0's monitor looks whether any communicator has been used (`UnusedWatch`). Where torch's optimizers
step, more is known, and earlier. There are two cases. A library that looks for the other processes by itself has
found none, although `init` connected them: training ends at its second step, on every rank, with the order that works.
Or a plain loop averages nothing, which may be meant: rank 0 warns after some steps.

A script that averages with functions of its own is left alone. So between steps the elements of what it passes to
collectives are counted: a barrier and the loss for the log are less than the gradients or weights of a model. A library
whose ranks have begun equal may average seldom, so it gets as many steps as a plain loop. If it takes fewer, rank 0
says at the end that nothing was averaged.

Training may begin with averages and go on without, as where a script copies a model (deepcopy) and gives the copy an
optimizer of its own. So once an averager has averaged, rank 0 warns if none does in many steps.

`init` starts the watch once torch is loaded, and `broadcast_parameters` starts it again.
"""

from __future__ import annotations

import atexit
import sys
import time
import traceback
import weakref
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.threads import until
from ring_plugins.core.functions import argument_observers
from ring_plugins.core.job import World
from ring_plugins.core.world import current, is_initialized, on_joined
from ring_plugins.import_watch import ImportWatch, has_finished

#: Optimizer steps within which the ranks should have communicated. Several, since gradients may be accumulated.
_STEPS = 20
#: The same for a job that has averaged: an inner loop may adapt a copy of a model.
_LATER_STEPS = 100
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
#: Those of them that look for the variables of a launcher, or for a process group of torch.
_BY_VARIABLES = ("transformers", "accelerate")
#: Seconds within which a job should have communicated. Downloads and the first batch may take minutes.
_EXPECTED = 600.0
#: Only scripts that import one of these are taken to train. Others may want ranks and nothing else.
_FRAMEWORKS = ("torch", "tensorflow", "jax")
#: Communicators of the public functions: scripts log with them, too.
_PUBLIC = ("ring", "ring on GPUs")
#: Seconds within which rank 0 hears that another rank waits for it.
_HEARD = 2.5
#: Of the hook of the last world, at most.
_handles: list[Any] = []


def register() -> None:
    """Have `init` watch torch's optimizers, and know of ranks that another library has connected."""
    on_joined(_watch)


def _watch() -> None:
    job = current()
    if job.topology.size == 1:
        return
    if job.topology.rank == 0 and not job.is_joining:
        job.add_service(UnusedWatch(job))
    if has_finished("torch"):
        expect_averaging()
    else:
        sys.meta_path.insert(0, ImportWatch(["torch"], lambda _: expect_averaging()))


def expect_averaging(starts_equal: bool = False) -> None:
    """Notice if no rank averages during the next optimizer steps.

    Args:
        starts_equal: whether the ranks' weights are equal now.

    Raises:
        LaunchError: later, in such a step, if a library takes it that trains on several processes where it finds them.
    """
    if not is_initialized() or current().topology.size == 1 or not config.WEIGHT_CHECK.get():
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    for handle in _handles:
        handle.remove()
    watch = _Watch(current(), starts_equal)
    _handles[:] = [register_optimizer_step_post_hook(watch.after_step)]
    argument_observers[:] = [watch.count]
    atexit.unregister(_Watch.at_end)
    atexit.register(_Watch.at_end, watch)


def averages_seldom() -> None:
    """Expect no averages any more: they come, but not every so many steps (torch/local_updates), or never."""
    for handle in _handles:
        handle.remove()
    _handles.clear()
    argument_observers.clear()
    atexit.unregister(_Watch.at_end)


class UnusedWatch:
    """A service of rank 0's monitor thread: warns once if no rank communicates, after a while or when the job ends.

    Args:
        job: whose.
    """

    def __init__(self, job: World) -> None:
        self._job = job
        self._began = time.monotonic()
        self._is_over = False

    def tick(self, now: float) -> None:
        self._is_over = self._is_over or _is_connected_otherwise()
        if now - self._began > _EXPECTED:
            self._check(f"have not communicated in their first {_EXPECTED / 60:.0f} minutes")

    def close(self) -> None:
        self.tick(self._began)
        self._check("have ended without communicating")

    def _check(self, what: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        job, detector = self._job, self._job.failure_detector
        has_failed = detector is not None and (detector.failed or detector.failure() is not None)
        if job.has_communicated() or has_failed or not any(name in sys.modules for name in _FRAMEWORKS):
            return
        logger.warning(
            f"the {job.topology.size} ranks of this job {what}, so each has worked by itself. To train one model on "
            "all of them, use RingStrategy (Lightning), BroadcastCallback (Keras), or DistributedOptimizer and "
            "broadcast_parameters (a plain PyTorch loop)."
        )


class _Watch:
    """Counts the steps of a job's optimizers until it is certain whether anything averages."""

    def __init__(self, world: World, starts_equal: bool = False) -> None:
        self._world, self._steps, self._is_over, self._averages = weakref.ref(world), 0, False, False
        self._before: dict[str, int] = {}
        self._moved, self._size = 0, 1  # elements, since the last step and of the model
        self._starts_equal, self._began, self._library = starts_equal, 0.0, ""

    def count(self, arguments: Iterable[Any]) -> None:
        """Note what the script passes to a collective."""
        if not self._is_over:
            self._moved += sum(map(_elements, arguments))

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """A hook of torch; it is not removed when all is known, since torch iterates over its hooks at this moment."""
        if self._is_over:
            return
        self._steps += 1
        if self._averages and self._steps % _LATER_STEPS:
            return
        world = self._world()
        if world is None or not world.is_mine():
            self._is_over = True
            return
        operations = {activity.communicator: activity.number for activity in world.activities()}
        others = {name: number for name, number in operations.items() if name not in _PUBLIC}
        if self._averages:
            if others == self._before and self._moved < self._size:  # else the script averages weights by itself
                self._is_over = True
                self._warn(world, _LATER_STEPS)
            self._before, self._moved = others, 0
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._size = max(self._size, sum(p.numel() for p in trained))
        has_moved_all, self._moved = self._moved >= self._size, 0
        if self._steps == 1:
            self._before, self._began = others, time.monotonic()
            self._starts_equal = self._starts_equal or has_moved_all
            return
        self._library = self._library or _library_alone()
        connected = _is_connected_otherwise() and self._library not in _BY_VARIABLES
        if others != self._before and not connected:
            self._averages, self._before, self._library = True, others, ""
        elif has_moved_all or connected or _others_wait(world, self._began):
            self._is_over = True
        elif self._steps == _STEPS or (self._library and not self._starts_equal):
            self._name(world, bool(operations))

    def at_end(self) -> None:
        """Say that a library has trained alone in fewer steps than it was given."""
        world = self._world()
        if self._is_over or not self._library or world is None or world.topology.rank != 0 or not world.is_mine():
            return
        if world.failure_detector is None or not world.failure_detector.failed:
            logger.warning(self._alone("each rank"))

    def _alone(self, who: str) -> str:
        world, remedy = self._world(), _LIBRARIES[self._library]
        if world is not None and world.recovers and self._library in _BY_VARIABLES:
            remedy = (
                "With on_failure='continue' or 'replace' it cannot find them, since the number of ranks may change: "
                "use on_failure='end', or a loop with ring_plugins.torch.DistributedOptimizer"
            )
        return (
            f"{who} trains by itself: {self._library} has found no other process, and has taken {self._steps} steps "
            f"without averaging. {remedy}. If each rank is to train a model of its own, set "
            f"{config.WEIGHT_CHECK.name}=0; if ranks that have begun equal are to average now and then, call "
            "ring_plugins.torch.broadcast_parameters(model) before."
        )

    def _name(self, world: World, is_used: bool) -> None:
        """Say what is wrong.

        Raises:
            LaunchError: a library that looks for processes by itself has found none.
        """
        own = world.topology
        self._is_over = True
        if self._library:
            if own.rank == 0 and _others_wait(world, self._began, _HEARD):
                return
            raise LaunchError(self._alone(f"rank {own.rank} of {own.size}"))
        if is_used:  # else `UnusedWatch` names the job
            self._warn(world, _STEPS)

    def _warn(self, world: World, steps: int) -> None:
        if world.topology.rank == 0:
            logger.warning(
                f"no gradient has been averaged in {steps} steps of an optimizer: each rank trains by itself. Wrap "
                "the optimizer in ring_plugins.torch.DistributedOptimizer. If each rank is to train a model of its "
                f"own, set {config.WEIGHT_CHECK.name}=0."
            )


def _elements(value: Any) -> int:
    """The elements of the arrays and tensors that a value has or consists of."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_elements, value))
    shape = getattr(value, "shape", None)
    return prod(shape) if isinstance(shape, tuple) else 0  # torch.Size is a tuple


def _others_wait(world: World, since: float, seconds: float = 0.0) -> bool:
    """Whether other ranks let rank 0 train alone, and have waited for it since before its first step.

    Args:
        world: the job.
        since: time of that step.
        seconds: how long to look for it; ranks report only waits that last.
    """
    if world.topology.rank != 0 or world.observers is None or world.observers.all_stalls is None:
        return False
    stalls = world.observers.all_stalls
    return until(lambda: stalls.awaits(0, since), seconds, 0.05)


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


def _library_alone() -> str:
    """The library that takes this step and believes that there is one process; "" if none does."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    packages = {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames}
    library = next((name for name in _LIBRARIES if name in packages), "")
    if library in _BY_VARIABLES:
        accelerate: Any = sys.modules.get("accelerate")
        return library if accelerate is None or accelerate.PartialState().num_processes == 1 else ""
    # Strategies, whose methods take part in a step, have a world size if they are for several processes.
    callers = [frame.f_locals.get("self") for frame in frames] if library else []
    strategies = [caller for caller in callers if hasattr(caller, "optimizer_step") and hasattr(caller, "root_device")]
    return "" if any(getattr(strategy, "world_size", 1) > 1 for strategy in strategies) else library
