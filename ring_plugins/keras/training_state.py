"""The state of a training loop of the script's own, for a process that takes the place of a lost rank.

Within one `fit`, `BroadcastCallback` lets such a process join. But only the script knows in which of its calls of `fit`
the others are, or in which step of a loop without `fit`. So it says where its own loop is, as with
`ring_plugins.torch.TrainingState`.

Processes join where an epoch begins: no backend has an iterator over data that could be moved to a batch.
"""

from __future__ import annotations

import operator
from typing import Any

import keras
import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.joining.join import checksum_of, if_different
from ring_plugins.core.joining.training_state import ListedState
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import GradientAveraging, averaging_of, averaging_optimizers
from ring_plugins.keras.consistency import LossWatch, check_equal_after_losses
from ring_plugins.keras.job import connect
from ring_plugins.keras.joining import kind_of_state, set_joins_between_fits, share_state
from ring_plugins.keras.state import build_optimizer, optimizers_among, weight_checksums


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
        self._losses = LossWatch()
        #: On JAX, at the last commit: each averaging's steps, its weights' values, and the optimizer's own count.
        self._seen: dict[int, tuple[int, list[Any], Any]] = {}
        self._check_assigned()
        set_joins_between_fits()
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
        flags = np.array([world.elastic.wants_change, place, -place], np.int64)
        with purpose("TrainingState"):
            world.communicator.all_reduce(HostMemory(flags, "int64"), Op.MAX)
        wants_change, largest, negated_smallest = flags.tolist()  # max(-place) is -min(place)
        if wants_change:
            world.elastic.change_members()
        if self._losses.has_changed() and averaging:
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
        for optimizer in averaging_optimizers():
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
