"""The callback that makes `model.fit` train on all ranks together."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Literal

import keras

from ring_plugins.core.arrays.codec import CodecName, Compression
from ring_plugins.core.base.errors import ArgumentError, DriftError, MismatchError, RingError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.gradients.trials import Wanted, chosen_overlap
from ring_plugins.core.joining.join import admit, join
from ring_plugins.core.joining.root import Root
from ring_plugins.core.joining.state_transfer import fails_alone
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import (
    BUCKET_BYTES,
    GradientAveraging,
    averaging_of,
    make_train_function,
    not_sharded,
)
from ring_plugins.keras.backends import backend
from ring_plugins.keras.batch_norm import SynchronizedBatchNorm
from ring_plugins.keras.callback_list import (
    arrange,
    call_when_over,
    check_formats,
    decisions_of,
    differing_decisions,
    enclosing_list,
    saves_weights,
)
from ring_plugins.keras.drift import LIKELY_CAUSES, check_drift
from ring_plugins.keras.interrupted_fit import argument_of_fit, tell_interrupted
from ring_plugins.keras.job import connect
from ring_plugins.keras.joining import joins_within_fit, place_of_fit, share_state
from ring_plugins.keras.learning_rate import forget_last_rate, warn_of_steps
from ring_plugins.keras.recovery import LossWatch, check_equal
from ring_plugins.keras.shard import begin_epoch, continue_at
from ring_plugins.keras.sharded_optimizer import readmit
from ring_plugins.keras.state import (
    average_variables,
    broadcast_state,
    build_optimizer,
    check_built,
    optimizers_of,
    weight_checksums,
)
from ring_plugins.keras.validation import (
    FIT,
    STOP,
    SynchronizedStop,
    check_equal_epochs,
    check_equal_learning_rates,
    check_equal_steps,
    check_other_parallelism,
    check_root,
    differing_options,
)
from ring_plugins.keras.writers import HeldWriter, warn_of_lone_writers
from ring_plugins.observe.consistency import DriftCheck, chosen_interval, differing_weights, is_compared_after
from ring_plugins.observe.training import announce_training

#: Callbacks whose `fit` has begun and not ended, as far as they know.
_fitting: weakref.WeakSet[BroadcastCallback] = weakref.WeakSet()


def synchronize_fit(model: Any) -> None:
    """Bring all ranks together after the last step of an epoch, if a `BroadcastCallback` trains this model."""
    for callback in list(_fitting):
        if callback.model is model:
            callback._synchronize_state()


def broadcast_variables(model: keras.Model, root_rank: int = 0) -> None:
    """Broadcast a model's state, as `BroadcastCallback` does, for custom training loops. Collective.

    Args:
        model: a built model; its compiled optimizer, and optimizers that are its attributes, are included.
        root_rank: the rank whose state all ranks get.

    Raises:
        ArgumentError: the model is not built, or `root_rank` is not a rank.
        MismatchError: the models differ among ranks.
    """
    world = connect()
    with on_all_or_none(world.communicator, "broadcast_variables"):
        check_root(root_rank, world)
        if world.topology.size > 1:
            check_built(model)
            for optimizer in optimizers_of(model):
                readmit(optimizer)
            build_optimizer(model)
            for averaging in filter(None, map(averaging_of, optimizers_of(model))):
                if averaging.sharded is not None and averaging.optimizer.built:
                    averaging.sharded.share(averaging.variables, root_rank)
            broadcast_state(model, Root(root_rank), world.communicator)


class BroadcastCallback(keras.callbacks.Callback):
    """Starts all ranks from the same state and keeps them synchronized.

    Before the first update every rank gets the root's weights, optimizer state and moving statistics; seeds are offset
    by rank, so that dropout differs. From then on gradients are averaged (a `DistributedOptimizer` already does that).
    The model and optimizer are restored when `fit` is over. When any rank wants to stop (`EarlyStopping`,
    `model.stop_training`), all stop after the same step. Only the root writes checkpoints, logs and the progress bar.

    With `init(on_failure="replace")`, a process that takes the place of a lost rank joins at the end of an epoch, with
    the others' state (docs/healing.md).

    The callback moves itself to the end of the list, after callbacks that restore a state or decide to stop.

    Args:
        root_rank: the rank that broadcasts its state and writes files. If it is lost and the job goes on, the lowest
            rank that is left does so.
        average_gradients: False only broadcasts, so the weights of the ranks will diverge.
        moving_statistics: "average" makes the non-trainable weights (moving means and variances of
            BatchNormalization) equal by averaging them before each validation and at the end of each epoch; "local"
            keeps each rank's own.
        synchronized_batch_norm: True makes all `BatchNormalization` layers use mean and variance of all ranks' batches,
            at the cost of two small messages per layer and step; False makes each rank use those of its own batch;
            None synchronizes only layers made with `synchronized=True`.
        write_on_root_only: False lets every rank write checkpoints and logs; use different paths on each rank.
        bucket_bytes: size in bytes of the buckets in which gradients are averaged, 4 MiB by default.
        compression: "fp16" or "bf16" sends gradients in 16 bits between hosts; ranks on one host sum in full
            precision.
        error_feedback: whether the rounding error of a step is added to the next.
        overlap: whether gradients are averaged while others are still computed; see `DistributedOptimizer`.
        shard_optimizer: whether each rank updates only its part of every variable and keeps only that part's slot
            variables, such as Adam's momentum and velocity. When `fit` is over, the root has the whole state, and other
            ranks' optimizers have none until the next `fit`; see docs/sharded_optimizer.md.
        drift_check_every: batches after which the trainable weights of all ranks are compared; 0 for never,
            RING_DRIFT_CHECK by default.

    With one rank it does nothing. All ranks must pass the same arguments and take the same number of steps.

    Raises:
        ArgumentError: an argument is invalid, or something else already trains the model in parallel.
        MismatchError: models, optimizers or numbers of steps differ among ranks.
        DriftError: the weights differ among ranks.
        RingError: a step did not average, for example because `train_step` updates with an optimizer that is not an
            attribute of the model.
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
        compression: CodecName | None = None,
        error_feedback: bool = False,
        overlap: bool | Literal["auto"] = "auto",
        shard_optimizer: bool = False,
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
        self.compression, self.error_feedback = compression, error_feedback
        chosen_overlap(overlap)  # raises now rather than in fit
        self.overlap: Wanted = overlap
        self.shard_optimizer = shard_optimizer
        if shard_optimizer and not average_gradients:
            raise ArgumentError("shard_optimizer=True needs average_gradients=True: parts of equal models are updated.")
        Compression.named(compression, error_feedback)  # raises now rather than in fit
        self.drift_check_every = chosen_interval(drift_check_every)
        self._drift = DriftCheck(0)
        self._first = _First(self._begin_data, self._synchronize_state)
        self._installed: list[GradientAveraging] = []
        self._communicators: list[Communicator] = []
        self._batch_norm: SynchronizedBatchNorm | None = None
        self._stop: SynchronizedStop | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._losses: LossWatch | None = None
        self._root: Root | None = None
        self._writers: list[HeldWriter] = []
        self._is_fitting, self._has_begun = False, False
        self._passes_before, self._steps_until_check = 0, 0
        self._saves_weights = False
        self._is_synchronized = self._has_told_difference = False
        self._first_epoch: Any = None
        self._epoch: int | None = None

    #: Tells `check_first_step` not to add another callback that compares weights.
    compares_weights = True
    #: Tells `watch_fit` that this callback tells other ranks of an exception that ends `fit`.
    tells_interruptions = True

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        world = connect()
        check_root(self.root_rank, world)
        callbacks = enclosing_list(self)
        self._root, self._writers = Root(self.root_rank), []
        if callbacks is not None and world.topology.size > 1:
            self._saves_weights = saves_weights(callbacks)
            self._first.set_model(model)
            saves_together = self.shard_optimizer or any(averaging.sharded for averaging in self._active())
            if saves_together:
                check_formats(callbacks)
            self._writers = arrange(
                callbacks,
                self._first,
                self,
                self._root.is_here,
                self.write_on_root_only,
                world.recovers,
                saves_together,
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        world = connect()
        self._epoch = None
        if self._model.optimizer is not None:
            forget_last_rate(self._model.optimizer)
        for callback in list(_fitting):  # an exception that the script keeps may keep an interrupted fit alive
            if callback.model is self.model:
                callback._abandon()
        if world.topology.size == 1:
            return
        announce_training()
        self._is_fitting, self._has_begun, self._has_told_difference = True, False, False
        _fitting.add(self)
        self._finalizer = call_when_over(self, self._abandon)
        if self._finalizer is not None:
            self._finalizer.atexit = False  # at exit the other ranks learn how this one ended
        self._communicator, stop = world.new_communicator(FIT), world.new_communicator(STOP)
        self._communicators = [self._communicator, stop]
        self._stop = SynchronizedStop(stop, self._take_part_in_saving, self._tell_interrupted)
        self._losses = LossWatch()
        self._drift = DriftCheck(self.drift_check_every)
        model = self.model
        check_other_parallelism(model)
        check_equal_steps(self.params, self._communicator)
        # If the root restored a backup, all ranks continue from there.
        model._initial_epoch = self._first_epoch = repeated(self._initial_epoch)
        # A script may give the callback that saves to one rank only.
        self._saves_weights = any(self._communicator.all_gather_object(self._saves_weights, "fit"))
        if world.recovers and self.write_on_root_only:
            warn_of_lone_writers(self._writers, self._communicator)
        if any(self._communicator.all_gather_object(backend().is_lazy(model), "fit")):
            if world.replaces:
                raise ArgumentError(
                    'with on_failure="replace", a model must be built before fit(), so that a process that takes the '
                    "place of a lost rank can get the weights: begin it with keras.Input(...), or call it once."
                )
            backend().before_first_step(model, self._start)
        else:
            self._start()
        if world.elastic.is_added:
            raise ArgumentError(
                "ranks cannot be added within a fit(), whose data is divided once for all epochs: make a "
                "ring_plugins.keras.TrainingState, and call shard() and fit() for each epoch."
            )
        if world.is_joining:
            self._join()

    def _initial_epoch(self) -> Any:
        """The root's first epoch, on all ranks."""
        assert self._root is not None
        self._settle_writers()  # one of them may restore a backup
        root = self._root.rank_in(self._communicator)
        return self._communicator.broadcast_object(self._model._initial_epoch, root, operation="initial_epoch")

    def _start(self) -> None:
        """Broadcast the root's state and install the averaging."""
        model, root = self.model, self._root
        assert root is not None
        for optimizer in optimizers_of(model):
            readmit(optimizer)
        self._install()
        active = self._active()
        # A fit that an exception ended, on this rank or another, has released those of the script's own optimizers.
        released = [averaging.settings.name for averaging in active if averaging.exchange is None]
        anywhere = set(itertools.chain.from_iterable(self._communicator.all_gather_object(released, "memory of fit")))
        for averaging in active:
            if averaging.settings.name in anywhere:
                averaging.release()
        for averaging in active:
            self._share(averaging, root)
        build_optimizer(model)
        broadcast_state(model, root, self._communicator)
        backend().offset_seed(self._communicator, root)
        for averaging in active:
            averaging.is_equal, averaging.compares_weights = True, False
            # `compile()` without an optimizer makes an RMSprop for all variables. A GAN whose optimizers are other
            # attributes never uses it, and on torch a variable has one averager.
            is_perhaps_unused = averaging.optimizer is model.optimizer and len(active) > 1
            if averaging.optimizer.built and not is_perhaps_unused:
                averaging.prepare(averaging.variables)
        if self.synchronized_batch_norm is not False:
            self._batch_norm = SynchronizedBatchNorm(model, every=self.synchronized_batch_norm is True)
            self._batch_norm.install()
        make_train_function(model)
        assert self._stop is not None
        self._stop.watch_steps(model)
        self._passes_before = self._passes()
        self._steps_until_check = max((averaging.accumulation_steps for averaging in self._active()), default=1)

    def _join(self) -> None:
        """In a process that takes the place of a lost rank: go on with the others from the end of an epoch."""
        self._settle_writers()  # what they have not written belongs to this process alone
        joined = join(place_of_fit(self.params, self._model), "finish the epoch")
        with fails_alone():
            told = self._share_state(0, joined)
        self._after_joining()
        assert told is not None
        assert self._root is not None
        self._root.world_rank, self._saves_weights = told["root"], told["saves_weights"]
        self._epoch, self._has_begun, self._steps_until_check = told["epoch"], True, told["steps_until_check"]
        self._passes_before = self._passes() - told["passes"]
        self._first_epoch, self._model._initial_epoch = told["first_epoch"], told["epoch"] + 1

    def _share_state(self, epoch: int, joined: tuple[int, ...]) -> dict[str, Any] | None:
        """Give those that have joined this rank's state, and what it knows of this `fit`; returns that on them."""
        assert self._root is not None
        callbacks = enclosing_list(self)
        told = {
            "epoch": epoch,
            "first_epoch": self._first_epoch,
            "root": self._root.world_rank,
            "saves_weights": self._saves_weights,
            "steps_until_check": self._steps_until_check,
            "passes": self._passes() - self._passes_before,
        }
        own = [] if callbacks is None else callbacks.callbacks
        return share_state([self.model], own, told, joined, self._communicator)

    def _after_joining(self) -> None:
        current().elastic.tell_changes()
        for writer in self._writers:
            writer.hand_over()

    def _forget_joining(self) -> None:
        """Let a later `fit` begin where the other ranks' does: Keras has read where this one begins, but keeps it."""
        self._model._initial_epoch = self._first_epoch

    def _install(self) -> None:
        """Let the model's optimizers average, those that do not yet."""
        if not self.average_gradients:
            return
        for optimizer in optimizers_of(self._model):
            averaging = averaging_of(optimizer)
            if averaging is None:
                options = self.bucket_bytes, self.compression, self.error_feedback, self.overlap
                averaging = GradientAveraging(optimizer, *options, shard_optimizer=self.shard_optimizer)
                averaging.install()
                self._installed.append(averaging)
            elif self.shard_optimizer and averaging.sharded is None:
                raise not_sharded(optimizer)

    def _share(self, averaging: GradientAveraging, root: Root) -> None:
        """Divide the root's state of an optimizer among all ranks, if it is to be sharded and known."""
        sharded, optimizer = averaging.sharded, averaging.optimizer
        if sharded is None:
            return
        if optimizer is self._model.optimizer:
            sharded.share(averaging.variables or self._model.trainable_variables, root.rank_in(self._communicator))
        elif all(self._communicator.all_gather_object(optimizer.built, "state of optimizers")):
            sharded.share(averaging.variables, root.rank_in(self._communicator))
        sharded.before_saving = self._request_saving(averaging)

    def _request_saving(self, averaging: GradientAveraging) -> Callable[[], None]:
        """What makes the other ranks take part when this one saves: most callbacks that save are on one rank only."""
        assert self._stop is not None
        number, stop = self._active().index(averaging) + 1, self._stop
        return lambda: stop.request(number)

    def _take_part_in_saving(self, number: int) -> None:
        _ = self.model  # on JAX, gives the variables their values of the last step
        sharded = self._active()[number - 1].sharded
        assert sharded is not None
        sharded.take_part_in_saving()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_synchronized = False
        self._begin_data(epoch)
        if not self._is_fitting:
            return
        assert self._stop is not None
        self._forget_joining()
        self._stop.watch_steps(self._model)
        if not self._has_begun:
            self._has_begun = True
            check_equal_epochs(epoch, self._communicator)

    def _begin_data(self, epoch: int) -> None:
        """Let data have the order of the first epoch of this fit, which Keras tells no earlier."""
        if self._epoch is None:
            continue_at(epoch, argument_of_fit("x"))
            warn_of_steps(self.model, epoch, (self.params or {}).get("steps"))
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._is_fitting:
            return
        assert self._stop is not None
        self._steps_until_check -= 1
        if self._steps_until_check == 0:
            self._check_averaged()
            self._compare_weights("after the first step")
        if self._drift.every:
            self._drift.after_step(lambda: weight_checksums(self._model), self._communicator)
        elif self.average_gradients and is_compared_after(1 - self._steps_until_check):
            optimizers = [averaging.optimizer for averaging in self._active()]
            when = f"after step {batch + 1} of epoch {(self._epoch or 0) + 1}"
            check_drift(lambda: weight_checksums(self._model), optimizers, when, self._communicator)
        self._after_exchange(self._stop.after_step(self._model, batch))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._epoch is not None:
            begin_epoch(argument_of_fit("validation_data"), self._epoch)
        self._synchronize_state()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._is_fitting:
            return
        assert self._stop is not None
        self._after_exchange(self._stop.after_epoch(self._model))
        if self._model.optimizer is not None:
            check_equal_learning_rates(self._model.optimizer, self._communicator)
        if current().elastic.is_pending and joins_within_fit() and not self._model.stop_training:
            joined = admit(place_of_fit(self.params, self._model))
            if joined:
                self._share_state(epoch, joined)
                self._after_joining()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if not self._is_fitting:
            return
        self._forget_joining()  # again, as there may have been no epoch left
        self._compare_what_callbacks_left()
        sharded = [averaging.sharded for averaging in self._active() if averaging.sharded is not None]
        # A writer may still be lost while it completes its files, or save here.
        if current().recovers or sharded:
            assert self._stop is not None
            self._after_exchange(self._stop.after_epoch(self.model))
        assert self._root is not None
        for averaging in self._installed:
            if averaging.sharded is not None:
                averaging.sharded.restore(self._root.rank_in(self._communicator))
        self._restore()

    # Helpers ----------------------------------------------------------------------------------------

    def _active(self) -> list[GradientAveraging]:
        found = [averaging_of(optimizer) for optimizer in optimizers_of(self._model)]
        return [averaging for averaging in found if averaging is not None]

    def _passes(self) -> int:
        return sum(averaging.passes for averaging in self._active())

    def _after_exchange(self, wants_change: bool) -> None:
        """Do what is due after ranks were lost, or if some leave or wait to join; all know after an exchange."""
        if wants_change:
            current().elastic.change_members()
        self._settle_writers()
        assert self._losses is not None
        if self._losses.has_changed():
            if self.average_gradients:
                check_equal(lambda: weight_checksums(self._model), self._communicator)
            current().elastic.tell_changes()

    def _settle_writers(self) -> None:
        for writer in self._writers:
            writer.settle()

    def _check_averaged(self) -> None:
        """Check that the first update was averaged."""
        if self.average_gradients and self._model.trainable_variables and self._passes() <= self._passes_before:
            raise RingError(
                f"rank {self._communicator.rank} took its first step without averaging gradients. "
                f"{type(self._model).__name__}.train_step seems to update with an optimizer that is not an attribute "
                "of the model, or without optimizer.apply; wrap that optimizer with "
                "ring_plugins.keras.DistributedOptimizer."
            )

    def _compare_weights(self, when: str) -> None:
        """Warn on the root if the ranks' weights differ, although their gradients are averaged."""
        if not self.average_gradients:
            return
        assert self._root is not None
        found = differing_weights(lambda: weight_checksums(self._model), when, self._communicator)
        self._has_told_difference |= bool(found)
        if found and self._root.is_here():
            logger.warning(
                f"{found} A rank made a different update: a train_step or an optimizer that draws random numbers, or "
                "weights that no averaged optimizer updates. If they differ on purpose, RING_WEIGHT_CHECK=0 switches "
                "this comparison off."
            )

    def _compare_what_callbacks_left(self) -> None:
        """Compare what the other callbacks may have set when `fit` ends, each on its own rank.

        Raises:
            DriftError: the weights differ, and no warning has said so before.
        """
        decisions = self._communicator.all_gather_object(decisions_of(enclosing_list(self)), "end of epoch")
        told = differing_decisions(decisions, self._communicator.ranks)
        remedy = (
            "Callbacks that watch a metric see that of their own rank's data: add MetricAverageCallback() on all ranks."
        )
        all_weights = self.moving_statistics == "average"
        found = self.average_gradients and differing_weights(
            lambda: weight_checksums(self.model, all_weights), "when fit() ended", self._communicator
        )
        if found and not self._has_told_difference:
            options = differing_options([averaging.optimizer for averaging in self._active()], self._communicator)
            if told:
                cause = f"Callbacks decided differently: {told}. {remedy}"
            elif options:
                cause = f"The cause is likely that {options}. Set the same on all ranks."
            else:
                cause = f"{LIKELY_CAUSES} {remedy}"
            raise DriftError(f"{found} {cause}")
        assert self._root is not None
        if told and self._root.is_here():
            logger.warning(f"callbacks decided differently on the ranks: {told}. {remedy}")

    def _synchronize_state(self) -> None:
        """Average moving statistics and accumulators, once per epoch, before validation and saving."""
        if not self._is_fitting or self._is_synchronized:
            return
        assert self._stop is not None
        self._is_synchronized = True
        if self._saves_weights and self._steps_until_check <= 0:
            self._compare_weights("at the end of this epoch, before checkpoints are saved,")
        self._after_exchange(self._stop.after_epoch(self._model))  # raises if another rank is still in its epoch
        variables = list(self.model.non_trainable_weights) if self.moving_statistics == "average" else []
        for averaging in self._active():
            variables += averaging.accumulators()
        average_variables(variables, self._communicator)

    def _tell_interrupted(self, cause: MismatchError | None) -> None:
        averagers = [communicator for averaging in self._active() for communicator in averaging.communicators()]
        tell_interrupted((*averagers, *self._communicators), cause)

    def _abandon(self) -> None:
        """Undo all changes after a fit that an exception ended, and tell ranks that still train and wait for this one.

        They raise, and a later fit works on all ranks.
        """
        if self._is_fitting:
            mismatch = self._stop.mismatch if self._stop is not None else ""
            self._tell_interrupted(MismatchError(mismatch) if mismatch else None)
            for averaging in self._active():  # those that the script itself has distributed stay installed
                averaging.release()
        self._restore()

    def _restore(self) -> None:
        """Undo all changes to model and optimizers."""
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if not self._is_fitting:
            return
        self._is_fitting = False
        _fitting.discard(self)
        self._model.train_function = None  # traced with the averaging
        for averaging in self._active():
            averaging.compares_weights = True
            if averaging.sharded is not None:
                averaging.sharded.before_saving = None
        for averaging in self._installed:
            averaging.remove()
        self._installed = []
        if self._batch_norm is not None:
            self._batch_norm.remove()
            self._batch_norm = None
        for communicator in self._communicators:
            communicator.close()
        self._communicators = []


class _First(keras.callbacks.Callback):
    """First in the list: synchronizes data and state, so that all other callbacks see these, and save the average."""

    def __init__(self, begin_data: Callable[[int], None], synchronize_state: Callable[[], None]) -> None:
        super().__init__()
        self._begin_data, self._synchronize_state = begin_data, synchronize_state

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin_data(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._synchronize_state()
