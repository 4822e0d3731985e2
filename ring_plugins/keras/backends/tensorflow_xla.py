"""A train step that XLA compiles in two parts, with the reduction between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf


class _UpdatesOtherwise(Exception):
    """The train step does not apply exactly one set of gradients with the optimizer."""


def compiled_around(model: Any, averaging: Any) -> Callable[[Any], Any]:
    """`model.train_step` with everything but the reduction compiled by XLA.

    The user's own `train_step` runs with an `apply` that only remembers what it is given; the reduction and the true
    `apply` follow. A step that updates more than once, or with another optimizer, runs uncompiled, and says so.

    Args:
        model: a compiled Keras model.
        averaging: of its optimizer, or None where nothing is averaged.

    Returns:
        A function from a batch to the logs.
    """
    if averaging is None:
        alone: Callable[[Any], Any] = tf.function(
            model.train_step, jit_compile=True, reduce_retracing=True, autograph=False
        )
        return alone
    seen: dict[str, Any] = {}

    def forward_and_backward(data: Any) -> tuple[Any, list[Any]]:
        given: list[tuple[list[Any], list[Any] | None]] = []

        def remember(grads: Any, trainable_variables: Any = None) -> None:
            given.append((list(grads), None if trainable_variables is None else list(trainable_variables)))

        attributes = averaging.optimizer.__dict__
        replaced, attributes["apply"] = attributes["apply"], remember
        try:
            logs = model.train_step(data)
        finally:
            attributes["apply"] = replaced
        if len(given) != 1:
            raise _UpdatesOtherwise
        gradients, variables = given[0]
        variables = list(averaging.optimizer._trainable_variables if variables is None else variables)
        seen["present"] = [gradient is not None for gradient in gradients]
        seen["variables"] = variables
        return logs, [gradient for gradient in gradients if gradient is not None]

    def update(gradients: list[Any]) -> None:
        variables = [v for v, present in zip(seen["variables"], seen["present"], strict=True) if present]
        averaging.previous("apply")(gradients, variables)

    first = tf.function(forward_and_backward, jit_compile=True, reduce_retracing=True, autograph=False)
    last = tf.function(update, jit_compile=True, autograph=False)

    def step(data: Any) -> Any:
        try:
            logs, gradients = first(data)
        except _UpdatesOtherwise:
            warnings.warn(
                f"{type(model).__name__}.train_step does not update exactly once with model.optimizer, so it runs "
                "without XLA (jit_compile=False) to keep its gradients averaged.",
                stacklevel=2,
            )
            return model.train_step(data)
        variables = [v for v, present in zip(seen["variables"], seen["present"], strict=True) if present]
        last(averaging.average(gradients, variables))
        return logs

    return step
