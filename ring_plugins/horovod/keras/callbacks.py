"""Horovod's Keras callbacks, with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ring_plugins import keras as ring_keras
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.functions import local_rank  # noqa: F401 - Horovod's module has it, too
from ring_plugins.horovod.basics import size
from ring_plugins.horovod.common.process_sets import group_of
from ring_plugins.horovod.keras.optimizer import mark_local
from ring_plugins.other_names import no_attribute

BestModelCheckpoint = ring_keras.BestModelCheckpoint

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


class BroadcastGlobalVariablesCallback(ring_keras.BroadcastCallback):
    """`ring_plugins.keras.BroadcastCallback`, which may leave some variables to each rank.

    Args:
        root_rank: as for `BroadcastCallback`.
        device: has no effect.
        local_variables: variables that keep each rank's own values: they are not broadcast, averaged or compared. Their
            gradients are averaged, unless the optimizer has them as local variables, too.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__(root_rank)
        mark_local(local_variables or (), begins_so=True)

    def register_local_var(self, var: Any) -> None:
        """Let a variable be one of `local_variables`, before `fit`."""
        mark_local([var], begins_so=True)


class MetricAverageCallback(ring_keras.MetricAverageCallback):
    """`ring_plugins.keras.MetricAverageCallback`, among the processes of a set; `device` has no effect."""

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        super().__init__(group=group_of(process_set))


class LearningRateWarmupCallback(ring_keras.LearningRateWarmupCallback):
    """Raises the rate from `initial_lr` / size to `initial_lr`, which scripts have multiplied by the size.

    Args:
        initial_lr: the rate for all ranks.
        warmup_epochs, momentum_correction, steps_per_epoch, verbose: as for `ring_plugins.keras`'s.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            warmup_epochs, momentum_correction, steps_per_epoch, verbose, initial_learning_rate=float(initial_lr)
        )

    def _multipliers(self) -> tuple[float, float]:
        return 1 / size(), 1.0

    def _multiplier(self, epoch: float) -> float | None:
        return super()._multiplier(epoch + 1 / self._steps())  # the full rate in the last step of warm-up


class LearningRateScheduleCallback(ring_keras.LearningRateScheduleCallback):
    """Multiplies `initial_lr`, which scripts have multiplied by the size, in a range of epochs.

    Args:
        initial_lr: the rate for all ranks.
        multiplier: a function of the epoch, or 1. Another number is rejected: Horovod 0.28 raises it to the power of
            the epochs since `start_epoch`, and earlier versions multiply by it.
        start_epoch, end_epoch, staircase, momentum_correction, steps_per_epoch: as for `ring_plugins.keras`'s.

    Raises:
        ArgumentError: `multiplier` is such a number, or as for `ring_plugins.keras`'s.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        if not callable(multiplier) and multiplier != 1:
            raise ArgumentError(
                f"multiplier={multiplier!r} has meant two things in Horovod. Pass multiplier=lambda epoch: "
                f"{multiplier!r} for a rate that is multiplied once, or lambda epoch: {multiplier!r} ** (epoch - "
                f"{start_epoch!r}) for one that decays in every epoch, as with Horovod 0.28."
            )
        super().__init__(
            multiplier,
            start_epoch,
            end_epoch,
            staircase,
            momentum_correction,
            steps_per_epoch,
            initial_learning_rate=float(initial_lr),
        )


check_calls(globals(), __all__)
