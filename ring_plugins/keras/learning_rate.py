"""Scale learning rates with the number of ranks: callbacks for warm-up and schedules; `rates.py` tells how.

The rate is always set through `self.model.optimizer`, since Keras on JAX synchronizes the optimizer's state on that
access; setting it on an older reference has no effect there.
"""

from __future__ import annotations

import abc
import math
import weakref
from collections.abc import Callable
from typing import Any, Literal

import keras

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.core.functions import was_size_asked
from ring_plugins.core.groups import Group
from ring_plugins.keras.averaging import make_train_function
from ring_plugins.keras.consistency import updating_optimizers
from ring_plugins.keras.job import connect
from ring_plugins.keras.rates import Rate, has_schedule, known_rate_of, multiply_schedule, rate_of, stop_multiplying
from ring_plugins.keras.running_fit import call_when_over, enclosing_list, expect_broadcast, group_of
from ring_plugins.keras.state import innermost

Scaling = Literal["linear", "sqrt", "none"]


class _RateCallback(keras.callbacks.Callback):
    """Sets the rate to base x multiplier(epoch), where `epoch` may be fractional."""

    def __init__(
        self,
        steps_per_epoch: int | None,
        initial_learning_rate: float | None,
        momentum_correction: bool,
        scaling: Scaling,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        if steps_per_epoch is not None and (not is_number(steps_per_epoch) or steps_per_epoch < 1):
            raise ArgumentError(f"steps_per_epoch={steps_per_epoch!r} is not a positive number.")
        if initial_learning_rate is not None and not is_factor(initial_learning_rate):
            raise ArgumentError(
                f"initial_learning_rate={initial_learning_rate!r} is not a learning rate: pass the number that is "
                "right for one process."
            )
        scale_for(scaling, 1)
        self.steps_per_epoch = steps_per_epoch
        self.initial_learning_rate = initial_learning_rate
        self.momentum_correction = momentum_correction
        self.scaling = scaling
        self.group = self._group = group
        self._rate: Rate | None = None  # None if a schedule computes it
        self._scheduled: Any = None  # the optimizer whose schedule this callback multiplies
        self._epoch = 0
        self._size = 0  # ranks of the job when the rate was last computed
        self._started = self._is_restored = False
        self._is_first = False  # batch of this fit, which may be in the middle of an epoch
        self._over: weakref.finalize[..., Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a process that joins in the middle of a `fit` has to know; see keras/joining.py."""
        rate = self._rate.state if self._started and self._rate is not None else None
        return {"rate": rate, "size": self._size, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a rate that is a number. One that a schedule computes is multiplied anew in the next epoch."""
        if state["rate"] is not None:
            self._rate = rate_of(self._optimizer)
            self._rate.begin_fit(self.model.optimizer, self.momentum_correction, state=state["rate"])
            self._started, self._size, self._epoch = True, state["size"], state["epoch"]

    @property
    def _optimizer(self) -> Any:
        return innermost(self.model.optimizer)

    @abc.abstractmethod
    def _multiplier(self, epoch: float) -> float | None:
        """The multiplier of the base at this epoch; None if this callback does not set the rate there."""

    @abc.abstractmethod
    def _sets_at(self, batch: int) -> bool:
        """Whether this callback sets the rate at this batch of an epoch."""

    def _follow_losses(self, before: int) -> bool:
        """Whether the rate must be set because ranks were lost or have joined; there were so many `before`."""
        return False

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # Before a callback restores a backup: a fit that was interrupted may not have been freed yet.
        rate = None if self.model.optimizer is None else known_rate_of(self._optimizer)
        if rate is not None:
            rate.end_fit(is_late=True)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._group = group_of(self)
        expect_broadcast(self)
        self._undo()  # an earlier fit may have been interrupted
        self._started = False
        self._over = call_when_over(self, self._undo)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._undo()

    def _ranks(self) -> tuple[int, int]:
        """This rank's number among those that train together, and how many these are."""
        if self._group is not None:
            return self._group.communicator.rank, self._group.size
        topology = connect().topology
        return topology.rank, topology.size

    def _undo(self) -> None:
        """Leave a scheduled rate as the schedule computes it, and one that is a number as it is for one process."""
        if self._over is not None:
            self._over.detach()
            self._over = None
        if self._rate is not None:
            _ = self.model  # on JAX, gives the variables their values of the last step
            self._rate.end_fit()
        optimizer, self._scheduled = self._scheduled, None
        if optimizer is not None:
            stop_multiplying(optimizer, self)
            self._model.train_function = None  # traced with the multipliers

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if not self._started:
            self._started = self._is_first = True
            self._start(self._optimizer)

    def _start(self, optimizer: Any) -> None:
        """Find or create the optimizer's rate, when the number of the first epoch is known."""
        callbacks = enclosing_list(self)
        for one in [] if callbacks is None else callbacks.callbacks:  # local updates average each host's ranks only
            self._group = getattr(getattr(one, "_fit", None), "team", None) or self._group
        (_, self._size), self._rate = self._ranks(), None
        if has_schedule(optimizer):
            self._scheduled = optimizer
            self._multiply(0)
            return
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise ArgumentError(
                f"{type(self).__name__} can set a learning rate that is a number, or multiply a LearningRateSchedule; "
                f"this {type(optimizer).__name__} has neither. Pass it one of these instead of a function."
            )
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            raise ArgumentError(
                f"a MultiOptimizer has a learning rate for each of its optimizers, so {type(self).__name__} has none "
                "to set. Leave the callback out, and multiply the rates of the optimizers in the script."
            )
        is_new = known_rate_of(optimizer) is None and self.initial_learning_rate is None
        # An update of before, and no fit of ours: a checkpoint may have brought the rate of a job.
        self._is_restored = is_new and int(keras.ops.convert_to_numpy(optimizer.iterations)) > 0
        self._rate = rate_of(optimizer)
        self._rate.begin_fit(self.model.optimizer, self.momentum_correction, self.initial_learning_rate)

    def _multiply(self, batch: int) -> None:
        """Multiply a scheduled rate from this batch on."""
        steps, epochs = self._steps(), int((self.params or {}).get("epochs") or 1)
        numbers = range(batch, (epochs - self._epoch) * steps + 1)
        wanted = [self._multiplier(self._epoch + number / steps) for number in numbers]
        multiply_schedule(self._scheduled, self, [1.0 if multiplier is None else multiplier for multiplier in wanted])
        make_train_function(self.model)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if batch == 0 and self._rate is not None:
            self._rate.follow(self._optimizer)
        before, (_, self._size) = self._size, self._ranks()
        is_due, self._is_first = self._is_first and batch > 0, False
        if self._scheduled is not None and (is_due or before != self._size):
            self._multiply(batch)
        if before != self._size:
            is_due |= self._follow_losses(before)
        if self._rate is None or not (self._sets_at(batch) or is_due):
            return
        multiplier = self._multiplier(self._epoch + (batch / self._steps() if batch else 0.0))
        if multiplier is not None:
            self._rate.set(self._optimizer, multiplier, self.momentum_correction)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _steps(self) -> int:
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not steps:
            raise ArgumentError(
                f"{type(self).__name__} does not know the number of steps per epoch of this data; pass steps_per_epoch."
            )
        return int(steps)


class LearningRateWarmupCallback(_RateCallback):
    """Raises the learning rate step by step from the rate for one process to the rate for all ranks.

    A batch k times as large needs a rate k times as large, but not in the first steps; so the rate grows linearly over
    the first epochs (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2). Compile the model with the rate
    for one process.

    The rate may be a number or a `LearningRateSchedule`, whose values are multiplied. `ReduceLROnPlateau` and schedule
    callbacks still take effect. A rate that the script sets between two fits is the rate for one process, and so is
    the one in a file, whatever number of ranks has saved it; with `initial_epoch`, warm-up continues there. If ranks
    are lost and the job goes on, the rate follows the number of those that are left.

    Args:
        warmup_epochs: epochs until the full rate; 0 uses the full rate from the first step.
        momentum_correction: whether to scale the velocities of SGD along with the rate.
        steps_per_epoch: required if Keras does not know it, as for a generator.
        verbose: 1 prints on rank 0 when warm-up is over.
        scaling: "linear", or "sqrt" for the square root of the number of ranks.
        initial_learning_rate: the rate for one process, if the optimizer was compiled with another.
        group: the ranks that train together, by default those of the `BroadcastCallback` in the same `fit`, or all.

    Raises:
        ArgumentError: an argument is invalid, or the number of steps is unknown.
    """

    def __init__(
        self,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *,
        scaling: Scaling = "linear",
        initial_learning_rate: float | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(steps_per_epoch, initial_learning_rate, momentum_correction, scaling, group)
        if not is_factor(warmup_epochs):
            raise ArgumentError(f"warmup_epochs={warmup_epochs!r} is not a number of epochs, 0 or more.")
        self.warmup_epochs, self.verbose = warmup_epochs, verbose
        self._is_over = self._has_said_rate = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_over": self._is_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_over = state["is_over"]

    def _multipliers(self) -> tuple[float, float]:
        """The multipliers of the base at the first step and after warm-up; Horovod's callback has others."""
        return 1.0, scale_for(self.scaling, self._ranks()[1])

    def _multiplier(self, epoch: float) -> float | None:
        first, full = self._multipliers()
        return full if epoch >= self.warmup_epochs else first + (full - first) * max(epoch, 0.0) / self.warmup_epochs

    def _start(self, optimizer: Any) -> None:
        super()._start(optimizer)
        self._say_rate()
        self._is_over = False
        if self._rate is not None:
            _, self._rate.scale = self._multipliers()

    def _follow_losses(self, before: int) -> bool:
        full = scale_for(self.scaling, self._size)
        factor = full / scale_for(self.scaling, before)
        if self._rate is not None:
            self._rate.scale = full
            if self._is_over:  # others may have set the rate since
                self._rate.set(self._optimizer, factor, self.momentum_correction, of_base=False)
        if self._ranks()[0] == 0 and factor != 1.0:
            ranks = "1 rank" if self._size == 1 else f"{self._size} ranks"
            logger.info(f"learning rate after warm-up: {factor:.3g} times what it was, for {ranks}")
        return False

    def _say_rate(self) -> None:
        """Print the rate after warm-up on rank 0, once; warn if the script may have multiplied it too."""
        (rank, size), (lowest, highest), was_read = self._ranks(), self._multipliers(), None
        if self._rate is not None:
            was_read, self._rate.was_read = self._rate.was_read, None
        if rank != 0 or lowest == highest or (self._has_said_rate and was_read is None):
            return
        self._has_said_rate = True
        one, all_ranks = "the schedule's", f"{highest:g} times that"
        if self._rate is not None:
            one, all_ranks = f"{self._rate.base * lowest:g}", f"{self._rate.base * highest:g}"
        text = f"learning rate: {one} for one process, {all_ranks} for {size} ranks after warm-up"
        if self._is_restored:
            logger.warning(
                f"{text}. The optimizer has made updates before: if a callback wrote its variables during fit() by "
                "tf.train.Checkpoint, HDF5 or Orbax, they hold the rate of that job, which is multiplied once more. "
                f"Pass the rate for one process then: {type(self).__name__}(initial_learning_rate=...). Other files "
                "hold that already."
            )
        elif was_read is not None:
            logger.warning(
                f"{text}. Since the last fit(), the script has read its rate, {was_read:g}, and has set another: what "
                "it sets is taken as the rate for one process."
            )
        elif was_size_asked():
            logger.warning(
                f"{text}. This script also reads ring_plugins.size(): if it has multiplied the rate by that, the rate "
                "is multiplied twice. Compile the model with the rate for one process."
            )
        else:
            logger.info(text)

    def _sets_at(self, batch: int) -> bool:
        """True until the full rate has been set once; afterwards other callbacks may set the rate."""
        if self._is_over:
            return False
        self._is_over = self._epoch + batch / self._steps() >= self.warmup_epochs
        return True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 >= self.warmup_epochs > epoch and self._ranks()[0] == 0:
            print(f"\nEpoch {epoch + 1}: learning rate warm-up is over.")


class LearningRateScheduleCallback(_RateCallback):
    """Multiplies the learning rate in a range of epochs.

    Args:
        multiplier: factor of the rate that the model was compiled with (and of the scale of a
            `LearningRateWarmupCallback`); a number, or a function of the epoch, fractional without `staircase`.
        start_epoch: the first epoch in which it sets the rate.
        end_epoch: the first epoch in which it no longer sets the rate; None for no end.
        staircase: whether to change the rate only at the beginning of epochs.
        momentum_correction: whether to scale the velocities of SGD along with the rate.
        steps_per_epoch: required if Keras does not know it.
        scaling: how the rate grows with the number of ranks if there is no warm-up: "linear", "sqrt", "none".
        initial_learning_rate: the rate for one process, if the optimizer was compiled with another.
        group: the ranks that train together, by default those of the `BroadcastCallback` in the same `fit`, or all.

    Raises:
        ArgumentError: an argument is invalid, or the number of steps is required and unknown.
    """

    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        *,
        scaling: Scaling = "none",
        initial_learning_rate: float | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(steps_per_epoch, initial_learning_rate, momentum_correction, scaling, group)
        if not callable(multiplier) and not is_factor(multiplier):
            raise ArgumentError(
                f"multiplier={multiplier!r} is neither a number nor a function: pass a factor of the rate, or a "
                "function of the epoch that returns one."
            )
        for name, given in (("start_epoch", start_epoch), ("end_epoch", end_epoch)):
            if not is_number(given) and (given is not None or name == "start_epoch"):
                raise ArgumentError(f"{name}={given!r} is not the number of an epoch.")
        if end_epoch is not None and end_epoch <= start_epoch:
            raise ArgumentError(f"end_epoch={end_epoch!r} is not after start_epoch={start_epoch!r}.")
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start_epoch, self.end_epoch, self.staircase = start_epoch, end_epoch, staircase

    def _warm_up(self) -> float:
        """What a `LearningRateWarmupCallback` multiplies the rate by in the end; 1 if there is none."""
        return self._rate.scale if self._rate else 1.0

    def _multiplier(self, epoch: float) -> float | None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return None
        own = self.multiplier(int(epoch) if self.staircase else epoch)
        if not is_factor(own):
            raise ArgumentError(
                f"the multiplier of {type(self).__name__} returned {own!r} for epoch {epoch:g}, not a number that a "
                "rate can be multiplied by."
            )
        scale = self._warm_up()
        return own * (scale if scale != 1.0 else scale_for(self.scaling, self._ranks()[1]))

    def _sets_at(self, batch: int) -> bool:
        return batch == 0 or not self.staircase

    def _follow_losses(self, before: int) -> bool:
        return self._warm_up() == 1.0 and self.scaling != "none"


def is_number(value: Any) -> bool:
    """Whether a value is a number, also one of numpy or a framework, and not a bool."""
    if isinstance(value, bool | str) or value is None:
        return False
    try:
        return not math.isnan(float(value))
    except (TypeError, ValueError):
        return False


def is_factor(value: Any) -> bool:
    """Whether a value is a number that a rate can be multiplied by: finite, zero or more."""
    return is_number(value) and 0 <= value < math.inf


def scale_for(scaling: Scaling, size: int) -> float:
    """The factor by which the rate grows with the number of ranks.

    Args:
        scaling: "linear" as in Goyal et al. 2017, "sqrt" as is common with Adam, "none".
        size: number of ranks, and so the factor of the batch size.

    Raises:
        ArgumentError: `scaling` is none of these.
    """
    if scaling not in ("linear", "sqrt", "none"):
        raise ArgumentError(f'scaling={scaling!r} must be "linear", "sqrt" or "none".')
    return {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}[scaling]


def warn_of_steps(model: Any, epoch: int, steps: int | None) -> None:
    """Warn on rank 0 of a scheduled rate that goes on elsewhere than the epochs: another job has counted the steps.

    Args:
        model: whose `fit` begins, perhaps with a checkpoint.
        epoch: the first of this `fit`, counted from 0.
        steps: of each epoch, if they are known.
    """
    optimizer = model.optimizer
    if not epoch or not steps or optimizer is None or connect().topology.rank:
        return
    for one in filter(has_schedule, updating_optimizers(optimizer)):
        found, expected = int(keras.ops.convert_to_numpy(one._iterations)), epoch * steps
        if found not in (0, expected):  # a new optimizer begins with 0 on one process, too
            logger.warning(
                f"the learning rate's {type(one._learning_rate).__name__} goes on at step {found}, and epoch "
                f"{epoch + 1} of this fit() begins with step {expected}, at {steps} steps an epoch: the optimizer has "
                "counted the steps of another number of ranks, or of other data. Make the schedule for the steps from "
                f"{found} on, or call optimizer.iterations.assign({expected}) before fit()."
            )
