"""Local updates in `fit`: hosts exchange weights every so many steps (`BroadcastCallback(sync_every=...)`).

Inside a host all is as ever, in the group of its ranks: averages, uneven data, what each step compares. So hosts are at
different batches, by different shares of data or by time. Behind each epoch they come together, before metrics are
averaged and callbacks validate or save: who is early takes part in the others' exchanges until they come. Then all
ranks have the same weights, of which any may save or validate its own.

That a rank wants to stop, or was told to end, travels with the exchanges. Behind the one that tells of a signal all
have the same weights: the root saves them, and all leave. Hosts may be at different batches then; the backup has the
place of the one that has come least far, whose samples nobody skips.
"""

from __future__ import annotations

import itertools
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.dtypes import FLOATS
from ring_plugins.core.arrays.memory import CACHE_LINE
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.gradients.local_settings import Settings
from ring_plugins.core.gradients.local_updates import OuterSteps
from ring_plugins.core.groups import Group
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import averagings_of
from ring_plugins.keras.backup import own_state
from ring_plugins.keras.consistency import LOCAL, updating_optimizers
from ring_plugins.keras.running_fit import enclosing_list, tell_interrupted
from ring_plugins.keras.state import value_of
from ring_plugins.keras.synchronized_fit import SynchronizedFit
from ring_plugins.keras.writers import HeldWriter
from ring_plugins.observe.averaging_check import averages_seldom


def local_settings(callback: Any, steps: int | None = None) -> Settings | None:
    """How hosts exchange weights, by the arguments of a `BroadcastCallback`; None if they average every step.

    Args:
        callback: with the arguments.
        steps: of the whole training, if known.

    Raises:
        ArgumentError: an argument is invalid, or they do not suit each other.
    """
    compression = Compression.named(callback.compression, callback.error_feedback)
    exchanges = callback.sync_every, callback.outer, callback.fragments
    return Settings.wanted("BroadcastCallback", *exchanges, compression, steps, callback.delay)


#: What a rank wants behind an exchange: to stop all ranks behind their epochs, or to tell that the job is to end.
_STOP, _END = 1, 2
#: By optimizer, of the last fit: the kind of outer optimizer, a checksum of the weights, the velocity, and exchanges.
_kept: weakref.WeakKeyDictionary[Any, tuple[tuple[float, float], int, Array, Array]] = weakref.WeakKeyDictionary()


