"""Synchronize state: broadcast weights, optimizer and seeds, average moving statistics, compute checksums."""

from __future__ import annotations

import functools
import gc
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.random.seed_generator import global_seed_generator  # Keras 3.15.1, which does not export it

from ring_plugins.core.arrays.dtypes import FLOATS, Op
from ring_plugins.core.arrays.memory import HostMemory, host_array
from ring_plugins.core.base.errors import ArgumentError, MembersLost, MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.groups import Group, root_in
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.core.world import current
from ring_plugins.keras.consistency import LOCAL, checksums_of
from ring_plugins.keras.job import members
from ring_plugins.keras.validation import check_root
from ring_plugins.observe.consistency import checksum

#: Difference between the seeds of consecutive ranks, so that no two ranks of a job draw the same numbers.
SEED_STRIDE = 7919
#: Attribute of a slot variable that holds only this rank's part, in a sharded optimizer.
PART = "_ring_part"


def broadcast_all(
    variables: Sequence[Any], root_rank: int, values: Sequence[Array] | None = None, group: Group | None = None
) -> list[Array]:
    """Broadcast variables. Collective.

    Args:
        variables: of Keras or TensorFlow.
        root_rank: the rank whose values all ranks get.
        values: of the variables, where they cannot be read or assigned: in a host call. By default they are assigned.
        group: the ranks that take part, all by default.

    Returns:
        The root's values, if they are not assigned.

    Raises:
        ArgumentError: there are no variables, or `root_rank` is not a rank.
        MismatchError: the variables differ among ranks.
    """
    ranks = members(group).communicator
    with on_all_or_none(ranks, "broadcast_variables"):
        root = root_in(check_root(root_rank, group), ranks, current())
        if not variables:
            raise ArgumentError(
                "variables is empty. Models and optimizers have their variables once they are built: broadcast them "
                "after that, or after the first step; leave this out for an optimizer that never has any."
            )
        if ranks.size > 1:
            check_equal(variables, ranks)
        own = map(value_of, variables) if values is None else (np.array(value, order="C") for value in values)
        found: list[Array] = []
        for variable, value in zip(variables, own, strict=True):
            broadcast_array(value, root, ranks)
            if values is None:
                variable.assign(value)
            else:
                found.append(value)
        return found


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer that the model was compiled with, and others that are its attributes, as in GANs."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    found = [optimizer for optimizer in held if isinstance(optimizer, keras.optimizers.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def accumulation_steps(optimizer: Any) -> int:
    """Over how many steps it accumulates gradients before it updates, 1 if it does not."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def forget_compiled_steps(optimizer: Any) -> None:
    """Let models that have trained with an optimizer compile their next step anew.

    A compiled step, of an earlier `fit` or `train_on_batch`, holds the update as it was when it was traced. An
    optimizer does not know its models, so they are looked for, which takes some 0.1 s, if it has made an update.
    """
    if not optimizer.built:
        return
    for model in [found for found in gc.get_objects() if issubclass(type(found), keras.Model)]:
        if optimizer in optimizers_of(model) and getattr(model, "train_function", None) is not None:
            model.train_function = None


def nested(optimizer: Any) -> list[Any]:
    """An optimizer and those inside any LossScaleOptimizer, from the outermost to the one that updates."""
    found = [optimizer]
    while (inner := getattr(found[-1], "inner_optimizer", None)) is not None:
        found.append(inner)
    return found


def innermost(optimizer: Any) -> Any:
    """The optimizer inside any LossScaleOptimizer."""
    return nested(optimizer)[-1]


def optimizers_among(parts: Iterable[Any]) -> list[Any]:
    """Those of models, and those that are parts themselves."""
    found = [[part] if isinstance(part, keras.optimizers.Optimizer) else optimizers_of(part) for part in parts]
    return list({id(optimizer): optimizer for some in found for optimizer in some}.values())


def check_built(model: Any) -> None:
    """Check that all variables of a model exist, which otherwise come later, with other values on each rank.

    Raises:
        ArgumentError: names the layers that are not built.
    """
    # A layer without a `build` of its own gets no variables there; those of the layers inside it are asked themselves.
    never = keras.Layer.build, keras.Model.build
    # Keras 3.15.1, layers/layer.py: `_flatten_layers` begins with the layer itself.
    layers = [layer for layer in model._flatten_layers() if not layer.built and type(layer).build not in never]
    if layers or not (model.built or model.variables):
        names = ", ".join(layer.name for layer in layers[:3]) or "it has no variables"
        raise ArgumentError(
            f"model={model.name} is not built ({names}), so its variables could not be broadcast, and would begin with "
            "other values on each rank. Begin the model with keras.Input(...), or call it once, before."
        )


def build_optimizer(model: Any) -> None:
    """Create the compiled optimizer's state before the first step, so that it can be broadcast."""
    optimizer = getattr(model, "optimizer", None)  # not set before compile()
    if optimizer is not None and not optimizer.built and model.trainable_variables:
        optimizer.build(model.trainable_variables)


def broadcast_state(model: Any, root: Root, communicator: Communicator) -> None:
    """Broadcast the root's weights, optimizer state and, offset by rank, seeds. Collective.

    Each rank keeps its own parts of a sharded optimizer's state.

    Args:
        model: a built Keras model.
        root: whose values all ranks get.
        communicator: communicator of all ranks.

    Raises:
        MismatchError: models or optimizers differ; the message names the first variable that differs.
        PeerFailed: the root was lost meanwhile, and nobody else has all of its weights and optimizer state.
    """
    state, seeds = state_and_seeds(model)
    seeds.append(global_seed_generator().state)  # for layers and functions without a seed
    check_equal([*state, *seeds], communicator)
    while not _has_broadcast(state, seeds, root, communicator):
        pass


