"""An optimizer's learning rate as a multiple of the rate for one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError

Scaling = Literal["linear", "sqrt", "none"]
_ATTRIBUTE = "_ring_rate"


def scale_for(scaling: Scaling, size: int) -> float:
    """By how much the rate grows with the number of ranks.

    Args:
        scaling: "linear" as in Goyal et al. 2017 (arXiv 1706.02677), "sqrt" as is common with Adam, "none".
        size: number of ranks, which is by how much the batch has grown.

    Raises:
        ArgumentError: another word.
    """
    if scaling not in ("linear", "sqrt", "none"):
        raise ArgumentError(f'scaling={scaling!r} must be "linear", "sqrt" or "none".')
    return {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}[scaling]


class Rate:
    """The learning rate of one optimizer, kept as base times multiplier.

    A change from outside (`ReduceLROnPlateau`) is seen as a change of the base, and stays.

    Attributes:
        base: the rate for one process.
        scale: what warm-up multiplies it by in the end.
    """

    def __init__(self, base: float, last: float) -> None:
        self.base, self.scale = base, 1.0
        self._last = last

    @classmethod
    def of(cls, optimizer: Any, given: float | None, multiplier_so_far: float) -> Rate:
        """The optimizer's, kept on it from one fit to the next.

        Args:
            optimizer: with a number for its learning rate.
            given: the rate for one process, if the user said so.
            multiplier_so_far: where the optimizer has just been loaded in the middle of a training, by what its rate
                had been multiplied then.
        """
        rate: Rate | None = vars(optimizer).get(_ATTRIBUTE)
        current = _read(optimizer)
        if rate is None:
            rate = cls(current / multiplier_so_far, current)
            optimizer.__dict__[_ATTRIBUTE] = rate
        rate._follow(current)
        if given is not None:
            rate.base, rate._last = given, current
        return rate

    def set(self, optimizer: Any, multiplier: float, momentum_correction: bool) -> None:
        """Let the rate be base x multiplier.

        Args:
            optimizer: the one this belongs to.
            multiplier: of the base.
            momentum_correction: scale SGD's velocities along with the rate that is in them, by which the momentum
                keeps its effect (Goyal et al. 2017, section 3).
        """
        current = _read(optimizer)
        self._follow(current)
        new = float(np.float32(self.base * multiplier))
        self._last = new
        if new == current:
            return
        optimizer.learning_rate = new
        velocities = getattr(optimizer, "momentums", None)
        if momentum_correction and velocities and isinstance(optimizer, keras.optimizers.SGD) and current > 0:
            for velocity in velocities:
                velocity.assign(velocity * (new / current))

    def _follow(self, current: float) -> None:
        if not math.isclose(current, self._last, rel_tol=1e-6) and self._last > 0:
            self.base *= current / self._last
            self._last = current


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates, inside a LossScaleOptimizer."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def has_schedule(optimizer: Any) -> bool:
    """Whether the rate is computed from the number of updates and cannot be set."""
    # Keras 3.15.1, optimizers/base_optimizer.py:777.
    return isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)


def multiply_schedule(optimizer: Any, multipliers: Sequence[float]) -> None:
    """Multiply a scheduled rate, update by update from now on; the last multiplier holds for ever.

    The instance's reading of its rate is replaced and the schedule itself is not, so that files saved with it load
    without this package (with the rate for one process).

    Args:
        optimizer: with a `LearningRateSchedule`.
        multipliers: one for each coming update.
    """
    first = int(keras.ops.convert_to_numpy(optimizer.iterations))
    table = np.asarray(multipliers, np.float32)
    scheduled: Callable[[], Any] = type(optimizer)._get_current_learning_rate.__get__(optimizer)

    def rate() -> Any:
        update = keras.ops.clip(keras.ops.cast(optimizer._iterations, "int32") - first, 0, len(table) - 1)
        return scheduled() * keras.ops.take(keras.ops.convert_to_tensor(table), update)

    optimizer.__dict__["_get_current_learning_rate"] = rate


def _read(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
