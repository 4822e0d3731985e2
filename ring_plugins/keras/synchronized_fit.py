"""A `fit` that all ranks run together, from its first step to its last.

It begins when all ranks have come to `on_train_begin`, where they take over the root's state and begin to average. It
is over at `on_train_end`, or when an exception has ended it: then model and optimizers are as they were before, but for
what they have learned. Between two steps the ranks meet in `SynchronizedStop`'s exchange.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.joining.join import admit, join
from ring_plugins.core.joining.state_transfer import Root, fails_alone
from ring_plugins.core.world import announce_training, current
from ring_plugins.keras.averaging import (
    GradientAveraging,
    averaging_of,
    averagings_of,
    make_train_function,
)
from ring_plugins.keras.backends import backend
from ring_plugins.keras.backup import own_state
from ring_plugins.keras.batch_norm import SynchronizedBatchNorm
from ring_plugins.keras.consistency import KerasChecks, check_end_of_fit, options_of, rates_of
from ring_plugins.keras.job import connect, members
from ring_plugins.keras.joining import joined_between_fits, place_of_fit, share_state
from ring_plugins.keras.running_fit import argument_of_fit, enclosing_list, ends_on_all, tell_interrupted
from ring_plugins.keras.shard import order_of
from ring_plugins.keras.sharded_optimizer import readmit
from ring_plugins.keras.state import (
    average_variables,
    broadcast_state,
    build_optimizer,
    optimizers_of,
    weight_checksums,
)
from ring_plugins.keras.uneven import UnevenData
from ring_plugins.keras.validation import CHANGE, FIT, STOP, SynchronizedStop, check_equal, check_other_parallelism
from ring_plugins.keras.whole_steps import WholeSteps
from ring_plugins.keras.writers import HeldWriter, warn_of_lone_writers
from ring_plugins.observe.consistency import check_equal_after_losses, is_check_wanted, is_compared_after

#: Those that have begun and not ended, as far as they know.
_running: weakref.WeakSet[SynchronizedFit] = weakref.WeakSet()


def fits_of(model: Any) -> list[SynchronizedFit]:
    """Those of a model that have begun and not ended."""
    return [fit for fit in _running if fit.model is model]


class SynchronizedFit:
    """The `fit` of a `BroadcastCallback`, in a job of several ranks.

    Args:
        callback: with the options, the model and its parameters.
        root: whose state all ranks take over.
        writers: callbacks that write, of which other ranks have counterparts.
        saves_weights: whether any callback saves weights.

    Attributes:
        joined_after: in a process that has joined, the epoch that the others had ended.
    """

    def __init__(self, callback: Any, root: Root, writers: Sequence[HeldWriter], saves_weights: bool) -> None:
        self._callback, self._root, self._writers, self._saves_weights = callback, root, writers, saves_weights
        # What `LocalFit` has for one host only: who averages, stops after the same step and may be uneven, and how.
        self._team, self._averages = callback.group, callback.average_gradients
        self._codec = callback.compression, callback.error_feedback
        self.joined_after: int | None = None
        self._model, self._backups = callback._model, callback.backups
        self._installed: list[GradientAveraging] = []
        self._batch_norm: SynchronizedBatchNorm | None = None
        self._uneven: UnevenData | None = None
        self._passes_before = self._steps_until_check = 0
        self._steps = 0  # since the ranks last changed
        self._has_begun = self._is_synchronized = False

    @property
    def model(self) -> Any:
        """The model; on JAX, asking for it gives the variables their values of the last step."""
        return self._callback.model

    @property
    def _is_running(self) -> bool:
        return self in _running

    def begin(self, finalizer: weakref.finalize[..., Any] | None) -> None:
        """Meet the other ranks. Collective.

        Args:
            finalizer: calls `abandon`.
        """
        announce_training()
        world, model = connect(), self.model
        self._finalizer = finalizer
        self._communicator = self._callback.ranks.new_communicator(FIT)
        stop = members(self._team).new_communicator(STOP)
        self._communicators: list[Communicator[Any]] = [self._communicator, stop]
        self._checks = KerasChecks(
            lambda: weight_checksums(self._model),
            lambda: [options_of(averaging.optimizer) for averaging in averagings_of(self._model)],
            start=0,  # all begin with the root's
            reads_in_pass=False,
        )
        self._stop = SynchronizedStop(stop, self._take_part_in_saving, self._tell_interrupted, self._checks)
        _running.add(self)
        check_other_parallelism(model)
        # If the root restored a backup, all ranks continue from there.
        initial, told = repeated(self._read_by_root)
        model._initial_epoch = self._first_epoch = initial
        # A script may give the callbacks that save to one rank only.
        own = self._saves_weights, self._backups.exist and self._backups.are_written_here
        saves, backups = zip(*self._communicator.all_gather_object(own, "fit"), strict=True)
        self._saves_weights = any(saves)
        self._backups.begin(told, any(backups))
        self._stop.follows_signals = any(backups) or self._callback.group is None
        # A rank with more steps would wait forever for the gradients of ranks that have finished.
        self._uneven = UnevenData(self._callback, stop, self._backups.rest.own)
        check_equal(
            (self._callback.params or {}).get("epochs"),
            self._communicator,
            "ranks would take different numbers of epochs",
            "Pass the same epochs to fit() on all ranks.",
        )
        if world.recovers and self._callback.write_on_root_only:
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

    def _read_by_root(self) -> Any:
        """The root's first epoch and the backup that it has read, on all ranks."""
        self._settle_writers()  # one of them may restore a backup
        root = self._root.rank_in(self._communicator)
        own = self._model._initial_epoch, self._backups.loaded
        return self._communicator.broadcast_object(own, root, purpose="initial_epoch")

    def _start(self) -> None:
        """Broadcast the root's state and install the averaging."""
        model, options = self.model, self._callback
        for optimizer in optimizers_of(model):
            readmit(optimizer)
        self._install()
        active = averagings_of(self._model)
        # A fit that an exception ended, on this rank or another, has released those of the script's own optimizers.
        released = [averaging.settings.name for averaging in active if averaging.exchange is None]
        anywhere = set(itertools.chain.from_iterable(self._communicator.all_gather_object(released, "memory of fit")))
        for averaging in active:
            if averaging.settings.name in anywhere:
                averaging.release()
        for number, averaging in enumerate(active, 1):
            self._share(averaging, number)
        build_optimizer(model)
        broadcast_state(model, self._root, self._communicator)
        backend().offset_seed(self._communicator, self._root)
        for averaging in active:
            averaging.starts_equal, averaging.checks.reads_in_pass = True, False
            # `compile()` without an optimizer makes an RMSprop for all variables. A GAN whose optimizers are other
            # attributes never uses it, and on torch a variable has one averager.
            is_perhaps_unused = averaging.optimizer is model.optimizer and len(active) > 1
            if averaging.optimizer.built and not is_perhaps_unused:
                averaging.prepare(averaging.variables)
        self._batch_norm = SynchronizedBatchNorm(model, options.synchronized_batch_norm, self._team)
        self._batch_norm.install()
        assert self._uneven is not None
        self._uneven.install(active)
        make_train_function(model)
        model.train_function = self._uneven.stepping(model.train_function)
        if (order := order_of(argument_of_fit("x"))) is not None and order.follows_ranks and current().recovers:
            full = self._uneven.full_of_single_steps if options.sync_every is None else None
            model.train_function = WholeSteps(model, order, full).stepping(model.train_function)
        self._stop.watch_steps(model)
        self._passes_before = self._passes()
        self._steps_until_check = max((averaging.accumulation_steps for averaging in active), default=1)

    def _install(self) -> None:
        """Let the model's optimizers average, those that do not yet."""
        options = self._callback
        for optimizer in optimizers_of(self._model) if self._averages else ():
            averaging = averaging_of(optimizer)
            if averaging is None:
                averaging = GradientAveraging(
                    optimizer,
                    options.bucket_bytes,
                    *self._codec,
                    options.overlap,
                    options.shard_optimizer,
                    self._team,
                )
                averaging.install()
                self._installed.append(averaging)
            else:
                averaging.check_fits(options.shard_optimizer, self._team)

    def _share(self, averaging: GradientAveraging, number: int) -> None:
        """Divide the root's state of an optimizer among all ranks, if it is to be sharded and known."""
        sharded, optimizer = averaging.sharded, averaging.optimizer
        if sharded is None:
            return
        if optimizer is self._model.optimizer:
            variables = averaging.variables or self._model.trainable_variables
            sharded.share(variables, self._root.rank_in(self._communicator))
        elif all(self._communicator.all_gather_object(optimizer.built, "state of optimizers")):
            sharded.share(averaging.variables, self._root.rank_in(self._communicator))
        # Makes the other ranks take part when this one saves: most callbacks that save are on one rank only.
        sharded.before_saving = functools.partial(self._stop.request, number)

    def _take_part_in_saving(self, number: int) -> None:
        _ = self.model  # on JAX, gives the variables their values of the last step
        sharded = averagings_of(self._model)[number - 1].sharded
        assert sharded is not None
        sharded.take_part_in_saving()

    def _join(self) -> None:
        """In a process that takes the place of a lost rank: go on with the others from the end of an epoch."""
        self._settle_writers()  # what they have not written belongs to this process alone
        joined = join(place_of_fit(self._callback.params, self._model), "finish the epoch")
        with fails_alone():
            received = self._share_state(0, joined)
        self._after_joining()
        assert received is not None
        self._root.world_rank, self._saves_weights = received["root"], received["saves_weights"]
        self.joined_after, self._has_begun = received["epoch"], True
        self._steps_until_check = received["steps_until_check"]
        self._passes_before = self._passes() - received["passes"]
        self._checks.weights.has_told = received["has_told"]  # all compare weights at the end of fit, or none
        self._first_epoch, self._model._initial_epoch = received["first_epoch"], received["epoch"] + 1
        self._backups.begin(None, received["backups"])

    def _share_state(self, epoch: int, joined: tuple[int, ...]) -> dict[str, Any] | None:
        """Give those that have joined this rank's state, and what it knows of this `fit`; returns that on them."""
        callbacks = enclosing_list(self._callback)
        own = {
            "epoch": epoch,
            "first_epoch": self._first_epoch,
            "root": self._root.world_rank,
            "saves_weights": self._saves_weights,
            "backups": self._backups.exist,
            "steps_until_check": self._steps_until_check,
            "passes": self._passes() - self._passes_before,
            "has_told": self._checks.weights.has_told,
        }
        those = [] if callbacks is None else callbacks.callbacks
        return share_state([self.model], those, own, joined, self._communicator)

    def _after_joining(self) -> None:
        current().elastic.tell_changes()
        for writer in self._writers:
            writer.hand_over()
        assert self._uneven is not None
        self._uneven.agree()

    def begin_epoch(self, epoch: int) -> None:
        self._is_synchronized = False
        if not self._is_running:
            return
        # A later `fit` begins where the other ranks' does: Keras has read where this one begins, but keeps it.
        self._model._initial_epoch = self._first_epoch
        self._stop.watch_steps(self._model)
        if not self._has_begun:
            self._has_begun = True
            check_equal(
                epoch,
                self._communicator,
                "ranks begin with different epochs",
                "Pass the same initial_epoch on all ranks; every rank must see the checkpoint that determines it.",
            )

    def end_batch(self, batch: int, epoch: int) -> None:
        if not self._is_running:
            return
        self._steps_until_check -= 1
        self._steps += 1
        updates, every, look = 1 - self._steps_until_check, self._callback.drift_check_every, self._checks.weights.look
        is_compared = self._averages and is_check_wanted()
        if (
            updates == 1
            and self._averages
            and self._passes() <= self._passes_before
            and self._model.trainable_variables
        ):
            raise RingError(
                f"rank {self._communicator.rank} took its first step without averaging gradients. "
                f"{type(self._model).__name__}.train_step seems to update with an optimizer that is not an attribute "
                "of the model, or without optimizer.apply; wrap that optimizer with "
                "ring_plugins.keras.DistributedOptimizer."
            )
        if every and self._steps % every == 0:
            look(f"after {self._steps} steps")
        elif updates == 1 and is_compared:
            look("after the first step", warns=True)
        elif not every and is_compared_after(updates) and is_compared:
            look(f"after step {batch + 1} of epoch {epoch + 1}")
        assert self._uneven is not None
        self._backups.after_step()
        wish = self._stop.after_step(self._model, batch, self._uneven.more, self._backups.is_due)
        self._uneven.others_have = self._stop.most
        self._after_exchange(wish == CHANGE)
        if wish or current().elastic.is_ending:
            self._back_up(batch, epoch)

    def _back_up(self, batch: int, epoch: int) -> None:
        """Save behind a step, and leave if the job is to end; behind the last step, when the epoch is over."""
        assert self._uneven is not None
        is_ending, has_more = current().elastic.is_ending, self._uneven.may_go_on(batch)
        if not self._backups.exist:
            self._model.stop_training |= is_ending and self._stop.follows_signals
        elif has_more or not is_ending:
            states = self._communicator.all_gather_object(own_state(self.model), "backup")
            self._backups.save(epoch, batch, has_more, states)
            # Nobody goes on before the root has written; in saving a sharded optimizer, all take part.
            self._after_exchange(self._stop.after_step(self._model, batch, self._uneven.more) == CHANGE)
            if is_ending:
                self._backups.leave()

    def synchronize_state(self) -> None:
        """Average moving statistics and accumulators, once per epoch, before validation and saving."""
        if not self._is_running or self._is_synchronized:
            return
        self._is_synchronized = True
        is_compared = self._averages and is_check_wanted()
        if self._saves_weights and self._steps_until_check <= 0 and is_compared:
            self._checks.weights.look("at the end of this epoch, before checkpoints are saved,", warns=True)
        self._after_exchange(self._stop.after_epoch(self._model))  # raises if another rank is still in its epoch
        self._come_together()
        is_averaged = self._callback.moving_statistics == "average"
        variables = list(self.model.non_trainable_weights) if is_averaged else []
        for averaging in averagings_of(self._model):
            variables += averaging.accumulators()
        average_variables(variables, self._communicator)

    def exchange_at_end(self, logs: dict[str, Any] | None) -> None:
        """Give logs to ranks without samples, and tell the rank that saves the others' random numbers. Collective."""
        if self._is_running and self._uneven is not None:
            self._uneven.share_logs(logs, self._communicator)
        if self._is_running and self._backups.exist and (own := backend().random_state()) is not None:
            self._backups.random = self._communicator.all_gather_object(own, "backup")

    def _come_together(self) -> None:
        """What is due before all ranks average state, behind an epoch."""

    def end_epoch(self, epoch: int) -> None:
        if not self._is_running:
            return
        if self._model.optimizer is not None:
            self._checks.rates.take(*rates_of(self._model.optimizer))
        self._after_exchange(self._stop.after_epoch(self._model))
        if current().elastic.is_pending and current() not in joined_between_fits and not self._model.stop_training:
            joined = admit(place_of_fit(self._callback.params, self._model))
            if joined:
                self._share_state(epoch, joined)
                self._after_joining()
        if current().elastic.is_ending and self._backups.exist:
            self._backups.save_epoch()
            self._after_exchange(self._stop.after_epoch(self._model))
            self._backups.leave()

    def end(self) -> None:
        if not self._is_running:
            return
        self._model._initial_epoch = self._first_epoch  # again, as there may have been no epoch left
        is_compared = self._callback.average_gradients and not self._checks.weights.has_told
        all_weights = self._callback.moving_statistics == "average"
        decided = check_end_of_fit(
            enclosing_list(self._callback),
            functools.partial(weight_checksums, self.model, all_weights) if is_compared else None,
            [averaging.optimizer for averaging in averagings_of(self._model)],
            self._communicator,
        )
        if decided and self._root.is_here():
            logger.warning(decided)
        # A writer may still be lost while it completes its files, or save here.
        if current().recovers or any(averaging.sharded for averaging in averagings_of(self._model)):
            self._after_exchange(self._stop.after_epoch(self.model))
        for averaging in self._installed:
            if averaging.sharded is not None:
                averaging.sharded.restore(self._root.rank_in(self._communicator))
        self._restore()

    def _passes(self) -> int:
        return sum(averaging.passes for averaging in averagings_of(self._model))

    def _after_exchange(self, wants_change: bool) -> None:
        """Do what is due after ranks were lost, or if some leave or wait to join; all know after an exchange."""
        if wants_change:
            current().elastic.change_members()
        self._settle_writers()
        if self._checks.follow_members():
            self._steps = 0
            if self._callback.average_gradients:
                check_equal_after_losses(lambda: weight_checksums(self._model), self._communicator)
            current().elastic.tell_changes()

    def _settle_writers(self) -> None:
        for writer in self._writers:
            writer.settle()

    def _tell_interrupted(self, cause: MismatchError | None) -> None:
        averagers = [
            communicator for averaging in averagings_of(self._model) for communicator in averaging.communicators()
        ]
        tell_interrupted((*averagers, *self._communicators), cause)

    def abandon(self) -> None:
        """Undo all changes after a fit that an exception ended, and tell ranks that still train and wait for this one.

        They raise, and a later fit works on all ranks.
        """
        if not self._is_running:
            return
        if not ends_on_all():
            self._tell_interrupted(MismatchError(self._stop.mismatch) if self._stop.mismatch else None)
            for averaging in averagings_of(self._model):  # those that the script itself has distributed stay installed
                averaging.release()
        self._restore()

    def _restore(self) -> None:
        """Undo all changes to model and optimizers."""
        if self._finalizer is not None:
            self._finalizer.detach()
        _running.discard(self)
        self._model.train_function = None  # traced with the averaging
        if self._uneven is not None:
            self._uneven.remove(averagings_of(self._model))
        for averaging in averagings_of(self._model):
            averaging.checks.reads_in_pass = True
            if averaging.sharded is not None:
                averaging.sharded.before_saving = None
        for averaging in self._installed:
            averaging.remove()
        self._installed = []
        if self._batch_norm is not None:
            self._batch_norm.remove()
        for communicator in self._communicators:
            communicator.close()
