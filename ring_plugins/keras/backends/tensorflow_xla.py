"""A train step that XLA compiles in two parts, with the reduction between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ring_plugins.core.base.errors import ArgumentError


class InsideXla(ArgumentError):
    """The ranks would have to meet inside a function that XLA compiles, where TensorFlow has no calls to the host."""


class _UpdatesOtherwise(Exception):
    """The train step does not apply exactly one set of gradients with the optimizer."""


def refuse_inside_xla(what: str = "optimizer.apply") -> None:
    """Refuse to reduce in a function with `jit_compile=True`; TensorFlow's own error comes late and names no remedy.

    Args:
        what: was called there, for the text.

    Raises:
        InsideXla: while such a function, or one inside it, is being traced.
    """
    if not tf.executing_eagerly() and _is_traced_for_xla(tf.compat.v1.get_default_graph()):
        raise InsideXla(
            f"{what} of several ranks was called inside tf.function(jit_compile=True), and XLA cannot call out to the "
            "other ranks. Return the gradients from the compiled function and call optimizer.apply outside of it, in a "
            "tf.function without jit_compile or in none; or train with model.fit, which does that by itself."
        )


def _is_traced_for_xla(graph: Any) -> bool:
    """Whether this graph, or one around it, is for XLA; False where this version of TensorFlow does not tell."""
    while graph is not None:
        # TensorFlow 2.21, eager/polymorphic_function: tracing for XLA happens inside an XLAControlFlowContext.
        context = graph._get_control_flow_context()
        if context is not None and context.IsXLAContext():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def compiled_around(model: Any, averaging: Any) -> Callable[[Any], Any]:
    """`model.train_step` with everything but the reduction compiled by XLA.

    A step that updates more than once, or with another optimizer, or whose layers reduce too, runs uncompiled, and
    says so.

    Args:
        model: a compiled Keras model.
        averaging: of its optimizer, or None where nothing is averaged.

    Returns:
        A function from a batch to the logs.
    """
    compiled = _whole(model) if averaging is None else _in_two_parts(model, averaging)
    fits = True

    def step(data: Any) -> Any:  # traced, so the choice is made when the first batch is seen
        nonlocal fits
        if not fits:
            return model.train_step(data)
        try:
            return compiled(data)
        except (InsideXla, _UpdatesOtherwise):
            fits = False
            warnings.warn(
                f"the ranks meet inside {type(model).__name__}.train_step other than in one update with "
                "model.optimizer, so it runs without XLA (jit_compile=False).",
                stacklevel=2,
            )
            return model.train_step(data)

    return step


def _whole(model: Any) -> Callable[[Any], Any]:
    compiled: Callable[[Any], Any] = tf.function(
        model.train_step, jit_compile=True, reduce_retracing=True, autograph=False
    )
    return compiled


def _in_two_parts(model: Any, averaging: Any) -> Callable[[Any], Any]:
    """The user's own `train_step` with an `apply` that only remembers what it is given, then the true `apply`."""
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
        variables = list(averaging.variables if variables is None else variables)
        seen["present"] = [gradient is not None for gradient in gradients]
        seen["variables"] = variables
        return logs, [gradient for gradient in gradients if gradient is not None]

    def update(gradients: list[Any]) -> None:
        averaging.previous("apply")(gradients, present())

    def present() -> list[Any]:
        return [v for v, present in zip(seen["variables"], seen["present"], strict=True) if present]

    first = tf.function(forward_and_backward, jit_compile=True, reduce_retracing=True, autograph=False)
    last = tf.function(update, jit_compile=True, autograph=False)

    def step(data: Any) -> Any:
        logs, gradients = first(data)
        last(averaging.average(gradients, present()))
        return logs

    return step
