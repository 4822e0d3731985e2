"""TensorFlow: gradients leave the graph in host calls, bucket by bucket, while backward goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import Entry
from ring_plugins.keras.averaging import Averaging, averaging_of
from ring_plugins.keras.backends import tensorflow_device
from ring_plugins.keras.backends.tensorflow_sparse import gathered
from ring_plugins.keras.backends.tensorflow_xla import compiled_around, refuse_inside_xla
from ring_plugins.keras.buckets import HostBuckets
from ring_plugins.keras.failure import remembering, unwrapped
from ring_plugins.keras.moments import BatchMoments, gradient_of_own


class GradientAveraging(Averaging):
    """Replaces `apply`.

    TensorFlow runs host calls of one function in the order in which they were traced, on every rank alike: one a
    bucket, last layers first, each started when its gradients are there, and one that waits for all of them.
    """

    methods = ("apply",)
    _call = staticmethod(tf.numpy_function)
    _variables: list[Any]
    _sparse: list[int]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stands in for the optimizer's `apply`; takes the same."""
        given = self.variables if trainable_variables is None else trainable_variables
        variables = list(given)
        averaged = self.average(list(grads), variables)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        before = len(graph.get_operations()) if graph is not None else 0
        self.previous("apply")(averaged, trainable_variables)
        if graph is not None:
            self._keep_until(graph.get_operations()[before:])

    def build(self, variables: Sequence[Any]) -> None:
        """Waits for the first gradients: those that are sparse have no place in a bucket."""
        self._variables = list(variables)

    def average(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The average of each gradient; None stays None, and sparse ones stay sparse.

        Raises:
            InsideXla: XLA compiles what is being traced.
        """
        refuse_inside_xla()
        if self.accumulation == 1:
            return self._average(gradients, variables)
        present = [place for place, gradient in enumerate(gradients) if gradient is not None]
        kept = [variables[place] for place in present]
        own = [tf.convert_to_tensor(gradients[place]) for place in present]
        accumulators = self.accumulators(kept)

        def update() -> list[Any]:
            """The optimizer finds the sum of all steps in place of this step's gradient, and nothing accumulated."""
            averages = self._average([_sum(*pair) for pair in zip(own, accumulators, strict=True)], kept)
            for accumulator in filter(None.__ne__, accumulators):
                accumulator.assign(tf.zeros_like(accumulator.value))
            return averages

        is_update = tf.equal((self.optimizer._iterations.value + 1) % self.accumulation, 0)
        averages = iter(tf.cond(is_update, update, lambda: own))
        return [None if gradient is None else next(averages) for gradient in gradients]

    def _average(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        self.prepare(self.variables if self.optimizer.built else variables)
        present = {self.index(v): g for g, v in zip(gradients, variables, strict=True) if g is not None}
        if self.buckets is None:
            self._sparse = [i for i, gradient in present.items() if isinstance(gradient, tf.IndexedSlices)]
            entries = self.entries(self._variables)
            for i in self._sparse:
                entries[i] = replace(entries[i], count=0, layout=f"{entries[i].layout}, sparse")
            self.buckets = self._on_gpus(entries) or HostBuckets(
                entries, self.communicator, self.bucket_bytes, self.first_bucket_bytes, self.compression
            )
        dense = {i: tf.convert_to_tensor(g) for i, g in present.items() if i not in self._sparse}
        averaged = self._average_dense(dense)
        for i in self._sparse:
            if i in present:
                averaged[i] = gathered(present[i], self.communicator)
        return [None if g is None else averaged[self.index(v)] for g, v in zip(gradients, variables, strict=True)]

    def _on_gpus(self, entries: Sequence[Entry]) -> tensorflow_device.DeviceBuckets | None:
        """Buckets in the memory of the GPUs, where that was asked for; what is rounded goes through the host."""
        if self.compression is not None:
            return None
        on_gpus = tensorflow_device.connect(f"{self.communicator.name} on GPUs", self.world, self.communicator)
        if on_gpus is None:
            return None
        self._call = tensorflow_device.call
        return tensorflow_device.DeviceBuckets(entries, on_gpus, self.bucket_bytes, self.first_bucket_bytes)

    def _average_dense(self, dense: dict[int, Any]) -> dict[int, Any]:
        assert self.buckets is not None
        for bucket in self.buckets.plan.buckets:
            here = [i for i in bucket.entries if i in dense]
            if here:
                self._call(self._give(here), [dense[i] for i in here], [])
        indices = list(dense)
        results = self._call(self._finish(indices), [], [dense[i].dtype for i in indices])
        if len(indices) == 1:  # which, outside of a graph, comes without its list
            results = tf.nest.flatten(results)
        return {i: tf.ensure_shape(result, dense[i].shape) for i, result in zip(indices, results, strict=True)}

    def _give(self, indices: list[int]) -> Callable[..., None]:
        def give(*gradients: Array) -> None:
            assert self.buckets is not None
            self.buckets.give(indices, gradients)

        return remembering(give)

    def _finish(self, indices: list[int]) -> Callable[[], list[Array]]:
        def finish() -> list[Array]:
            assert self.buckets is not None
            found = self.buckets.finish()
            return [found[i] for i in indices]

        return remembering(finish)

    def _keep_until(self, operations: list[Any]) -> None:
        """Let the next pass begin when these operations are over.

        What `finish` returns is the buckets' own memory: TensorFlow takes an aligned array as it is. A later step in
        the same graph (`steps_per_execution`) must not write to it while an update still reads it.
        """
        with tf.control_dependencies(operations):
            tf.numpy_function(_nothing, [], [])


def _sum(gradient: Any, accumulator: Any) -> Any:
    return gradient if accumulator is None else gradient + tf.cast(accumulator.value, gradient.dtype)


def _nothing() -> None:
    """A host call, which TensorFlow keeps in its place between others."""


def refuse_other_parallelism(model: Any) -> None:
    """See the protocol."""
    # Keras 3.15.1, backend/tensorflow/trainer.py:33: the strategy the model was made under.
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None or tf.distribute.has_strategy():
        kind = type(strategy or tf.distribute.get_strategy()).__name__
        raise ArgumentError(
            f"the model was made, or is fitted, under tf.distribute's {kind}, which averages gradients itself. Make "
            "and fit it outside of any strategy, one process a device."
        )


def is_lazy(model: Any) -> bool:
    """See the protocol; this backend builds a model when it traces the first step."""
    return not all(layer.built for layer in model._flatten_layers())


def make_train_function(model: Any) -> None:
    """See the protocol.

    Host calls cannot be inside a function that XLA compiles, so where XLA is asked for, forward with backward, and
    the update, are compiled each on its own with the reduction in between.
    """
    averaging = averaging_of(model.optimizer) if model.optimizer is not None else None
    if model.jit_compile and not model.run_eagerly:
        # Keras 3.15.1, backend/tensorflow/trainer.py:149: the step is compiled according to `jit_compile`.
        step = compiled_around(model, averaging)
        model._jit_compile = False
        try:
            model.train_function = model._make_function(step)
        finally:
            model._jit_compile = True
    else:
        model.make_train_function(force=True)
    model.train_function = _with_true_errors(model.train_function)


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """See the protocol."""

    def first(iterator: Any) -> Any:
        _build(model, iterator)
        action()  # which makes the train function anew
        return model.train_function(iterator)

    model.train_function = first


def moments_of_all(moments: BatchMoments, count: Any, own: Any) -> Any:
    """See the protocol."""
    refuse_inside_xla("a synchronized BatchNormalization")

    @tf.custom_gradient
    def combined(own: Any) -> tuple[Any, Callable[[Any], Any]]:
        everyones, share = tf.numpy_function(remembering(moments.combine), [count, own], [own.dtype, own.dtype])
        everyones, share = tf.ensure_shape(everyones, own.shape), tf.ensure_shape(share, [])

        def gradient(upstream: Any) -> Any:
            total = tf.numpy_function(remembering(moments.add_up), [upstream], own.dtype)
            return gradient_of_own(own, everyones, share, tf.ensure_shape(total, own.shape))

        return everyones, gradient

    return combined(own)


def seed_apart(communicator: Communicator, root: int) -> None:
    """See the protocol; layers on this backend draw from seed generators only."""


def _build(model: Any, iterator: Iterator[Any]) -> None:
    """Build model, loss, metrics and optimizer from the shapes that the data will have."""
    specification = getattr(iterator, "element_spec", None)
    if specification is None:
        raise ArgumentError(
            "the model has no variables yet and its first batch cannot be looked at; build it before fit(), with "
            "model.build(input_shape) or by calling it on a batch."
        )

    def symbol(spec: Any) -> Any:
        if isinstance(spec, tf.OptionalSpec):
            return None
        return keras.KerasTensor(tuple(spec.shape), spec.dtype.name)

    # Keras 3.15.1, trainers/trainer.py:1125: takes anything with shapes and dtypes.
    model._symbolic_build(data_batch=tf.nest.map_structure(symbol, specification))


def _with_true_errors(train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(train_function)
    def step(iterator: Any) -> Any:
        with unwrapped():
            return train_function(iterator)

    return step