class BetweenHosts(OuterSteps):
    """The exchanges of one `fit`. Collective.

    Args:
        callback: the `BroadcastCallback` whose `on_train_begin` is running; it has `sync_every`.

    Attributes:
        communicator: of all ranks that train the model.
        team: those of this host, which average every step.
        follows_signals: whether a signal that ends the job is told.

    Raises:
        ArgumentError: the job goes on when ranks are lost, the outer optimizer needs more exchanges, or an optimizer
            averages already.
        MismatchError: settings differ among ranks.
    """

    def __init__(self, callback: Any) -> None:
        self._callback, self._last, self.follows_signals = callback, -1, False
        host, params = current().topology.node_rank, callback.params or {}
        with on_all_or_none(callback.ranks.communicator, "the beginning of fit()"):
            current().refuse_to_recover(
                f"BroadcastCallback(sync_every={callback.sync_every!r}), whose hosts are at different batches where "
                "ranks would leave or join,"
            )
            for averaging in averagings_of(callback._model):
                raise ArgumentError(
                    f"BroadcastCallback(sync_every={callback.sync_every!r}) averages inside a host only, but the "
                    f"model's {type(averaging.optimizer).__name__} was passed to DistributedOptimizer. Call "
                    "ring_plugins.keras.undistribute(optimizer) before."
                )
            those = getattr(enclosing_list(callback), "callbacks", ())
            own = [one.save_freq for one in those if isinstance(one, keras.callbacks.BackupAndRestore)]
            told = itertools.chain(*callback.ranks.communicator.all_gather_object(own, "the beginning of fit()"))
            for every in told:  # of the root, which alone keeps it
                if isinstance(every, int) and every:
                    raise ArgumentError(
                        f"BackupAndRestore(save_freq={every}) saves in the middle of epochs, where hosts with "
                        f'sync_every={callback.sync_every!r} are at different batches: use save_freq="epoch".'
                    )
            steps = params["steps"] * params["epochs"] if params.get("steps") and params.get("epochs") else None
            settings = local_settings(callback, steps)
        assert settings is not None
        planned = steps / settings.every if steps and settings.every else math.inf
        self.communicator = callback.ranks.new_communicator("local updates")
        try:
            super().__init__(settings, self.communicator, host, planned=planned)
            self.team = Group.split(host, group=callback.group)
        except BaseException:
            self.communicator.close()
            raise
        current().elastic.exchanges += not self.is_idle  # which answer `preempted`, in place of passes

    def start(self) -> None:
        """Take the weights, which all ranks have in common now, for the anchor."""
        if self.is_idle:
            return
        self._last = self._callback.backups.rest.first - 1
        model = self._callback.model
        trained = model.trainable_variables
        # Frozen layers' weights are equal on all ranks, and stay so.
        frozen = {id(one) for layer in model._flatten_layers() for one in layer._trainable_variables}
        averaged = [one for one in model.non_trainable_weights if id(one) not in frozen and not hasattr(one, LOCAL)]
        if self._callback.moving_statistics != "average":
            averaged = []
        for optimizer in [] if model.optimizer is None else updating_optimizers(model.optimizer):
            if getattr(optimizer, "use_ema", False):  # of weights that each host has for itself
                averaged += optimizer._model_variables_moving_average
        self.begin(VariableWeights(lambda: self._callback.model, trained, averaged))
        self._go_on()
        averages_seldom()

    def _go_on(self) -> None:
        """Give the outer optimizer what it knew at a backup, or behind the last fit, if that has left these weights."""
        optimizer, found = self._callback._model.optimizer, self._callback.backups.outer
        kept = None if optimizer is None else _kept.get(optimizer)
        goes_on = kept is not None and kept[:2] == (self._settings.outer, self._checksum_of_anchor())
        if all(self.communicator.all_gather_object(goes_on, "local updates")):
            assert kept is not None
            found = found or kept[2:]
        if found:
            velocity, exchanges = found
            self.load({"anchor": self.anchor, "velocity": velocity, "exchanges": exchanges})
        self._tell_outer()

    def _checksum_of_anchor(self) -> int:
        return zlib.crc32(self.anchor.view(np.uint8))

    def _tell_outer(self) -> None:
        self._callback.backups.outer = [self._velocity, np.array(self.exchanges)]

    def after_batch(self, batch: int) -> None:
        """Count the steps up to this batch of the epoch, and exchange what is due.

        Between those of one execution (`steps_per_execution`) weights cannot be seen. One exchange for each would find
        no change but in the first, and move the weights by the outer optimizer's momentum alone.
        """
        unseen, self._last = batch - self._last - 1, batch
        self.steps += unseen
        self._left -= unseen
        self.after_step()

    def after_epoch(self) -> None:
        """Give all ranks the same weights, once all are here; tell them if one wants to stop."""
        self._last = -1
        self.exchange()

    def finish(self) -> None:
        super().finish()
        optimizer = self._callback._model.optimizer
        if self.has_begun and optimizer is not None:
            _kept[optimizer] = (self._settings.outer, self._checksum_of_anchor(), *self._callback.backups.outer)

    def wants_change(self) -> int:
        is_told = self.follows_signals and current().elastic.wants_change
        return _STOP * bool(self._callback._model.stop_training) | _END * is_told

    def follow_changes(self, wanted: int) -> bool:
        self._tell_outer()
        if wanted & _STOP:  # each rank ends its epoch, and all exchange there
            self._callback._model.stop_training = True
        if wanted & _END:
            current().elastic.change_members()
        is_ending = current().elastic.is_ending
        self._callback._model.stop_training |= is_ending and not self._callback.backups.exist
        return is_ending

    def close(self) -> None:
        """End the communication of both levels."""
        current().elastic.exchanges -= not self.is_idle
        self.communicator.close()
        self.team.close()


