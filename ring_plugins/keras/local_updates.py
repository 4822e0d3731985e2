"""Local updates in `fit`: hosts exchange weights every so many steps (`BroadcastCallback(sync_every=...)`).

Inside a host all is as ever, in the group of its ranks: averages, uneven data, what each step compares. So hosts are at
different batches, by different shares of data or by time. Behind each epoch they come together, before metrics are
averaged and callbacks validate or save: who is early takes part in the others' exchanges until they come. Then all
ranks have the same weights, of which any may save or validate its own.

That a rank wants to stop travels with the exchanges, in the place of one that is to leave: nobody leaves here.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.dtypes import FLOATS
from ring_plugins.core.arrays.memory import CACHE_LINE
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.gradients.local_settings import Settings
from ring_plugins.core.gradients.local_updates import OuterSteps
from ring_plugins.core.groups import Group
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import averagings_of
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
    return Settings.wanted("BroadcastCallback", *exchanges, compression, steps)


class BetweenHosts(OuterSteps):
    """The exchanges of one `fit`. Collective.

    Args:
        callback: the `BroadcastCallback` whose `on_train_begin` is running; it has `sync_every`.

    Attributes:
        communicator: of all ranks that train the model.
        team: those of this host, which average every step.

    Raises:
        ArgumentError: the job goes on when ranks are lost, the outer optimizer needs more exchanges, or an optimizer
            averages already.
        MismatchError: settings differ among ranks.
    """

    def __init__(self, callback: Any) -> None:
        self._callback, self._last = callback, -1
        host, params = current().topology.node_rank, callback.params or {}
        with on_all_or_none(callback.ranks.communicator, "the beginning of fit()"):
            current().refuse_to_recover("BroadcastCallback(sync_every=...)")
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

    def start(self) -> None:
        """Take the weights, which all ranks have in common now, for the anchor."""
        if self.is_idle:
            return
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
        averages_seldom()

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

    def wants_change(self) -> bool:
        return bool(self._callback._model.stop_training)

    def follow_changes(self, wanted: int) -> bool:
        if wanted:
            self._callback._model.stop_training = True
        return False  # each rank ends its epoch, and all exchange there


class LocalFit(SynchronizedFit):
    """A `fit` in which each host takes steps of its own; see the base class. Collective."""

    def __init__(self, callback: Any, root: Root, writers: Sequence[HeldWriter], saves_weights: bool) -> None:
        super().__init__(callback, root, writers, saves_weights)
        self._between = BetweenHosts(callback)
        self.team = self._team = self._between.team
        self._averages, self._codec = self.team.size > 1, (None, None)
        self._backups.exist = False  # in the middle of an epoch, where hosts are at different batches

    def begin(self, finalizer: weakref.finalize[..., Any] | None) -> None:
        super().begin(finalizer)
        self._stop.follows_signals = False  # the other hosts would not know of it

    def _start(self) -> None:
        super()._start()
        self._between.start()

    def end_batch(self, batch: int, epoch: int) -> None:
        super().end_batch(batch, epoch)
        if self._is_running:
            self._between.after_batch(batch)

    def _come_together(self) -> None:
        self._between.after_epoch()

    def end_epoch(self, epoch: int) -> None:
        super().end_epoch(epoch)
        if self._is_running:
            self._between.exchange()  # which tells if a callback wants to stop

    def end(self) -> None:
        if self._is_running:
            self._between.finish()
        super().end()

    def _tell_interrupted(self, cause: MismatchError | None) -> None:
        super()._tell_interrupted(cause)
        tell_interrupted([self._between.communicator], cause)

    def _restore(self) -> None:
        super()._restore()
        self._between.communicator.close()
        self.team.close()


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
