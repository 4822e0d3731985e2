"""The callback that makes `model.fit` train on all ranks together."""

from __future__ import annotations

from typing import Any, Literal

import keras

from ring_plugins.core.arrays.codec import CodecName
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.gradients.trials import Wanted, chosen_overlap
from ring_plugins.core.groups import Group
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.keras.averaging import BUCKET_BYTES, averagings_of
from ring_plugins.keras.backup import Backups
from ring_plugins.keras.consistency import updating_optimizers
from ring_plugins.keras.job import are_several, connect, members
from ring_plugins.keras.learning_rate import warn_of_steps
from ring_plugins.keras.local_updates import LocalFit, local_settings
from ring_plugins.keras.rates import forget_last_rate
from ring_plugins.keras.running_fit import argument_of_fit, call_when_over, enclosing_list
from ring_plugins.keras.shard import begin_epoch, continue_at
from ring_plugins.keras.sharded_optimizer import readmit
from ring_plugins.keras.state import broadcast_state, build_optimizer, check_built, optimizers_of
from ring_plugins.keras.synchronized_fit import SynchronizedFit, fits_of
from ring_plugins.keras.validation import check_equal, check_root
from ring_plugins.keras.writers import HeldWriter, arrange, check_formats, saves_weights
from ring_plugins.observe.consistency import chosen_interval


def broadcast_variables(model: keras.Model, root_rank: int | None = None, *, group: Group | None = None) -> None:
    """Broadcast a model's state, as `BroadcastCallback` does, for custom training loops. Collective.

    Args:
        model: a built model; its compiled optimizer, and optimizers that are its attributes, are included.
        root_rank: the rank of the job whose state all ranks get, by default the first.
        group: the ranks that get it, all by default. Only they call this.

    Raises:
        ArgumentError: the model is not built, `root_rank` is not a rank, or not one of the group, or this one is not.
        MismatchError: the models differ among ranks.
    """
    ranks = members(group).communicator
    with on_all_or_none(ranks, "broadcast_variables"):
        root = Root(check_root(root_rank, group))
        if are_several(ranks):
            check_built(model)
            for optimizer in optimizers_of(model):
                readmit(optimizer)
            build_optimizer(model)
            for averaging in averagings_of(model):
                if averaging.sharded is not None and averaging.optimizer.built:
                    averaging.sharded.share(averaging.variables, root.rank_in(ranks))
            broadcast_state(model, root, ranks)


