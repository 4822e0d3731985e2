"""Callbacks that set the learning rate, for batches that grow with the number of ranks."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import keras

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.backends import backend
from ring_plugins.keras.connection import connect
from ring_plugins.keras.rates import Rate, Scaling, has_schedule, innermost, multiply_schedule, scale_for


class _RateCallback(keras.callbacks.Callback):
    """What both callbacks share: the rate is base x multiplier(epoch), where epoch counts on within an epoch."""

    def __init__(
        self, steps_per_epoch: int | None, initial_learning_rate: float | None, momentum_correction: bool
    ) -> None:
        super().__init__()
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ArgumentError(f"steps_per_epoch={steps_per_epoch!r} is not a positive number.")
        self.steps_per_epoch = steps_per_epoch
        self.initial_learning_rate = initial_learning_rate
        self.momentum_correction = momentum_correction
        self._rate: Rate | None = None
        self._epoch = 0
        self._started = False

    @abc.abstractmethod
    def _multiplier(self, epoch: float) -> float | None:
        """Of the single-process rate; None where this callback has no say."""

    def _scale(self) -> float:
        """What the rate has grown by after warm-up."""
        return self._rate.scale if self._rate else 1.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._started = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if not self._started:
            self._started = True
            self._start(innermost(self.model.optimizer), epoch)

    def _start(self, optimizer: Any, epoch: int) -> None:
        """What can be done only when the first epoch's number is known."""
        self._rate = None
        if has_schedule(optimizer):
            steps, epochs = self._steps(), int((self.params or {}).get("epochs") or 1)
            multipliers = [
                self._multiplier(epoch + step / steps) or 1.0 for step in range((epochs - epoch) * steps + 1)
            ]
            multiply_schedule(optimizer, multipliers)
            backend().make_train_function(self.model)
            return
        resumed = epoch > 0 and int(keras.ops.convert_to_numpy(optimizer.iterations)) > 0
        so_far = self._multiplier(epoch - 1 / self._steps()) if resumed else None
        self._rate = Rate.of(optimizer, self.initial_learning_rate, so_far or 1.0)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._rate is None or not self._sets_at(batch):
            return
        multiplier = self._multiplier(self._epoch + (batch / self._steps() if batch else 0.0))
        if multiplier is not None:
            # Through self.model, which on JAX fetches the state first and has it handed back.
            self._rate.set(innermost(self.model.optimizer), multiplier, self.momentum_correction)

    def _sets_at(self, batch: int) -> bool:
        """Whether the rate changes at this batch of an epoch."""
        return True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _steps(self) -> int:
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not steps:
            raise ArgumentError(
                f"{type(self).__name__} cannot tell how many steps an epoch of this data has; pass steps_per_epoch."
            )
        return int(steps)


class LearningRateWarmupCallback(_RateCallback):
    """Raises the learning rate from that for one process to that for all ranks, step by step.

    A batch that is k times as large wants a rate k times as large, which at the very start is too much; so the rate
    grows linearly over the first epochs (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2). Compile
    the model with the rate for one process.

    Works on a number and on a `LearningRateSchedule`, whose values are multiplied; `ReduceLROnPlateau` and schedules
    behind it keep their effect. A training that goes on at `initial_epoch` with a loaded optimizer goes on with its
    rate.

    Args:
        warmup_epochs: how long it takes; 0 scales from the first step on.
        momentum_correction: scale the velocities of SGD along with the rate.
        steps_per_epoch: where Keras cannot tell, as for a generator.
        verbose: 1 says on rank 0 when warm-up is over.
        scaling: "linear", or "sqrt" for the square root of the number of ranks.
        initial_learning_rate: the rate for one process, where it is not what the optimizer was compiled with.

    Raises:
        ArgumentError: an argument has no meaning, or the number of steps is unknown.
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
    ) -> None:
        super().__init__(steps_per_epoch, initial_learning_rate, momentum_correction)
        if warmup_epochs < 0:
            raise ArgumentError(f"warmup_epochs={warmup_epochs!r} is negative.")
        scale_for(scaling, 1)
        self.warmup_epochs, self.verbose, self.scaling = warmup_epochs, verbose, scaling
        self._is_over = False

    def _multiplier(self, epoch: float) -> float | None:
        scale = scale_for(self.scaling, connect().topology.size)
        if epoch >= self.warmup_epochs:
            return scale
        return 1.0 + (scale - 1.0) * max(epoch, 0.0) / self.warmup_epochs

    def _start(self, optimizer: Any, epoch: int) -> None:
        super()._start(optimizer, epoch)
        self._is_over = False
        if self._rate is not None:
            self._rate.scale = scale_for(self.scaling, connect().topology.size)

    def _sets_at(self, batch: int) -> bool:
        """Until warm-up is over, and once more, at the full rate; from then on the rate is others' to set."""
        if self._is_over:
            return False
        self._is_over = self._epoch + batch / self._steps() >= self.warmup_epochs
        return True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 >= self.warmup_epochs > epoch and connect().topology.rank == 0:
            print(f"\nEpoch {epoch + 1}: learning rate warm-up is over.")


class LearningRateScheduleCallback(_RateCallback):
    """Sets the learning rate to a multiple, over a range of epochs.

    Args:
        multiplier: of the rate that the model was compiled with (times what a `LearningRateWarmupCallback` beside it
            scales by); a number, or a function of the epoch, which is a fraction within an epoch if not `staircase`.
        start_epoch: first epoch in which it sets the rate.
        end_epoch: the first in which it does so no more; None for never.
        staircase: change at the beginning of epochs only.
        momentum_correction: scale the velocities of SGD along with the rate.
        steps_per_epoch: where Keras cannot tell.
        scaling: by how much the rate grows with the number of ranks where there is no warm-up: "linear", "sqrt",
            "none".
        initial_learning_rate: the rate for one process, where it is not what the optimizer was compiled with.

    Raises:
        ArgumentError: an argument has no meaning, or the number of steps is needed and unknown.
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
    ) -> None:
        super().__init__(steps_per_epoch, initial_learning_rate, momentum_correction)
        if end_epoch is not None and end_epoch <= start_epoch:
            raise ArgumentError(f"end_epoch={end_epoch!r} is not after start_epoch={start_epoch!r}.")
        scale_for(scaling, 1)
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.start_epoch, self.end_epoch, self.staircase, self.scaling = start_epoch, end_epoch, staircase, scaling

    def _multiplier(self, epoch: float) -> float | None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return None
        own = self.multiplier(int(epoch) if self.staircase else epoch)
        scale = self._scale()
        return own * (scale if scale != 1.0 else scale_for(self.scaling, connect().topology.size))

    def _sets_at(self, batch: int) -> bool:
        return batch == 0 or not self.staircase