def state_and_seeds(*parts: Any) -> tuple[list[Any], list[Any]]:
    """The variables that are equal on all ranks, and the states of the seed generators of dropout and the like.

    Args:
        parts: models, whose optimizers are included, and other optimizers.
    """
    models = [part for part in parts if not isinstance(part, keras.optimizers.Optimizer)]
    state = [weight for model in models for weight in model.weights if not getattr(weight, LOCAL, False)]
    for optimizer in optimizers_among(parts):
        state.extend(variable for variable in optimizer.variables if not hasattr(variable, PART))
    weights = {id(weight) for model in models for weight in model.weights} | set(map(id, state))
    return state, [variable for model in models for variable in model.variables if id(variable) not in weights]


def _has_broadcast(state: Sequence[Any], seeds: Sequence[Any], root: Root, communicator: Communicator) -> bool:
    """Broadcast them from the rank that is the root now; returns whether it is still there at the end."""
    is_equal = False
    if current().recovers:
        checksums = [checksum(value_of(variable)) for variable in state]
        told = communicator.all_gather_object(checksums, "comparison of weights")
        is_equal = all(other == checksums for other in told)
    source = communicator.ranks[root.rank_in(communicator)]
    try:
        for variable in state:
            variable.assign(_broadcast(variable, communicator.ranks.index(source), communicator))
        for variable in seeds:
            rank = communicator.ranks.index(source)
            seed = _broadcast(variable, rank, communicator)
            rank = communicator.ranks.index(source)  # ranks before it may have been lost
            seed.reshape(-1)[0] += (communicator.rank - rank) % communicator.size * SEED_STRIDE
            variable.assign(seed)
    except MembersLost:
        if not is_equal:
            raise
        return False
    return True


def check_equal(variables: Sequence[Any], communicator: Communicator) -> None:
    """Check that shapes and dtypes are the same on all ranks. Collective.

    Raises:
        MismatchError: names the first variable that differs, with its shape and dtype on each rank.
    """
    # Paths are only for the message: automatic layer names have a counter per process.
    kinds = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
    if len(set(communicator.all_gather_object(zlib.crc32(repr(kinds).encode()), "broadcast_variables"))) == 1:
        return
    paths = [getattr(variable, "path", variable.name) for variable in variables]
    by_rank = communicator.all_gather_object(list(zip(paths, kinds, strict=True)), "broadcast_variables")
    for i in range(max(map(len, by_rank))):
        at_i = [found[i] if i < len(found) else None for found in by_rank]
        if len({found and found[1] for found in at_i}) > 1:
            texts = [f"{found[0]} of shape {found[1][0]}, {found[1][1]}" if found else "nothing" for found in at_i]
            parts = "; ".join(f"rank {rank} has {text}" for rank, text in zip(communicator.ranks, texts, strict=True))
            raise MismatchError(
                f"the models or optimizers differ among ranks. First at variable {i}: {parts}. Build and compile the "
                "same model on all ranks."
            )


def average_variables(variables: Sequence[Any], communicator: Communicator) -> None:
    """Average the variables that differ among ranks. Variables that are not floats get rank 0's value. Collective.

    Args:
        variables: variables that each rank computed from its own batches, such as moving statistics; those that each
            rank has for itself stay as they are.
        communicator: communicator of all ranks.
    """
    variables = [variable for variable in variables if not hasattr(variable, LOCAL)]
    values = [value_of(variable) for variable in variables]
    checksums = communicator.all_gather_object(
        [zlib.crc32(host_array(value)[0].tobytes()) for value in values], "average_variables"
    )
    for i, (variable, value) in enumerate(zip(variables, values, strict=True)):
        if len({of_rank[i] for of_rank in checksums}) == 1:
            continue
        array, dtype = host_array(value)
        memory = HostMemory(array.reshape(-1), dtype)
        if memory.dtype in FLOATS:
            with purpose("average_variables"):
                communicator.all_reduce(memory, Op.AVERAGE)
            variable.assign(value)
        else:
            variable.assign(repeated(functools.partial(_broadcast, variable, 0, communicator)))


def value_of(variable: Any) -> Array:
    """Copy a variable's value as a numpy array of the same shape."""
    return np.array(keras.ops.convert_to_numpy(variable), order="C")


def weight_checksums(model: Any, all_weights: bool = False) -> tuple[list[str], list[int]]:
    """Return the names and checksums of a model's trainable weights, or of all."""
    if hasattr(model, "jax_state_sync"):  # on JAX, Keras updates the variables during fit only on request
        model.jax_state_sync()
    weights = model.weights if all_weights else model.trainable_variables
    return checksums_of(weights)


def _broadcast(variable: Any, root: int, communicator: Communicator) -> Array:
    return broadcast_array(value_of(variable), root, communicator)


def broadcast_array(value: Array, root: int, communicator: Communicator) -> Array:
    """Overwrite an array with the root's. Collective."""
    array, dtype = host_array(value)
    with purpose("broadcast of variables"):
        communicator.broadcast(HostMemory(array.reshape(-1), dtype), root)
    return value
