"""`import ring_plugins.horovod.keras as hvd`: what scripts use of `horovod.keras` and `horovod.tensorflow.keras`.

`model.fit` may use `hvd.DistributedOptimizer` or only `hvd.callbacks.BroadcastGlobalVariablesCallback`, which also
averages gradients. Only rank 0 writes checkpoints, logs and the progress bar, whether or not the script asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ring_plugins.horovod import basics
from ring_plugins.horovod.keras import callbacks  # explains a missing Keras, so it comes before Keras itself

# isort: split
import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    begin,
    op_of,
    reduction_of,
    scaled,
    size,
    told,
)
from ring_plugins.horovod.keras import elastic
from ring_plugins.horovod.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ring_plugins.other_names import no_attribute

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "callbacks",
    "load_model",
    "reducescatter",
]
__all__ += ["elastic"]
__all__ += basics.__all__

O = TypeVar("O", bound=keras.optimizers.Optimizer)  # noqa: E741 - one letter, as type variables are


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Iterable[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Load a model, and let its optimizer average gradients.

    Args:
        filepath: of the file.
        custom_optimizers: optimizer classes of the script's own.
        custom_objects: other classes and functions of its own.
        compression: as for `DistributedOptimizer`.
    """
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


@told
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    process_set: Any = None,
) -> Any:
    """Combine a value of all ranks, an array or number; the result is a numpy array. It passes no gradient."""
    reduction, array = op_of(average, op), _array(value)
    group = begin("allreduce", name, process_set)
    is_whole = array.dtype.kind in "iub"
    reduction, after = reduction_of(reduction, postscale_factor, size(process_set), is_whole)
    found = ring.all_reduce(scaled(array, prescale_factor, is_whole), reduction, group=group)
    return scaled(found, after, is_whole)


@told
def allgather(value: Any, name: str | None = None, process_set: Any = None) -> Any:
    """Concatenate the values of all ranks along the first dimension, in a numpy array."""
    return ring.all_gather(_array(value), group=begin("allgather", name, process_set))


@told
def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """The root's value on all ranks, in a numpy array."""
    return ring.broadcast(_array(value), root_rank, group=begin("broadcast", name, process_set))


@told
def reducescatter(value: Any, name: str | None = None, op: Op = Average, process_set: Any = None) -> Any:
    """Combine a value of all ranks and keep this rank's rows, in a numpy array."""
    array = _array(value)
    group = begin("reducescatter", name, process_set)
    is_whole = array.dtype.kind in "iub"
    reduction, after = reduction_of(op_of(None, op), 1.0, size(process_set), is_whole)
    return scaled(ring.reduce_scatter(array, reduction, group=group), after, is_whole)


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(keras.ops.convert_to_numpy(value))


check_calls(globals(), __all__)
