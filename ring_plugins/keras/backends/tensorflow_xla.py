"""Compile a train step with XLA in two parts, with the reduction between them.

With `jit_compile=True` (Keras's "auto" chooses it on GPUs) TensorFlow compiles the whole train step, and XLA cannot
call the host: "No registered 'EagerPyFunc' OpKernel for XLA". So the user's own `train_step` is traced with an `apply`
that only records its arguments. XLA compiles that part, forward and backward; then the gradients are averaged outside
XLA; then the original `apply` runs, compiled separately.

Considered and rejected: always turning `jit_compile` off. That happens, with a warning, only for steps that do not fit
this scheme.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.patches import replaced


class InsideXla(ArgumentError):
    """A collective was called inside a function that XLA compiles, which cannot make host calls."""


class _NotOneUpdate(Exception):
    """The train step does not update exactly once with the model's optimizer."""


_OUTSIDE = (
    "Return the gradients from the compiled function and call optimizer.apply outside it, eagerly or in a tf.function "
    "without jit_compile; or train with model.fit, which does that automatically."
)


def reject_inside_xla(what: str = "optimizer.apply of several ranks", remedy: str = _OUTSIDE) -> None:
    """Raise if a function with `jit_compile=True` is being traced. TensorFlow's own error comes late and has no remedy.

    Args:
        what: name of the caller, for the message.
        remedy: what to write instead.

    Raises:
        InsideXla: such a function, or one nested in it, is being traced.
    """
    if not tf.executing_eagerly() and _is_traced_for_xla(tf.compat.v1.get_default_graph()):
        raise InsideXla(
            f"{what} was called inside tf.function(jit_compile=True), and XLA cannot communicate with other ranks. "
            f"{remedy}"
        )


def _is_traced_for_xla(graph: Any) -> bool:
    """Whether this graph or an enclosing one is for XLA; False if this version of TensorFlow does not say."""
    while graph is not None:
        # TensorFlow 2.21, eager/polymorphic_function: tracing for XLA happens inside an XLAControlFlowContext.
        context = graph._get_control_flow_context()
        if context is not None and context.IsXLAContext():
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def compiled_around(model: Any, averaging: Any) -> Callable[[Any], Any]:
    """Compile all of `model.train_step` except the reduction with XLA.

    A step that updates more than once, or with another optimizer, or whose layers call collectives, runs without XLA,
    with a warning.

    Args:
        model: a compiled Keras model.
        averaging: the `GradientAveraging` of its optimizer, or None if nothing is averaged.

    Returns:
        A function from a batch to the logs.
    """
    if averaging is None:
        compiled = tf.function(model.train_step, jit_compile=True, reduce_retracing=True, autograph=False)
    else:
        compiled = _in_two_parts(model, averaging)
    fits = True

    def step(data: Any) -> Any:  # traced, so the choice is made for the first batch
        nonlocal fits
        if not fits:
            return model.train_step(data)
        try:
            return compiled(data)
        except (InsideXla, _NotOneUpdate):
            fits = False
            warnings.warn(
                f"{type(model).__name__}.train_step calls collectives other than in one update with model.optimizer, "
                "so it runs without XLA (jit_compile=False).",
                stacklevel=2,
            )
            return model.train_step(data)

    return step


def _in_two_parts(model: Any, averaging: Any) -> Callable[[Any], Any]:
    """Run the user's `train_step` with an `apply` that only records, then average, then run the original `apply`."""
    updated: list[Any] = []  # variables with gradients, set while the first part is traced

    def forward_and_backward(data: Any) -> tuple[Any, list[Any]]:
        calls: list[tuple[list[Any], list[Any]]] = []

        def record(grads: Any, trainable_variables: Any = None) -> None:
            calls.append(
                (list(grads), list(averaging.variables if trainable_variables is None else trainable_variables))
            )

        later = (
            contextlib.nullcontext() if averaging.share is None else replaced(averaging.share, is_weighed_later=True)
        )
        with replaced(averaging.optimizer, apply=record), later:
            logs = model.train_step(data)
        if len(calls) != 1:
            raise _NotOneUpdate
        present = [(gradient, v) for gradient, v in zip(*calls[0], strict=True) if gradient is not None]
        updated[:] = [variable for _, variable in present]
        return logs, [gradient for gradient, _ in present]

    def update(averages: list[Any]) -> None:
        averaging.apply_averages(averages, list(updated))

    first = tf.function(forward_and_backward, jit_compile=True, reduce_retracing=True, autograph=False)
    # The update of a sharded optimizer ends with a collective.
    last = tf.function(update, jit_compile=averaging.sharded is None, autograph=False)

    def step(data: Any) -> Any:
        logs, gradients = first(data)
        share = averaging.share
        if share is not None and share.is_used:  # with a tensor of the first part's graph
            share.samples = share.count(data)
            if share.weigh is not None:
                weight = share.weigh(share.samples)
                gradients = [_times(gradient, weight) for gradient in gradients]
        last(averaging.average(gradients, list(updated), averaging.rate()))
        return logs

    return step


def _times(gradient: Any, weight: Any) -> Any:
    factor = tf.cast(weight, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
