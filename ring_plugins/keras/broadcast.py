"""The callback that makes `model.fit` train on all ranks together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import keras

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.averaging import BUCKET_BYTES, Averaging, averaging_of, optimizers_of
from ring_plugins.keras.backends import backend
from ring_plugins.keras.batch_norm import SynchronizedBatchNorm
from ring_plugins.keras.callback_list import arrange, enclosing_list, when_over
from ring_plugins.keras.connection import check_root, connect
from ring_plugins.keras.refusals import refuse_different_epochs, refuse_other_parallelism, refuse_unequal_steps
from ring_plugins.keras.state import average_variables, broadcast_state, build_optimizers, weight_checksums
from ring_plugins.keras.stopping import StopTogether
from ring_plugins.observe.drift import DriftCheck, chosen_interval, drift_check


class BroadcastCallback(keras.callbacks.Callback):
    """Starts all ranks from one state and keeps them together.

    Before the first update every rank gets the root's weights, optimizer state and moving statistics; seeds are
    offset by rank, so that each drops other units out. Gradients are averaged from then on, unless the optimizer
    already is a `DistributedOptimizer`; all of that is undone when `fit` is over. A rank that wants to stop
    (`EarlyStopping`, `model.stop_training`) stops all of them after the same step, and only the root writes
    checkpoints, logs and the progress bar.

    It moves itself to the end of the list of callbacks, behind those that restore a state or decide to stop.

    Args:
        root_rank: whose state everyone starts from, and who writes.
        average_gradients: False only broadcasts; the replicas then drift apart.
        moving_statistics: "average" makes the non-trainable weights (moving means and variances of
            BatchNormalization) equal by averaging them before each validation and at the end of each epoch; "local"
            leaves each rank its own.
        synchronized_batch_norm: True lets all `BatchNormalization` layers normalise by mean and variance of all ranks'
            batches together, as one process would, for two small messages a layer and step; False lets each rank
            normalise by its own batch; None does the former for layers made with `synchronized=True`.
        write_on_root_only: False lets checkpoints and logs be written by every rank; give them paths of their own.
        bucket_bytes: size in bytes of the buckets in which gradients are averaged.
        compression: "fp16" or "bf16" sends gradients in 16 bits between hosts; those of ranks on one host are added up
            in full.
        error_feedback: whether what this rounding loses in a step is added to the next.
        drift_check_every: compare the trainable weights of all ranks after every so many batches; 0 for never,
            RING_DRIFT_CHECK by default.

    With one rank it does nothing. All ranks use it alike, with as many steps.

    Raises:
        ArgumentError: an argument has no meaning, or something else already trains the model in parallel.
        MismatchError: models, optimizers or numbers of steps differ among ranks.
        DriftError: the weights have come to differ.
        RingError: a step was taken without averaging, as happens when `train_step` updates with an optimizer that
            the model does not hold.
    """

    def __init__(
        self,
        root_rank: int = 0,
        *,
        average_gradients: bool = True,
        moving_statistics: Literal["average", "local"] = "average",
        synchronized_batch_norm: bool | None = None,
        write_on_root_only: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Literal["fp16", "bf16"] | None = None,
        error_feedback: bool = False,
        drift_check_every: int | None = None,
    ) -> None:
        super().__init__()
        if moving_statistics not in ("average", "local"):
            raise ArgumentError(f'moving_statistics={moving_statistics!r} must be "average" or "local".')
        self.root_rank = root_rank
        self.average_gradients = average_gradients
        self.moving_statistics = moving_statistics
        self.synchronized_batch_norm = synchronized_batch_norm
        self.write_on_root_only = write_on_root_only
        self.bucket_bytes = bucket_bytes
        self.wire_arguments: dict[str, Any] = {"compression": compression, "error_feedback": error_feedback}
        Compression.named(compression, error_feedback)  # raises now what fit would
        self.drift_check_every = chosen_interval(drift_check_every)
        self._drift: DriftCheck | None = None
        self._first = _EpochIsOver(self._settle)
        self._installed: list[Averaging] = []
        self._communicators: list[Communicator] = []
        self._batch_norm: SynchronizedBatchNorm | None = None
        self._stop: StopTogether | None = None
        self._over: weakref.finalize[..., Any] | None = None
        self._under_way = False
        self._has_begun = False
        self._reductions, self._steps_until_check = 0, 0
        self._settled = False

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        world = connect()
        check_root(self.root_rank, world)
        callbacks = enclosing_list(self)
        if callbacks is not None and world.topology.size > 1:
            self._first.set_model(model)
            arrange(callbacks, self._first, self, world.topology.rank == self.root_rank, self.write_on_root_only)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        world = connect()
        self._restore()
        if world.topology.size == 1:
            return
        self._under_way, self._has_begun = True, False
        self._over = when_over(self, self._restore)
        self._communicator, stop = world.new_communicator("fit"), world.new_communicator("stop")
        self._communicators = [self._communicator, stop]
        self._stop = StopTogether(stop)
        self._drift = drift_check(self.drift_check_every, lambda: weight_checksums(self.model))
        model = self.model
        refuse_other_parallelism(model)
        refuse_unequal_steps(self.params, self._communicator)
        # A rank that restored a backup goes on where that ended, and so does everyone.
        model._initial_epoch = self._communicator.broadcast_object(model._initial_epoch, self.root_rank)
        if any(self._communicator.all_gather_object(backend().is_lazy(model))):
            backend().before_first_step(model, self._start_together)
        else:
            self._start_together()

    def _start_together(self) -> None:
        """Give all ranks one state and put the averaging into the train function."""
        model = self.model
        build_optimizers(model)
        broadcast_state(model, self.root_rank, self._communicator)
        backend().seed_apart(self._communicator, self.root_rank)
        if self.average_gradients:
            for optimizer in optimizers_of(model):
                if averaging_of(optimizer) is None:
                    averaging = backend().GradientAveraging(optimizer, self.bucket_bytes, **self.wire_arguments)
                    averaging.install()
                    self._installed.append(averaging)
        for averaging in self._active():
            if averaging.optimizer.built:
                averaging.prepare(averaging.variables)
        if self.synchronized_batch_norm is not False:
            self._batch_norm = SynchronizedBatchNorm(model, every=self.synchronized_batch_norm is True)
            self._batch_norm.install()
        # A function traced before would go on without averaging, and would say nothing.
        backend().make_train_function(model)
        self._reductions = self._count()
        self._steps_until_check = max((averaging.accumulation for averaging in self._active()), default=1)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._settled = False
        if self._under_way and not self._has_begun:
            self._has_begun = True
            refuse_different_epochs(epoch, self._communicator)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._under_way:
            return
        assert self._stop is not None
        self._steps_until_check -= 1
        if self._steps_until_check == 0:
            self._check_that_a_reduction_ran()
        if self._drift is not None:
            self._drift.after_step()
        self._stop.after_step(self._model, batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._settle()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._under_way:
            return
        assert self._stop is not None
        self._stop.after_epoch(self._model)
        self._check_learning_rates()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore()

    # Parts ----------------------------------------------------------------------------------------

    def _active(self) -> list[Averaging]:
        found = [averaging_of(optimizer) for optimizer in optimizers_of(self._model)]
        return [averaging for averaging in found if averaging is not None]

    def _count(self) -> int:
        return sum(averaging.reductions for averaging in self._active())

    def _check_that_a_reduction_ran(self) -> None:
        if self.average_gradients and self._model.trainable_variables and self._count() <= self._reductions:
            raise RingError(
                f"rank {self._communicator.rank} took its first step without averaging gradients. "
                f"{type(self._model).__name__}.train_step seems to update with an optimizer that is no attribute of "
                "the model, or without optimizer.apply; wrap that optimizer with "
                "ring_plugins.keras.DistributedOptimizer."
            )

    def _settle(self) -> None:
        """What ranks gather apart, once an epoch, before validation uses it and a checkpoint holds it."""
        if not self._under_way or self._settled:
            return
        assert self._stop is not None
        self._settled = True
        self._stop.after_epoch(self._model)  # and not wait for ranks that are elsewhere
        gathered = list(self.model.non_trainable_weights) if self.moving_statistics == "average" else []
        for averaging in self._active():
            gathered += averaging.left_over()
        average_variables(gathered, self._communicator)

    def _check_learning_rates(self) -> None:
        """Callbacks that decide on what one rank measured let the ranks drift apart."""
        optimizer = self._model.optimizer
        if optimizer is None:
            return
        rates = self._communicator.all_gather_object(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
        if len(set(rates)) > 1:
            raise MismatchError(
                f"learning rates have come to differ among ranks: {rates}, in rank order. A callback such as "
                "ReduceLROnPlateau decided on metrics of its own rank; add MetricAverageCallback()."
            )

    def _restore(self) -> None:
        """Leave model and optimizers as they were found, also after a fit that was interrupted."""
        if self._over is not None:
            self._over.detach()
            self._over = None
        if not self._under_way:
            return
        self._under_way = False
        self._model.train_function = None  # which has the averaging in it
        for averaging in self._installed:
            averaging.remove()
        self._installed = []
        if self._batch_norm is not None:
            self._batch_norm.remove()
            self._batch_norm = None
        for communicator in self._communicators:
            communicator.close()
        if self._drift is not None:
            self._drift.close()
            self._drift = None
        self._communicators = []


class _EpochIsOver(keras.callbacks.Callback):
    """Stands first in the list, so that all others see and write what the ranks agree on."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._settle()
