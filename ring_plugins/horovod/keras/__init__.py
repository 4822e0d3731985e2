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
from ring_plugins import keras as ring_keras
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.functions import all_or_none
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    begin,
    check_averages,
    check_compression,
    check_process_set,
    op_of,
)
from ring_plugins.other_names import no_attribute

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "callbacks",
    "load_model",
    "reducescatter",
]
__all__ += basics.__all__

O = TypeVar("O", bound=keras.optimizers.Optimizer)  # noqa: E741 - one letter, as type variables are


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


def DistributedOptimizer(  # noqa: N802 - known by this name
    optimizer: O,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> O:
    """`ring_plugins.keras.DistributedOptimizer` with Horovod's arguments.

    Args:
        optimizer: any Keras optimizer.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average`; no other reduction of gradients is supported.
        backward_passes_per_step: 1. More is `gradient_accumulation_steps` of the Keras optimizer.
        process_set: all processes.
        name, device_dense, device_sparse, sparse_as_dense, gradient_predivide_factor, average_aggregated_gradients,
            num_groups, groups, scale_local_gradients: have no effect.

    Returns:
        The same optimizer.

    Raises:
        ArgumentError: an argument is not supported.
    """
    check_averages(op, gradient_predivide_factor)
    check_process_set(process_set)
    if backward_passes_per_step != 1:
        raise ArgumentError(
            f"backward_passes_per_step={backward_passes_per_step!r} is not supported with Keras 3; give the optimizer "
            f"gradient_accumulation_steps={backward_passes_per_step!r}, whose update is the mean over these steps "
            "(Horovod's is the sum unless average_aggregated_gradients=True)."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentError(
            f"optimizer={type(optimizer).__name__} of {type(optimizer).__module__} is not of Keras 3; pass one of "
            "keras.optimizers. In a loop, ring_plugins.horovod.tensorflow.DistributedGradientTape serves any optimizer."
        )
    return ring_keras.DistributedOptimizer(optimizer, compression=check_compression(compression))


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


@all_or_none
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
    reduction = op_of(average, op)
    begin("allreduce", name, process_set)
    return _times(ring.all_reduce(_times(_array(value), prescale_factor), reduction), postscale_factor)


@all_or_none
def allgather(value: Any, name: str | None = None, process_set: Any = None) -> Any:
    """Concatenate the values of all ranks along the first dimension, in a numpy array."""
    begin("allgather", name, process_set)
    return ring.all_gather(_array(value))


@all_or_none
def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """The root's value on all ranks, in a numpy array."""
    begin("broadcast", name, process_set)
    return ring.broadcast(_array(value), root_rank)


@all_or_none
def reducescatter(value: Any, name: str | None = None, op: Op = Average, process_set: Any = None) -> Any:
    """Combine a value of all ranks and keep this rank's rows, in a numpy array."""
    begin("reducescatter", name, process_set)
    return ring.reduce_scatter(_array(value), op_of(None, op))


def _times(array: np.ndarray[Any, Any], factor: float) -> np.ndarray[Any, Any]:
    """An array times a factor, in its dtype; integers are multiplied in float64."""
    return array if factor == 1.0 else (array * np.float64(factor)).astype(array.dtype)


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(keras.ops.convert_to_numpy(value))


check_calls(globals(), __all__)
