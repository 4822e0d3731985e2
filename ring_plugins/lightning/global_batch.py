"""A Trainer whose steps have the same samples on any number of ranks (`RingStrategy(global_batch_size=...)`).

**Problem.** Lightning counts batches of this rank. With `accumulate_grad_batches`, the number of batches of a step
would have to follow the number of ranks, and so would all that Lightning counts by them: the length of an epoch, when
it validates, saves and logs, and `batch_idx`.

**Here** a batch of Lightning's loop is a step. The loader that it sees has as many items as the job has steps, each of
which is this rank's first batch of the step. Where Lightning computes a batch, its closure runs once for each of this
rank's batches, by the same `Steps` as in a loop of the script (`torch.global_batch`): with averages in the last one,
and all of them once more if a rank was lost. So `global_step`, schedules, callbacks and checkpoints count what the job
does.

**Ranks have equally many passes**, since `training_step` may call collectives, as `self.log(sync_dist=True)` does. One
that has no batch for a pass runs another, which does not count, as in `uneven`. What a step logs weighs by samples.

Lightning 2.6.6 has no hook for this: methods of its loops are replaced in the Trainer's own objects, as in `same_loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.world import current
from ring_plugins.lightning.uneven import as_it_is, weigh_logs
from ring_plugins.torch.global_batch import Step, Steps
from ring_plugins.torch.order import Resumption, checksum_of_order
from ring_plugins.torch.step_plan import StepPlan
from ring_plugins.torch.sync_batch_norm import uncounted

_CALLER = "RingStrategy(global_batch_size=...)"
_INSTEAD = {
    "sync_every": "hosts that train by themselves have batches of their own",
    "group": "a step is divided among all ranks",
    "skip_step_on": "a step that is skipped has none of its samples",
}


def check_global_batch(arguments: Mapping[str, Any]) -> None:
    """Check a strategy's arguments, by name.

    Raises:
        ArgumentError: one is invalid, or does not work with another.
    """
    size = arguments["global_batch_size"]
    if size is None:
        if arguments["exact"]:
            raise ArgumentError(
                "RingStrategy(exact=True) needs global_batch_size, such as global_batch_size=64: the sums of gradients "
                "have the same bits on any number of ranks only if the steps have the same samples."
            )
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f"RingStrategy(global_batch_size={size!r}) is not a positive number of samples.")
    if arguments["exact"] and arguments["compression"] is not None:
        raise ArgumentError(
            f"RingStrategy(compression={arguments['compression']!r}) has no effect with exact=True, which sends "
            "gradients as they are: leave one out."
        )
    for name, reason in _INSTEAD.items():
        if arguments[name] is not None:
            raise ArgumentError(
                f"RingStrategy({name}={arguments[name]!r}) does not work with global_batch_size={size}: {reason}. "
                "Leave one out."
            )


class StepLoader:
    """What a Trainer has in place of a loader: this rank's first batch of each step.

    Other attributes, such as `num_workers`, are those of the script's loader.

    Args:
        owner: makes the steps.
        plan: of the script's loader.
        seed: of all epochs.

    Attributes:
        step: the one whose batch was taken last.
        first: that batch.
    """

    step: Step[Any]
    first: Any

    def __init__(self, owner: GlobalBatch, plan: StepPlan[Any]) -> None:
        self._owner, self.plan = owner, plan
        self.dataset, self.batch_size = plan.loader.dataset, plan.batch_size
        self._epoch = self._begin = 0

    def __getattr__(self, name: str) -> Any:
        # Not where that loader is: this one knows it by samples (`position`).
        if name.startswith("_") or name in ("plan", "first", "step", "state_dict", "load_state_dict"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.plan.loader, name)

    @property
    def sampler(self) -> StepLoader:
        """What hears of epochs."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that begins."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        # Lightning begins to iterate over the first epoch before it tells which that is.
        begin, self._begin = self._begin, 0
        self.plan.begin_at(self._epoch, begin)
        while (step := self._owner.steps_of(self.plan).next()) is not None:
            self.step, self.first = step, step.peek()
            yield self.first
            self.plan.samples = step.end

    # In the middle of an epoch ------------------------------------------------------------------------

    def position(self, steps: int, begun: int) -> dict[str, Any]:
        """As `order.position_of`: behind so many steps, which began behind so many samples."""
        plan = self.plan
        consumed = min(begun + steps * plan.global_batch_size, len(plan.order()))
        return {"consumed": consumed, "length": len(plan.order()), **self._drawn()}

    def resumed(self, position: Mapping[str, Any]) -> Resumption:
        """As `order.resumed`."""
        self.plan.begin_at(self._epoch, 0)
        own = {"length": len(self.plan.order()), **self._drawn()}
        problem = ""
        if "consumed" not in position or any(position[name] != own[name] for name in own):
            problem = (
                "that was in another order, of other samples, or of a loader whose order is not known, so some are "
                "read twice or never. Samplers need the same seed in each run."
            )
        self._begin = begin = position.get("consumed", 0)
        left = max(-(-(self.plan.end() - begin) // self.plan.global_batch_size), 0)
        return Resumption(self, begin, left, left, None, problem)

    def _drawn(self) -> dict[str, Any]:
        plan = self.plan
        checksum = checksum_of_order(plan.loader.sampler, plan.order())
        return {"drawn_by": plan.seed + self._epoch, "checksum": checksum}


class GlobalBatch:
    """The steps of one `fit`.

    Args:
        strategy: the Trainer's.
        trainer: the Trainer, in ``Strategy.setup``.

    Attributes:
        ran_out, weight, is_logging: as of `UnevenData`, of the pass that is being computed.
        passes: batches of a step.

    Raises:
        ArgumentError: on all ranks, the Trainer or the module does not fit.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self.size, self._exact = strategy.arguments["global_batch_size"], strategy.arguments["exact"]
        self.ran_out, self.weight, self.is_logging, self.passes = False, 1.0, False, 1
        self._steps: Steps[Any] | None = None
        self._has_told = False
        self._told(self._check)
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._make_closure = self._loop._make_closure
        self._loop._make_closure = self._closure

    def close(self) -> None:
        """Leave the Trainer as it was."""
        vars(self._loop).pop("_make_closure", None)

    def loader(self, loader: Any, seed: int) -> StepLoader:
        """What the Trainer gets in place of a training loader.

        Raises:
            ArgumentError: on all ranks, the loader cannot be divided.
        """
        plan = self._told(lambda: StepPlan(loader, self.size, seed, _CALLER, is_even=True))
        self.passes = self.size // plan.batch_size
        return StepLoader(self, plan)

    def steps_of(self, plan: StepPlan[Any]) -> Steps[Any]:
        """The steps of a plan, in place of those of the loader before."""
        if self._steps is None or self._steps.plan is not plan:
            if self._steps is not None:
                self._steps.close()
            self._steps = Steps(plan, [self._strategy._averager], self._exact, accumulates=True)
            self._tell(plan)
        return self._steps

    def _told(self, function: Callable[[], Any]) -> Any:
        with rejections_told(current().communicator, _CALLER):
            return function()

    def _tell(self, plan: StepPlan[Any]) -> None:
        if not self._has_told and self._strategy.is_global_zero:
            logger.info(
                f"a step has {self.size} samples, in {self.passes} batches, on any number of ranks. "
                + (
                    "Gradients are added up in the batches' order: the same bits on any number of ranks."
                    if self._exact
                    else "On another number of ranks, sums of gradients are rounded otherwise (with exact=True not)."
                )
            )
        self._has_told = True

    def _check(self) -> None:
        trainer, rank = self._trainer, current().communicator.rank
        if not trainer.lightning_module.automatic_optimization:
            raise ArgumentError(
                f"global_batch_size={self.size} on rank {rank} needs automatic optimization: in manual optimization, "
                "only training_step knows what a step is. Use automatic optimization, or a loop of your own with "
                "ring_plugins.torch.GlobalBatches."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ArgumentError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and global_batch_size={self.size} "
                f"on rank {rank} both say how many batches a step has: leave accumulate_grad_batches (and "
                "GradientAccumulationScheduler) out, and multiply global_batch_size by it."
            )
        made = trainer.fit_loop._combined_loader
        if made is not None and not all(isinstance(loader, StepLoader) for loader in made.flattened):
            raise ArgumentError(
                f"global_batch_size={self.size} on rank {rank}: the script has asked for the number of training "
                "batches before fit has divided the data. Read trainer.estimated_stepping_batches in "
                "configure_optimizers(), not in setup()."
            )
        if self._strategy._layer_sync:
            raise ArgumentError(
                f"Trainer(sync_batchnorm=True) with global_batch_size={self.size} on rank {rank}: its statistics would "
                "be those of as many batches as there are ranks. Leave it out: those of BatchNorm are of a batch of "
                "the loader, whatever the number of ranks; or use GroupNorm or LayerNorm."
            )

    # A step -------------------------------------------------------------------------------------------

    def _closure(self, kwargs: dict[str, Any], *args: Any) -> Any:
        """Lightning's closure, which computes the whole of this rank's part of a step."""
        self._told(lambda: self._check_step(kwargs))
        closure: Any = self._make_closure(kwargs, *args)
        loader = self._trainer.fit_loop._combined_loader.flattened[0]
        vars(closure)["closure"] = partial(self._compute, loader, closure, closure.closure, kwargs)
        return closure

    def _check_step(self, kwargs: Mapping[str, Any]) -> None:
        self._check()  # callbacks may change it
        count, rank = len(self._trainer.fit_loop._combined_loader.flattened), current().communicator.rank
        if "batch" not in kwargs or count != 1:
            found = f"{count} training loaders" if count != 1 else "a training_step that takes dataloader_iter"
            raise ArgumentError(
                f"global_batch_size={self.size} on rank {rank} with {found}: a step is divided by the batches of one "
                "DataLoader, which training_step gets one at a time. Use one of a dataset that has both, or take batch."
            )

    def _compute(self, loader: StepLoader, closure: Any, compute: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        step, module = loader.step, self._trainer.lightning_module
        results = self._trainer.fit_loop.epoch_loop._results
        given, clear, result = kwargs["batch"], closure._zero_grad_fn, None
        times, total, samples = 0, torch.zeros(()), 0
        undo: Callable[[], None] | None = None
        batches = iter(step)
        try:
            for batch in batches:
                if step.times != times:  # a rank was lost: nothing that was computed counts
                    if undo is not None:
                        undo()
                    undo = _snapshot(module, results) if self._strategy._recovers else None
                    times, total, samples, logged = step.times, torch.zeros(()), 0, _Logged()
                kwargs["batch"] = results.batch = given if batch is loader.first else self._moved(batch)
                results.batch_size = None
                closure._zero_grad_fn = clear if step.index == 0 else None
                own = self._begin_pass(step, results, logged)
                with ExitStack() as stack:
                    if not own:
                        stack.enter_context(uncounted())
                        stack.callback(as_it_is(module))
                    loader.plan.draw_by(step.by_rank[current().communicator.rank][step.index].number, "pass")
                    result = compute()
                if own and result.loss is not None:
                    total, samples = total + result.loss * own, samples + own
        finally:
            batches.close()
            self.ran_out, self.weight = False, 1.0
            vars(results).pop("update_metrics", None)
            kwargs["batch"], closure._zero_grad_fn = given, clear
        if result is None:
            raise ArgumentError(
                "the closure of a step was evaluated twice with global_batch_size, and its batches are no longer "
                "there. Let optimizer_step call it once."
            )
        if samples:
            result.loss = total / samples
        self._strategy._shared_step.weight = current().communicator.size * samples / step.samples
        return result

    def _begin_pass(self, step: Step[Any], results: Any, logged: _Logged) -> int:
        """Let what a pass logs weigh as it does; returns how many samples it has that count."""
        vars(results).pop("update_metrics", None)
        by_rank = [step.samples_of(passes[step.index]) for passes in step.by_rank]
        own, in_pass = by_rank[current().communicator.rank], sum(by_rank)
        self.ran_out, self.weight = not own, len(by_rank) * own / in_pass
        if in_pass < step.samples or self.weight != 1:
            weigh_logs(results, self)
            logged.follow(results, own, in_pass)
        return own

    def _moved(self, batch: Any) -> Any:
        """A batch as Lightning's loop makes it (pytorch/loops/training_epoch_loop.py:274)."""
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)


class _Logged:
    """Means of what the passes of a step log for the step: of all its samples, or of this rank's."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int]] = {}

    def follow(self, results: Any, own: int, in_pass: int) -> None:
        """Follow what is logged in a pass of so many samples, of which this rank has some."""
        update = results.update_metrics

        def log(key: str, value: Any, batch_size: int) -> None:
            update(key, value, batch_size)
            metric = results[key]
            meta = metric.meta
            if not metric.is_tensor or not meta.on_step or not meta.is_mean_reduction or "epoch" in meta.fx:
                return
            samples = in_pass if meta.sync.should else own
            before, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = total, count = before + metric._forward_cache * samples, count + samples
            metric._forward_cache = total / max(count, 1)
            if not meta.on_epoch:
                metric.value = metric._forward_cache

        results.update_metrics = log


def _snapshot(module: torch.nn.Module, results: Any) -> Callable[[], None]:
    """What puts back all that a step changes in a module beside its parameters, and what it logs."""
    back, logged = as_it_is(module), {key: dict(vars(metric)) for key, metric in results.items()}

    def undo() -> None:
        back()
        for key in [*results]:
            if key in logged:
                vars(results[key]).update(logged[key])
            else:
                del results[key]

    return undo
