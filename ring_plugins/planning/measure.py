"""Measure the profile of your own model by running a few steps in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.planning.profile import Profile


def measure(
    model: Any,
    batch: Any,
    loss: Any = None,
    optimizer: Any = None,
    *,
    steps: int = 10,
    file: Path | str | None = None,
) -> Profile:
    """Run training steps of a model on this rank alone, and record when in backward each gradient is complete.

    Weights, running statistics and the optimizer's state are restored afterwards. Keras does not report when a gradient
    is complete, so the whole step is timed and divided among layers in proportion to their arithmetic.

    Args:
        model: a torch module (a LightningModule too), or a compiled Keras model.
        batch: batch of one rank for one step, on the model's device. For torch: the argument of `loss`; without a
            loss, a pair (inputs, targets), a dictionary for a model that returns an object with `.loss`, or inputs
            alone. For Keras: (x, y).
        loss: for torch, `loss(model, batch)` returning a number to differentiate. By default `model.training_step`
            if there is one, else cross entropy for integer targets and squared error for others.
        optimizer: for torch, the optimizer whose step is timed; SGD by default.
        steps: number of steps to time; the profile has their medians.
        file: file to which the profile is written as JSON, for `ring plan --profile`.

    Raises:
        ArgumentError: the model is neither a torch nor a Keras model, or cannot take the batch.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps={steps!r} is not a positive number of steps.")
    kinds = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if "keras" in kinds:
        from ring_plugins.planning.measure_keras import measure_keras

        profile = measure_keras(model, batch, steps)
    elif "torch" in kinds:
        from ring_plugins.planning.measure_torch import measure_torch

        profile = measure_torch(model, batch, loss, optimizer, steps)
    else:
        raise ArgumentError(f"model={type(model).__name__} is neither a torch module nor a Keras model.")
    if file is not None:
        profile.save(file)
    return profile