class BroadcastCallback(keras.callbacks.Callback):
    """Starts all ranks from the same state and keeps them synchronized.

    Before the first update every rank gets the root's weights, optimizer state and moving statistics; seeds are offset
    by rank, so that dropout differs. From then on gradients are averaged (a `DistributedOptimizer` already does that).
    The model and optimizer are restored when `fit` is over. When any rank wants to stop (`EarlyStopping`,
    `model.stop_training`), all stop after the same step. Only the root writes checkpoints, logs and the progress bar.

    With `init(on_failure="replace")`, a process that takes the place of a lost rank joins at the end of an epoch, with
    the others' state (docs/fault_tolerance.md).

    The callback moves itself to the end of the list, after callbacks that restore a state or decide to stop.

    Args:
        root_rank: the rank of the job that broadcasts its state and writes files, by default the first. If it is lost
            and the job goes on, the lowest rank that is left does so.
        average_gradients: False only broadcasts, so the weights of the ranks will diverge.
        moving_statistics: "average" makes the non-trainable weights (moving means and variances of
            BatchNormalization) equal by averaging them before each validation and at the end of each epoch; "local"
            keeps each rank's own.
        synchronized_batch_norm: True makes all `BatchNormalization` layers use mean and variance of all ranks' batches,
            at the cost of two small messages per layer and step; False makes each rank use those of its own batch;
            None synchronizes only layers made with `synchronized=True`.
        write_on_root_only: False lets every rank write checkpoints and logs; use different paths on each rank.
        bucket_bytes: size in bytes of the buckets in which gradients are averaged, 4 MiB by default.
        compression: "fp16" or "bf16" sends gradients in 16 bits between hosts, "int8" in 8, "auto" as is fastest;
            ranks on one host sum in full precision.
        error_feedback: whether the rounding error of a step is added to the next; None: with "int8" only.
        overlap: whether gradients are averaged while others are still computed; see `DistributedOptimizer`.
        shard_optimizer: whether each rank updates only its part of every variable and keeps only that part's slot
            variables, such as Adam's momentum and velocity. When `fit` is over, the root has the whole state, and other
            ranks' optimizers have none until the next `fit`; see docs/sharded_optimizer.md.
        drift_check_every: batches after which the trainable weights of all ranks are compared; 0 for never,
            RING_DRIFT_CHECK by default.
        uneven: what happens if ranks have different numbers of batches. "join" trains to the end of the longest: a rank
            that has run out takes part with nothing, and averages are those of the samples that came. "error" raises a
            `MismatchError`.
        sync_every: steps, or a time such as "30s", between exchanges of weights among hosts; gradients are averaged
            inside a host only then (docs/slow_networks.md), and `compression` is that of exchanges. None averages all
            ranks' gradients in every step.
        outer: with `sync_every`: "average", "nesterov", or the outer optimizer's learning rate and momentum.
        fragments: with `sync_every`: parts of the weights that take turns; a divisor of it.
        delay: with `sync_every`: steps that go on while an exchange travels, less than `sync_every` / `fragments`.
        group: the ranks that train together, all by default. Others train something else, or pass a group of their own;
            each group writes its own files, so give these paths of their own.

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
        root_rank: int | None = None,
        *,
        average_gradients: bool = True,
        moving_statistics: Literal["average", "local"] = "average",
        synchronized_batch_norm: bool | None = None,
        write_on_root_only: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        compression: CodecName | None = None,
        error_feedback: bool | None = None,
        overlap: bool | Literal["auto"] = "auto",
        shard_optimizer: bool = False,
        drift_check_every: int | None = None,
        uneven: Literal["join", "error"] = "join",
        sync_every: int | str | None = None,
        outer: Literal["average", "nesterov"] | tuple[float, float] = "average",
        fragments: int = 1,
        delay: int = 0,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        if moving_statistics not in ("average", "local"):
            raise ArgumentError(f'moving_statistics={moving_statistics!r} must be "average" or "local".')
        if uneven not in ("join", "error"):
            raise ArgumentError(f'uneven={uneven!r} must be "join" or "error".')
        if shard_optimizer and not average_gradients:
            raise ArgumentError("shard_optimizer=True needs average_gradients=True: parts of equal models are updated.")
        if sync_every is not None and (shard_optimizer or not average_gradients):
            other = "shard_optimizer=True" if shard_optimizer else "average_gradients=False"
            raise ArgumentError(
                f"BroadcastCallback(sync_every={sync_every!r}) does not work with {other}: leave one out."
            )
        self.root_rank = root_rank
        self.average_gradients = average_gradients
        self.moving_statistics = moving_statistics
        self.synchronized_batch_norm = synchronized_batch_norm
        self.write_on_root_only = write_on_root_only
        self.bucket_bytes = bucket_bytes
        self.compression, self.error_feedback = compression, error_feedback
        self.overlap: Wanted = overlap
        self.shard_optimizer = shard_optimizer
        self.sync_every, self.outer, self.fragments, self.delay = sync_every, outer, fragments, delay
        chosen_overlap(overlap)  # these raise now rather than in fit
        local_settings(self)
        self.drift_check_every = chosen_interval(drift_check_every)
        self.group, self.uneven = group, uneven
        self._first = _First(self)
        self._saves_weights = False
        self._writers: list[HeldWriter] = []
        self._fit: SynchronizedFit | None = None  # the last one; None if there is one rank
        self._epoch: int | None = None
        self.backups = Backups(self, [])

    #: Tells `expect_broadcast` and `watch_fit` not to add callbacks that compare weights, and that tell other ranks of
    #: an exception that ends `fit`.
    compares_weights = tells_interruptions = trains_group = True

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.ranks = members(self.group)
        callbacks = enclosing_list(self)
        self._root, self._writers = Root(check_root(self.root_rank, self.group)), []
        if callbacks is not None and are_several(self.ranks.communicator):
            self._saves_weights = saves_weights(callbacks)
            self._first.set_model(model)
            saves_together = self.shard_optimizer or any(averaging.sharded for averaging in averagings_of(model))
            if saves_together:
                check_formats(callbacks)
            self._writers = arrange(
                callbacks,
                self._first,
                self,
                self._root.is_here,
                self.write_on_root_only,
                connect().recovers,
                saves_together,
            )
        self.backups = Backups(self, [] if callbacks is None else callbacks.callbacks)
        if callbacks is not None and self.backups.exist:  # those that save a state come behind all that change it
            callbacks.callbacks = self.backups.at_the_end(callbacks.callbacks)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._epoch = self._fit = None
        for optimizer in [] if self._model.optimizer is None else updating_optimizers(self._model.optimizer):
            forget_last_rate(optimizer)
        for fit in fits_of(self.model):  # an exception that the script keeps may keep an interrupted one alive
            fit.abandon()
        if are_several(self.ranks.communicator):
            for name in ("sync_every", "outer", "fragments", "delay"):
                own, remedy = getattr(self, name), f"Pass the same {name} to BroadcastCallback on all ranks."
                check_equal(own, self.ranks.communicator, f"{name} differs among ranks", remedy)
            kind = SynchronizedFit if self.sync_every is None else LocalFit
            self._fit = kind(self, self._root, self._writers, self._saves_weights)
            self._fit.begin(call_when_over(self, self._fit.abandon))
            self._epoch = self._fit.joined_after
        else:
            self.backups.begin(self.backups.loaded, self.backups.exist)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.begin_data(epoch)
        if self._fit is not None:
            self._fit.begin_epoch(epoch)

    def begin_data(self, epoch: int) -> None:
        """Let data have the order of the first epoch of this fit, which Keras tells no earlier."""
        if self._epoch is None:
            continue_at(epoch, argument_of_fit("x"))
            warn_of_steps(self.model, epoch, (self.params or {}).get("steps"))
        self._epoch = epoch
        self.backups.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._fit is not None:
            self._fit.end_batch(batch, self._epoch or 0)
        else:
            self.backups.end_batch_alone(self._epoch or 0, batch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._epoch is not None:
            begin_epoch(argument_of_fit("validation_data"), self._epoch)
        self.synchronize_state()

    def synchronize_state(self) -> None:
        """Average moving statistics and accumulators, once per epoch, before validation and saving."""
        if self._fit is not None:
            self._fit.synchronize_state()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._fit is not None:
            self._fit.end_epoch(epoch)
        else:
            self.backups.end_epoch_alone()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._fit is not None:
            self._fit.end()
        self.backups.undo()


class _First(keras.callbacks.Callback):
    """First in the list: synchronizes data and state, so that all other callbacks see these, and save the average."""

    def __init__(self, last: BroadcastCallback) -> None:
        super().__init__()
        self._last = last

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last.begin_data(epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._last.synchronize_state()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._last.synchronize_state()
        if self._last._fit is not None:
            self._last._fit.exchange_at_end(logs)
