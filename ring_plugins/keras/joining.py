"""A `fit` that a process joins in the place of a lost rank: `on_failure="replace"`.

The process runs the script from its first line, and comes to `fit` while the others train. Everything that
`BroadcastCallback` does at its beginning meets nobody: the process is a job of one until it joins, at the end of
`on_train_begin`. The members let it join at the end of an epoch, when all other callbacks are done. There it gets their
weights, the optimizer's variables and the number of the epoch, and `fit` begins with the next one.

Callbacks know how training went: the best result, how long to wait, how fast to learn. Keras's have no interface for
that, but keep it in attributes that are numbers, arrays and lists of them. These are copied, unless a script may have
passed them to the constructor, and so are those of subclasses. Any other callback takes part if it has `state_dict` and
`load_state_dict`. Shuffled parts of `shard` go on in the order that the others' have.

Considered and rejected: to join at the end of a batch. The number of the epoch is a local variable of `fit`, and so is
the iterator over the data, which cannot be moved to a batch on every backend.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.job import World
from ring_plugins.core.joining.state_transfer import transfer_state
from ring_plugins.core.world import current
from ring_plugins.keras.shard import go_on_in_orders, places_in_orders
from ring_plugins.keras.state import SEED_STRIDE, broadcast_array, state_and_seeds, value_of
from ring_plugins.keras.writers import HeldWriter


def reject_before_joining() -> None:
    """Refuse to average gradients in a process that has yet to join the others, and would train alone.

    Raises:
        ArgumentError: it is to take the place of a lost rank.
    """
    if current().is_joining:
        raise ArgumentError(
            "this process takes the place of a lost rank, and averages gradients before it has joined the others: with "
            'on_failure="replace", train by model.fit(callbacks=[BroadcastCallback()]), or make a '
            "ring_plugins.keras.TrainingState before the loop, and call commit() at the beginning of each epoch."
        )


def set_joins_between_fits() -> None:
    """Let nobody join within a `fit` from now on: the script has a loop of its own (`TrainingState`)."""
    _between_fits.append(current())


def joins_within_fit() -> bool:
    """Whether processes join at the end of an epoch."""
    return current() not in _between_fits


#: Worlds of which the script has a `TrainingState`.
_between_fits: list[World] = []


def place_of_fit(params: dict[str, Any] | None, model: Any) -> str:
    """What has to be the same in a process that joins at the end of an epoch."""
    given = params or {}
    return f"fit() with {given.get('epochs')} epochs of {given.get('steps')} steps, with {kind_of_state(model)}"


def kind_of_state(*parts: Any) -> str:
    """What must be equal of the variables of models and optimizers, so that the values of some fit the others."""
    found = state_and_seeds(*parts)
    kinds = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for variables in found for v in variables]
    elements = sum(math.prod(shape) for shape, _ in kinds)
    return (
        f"{len(kinds)} variables of model and optimizer, of {elements} elements in all (checksum of their shapes: "
        f"{zlib.crc32(repr(kinds).encode()):08x})"
    )


def share_state(
    parts: Sequence[Any],
    callbacks: Sequence[Any],
    told: dict[str, Any],
    joined: Sequence[int],
    communicator: Communicator[Any],
) -> dict[str, Any] | None:
    """Give those that have joined the state of an earlier rank; if that is lost meanwhile, of the next one. Collective.

    Args:
        parts: models and optimizers, built, of the same `kind_of_state` on all ranks.
        callbacks: of `fit`. Those of a kind have the same order on all ranks that have them.
        told: what else an earlier rank tells; can be pickled.
        joined: world ranks of those that have joined.
        communicator: of all ranks.

    Returns:
        What was told, in a process that has joined; None on the other ranks; see `transfer_state`.

    Raises:
        PeerFailed, ArgumentError: as for `transfer_state`.
    """
    variables, seeds = state_and_seeds(*parts)
    values: list[Array] = []

    def own() -> tuple[None, Any]:
        states = {name: _state_of(callback) for name, callback in _named(callbacks)}
        return None, (told, states, places_in_orders(), current().shard[0])

    def send(_: None, root: Callable[[], int]) -> None:
        nonlocal values
        values = [broadcast_array(value_of(variable), root(), communicator) for variable in [*variables, *seeds]]

    received = transfer_state(own, joined, send, communicator)
    if received is None:
        return None
    result: dict[str, Any]
    result, states, places, slot = received
    for variable, value in zip(variables, values, strict=False):
        variable.assign(value)
    own_slot, slots = current().shard
    for variable, value in zip(seeds, values[len(variables) :], strict=True):
        value.reshape(-1)[0] += (own_slot - slot) % slots * SEED_STRIDE
        variable.assign(value)
    for name, callback in _named(callbacks):
        _load_state(callback, states.get(name))
    go_on_in_orders(places)
    return result


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each with its class and a number: a script may give some callbacks to one rank only."""
    counts = Counter[str]()
    for given in callbacks:
        callback = given.writer if isinstance(given, HeldWriter) else given
        kind = type(callback).__name__
        counts[kind] += 1
        yield f"{kind} {counts[kind]}", callback


def _state_of(callback: Any) -> Any:
    if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
        return callback.state_dict()
    if not _is_of_keras(callback):
        return None
    given = _parameters(type(callback))
    return {name: value for name, value in vars(callback).items() if name not in given and _is_state(value)}


def _load_state(callback: Any, state: Any) -> None:
    if state is None:
        return
    if hasattr(callback, "load_state_dict"):
        callback.load_state_dict(state)
        return
    own = vars(callback)
    own.update({name: value for name, value in state.items() if _is_plain(own.get(name))})


def _parameters(kind: type[Any]) -> set[str]:
    """What scripts pass to a class of callbacks: it may differ among ranks, and Keras changes some of it once."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__[:-1] if "__init__" in vars(base)]
    return {"params", *(name for one in constructors for name in inspect.signature(one).parameters)}


def _is_state(value: Any) -> bool:
    return _is_plain(value) and not isinstance(value, str)  # a string is where to write


def _is_of_keras(callback: Any) -> bool:
    """Whether Keras defines its class, or one from which that derives, and not only `Callback` itself."""
    kinds = type(callback).__mro__
    return any(kind.__module__.split(".")[0] == "keras" for kind in kinds if kind is not keras.callbacks.Callback)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str | np.generic | np.ndarray)
