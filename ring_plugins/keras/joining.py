"""How a process joins in the place of a lost rank, with `on_failure="replace"`: in a `fit`, or in a loop around it.

**Within one `fit`**, the process runs the script from its first line, and comes to `fit` while the others train.
Everything that `BroadcastCallback` does at its beginning meets nobody: the process is a job of one until it joins, at
the end of `on_train_begin`. The members let it join at the end of an epoch, when all other callbacks are done. There it
gets their weights, the optimizer's variables and the number of the epoch, and `fit` begins with the next one.

Callbacks know how training went: the best result, how long to wait, how fast to learn. Keras's have no interface for
that, but keep it in attributes that are numbers, arrays and lists of them. These are copied, unless a script may have
passed them to the constructor, and so are those of subclasses. Any other callback takes part if it has `state_dict` and
`load_state_dict`. Shuffled parts of `shard` go on in the order that the others' have.

**Between two calls of `fit`**, or in a loop without it, only the script knows where the others are. So it says where
its own loop is, by a `TrainingState`, as with `ring_plugins.torch.TrainingState`.

Considered and rejected: to join at the end of a batch. The number of the epoch is a local variable of `fit`, and so is
the iterator over the data, which cannot be moved to a batch on every backend.
"""

from __future__ import annotations

import inspect
import math
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.job import World
from ring_plugins.core.joining.join import checksum_of, if_different
from ring_plugins.core.joining.state_transfer import transfer_state
from ring_plugins.core.joining.training_state import ListedState
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import GradientAveraging, averaging_of, installed
from ring_plugins.keras.job import connect
from ring_plugins.keras.shard import go_on_in_orders, places_in_orders
from ring_plugins.keras.state import (
    SEED_STRIDE,
    broadcast_array,
    build_optimizer,
    optimizers_among,
    state_and_seeds,
    value_of,
    weight_checksums,
)
from ring_plugins.keras.writers import HeldWriter
from ring_plugins.observe.consistency import check_equal_after_losses

#: Jobs in which nobody joins within a `fit`, since the script has a loop of its own (`TrainingState`).
joined_between_fits: list[World] = []


def place_of_fit(params: dict[str, Any] | None, model: Any) -> str:
    """What has to be the same in a process that joins at the end of an epoch. Numbers of steps are compared behind."""
    return f"fit() with {(params or {}).get('epochs')} epochs, with {kind_of_state(model)}"


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
        states = {name: state_of(callback) for name, callback in named(callbacks)}
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
    for name, callback in named(callbacks):
        load_state(callback, states.get(name))
    go_on_in_orders(places)
    return result


