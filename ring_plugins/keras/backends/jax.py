"""JAX: one ordered host call in front of the update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.keras.averaging import Averaging
from ring_plugins.keras.failure import remembering, unwrapped

Array = np.ndarray[Any, np.dtype[Any]]


class GradientAveraging(Averaging):
    """Replaces `stateless_apply`, which `fit` calls, and `apply`, for loops that run eagerly."""

    methods = ("stateless_apply", "apply")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inside = False

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """Stands in for the optimizer's method; takes and returns the same."""
        self.prepare(self.optimizer._trainable_variables)
        averaged = self.average(list(grads), list(range(len(grads))))
        self._inside = True
        try:
            return self.previous("stateless_apply")(optimizer_variables, averaged, trainable_variables)
        finally:
            self._inside = False

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stands in for the optimizer's `apply`; takes the same."""
        gradients = list(grads)
        if not self._inside:
            given = self.optimizer._trainable_variables if trainable_variables is None else trainable_variables
            variables = list(given)
            self.prepare(self.optimizer._trainable_variables if self.optimizer.built else variables)
            gradients = self.average(gradients, [self.index(variable) for variable in variables])
        self.previous("apply")(gradients, trainable_variables)

    def average(self, gradients: list[Any], indices: list[int]) -> list[Any]:
        """The average of each gradient; None stays None."""
        present = [place for place, gradient in enumerate(gradients) if gradient is not None]
        given = [gradients[place] for place in present]
        exchange = self._exchange([indices[place] for place in present])
        if any(isinstance(gradient, jax.core.Tracer) for gradient in given):
            shapes = [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in given]
            results = io_callback(exchange, shapes, *given, ordered=True)
        else:
            results = [jax.numpy.array(average) for average in exchange(*given)]
        averaged: list[Any] = [None] * len(gradients)
        for place, result in zip(present, results, strict=True):
            averaged[place] = result
        return averaged

    def _exchange(self, indices: list[int]) -> Callable[..., list[Array]]:
        def exchange(*gradients: Any) -> list[Array]:
            assert self.buckets is not None
            self.buckets.give(indices, [np.asarray(gradient) for gradient in gradients])
            found = self.buckets.finish()
            return [found[i] for i in indices]

        return remembering(exchange)


def refuse_other_parallelism(model: Any) -> None:
    """See the protocol; `keras.distribution` is refused for all backends."""


def is_lazy(model: Any) -> bool:
    """See the protocol; Keras builds a model on this backend before any callback is called."""
    return False


def make_train_function(model: Any) -> None:
    """See the protocol."""
    model.make_train_function(force=True)
    train_function = model.train_function

    @functools.wraps(train_function)
    def step(state: Any, iterator: Any) -> Any:
        with unwrapped():
            return train_function(state, iterator)

    model.train_function = step


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """See the protocol."""
    action()


def seed_apart(communicator: Communicator, root: int) -> None:
    """See the protocol; layers on this backend draw from seed generators only."""
