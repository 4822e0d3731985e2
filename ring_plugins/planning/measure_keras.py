"""Measure the profile of a Keras model: time its step and divide it among layers in proportion to their arithmetic."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from typing import Any

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.planning.profile import Profile, from_costs

_WARM_UP = 3


def measure_keras(model: Any, batch: Any, steps: int) -> Profile:
    """`measure` for a compiled Keras model."""
    import keras

    if getattr(model, "optimizer", None) is None:
        raise ArgumentError("model is not compiled; call model.compile(optimizer, loss) before measure.")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ArgumentError(f"batch={type(batch).__name__} must be (x, y), or (x, y, sample_weight).")
    if not model.built:
        model(batch[0])
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    seconds = []
    try:
        for step in range(-_WARM_UP, steps):
            began = time.perf_counter()
            model.train_on_batch(*batch)
            if step >= 0:
                seconds.append(time.perf_counter() - began)
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        model.reset_metrics()
    layers = [
        (variable.path, _size(variable.shape), _operations(layer, variable))
        for layer in model._flatten_layers(include_self=False, recursive=True)
        for variable in layer._trainable_variables
        if layer.trainable
    ]
    if not layers:
        raise ArgumentError("model has no trainable variable.")
    x = batch[0]
    first = x if hasattr(x, "shape") else next(iter(x.values() if isinstance(x, dict) else x))
    source = f"step measured over {steps} steps with Keras on {keras.backend.backend()}, layers by their arithmetic"
    return from_costs(model.name, int(first.shape[0]), layers, statistics.median(seconds), source)


def _operations(layer: Any, variable: Any) -> float:
    """Operations of a product with a kernel: two per weight and output position; one for any other variable."""
    if len(variable.shape) < 2:
        return 1.0
    try:
        shape = layer.output.shape
    except (AttributeError, ValueError):  # the layer is used more than once, or by a subclassed model
        return 2.0 * _size(variable.shape)
    channels_first = getattr(layer, "data_format", "") == "channels_first"
    positions = shape[2:] if channels_first else shape[1:-1]
    return 2.0 * _size(variable.shape) * _size(n for n in positions if n)


def _size(shape: Iterable[int]) -> int:
    return math.prod(int(n) for n in shape)
