"""Sparse gradients of TensorFlow: the rows of all ranks one behind the other, as one process would have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ring_plugins.core.arrays.memory import host_memory
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.failure import remembering


def gathered(gradient: Any, communicator: Communicator) -> Any:
    """The average of a sparse gradient, sparse.

    A dense average would be the same sum, but not the same update: Keras leaves the moments of rows that are not in
    the gradient alone.

    Args:
        gradient: `tf.IndexedSlices` with any number of rows, or the dense gradient of a variable that had sparse ones.
        communicator: gathers them.

    Returns:
        `tf.IndexedSlices`; rows may occur several times, as they may in what the tape returns.
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
    indices, values = tf.numpy_function(remembering(gather), [gradient.indices, gradient.values], types)
    indices = tf.ensure_shape(indices, [None])
    values = tf.ensure_shape(values, [None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
