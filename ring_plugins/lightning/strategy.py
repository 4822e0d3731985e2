"""The strategy for Lightning's Trainer; `packages` derives it from either package's base class."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from ring_plugins.core import world
from ring_plugins.core.arrays.codec import CodecName
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.groups import Group
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.lightning.buffers import BufferBroadcast
from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.lightning.global_batch import GlobalBatch, check_global_batch
from ring_plugins.lightning.hyperparameters import check_equal
from ring_plugins.lightning.joining import MeetingPoint
from ring_plugins.lightning.launcher import (
    has_failed,
    report_failure,
    set_exit_status,
)
from ring_plugins.lightning.local_updates import LocalTraining, local_settings
from ring_plugins.lightning.parallel import RingParallelLogic, StartMethod
from ring_plugins.lightning.predictions import Predictions
from ring_plugins.lightning.preemption import Preemption, is_sigterm
from ring_plugins.lightning.process_group import metrics_within
from ring_plugins.lightning.recovery import LossFollower
from ring_plugins.lightning.resume import KEY, MidEpoch
from ring_plugins.lightning.same_loop import SameLoop
from ring_plugins.lightning.shared_step import SharedStep, SkipStepOn, exceptions_to_skip
from ring_plugins.lightning.shares import EvenEvaluation, Shares, tell_if_undivided
from ring_plugins.lightning.sync_batchnorm import OwnSyncBatchNorm
from ring_plugins.lightning.uneven import UnevenData
from ring_plugins.observe.consistency import DriftCheck, chosen_interval
from ring_plugins.torch.broadcast import broadcast_parameters
from ring_plugins.torch.consistency import parameter_checksums
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.sharded_optimizer import Shard, ShardedOptimizer

_groups_in = attrgetter("param_groups")
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024


class RingTrainerLogic(RingParallelLogic):
    """Data parallelism over `ring_plugins`: one process a rank, gradients averaged in every step.

    ``Trainer(strategy=RingStrategy())`` or, once `ring_plugins.lightning` is imported, ``Trainer(strategy="ring")``.

    The ranks are those of mpirun, torchrun or SLURM; a script that was started alone starts the other ``devices - 1``
    processes itself. In a notebook workers are forked (``strategy="ring_notebook"``). At world size 1 the strategy
    behaves like ``SingleDeviceStrategy``: no launcher, no process group, no hooks, no sampler.

    Args:
        accelerator: See ``Trainer(accelerator=...)``.
        parallel_devices: One device for each rank of this node; derived from the launcher by default.
        cluster_environment: A `RingEnvironment`; made by default. Of a ``SLURMEnvironment``, ``auto_requeue`` counts.
        checkpoint_io: Lightning's plugin for files.
        precision_plugin: Lightning's plugin for precision.
        bucket_bytes: Gradients travel together in buckets of about this many bytes, 25 MiB by default.
        sparse: What to do with sparse gradients: "gather" rows from all ranks, or "densify" them.
        autotune: Whether to try other bucket sizes in the first steps and keep the fastest; as RING_AUTOTUNE says by
            default.
        compression: "fp16" or "bf16" sends gradients in 16 bits between hosts, and between GPUs, "int8" in 8 bits
            between hosts; "auto" tries it; see `ring_plugins.torch.GradientAverager`.
        error_feedback: whether the rounding error of a step is added to the next; None: with "int8" only.
        shard_optimizer: True lets each rank update 1/n of the parameters and keep 1/n of the optimizers' state (ZeRO
            stage 1), "tensors" gives whole tensors to ranks; see `ring_plugins.torch.DistributedOptimizer`.
        overlap: Whether gradients are averaged while backward runs (True) or when it is over (False); "auto" tries both
            in the first steps, unless RING_OVERLAP chooses.
        broadcast_buffers: Whether every rank uses the buffers (such as running statistics) of rank 0, as with
            ``DistributedDataParallel``.
        drift_check_every: Steps of an optimizer between comparisons of the weights of all ranks, which raise
            ``DriftError`` if they differ; 0 for never, the environment variable RING_DRIFT_CHECK by default.
        skip_step_on: An exception, or a tuple of them, such as ``torch.cuda.OutOfMemoryError``: a step in which any
            rank's ``training_step`` or backward raises it is skipped by all ranks, with a warning. Only for automatic
            optimization.
        uneven: What happens when a rank of ``fit`` has fewer batches than others: with "join" it goes on to the end of
            the longest, and what it computes does not count (docs/lightning.md); "error" ends the job.
        gather_predictions: Whether ``Trainer.predict`` returns the predictions of all ranks, in the order of the data:
            True on all ranks, "rank 0" on that one, and None on the others. By default those of this rank.
        on_failure: What happens when a rank is killed: "end" ends the job; "continue" lets the other ranks finish the
            step and go on (docs/fault_tolerance.md); "replace" also starts another process in its place, which joins
            them between two batches. The default is RING_ON_FAILURE, or "end".
        min_ranks: The fewest ranks with which a job goes on. The default is RING_MIN_RANKS, or 1.
        max_ranks: Up to how many ranks ``ring add-ranks`` may let a job grow while it runs, with "replace". The default
            is RING_MAX_RANKS, or no more than at the start.
        timeout: For calls through torch.distributed; by default torch's, 30 minutes.
        start_method: How a script that was started alone starts the other ranks: "popen" runs the script again; with
            "fork", "forkserver" and "spawn" they run only ``fit``, ``validate``, ``test`` or ``predict``. By default
            "fork" in a notebook, else "popen".
        sync_every: Steps, or a time such as "30s", between exchanges of weights among hosts; gradients are averaged
            inside a host only then (docs/slow_networks.md). None averages all ranks' gradients in every step.
        outer: With `sync_every`: "average", "nesterov", or the outer optimizer's learning rate and momentum.
        fragments: With `sync_every`: parts of the weights that take turns; a divisor of it.
        delay: With `sync_every`: steps that go on while an exchange travels, less than `sync_every` / `fragments`.
        global_batch_size: Samples of a step on all ranks together, a multiple of the DataLoader's `batch_size`: the
            ranks that are there make as many passes as that needs (docs/batch_size.md). A step is a batch to Lightning.
        exact: With `global_batch_size`: whether gradients are added up in the order of the batches, so that the
            averages have the same bits on any number of ranks. It takes longer, and more memory.
        group: A `ring_plugins.Group` of the ranks that train together, all by default: the data-parallel group of a
            mesh, or one of several models. To Lightning, these ranks are the whole job (docs/lightning.md).

    """

    # It derives from ParallelStrategy and not from DDPStrategy: the module is not wrapped, and nearly everything that
    # DDPStrategy adds (the wrapper, its forward redirection, communication hooks, static graphs, model averaging, the
    # assumption of being distributed at world size 1, a mean that truncates integers) would have to be switched off
    # again. What it would have brought, permission to train compiled modules, is one line in `packages`. The class has
    # more than 25 methods, and the file more lines than others, since nearly all are hooks of Lightning's strategies.

    strategy_name = "ring"
    recovers = True
    model: Module | None
    lightning_module: Any
    optimizers: list[Any]

    def __init__(
        self,
        accelerator: Any | None = None,
        parallel_devices: list[Any] | None = None,
        cluster_environment: RingEnvironment | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        sparse: Literal["gather", "densify"] = "gather",
        autotune: bool | None = None,
        compression: CodecName | None = None,
        error_feedback: bool | None = None,
        shard_optimizer: Shard = False,
        overlap: bool | Literal["auto"] = "auto",
        broadcast_buffers: bool = True,
        drift_check_every: int | None = None,
        skip_step_on: SkipStepOn = None,
        uneven: Literal["join", "error"] = "join",
        gather_predictions: bool | Literal["rank 0"] = False,
        on_failure: Literal["end", "continue", "replace"] | None = None,
        min_ranks: int | None = None,
        max_ranks: int | None = None,
        timeout: timedelta | None = None,
        start_method: StartMethod | None = None,
        sync_every: int | str | None = None,
        outer: Literal["average", "nesterov"] | tuple[float, float] = "average",
        fragments: int = 1,
        delay: int = 0,
        global_batch_size: int | None = None,
        exact: bool = False,
        group: Group | None = None,
        **unknown: Any,
    ) -> None:
        self._construct(locals())
        local_settings(self.arguments)  # raises if one is invalid
        check_global_batch(self.arguments)
        self._local: LocalTraining | None = None
        if uneven not in ("join", "error"):
            raise ArgumentError(f'RingStrategy(uneven={uneven!r}) has to be "join" or "error".')
        self._joins, self._uneven = uneven == "join", cast("UnevenData | None", None)
        self._global_batch: GlobalBatch | None = None
        self._evaluation: EvenEvaluation | None = None
        if gather_predictions not in (False, True, "rank 0"):
            raise ArgumentError(
                f'RingStrategy(gather_predictions={gather_predictions!r}) has to be a bool or "rank 0".'
            )
        self._gathers = gather_predictions
        self._loaded: dict[str, Any] | None = None  # of the checkpoint from which `fit` goes on, what `MidEpoch` needs
        self._mid_epoch: MidEpoch | None = None
        FailurePolicy.chosen(on_failure, min_ranks, max_ranks)  # raises if one is invalid
        policy = {"on_failure": on_failure, "min_ranks": min_ranks, "max_ranks": max_ranks}
        self.cluster_environment.failure_policy = policy
        #: What `setup` has done to the Trainer, and is undone at the end.
        self._set_up = ExitStack()
        self._broadcast_buffers = broadcast_buffers
        self._skip_step_on = exceptions_to_skip(skip_step_on)
        self._shared_step: SharedStep | None = None
        self._averager: GradientAverager | None = None
        self._preemption: Preemption | None = None
        self._drift = DriftCheck(chosen_interval(drift_check_every))
        self._accumulates = False
        self._buffers: BufferBroadcast | None = None
        self._waited_seconds = 0.0

    @property
    def is_distributed(self) -> bool:
        """Whether there are or were several ranks; Lightning then injects samplers and synchronizes logged values."""
        return self.world_size > 1 or self._recovers

    @property
    def ran_out(self) -> bool:
        """Whether this rank has run out of batches in this epoch and repeats its last one, which does not count."""
        return any(one.ran_out for one in self._weighing)

    @property
    def _weighing(self) -> Iterator[Any]:
        """What knows how much this rank's batch weighs."""
        return (one for one in (self._uneven, self._evaluation, self._global_batch) if one is not None)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        for one in self._weighing:
            if one.is_logging and reduce_op in ("mean", "avg", None):
                tensor = tensor * one.weight
        return super().reduce(tensor, group, reduce_op)

    @property
    def waited_seconds(self) -> float:
        """Seconds in which this process waited for gradients to be averaged, over all calls of ``fit``."""
        return self._waited_seconds + (0.0 if self._averager is None else self._averager.waited_seconds)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed:
            # Building models and data may have drawn different random numbers on each rank.
            self.reset_seed()

    @override
    def setup(self, trainer: Any) -> None:
        is_fitting = trainer.state.fn == "fit"
        self._undo_setup()
        self._preemption = Preemption(trainer, compares=False)
        self._divide_data(trainer, is_fitting)
        if self._recovers:
            if self._layer_sync:
                world.current().refuse_to_recover("Trainer(sync_batchnorm=True)")
            self._set_up.callback(LossFollower(self, trainer, self.lightning_module).close)
            if is_fitting and world.current().replaces:
                self._set_up.callback(MeetingPoint(self, trainer).close)
        if is_fitting and self.is_distributed and not self._is_alone:
            check_equal(trainer, self.group)  # before the weights, of which other numbers make other shapes
        team, come_together = self._begin_local(trainer) if is_fitting else (self.group, None)
        if is_fitting and self.is_distributed and self._layer_sync:
            # torch's own refuses to work on the CPU, and knows no groups of ours.
            needs_ours = self.root_device.type == "cpu" or team is not None
            is_torchs = type(self._layer_sync).__name__ == "TorchSyncBatchNorm"
            layer_sync: Any = OwnSyncBatchNorm(team) if is_torchs and needs_ours else self._layer_sync
            self.model = layer_sync.apply(self.model)
            self._set_up.callback(lambda: setattr(self, "model", layer_sync.revert(self.model)))
        if self.is_distributed:
            loop = SameLoop(trainer, not self._recovers and self.world_size > 1, team, come_together)
            self._set_up.callback(loop.close)
            self._preemption = loop.preemption
            if self.world_size > 1 and not world.current().replaces and trainer.state.fn != "predict":
                evaluating = trainer.fit_loop.epoch_loop.val_loop if is_fitting else trainer._active_loop
                self._evaluation = EvenEvaluation(evaluating, self.lightning_module, self.group)
                self._set_up.callback(self._evaluation.close)
            if self.world_size > 1 and trainer.state.fn == "predict":
                self._set_up.callback(Predictions(trainer, self._gathers, self.group).close)
            joins = self._joins and self._global_batch is None and not world.current().replaces
            if is_fitting and joins and self.world_size > 1:
                self._uneven = UnevenData(self, trainer, loop, team)
                self._set_up.callback(self._uneven.close)
        super().setup(trainer)
        if self.group is not None:  # even of one rank
            self._set_up.callback(metrics_within(self.group, self.lightning_module))
        if is_fitting and self.is_distributed:
            assert self.lightning_module is not None
            self._buffers = BufferBroadcast(self.lightning_module, team) if self._broadcast_buffers else None
            self._drift = DriftCheck(self._drift.every)
        if is_fitting and (self.is_distributed or self._skip_step_on or self._global_batch):
            own = {} if self._local is None else self._local.averager_arguments
            self._averager = GradientAverager(self.lightning_module, **{**self._averager_arguments, **own})
            self._averager.tells_same_samples = False  # `tell_if_undivided` does
            self._set_up.callback(self._averager.close)
            self._averager.compare_options(partial(_groups_of, self))
            self._shared_step = SharedStep(
                self._averager,
                self.lightning_module.automatic_optimization,
                lambda: self._accumulates or self._trainer.accumulate_grad_batches > 1 or bool(self._global_batch),
                self._skip_step_on,
            )

    def _begin_local(self, trainer: Any) -> tuple[Group | None, Callable[[], None] | None]:
        """The ranks that average every step, and what they do before all come together."""
        if not self.is_distributed or self.arguments["sync_every"] is None:
            return self.group, None
        steps, follows = max(trainer.max_steps, 0) or None, lambda: self._preemption
        self._local = LocalTraining(self.lightning_module, self.arguments, self.group, follows, steps)
        self._set_up.callback(self._local.close)
        return self._local.team, self._local.exchange

    def _divide_data(self, trainer: Any, is_fitting: bool) -> None:
        loaded, self._loaded = self._loaded, None
        if is_fitting:
            self._mid_epoch = MidEpoch(self, trainer, loaded)
            self._set_up.callback(self._mid_epoch.close)
        if is_fitting or self.is_distributed:
            self._set_up.callback(Shares(self, trainer).close)
        if is_fitting and self.arguments["global_batch_size"] is not None:
            self._global_batch = GlobalBatch(self, trainer)
            self._set_up.callback(self._global_batch.close)
        elif is_fitting and self.is_distributed and not self._recovers:
            self.on_train_batch_start = self._begin_first_batch

    def _begin_first_batch(self, batch: Any, batch_idx: int) -> None:
        """In place of Lightning's hook in the first batch of `fit`, and only there."""
        del self.on_train_batch_start
        if self.world_size > 1:
            own = None if self.ran_out else batch  # else it is another rank's
            tell_if_undivided(self._trainer.fit_loop._combined_loader, own, self.group)
        self.on_train_batch_start(batch, batch_idx)

    @override
    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        self.optimizers = self._sharded(self.optimizers, self.lightning_module.named_parameters())

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state, which rank 0 writes; all ranks call this, as Lightning does."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # of Lightning's wrapper for manual optimization
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.state_dict(to=self.first_rank)
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._local is not None and optimizer is self.optimizers[0]:
            self._local.save_into(state)
        return state

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._local is not None and checkpoint["optimizer_states"]:
            self._local.resume(checkpoint["optimizer_states"][0])

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state for a checkpoint, which all ranks make."""
        if self._local is not None and not has_failed():
            self._local.exchange()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    @override
    def _setup_model(self, model: Module) -> Module:
        if self.is_distributed:
            broadcast_parameters(model, self.first_rank, group=self.group)
        result: Module = super()._setup_model(model)
        return result

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step():
            return super().test_step(*args, **kwargs)

    def _evaluation_step(self) -> AbstractContextManager[None]:
        return self._evaluation.step() if self._evaluation is not None else nullcontext()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffers is not None:
            self._buffers.before_training_step()
        step = super().training_step
        if self._shared_step is None:
            return step(*args, **kwargs)
        with nullcontext() if self._uneven is None else self._uneven.step():
            output: Any = self._shared_step.attempt(lambda: step(*args, **kwargs))
        if output is None and self._shared_step.has_failed:
            # Lightning 2.6.6, pytorch/loops/optimization/automatic.py:323, rejects None with several ranks.
            return torch.full((), torch.nan, device=self.root_device)
        return output

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._shared_step is None:
            return super().backward(closure_loss, *args, **kwargs)  # type: ignore[no-any-return]
        backward = super().backward
        if self._uneven is not None:
            closure_loss = self._uneven.weighed(closure_loss)
        loss: Tensor | None = self._shared_step.attempt(lambda: backward(closure_loss, *args, **kwargs))
        return closure_loss.detach() if loss is None else loss

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        # `toggle_model` freezes and unfreezes within a training step, and Lightning calls the step, not the module's
        # forward, in which the averager would notice.
        if self._averager is not None and not self._accumulates:
            self._averager.prepare()

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        step = super().optimizer_step
        if self._shared_step is None:
            return step(optimizer, closure, *args, **kwargs)
        assert self._averager is not None
        if self._drift.every and self._shard:
            self._check_drift(self._averager)  # before the step, which gives all ranks the same weights
        if self._local is not None:
            self._local.before_step()
        skipped_before = self._averager.skipping.count
        self._shared_step.weight = 1.0 if self._uneven is None else self._uneven.weight
        result = self._shared_step.run(optimizer, closure, lambda one: step(optimizer, one, *args, **kwargs))
        if self._recovers and self._preemption is not None:
            self._preemption.after_pass()
        if self._local is not None:
            self._local.after_step()
        if self._averager.skipping.count > skipped_before:
            return result
        self._averager.checks.updates.add()
        if self._drift.every and not self._shard:
            self._check_drift(self._averager)
        return result

    def _check_drift(self, averager: GradientAverager) -> None:
        self._drift.after_step(lambda: parameter_checksums(averager.named_parameters), averager.communicator)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Let gradients accumulate on this rank inside the context."""
        if self._averager is None:
            yield
        else:
            before, self._accumulates = self._accumulates, True
            try:
                with self._averager.no_sync():
                    yield
            finally:
                self._accumulates = before

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._loaded = {key: checkpoint[key] for key in (KEY, "loops") if key in checkpoint}
        return checkpoint

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._mid_epoch is not None and "loops" in checkpoint:
            checkpoint = {**checkpoint, KEY: self._mid_epoch.state()}
        if self._averager is not None:
            self._averager.check()
            if self._averager.steps and not has_failed():
                self._averager.checks.weights.compare("before this checkpoint is saved", self._averager.communicator)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._take_signals()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._local is not None:
            self._local.finish()
        if self._averager is not None:
            self._averager.checks.weights.compare("when training ended", self._averager.communicator)
        self._broadcast_all_buffers()

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._on_evaluation_start()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._on_evaluation_start()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._on_evaluation_start()

    def _on_evaluation_start(self) -> None:
        self._take_signals()
        self._broadcast_all_buffers()

    def _take_signals(self) -> None:
        if self._preemption is not None:
            self._preemption.take_signals()

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _broadcast_all_buffers(self) -> None:
        if self._broadcast_buffers and self.is_distributed:
            assert self.model is not None
            BufferBroadcast(self.model, self.group).broadcast_all()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        set_exit_status(exception)
        report_failure(exception)
        if self._preemption is not None and is_sigterm(exception):
            self._preemption.requeue()

    @override
    def teardown(self) -> None:
        self._undo_setup()
        super().teardown()

    def _undo_setup(self) -> None:
        if self._averager is not None:
            self._waited_seconds += self._averager.waited_seconds
        self._set_up.close()
        self.__dict__.pop("on_train_batch_start", None)
        self._averager = self._buffers = self._shared_step = self._uneven = self._evaluation = None
        self._preemption = self._local = self._mid_epoch = self._global_batch = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Hooks and communication threads stay in the process they belong to.
        state: dict[str, Any] = super().__getstate__()
        return {
            **{name: value for name, value in state.items() if name != "on_train_batch_start"},
            "_averager": None,
            "_shared_step": None,
            "_uneven": None,
            "_evaluation": None,
            "_preemption": None,
            "_local": None,
            "_mid_epoch": None,
            "_global_batch": None,
            "_set_up": ExitStack(),
        }


def _groups_of(strategy: Any) -> list[dict[str, Any]]:
    """The parameter groups of a strategy's optimizers."""
    return list(chain.from_iterable(map(_groups_in, strategy.optimizers)))


check_calls({"RingStrategy": RingTrainerLogic}, ("RingStrategy",))