def named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each with its class and a number: a script may give some callbacks to one rank only."""
    counts = Counter[str]()
    for given in callbacks:
        callback = given.writer if isinstance(given, HeldWriter) else given
        kind = type(callback).__name__
        counts[kind] += 1
        yield f"{kind} {counts[kind]}", callback


def state_of(callback: Any) -> Any:
    """What a callback knows of the training, None if nobody can tell."""
    if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
        return callback.state_dict()
    if not _is_of_keras(callback):
        return None
    given = _parameters(type(callback))
    plain = {name: value for name, value in vars(callback).items() if name not in given and _is_plain(value)}
    return {name: value for name, value in plain.items() if not isinstance(value, str)}  # which is where to write


def load_state(callback: Any, state: Any) -> None:
    """Let a callback know that, too."""
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


class TrainingState(ListedState):
    """Where a script with a loop of its own has come to; a process that replaces a lost rank gets it.

        state = TrainingState(model, epoch=0)
        for state.epoch in range(state.epoch, 12):
            state.commit()
            model.fit(..., callbacks=[BroadcastCallback()])

    A loop without `fit` passes its optimizers, too: `TrainingState(model, optimizer=optimizer, epoch=0)`. On JAX, it
    assigns the values that it has computed to the variables before it calls `commit`.

    Create it on all ranks, before the loop. In a replacement, the constructor waits until the other ranks call
    `commit`, and then gives models and optimizers their values and sets the attributes. No process joins within `fit`
    then. It works with any `on_failure`; processes join only with "replace".

    Args:
        model: built, and compiled if it is to `fit`.
        values: become attributes. Further models, and optimizers that are no attributes of a model, must be built, and
            a new process gets their variables; anything else must be picklable, such as numbers that the script reads
            and sets.

    Raises:
        ArgumentError: a name is taken or begins with an underscore, a value cannot be pickled, a model or an optimizer
            is not built, or an optimizer that averages gradients is missing.
        MismatchError: in a replacement, the script has come to another place, or models differ.
    """

    def __init__(self, model: Any, **values: Any) -> None:
        world = connect()
        self._parts = [model, *(value for value in values.values() if _is_part(value))]
        self._names = [name for name, value in values.items() if not _is_part(value)]
        super().__init__(values, self._names)
        if not world.replaces:
            return
        self._build()
        self._view = world.elastic.view
        #: On JAX, at the last commit: each averaging's steps, its weights' values, and the optimizer's own count.
        self._seen: dict[int, tuple[int, list[Any], Any]] = {}
        self._check_assigned()
        joined_between_fits.append(world)
        if world.is_joining:
            self._join("call TrainingState.commit()")
            self._check_assigned()

    def commit(self) -> None:
        """Let waiting processes join here; call it on all ranks before each `fit`, or at the beginning of each epoch.

        Raises:
            MismatchError: after a process has joined, an integer of the state differs among ranks.
            DriftError: after ranks were lost or joined, the weights differ in a loop without `fit`.
            ArgumentError: an optimizer that averages gradients is missing in the state; or, on JAX, the values of the
                last steps were not assigned to the variables.
        """
        world = current()
        if not world.replaces or self._is_where_it_joined():
            return
        averaging = self._averaging()
        self._check_assigned()
        place = checksum_of(self._integers_of(self._names)) if self._has_joined else 0
        largest, negated_smallest = self._change_members(place, -place)  # max(-place) is -min(place)
        before, self._view = self._view, world.elastic.view
        if before != self._view and averaging:
            check_equal_after_losses(self._checksums, world.communicator)
        if world.elastic.changes.untold:
            world.elastic.tell_changes()
        if self._let_join(added=True) or largest == -negated_smallest:
            return
        if differing := if_different(self._integers_of(self._names)):
            raise MismatchError(
                f"ranks are at different places of the training since a process has joined: {differing}. Begin the "
                "loop with the numbers of the TrainingState, as in `for state.epoch in range(state.epoch, epochs)`, "
                "and call commit() where an epoch begins."
            )

    def _described(self) -> str:
        return f"{', '.join(self._names) or 'no values'} and {kind_of_state(*self._parts)}"

    def _build(self) -> None:
        """Make what the first steps would make later: variables of optimizers, and memory for their gradients."""
        models = [part for part in self._parts if not isinstance(part, keras.optimizers.Optimizer)]
        for model in models:
            if not model.built:
                raise ArgumentError(
                    f"TrainingState: {model.name!r} must be built, so that a process that takes the place of a lost "
                    "rank can get the weights: begin it with keras.Input(...), or call it once."
                )
            build_optimizer(model)
        for optimizer in optimizers_among(self._parts):
            if not optimizer.built:
                raise ArgumentError(
                    f"TrainingState: this {type(optimizer).__name__} must be built, so that a process that takes the "
                    "place of a lost rank can get its momentum and the like: call "
                    "optimizer.build(model.trainable_variables) before."
                )
        for averaging in self._averaging():
            averaging.prepare(averaging.variables)

    def _averaging(self) -> list[GradientAveraging]:
        """Of the optimizers of this state; raises if others average, too."""
        own = optimizers_among(self._parts)
        for optimizer in [averaging.optimizer for averaging in installed]:
            if not any(optimizer is one for one in own):
                raise ArgumentError(
                    f"TrainingState: a {type(optimizer).__name__} averages gradients and is not part of the state, so "
                    "a process that takes the place of a lost rank would lack its momentum and the like. Pass it: "
                    "TrainingState(model, optimizer=optimizer, ...)."
                )
        return list(filter(None, map(averaging_of, own)))

    def _check_assigned(self) -> None:
        """On JAX, check that variables have the values of the last steps, which a joiner is to get.

        Arrays of JAX never change, so a variable that still has the same one was not assigned.
        """
        if keras.backend.backend() != "jax":
            return
        before, self._seen = self._seen, {}
        for averaging in self._averaging():
            optimizer, weights = averaging.optimizer, [variable._value for variable in averaging.variables]
            count = optimizer.iterations._value.block_until_ready()  # JAX returns before a step is over
            self._seen[id(averaging)] = averaging.passes, weights, count
            passes, old_weights, old_count = before.get(id(averaging), self._seen[id(averaging)])
            is_assigned = count is not old_count and any(map(operator.is_not, weights, old_weights))
            if averaging.passes > passes and not is_assigned:
                raise ArgumentError(
                    "TrainingState.commit(): steps have averaged gradients, but the variables still have the values "
                    "from before, which a process that takes the place of a lost rank would get. Assign what the last "
                    "step has returned to model.trainable_variables, model.non_trainable_variables and "
                    "optimizer.variables: `for variable, value in zip(...): variable.assign(value)`."
                )

    def _checksums(self) -> tuple[list[str], list[int]]:
        found = [weight_checksums(part) for part in self._parts if not isinstance(part, keras.optimizers.Optimizer)]
        return [name for names, _ in found for name in names], [value for _, values in found for value in values]

    def _share(self, joined: tuple[int, ...]) -> None:
        values = {name: getattr(self, name) for name in self._names}
        found = share_state(self._parts, [], values, joined, current().communicator)
        for name, value in (found or {}).items():
            setattr(self, name, value)
        self._has_joined = True


def _is_part(value: Any) -> bool:
    """Whether a new process gets its variables, and not the object."""
    return isinstance(value, keras.Model | keras.optimizers.Optimizer)
