"""Whose state may be added up over ranks."""

from __future__ import annotations

import inspect
from typing import Any

import keras

#: What a state that is an extreme, and no sum, is computed with, on any backend.
_EXTREMES = {"max", "min", "maximum", "minimum", "amax", "amin", "reduce_max", "reduce_min", "fmax", "fmin"}


def is_additive(metric: keras.metrics.Metric) -> bool:
    """Whether the state of all data is the sum of the states of its parts.

    All metrics that come with Keras are of this kind. A metric of the user's own is taken for additive unless its
    variables declare another `aggregation`, or its `update_state` names a maximum or minimum: a heuristic, for nothing
    in a metric says how its state grows. Declare `add_variable(..., aggregation="none")` where it errs.

    Args:
        metric: any Keras metric.
    """
    update = inspect.unwrap(getattr(type(metric), "update_state"))  # noqa: B009 - the class's, not the instance's
    if update.__module__.split(".")[0] == "keras":
        return True
    if any(variable.aggregation not in (None, "sum") for variable in metric.variables):
        return False
    code = getattr(update, "__code__", None)
    return code is None or _EXTREMES.isdisjoint(code.co_names)


def leaves(metrics: list[Any]) -> list[Any]:
    """The metrics themselves, taken out of the containers in which `compile` keeps them."""
    found: list[Any] = []
    for metric in metrics:
        # Keras 3.15.1, trainers/compile_utils.py: CompileMetrics lists what it holds under `metrics`.
        inner = getattr(metric, "metrics", None)
        found.extend(leaves(list(inner)) if inner else [metric])
    return found