class LocalFit(SynchronizedFit):
    """A `fit` in which each host takes steps of its own; see the base class. Collective."""

    def __init__(self, callback: Any, root: Root, writers: Sequence[HeldWriter], saves_weights: bool) -> None:
        super().__init__(callback, root, writers, saves_weights)
        self._between = BetweenHosts(callback)
        self.team = self._team = self._between.team
        self._averages, self._codec = self.team.size > 1, (None, None)
        self._is_completing, self._batch, self._epoch = False, 0, 0
        self._place = dict[str, int]()

    def begin(self, finalizer: weakref.finalize[..., Any] | None) -> None:
        super().begin(finalizer)
        if not self._between.is_idle:  # the other hosts would not know of what is told behind a step
            self._between.follows_signals, self._stop.follows_signals = self._stop.follows_signals, False

    def _start(self) -> None:
        super()._start()
        self._between.start()

    def end_batch(self, batch: int, epoch: int) -> None:
        super().end_batch(batch, epoch)
        # Behind an epoch's end, data may have the next one's order.
        self._batch, self._epoch, self._place = batch, epoch, self._backups.place_of_data(batch)
        if self._is_running and not self._between.is_idle:
            self._between.after_batch(batch)
            assert self._uneven is not None
            self._end_if_told(batch, epoch, self._uneven.may_go_on(batch))

    def _back_up(self, batch: int, epoch: int) -> None:
        if self._between.is_idle:
            super()._back_up(batch, epoch)

    def _end_if_told(self, batch: int, epoch: int, has_more: bool) -> None:
        """Save and leave if an exchange has told that the job is to end; if nobody has more, when the epoch is over."""
        if not current().elastic.is_ending or self._is_completing or not self._backups.exist:
            return
        self._between.exchange()  # unless this was one of all
        self._is_completing = True
        own = batch, has_more, own_state(self.model), self._place
        batches, more, states, places = zip(*self._communicator.all_gather_object(own, "backup"), strict=True)
        if not any(more):
            return
        if min(batches) < max(batches) and self._root.is_here():
            logger.warning(
                f"sync_every={self._callback.sync_every!r}: the job ends where hosts have taken {min(batches) + 1} to "
                f"{max(batches) + 1} steps of epoch {epoch + 1}. fit() goes on behind the first of these, and what "
                "others have read since is read again."
            )
        # Of a rank that has come least far, not the root's.
        self._backups.save(epoch, min(batches), True, states, places[batches.index(min(batches))])
        self._backups.leave()

    def _come_together(self) -> None:
        self._between.after_epoch()
        if not self._between.is_idle:
            self._end_if_told(self._batch, self._epoch, False)

    def end_epoch(self, epoch: int) -> None:
        if self._is_running:
            self._between.exchange()  # which tells of signals, and if a callback wants to stop
        super().end_epoch(epoch)

    def end(self) -> None:
        if self._is_running:
            self._between.finish()
        super().end()

    def _tell_interrupted(self, cause: MismatchError | None) -> None:
        super()._tell_interrupted(cause)
        tell_interrupted([self._between.communicator], cause)

    def _restore(self) -> None:
        super()._restore()
        self._between.close()


class VariableWeights:
    """The numbers of Keras variables one after the other: the core's `Weights`.

    Args:
        synchronize: gives the variables their values of the last step, on JAX.
        trained, averaged: variables; those that are not floats are left out.
    """

    def __init__(self, synchronize: Callable[[], Any], trained: Sequence[Any], averaged: Sequence[Any]) -> None:
        self._synchronize = synchronize
        trained, averaged = ([one for one in some if _kind(one) in FLOATS] for some in (trained, averaged))
        self.dtype = "float64" if any(_kind(one) == "float64" for one in (*trained, *averaged)) else "float32"
        line = CACHE_LINE // np.dtype(self.dtype).itemsize
        self.trained = -(-sum(map(_count, trained)) // line) * line  # so that the others begin on a line
        self.averaged = sum(map(_count, averaged))
        begins = itertools.accumulate(map(_count, trained), initial=0)
        behind = itertools.accumulate(map(_count, averaged), initial=self.trained)
        self._places = [*zip(begins, trained, strict=False), *zip(behind, averaged, strict=False)]

    def _pieces(self, start: int, size: int) -> Iterator[tuple[Any, slice, slice]]:
        """Variables of which a stretch has some, which of their numbers, and the place of these in the stretch."""
        for begin, variable in self._places:
            first, last = max(start, begin), min(start + size, begin + _count(variable))
            if first < last:
                yield variable, slice(first - begin, last - begin), slice(first - start, last - start)

    def read(self, start: int, out: Array) -> None:
        """See `Weights`."""
        self._synchronize()
        out.fill(0)  # also what fills the last line
        for variable, of_variable, of_stretch in self._pieces(start, out.size):
            out[of_stretch] = keras.ops.convert_to_numpy(variable).reshape(-1)[of_variable]

    def write(self, start: int, values: Array) -> None:
        """See `Weights`. Each variable gets memory of its own, which frameworks may keep."""
        self._synchronize()
        for variable, of_variable, of_stretch in self._pieces(start, values.size):
            value = value_of(variable)
            value.reshape(-1)[of_variable] = values[of_stretch]
            variable.assign(value)


def _kind(variable: Any) -> str:
    kind: str = keras.backend.standardize_dtype(variable.dtype)
    return kind


def _count(variable: Any) -> int:
    return math.prod(int(length) for length in variable.shape)
