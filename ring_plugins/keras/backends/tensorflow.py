"""TensorFlow: gradients leave the graph in host calls, bucket by bucket, while backward continues.

TensorFlow runs the host calls of a function in the order in which they were traced, which is the same on all ranks.
There is one call per bucket, last layers first, which starts as soon as its gradients are ready, and one that waits for
all buckets. `tf.numpy_function` takes 0.02 ms per call and does not copy; `tf.py_function`, the only choice on a GPU,
takes 5 ms more for 26 MB. XLA cannot compile host calls; `tensorflow_xla.py` deals with that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import Entry
from ring_plugins.keras.backends import Settings, tensorflow_device
from ring_plugins.keras.backends.tensorflow_xla import compiled_around, refuse_inside_xla
from ring_plugins.keras.buckets import Buckets, HostBuckets, call_weakly
from ring_plugins.keras.healing import Root
from ring_plugins.keras.job import capture_exceptions, connect, restore_exceptions


class Exchange:
    """See the protocol. Buckets are planned when the first gradients are known, since sparse ones need no bucket."""

    def __init__(self, variables: Sequence[Any], entries: Sequence[Entry], settings: Settings) -> None:
        self._entries, self._settings = list(entries), settings
        self.communicator = connect().new_communicator(settings.name)
        self.buckets: Buckets | None = None
        self._sparse: list[int] = []
        self._call = tf.numpy_function

    @property
    def passes(self) -> int:
        return self.buckets.reducer.passes if self.buckets else 0

    @property
    def waited_seconds(self) -> float:
        return self.buckets.reducer.waited if self.buckets else 0.0

    @property
    def reduced_bytes(self) -> int:
        return self.buckets.reducer.reduced_bytes if self.buckets else 0

    def average(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """See the protocol; sparse gradients stay sparse.

        Raises:
            InsideXla: the function being traced will be compiled by XLA.
        """
        refuse_inside_xla()
        if self.buckets is None:
            self._sparse = [i for i, gradient in gradients.items() if isinstance(gradient, tf.IndexedSlices)]
            self.buckets = self._plan()
        dense = {i: tf.convert_to_tensor(g) for i, g in gradients.items() if i not in self._sparse}
        averages = self._average_dense(self.buckets, dense)
        for i in self._sparse:
            if i in gradients:
                averages[i] = _average_sparse(gradients[i], self.communicator)
        return averages

    def _plan(self) -> Buckets:
        """Create the buckets: on the GPUs if requested, unless compression is used, which rounds on the host."""
        entries, settings = list(self._entries), self._settings
        if self._sparse:
            connect().refuse_to_heal("Averaging sparse gradients")
        for i in self._sparse:
            entries[i] = replace(entries[i], count=0, layout=f"{entries[i].layout}, sparse")
        on_gpus = None if settings.compression else tensorflow_device.connect(settings.name, self.communicator)
        if on_gpus is not None:
            self._call = tensorflow_device.call
            return tensorflow_device.DeviceBuckets(entries, on_gpus, settings.sizes)
        return HostBuckets(entries, self.communicator, settings.sizes, settings.rounding, overlap=settings.overlap)

    def _average_dense(self, buckets: Buckets, dense: dict[int, Any]) -> dict[int, Any]:
        """Trace a call for each bucket and one for the averages."""
        indices = list(dense)
        give_now, finish_now = call_weakly(buckets.give), call_weakly(buckets.finish)

        def give(indices: list[int], *gradients: Array) -> None:
            give_now(indices, gradients)

        def finish() -> list[Array]:
            averages = finish_now()
            return [averages[i] for i in indices]

        for bucket in buckets.plan.buckets:
            here = [i for i in bucket.entries if i in dense]
            if here:
                self._call(capture_exceptions(functools.partial(give, here)), [dense[i] for i in here], [])
        averages = self._call(capture_exceptions(finish), [], [dense[i].dtype for i in indices])
        if len(indices) == 1:  # eager calls return a single result without a list
            averages = tf.nest.flatten(averages)
        return {i: tf.ensure_shape(average, dense[i].shape) for i, average in zip(indices, averages, strict=True)}

    def update(self, apply: Callable[..., None], gradients: list[Any], variables: Any) -> None:
        """See the protocol.

        Averages are views of the buckets, since TensorFlow does not copy an aligned array. In a graph of several steps
        (`steps_per_execution`) the next step's calls must wait until this update has read them.
        """
        if tf.executing_eagerly():
            apply(gradients, variables)
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        apply(gradients, variables)
        with tf.control_dependencies(graph.get_operations()[before:]):
            tf.numpy_function(_nothing, [], [])

    def release(self) -> None:
        if self.buckets is not None:
            self.buckets.release()
        self.communicator.close()


def _nothing() -> None:
    """A host call that does nothing; TensorFlow keeps its order among other host calls."""


def _average_sparse(gradient: Any, communicator: Communicator) -> Any:
    """Average a sparse gradient by concatenating the rows of all ranks.

    A dense average would give the same sum but another update, since Keras does not update the moments of rows that are
    not in the gradient.

    Args:
        gradient: `tf.IndexedSlices` with any number of rows, or the dense gradient of a variable that had sparse ones.
        communicator: gathers the rows.

    Returns:
        `tf.IndexedSlices`; rows may occur several times, as in gradients from the tape.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        rows = tf.shape(gradient)[0]
        gradient = tf.IndexedSlices(gradient, tf.range(rows), tf.shape(gradient))

    def gather(indices: Array, values: Array) -> tuple[Array, Array]:
        counts = communicator.all_gather_object(len(indices))
        row = int(np.prod(values.shape[1:], dtype=np.int64))
        all_indices = np.empty(sum(counts), indices.dtype)
        all_values = np.empty((sum(counts), *values.shape[1:]), values.dtype)
        mine = np.ascontiguousarray(values / values.dtype.type(communicator.size))
        communicator.all_gather(host_memory(indices), host_memory(all_indices), counts)
        communicator.all_gather(host_memory(mine), host_memory(all_values), [count * row for count in counts])
        return all_indices, all_values

    types = [gradient.indices.dtype, gradient.values.dtype]
    indices, values = tf.numpy_function(capture_exceptions(gather), [gradient.indices, gradient.values], types)
    indices = tf.ensure_shape(indices, [None])
    values = tf.ensure_shape(values, [None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def at_once() -> contextlib.AbstractContextManager[Any]:
    """See the protocol."""
    return cast("contextlib.AbstractContextManager[Any]", tf.init_scope())


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """See the protocol. No-op, because a graph contains only the host calls."""
    return function


def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """See the protocol."""
    return tf.cond(condition, yes, no)


def to_dense(gradient: Any) -> Any:
    """See the protocol."""
    return tf.convert_to_tensor(gradient)


def check_other_parallelism(model: Any) -> None:
    """See the protocol."""
    # Keras 3.15.1, backend/tensorflow/trainer.py:33: the strategy that was active when the model was created.
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None or tf.distribute.has_strategy():
        kind = type(strategy or tf.distribute.get_strategy()).__name__
        raise ArgumentError(
            f"the model was created, or is fitted, under tf.distribute's {kind}, which averages gradients itself. "
            "Create and fit it outside any strategy, with one process per device."
        )


def is_lazy(model: Any) -> bool:
    """See the protocol. On this backend Keras builds a model when it traces the first step."""
    return not all(layer.built for layer in model._flatten_layers())


def make_train_function(model: Any, averaging: Any) -> None:
    """See the protocol.

    Functions compiled by XLA cannot contain host calls. With `jit_compile=True`, XLA compiles forward and backward as
    one function and the update as another; the reduction runs between the two.
    """
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
    train_function = model.train_function

    @functools.wraps(train_function)
    def step_with_original_errors(iterator: Any) -> Any:
        with restore_exceptions():
            return train_function(iterator)

    model.train_function = step_with_original_errors


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """See the protocol."""

    def first(iterator: Any) -> Any:
        _build(model, iterator)
        action()  # replaces the train function
        return model.train_function(iterator)

    model.train_function = first


def _build(model: Any, iterator: Iterator[Any]) -> None:
    """Build model, loss, metrics and optimizer from the shapes of the data."""
    specification = getattr(iterator, "element_spec", None)
    if specification is None:
        raise ArgumentError(
            "the model has no variables yet, and the shapes of its first batch are unknown; build it before fit(), "
            "with model.build(input_shape) or by calling it on a batch."
        )

    def symbol(spec: Any) -> Any:
        if isinstance(spec, tf.OptionalSpec):
            return None
        return keras.KerasTensor(tuple(spec.shape), spec.dtype.name)

    # Keras 3.15.1, trainers/trainer.py:1125, accepts anything with shapes and dtypes.
    model._symbolic_build(data_batch=tf.nest.map_structure(symbol, specification))


def host_call_with_gradient(
    forward: Callable[..., tuple[Array, Array]], backward: Callable[..., Array], own: Any, count: Any
) -> Any:
    """See the protocol."""
    refuse_inside_xla("a synchronized BatchNormalization")

    @tf.custom_gradient
    def call(own: Any) -> tuple[Any, Callable[[Any], Any]]:
        result, share = tf.numpy_function(capture_exceptions(forward), [own, count], [own.dtype, own.dtype])
        result, share = tf.ensure_shape(result, own.shape), tf.ensure_shape(share, [])

        def gradient(upstream: Any) -> Any:
            inputs = [own, result, share, upstream]
            return tf.ensure_shape(tf.numpy_function(capture_exceptions(backward), inputs, own.dtype), own.shape)

        return result, gradient

    return call(own)


def offset_seed(communicator: Communicator, root: Root) -> None:
    """See the protocol. No-op: on this backend layers use only seed generators."""
