"""What ranks must agree on before they train: weights, optimizer state, seeds."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import FLOATS, Op
from ring_plugins.core.arrays.memory import HostMemory, host_array
from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.averaging import optimizers_of
from ring_plugins.observe.drift import checksum

#: Seeds of neighbouring ranks are this far apart; a prime, so that no two ranks of any job meet.
_SEED_STRIDE = 7919


def weights_of(model: Any) -> list[Any]:
    """Trainable and non-trainable weights, without seeds and metrics."""
    return list(model.weights)


def seeds_of(model: Any) -> list[Any]:
    """States of the seed generators of dropout and its like."""
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def build_optimizers(model: Any) -> None:
    """Let the compiled optimizer have its state before the first step, so that it can be broadcast."""
    optimizer = getattr(model, "optimizer", None)  # there is none before compile()
    if optimizer is not None and not optimizer.built and model.trainable_variables:
        optimizer.build(model.trainable_variables)


def broadcast_state(model: Any, root: int, communicator: Communicator) -> None:
    """Give every rank the root's weights, optimizer state and, offset by rank, seeds; collective.

    Args:
        model: a built Keras model.
        root: the rank whose values everyone gets.
        communicator: over all ranks.

    Raises:
        MismatchError: models or optimizers differ; the text names the first variable that does.
    """
    state = weights_of(model)
    for optimizer in optimizers_of(model):
        state.extend(optimizer.variables)
    seeds = seeds_of(model)
    check_equal([*state, *seeds], communicator)
    for variable in state:
        variable.assign(_broadcast(variable, root, communicator))
    for variable in seeds:
        seed = _broadcast(variable, root, communicator)
        seed.reshape(-1)[0] += (communicator.rank - root) % communicator.size * _SEED_STRIDE
        variable.assign(seed)


def check_equal(variables: Sequence[Any], communicator: Communicator) -> None:
    """Compare shapes and dtypes of all ranks; collective.

    Raises:
        MismatchError: naming the first variable that differs, and what each rank has.
    """
    # Paths are for the text only: automatic layer names count on per process.
    mine = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
    if len(set(communicator.all_gather_object(zlib.crc32(repr(mine).encode())))) == 1:
        return
    paths = [variable.path for variable in variables]
    everyones = communicator.all_gather_object(list(zip(paths, mine, strict=True)))
    for i in range(max(map(len, everyones))):
        said = [f"{v[i][0]} of shape {v[i][1][0]}, {v[i][1][1]}" if i < len(v) else "nothing" for v in everyones]
        kinds = [v[i][1] if i < len(v) else None for v in everyones]
        if len(set(kinds)) > 1:
            parts = "; ".join(f"rank {rank} has {text}" for rank, text in zip(communicator.ranks, said, strict=True))
            raise MismatchError(
                f"the models or optimizers differ among ranks. First at variable {i}: {parts}. Build and compile the "
                "same on all ranks."
            )


def average_variables(variables: Sequence[Any], communicator: Communicator) -> None:
    """Average those variables that have come to differ among ranks; collective. What is no float becomes rank 0's.

    Args:
        variables: each rank's own, such as moving statistics, which it gathered from its own batches.
        communicator: over all ranks.
    """
    values = [value_of(variable) for variable in variables]
    digests = communicator.all_gather_object([zlib.crc32(_bytes(value)) for value in values])
    for i, (variable, value) in enumerate(zip(variables, values, strict=True)):
        if len({digest[i] for digest in digests}) == 1:
            continue
        memory = HostMemory(host_array(value)[0].reshape(-1), host_array(value)[1])
        if memory.dtype in FLOATS:
            communicator.all_reduce(memory, Op.AVERAGE)
        else:
            communicator.broadcast(memory, 0)
        variable.assign(value)


def value_of(variable: Any) -> Array:
    """A copy of a variable's value; 0-d stays 0-d."""
    return np.array(keras.ops.convert_to_numpy(variable), order="C")


def weight_checksums(model: Any) -> tuple[list[str], list[int]]:
    """Names and checksums of a model's trainable weights."""
    if hasattr(model, "jax_state_sync"):  # Keras keeps the state of a fit elsewhere on JAX, until it is asked for
        model.jax_state_sync()
    weights = model.trainable_variables
    return [weight.path for weight in weights], [checksum(value_of(weight)) for weight in weights]


def _broadcast(variable: Any, root: int, communicator: Communicator) -> Array:
    value = value_of(variable)
    array, dtype = host_array(value)
    communicator.broadcast(HostMemory(array.reshape(-1), dtype), root)
    return value


def _bytes(value: Array) -> bytes:
    return host_array(value)[0].tobytes()
