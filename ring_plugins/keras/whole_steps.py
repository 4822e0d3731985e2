"""Steps of a `fit` that have all of their samples while ranks are lost or leave (`shard(global_batch_size=...)`).

**Problem.** With `on_failure="continue"` the ranks that are left average what they have: a step in which a rank dies
lacks its samples, and so do all steps behind it.

**Here** a step's samples are divided among the ranks that are there when it is taken (`Order.follows_ranks`), so that
each has a larger part when there are fewer; averages weigh by samples, as with `uneven`. If a rank is lost in a step,
its update has happened when the others know. So all that a step changes is copied before it and put back, and the step
is taken once more by those that are left. Whether a rank was lost in it is the same on all
(core/collectives/recovery.py).

What Keras has read ahead was divided among the ranks of before. So once they have changed, a step reads its part
itself, and what Keras has read only counts the steps.

Considered and rejected: more passes instead of larger parts, which take no more memory. Each backend's compiled step
updates at its end, so passes would need a step of our own instead of the model's `train_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.world import current
from ring_plugins.keras.running_fit import argument_of_fit
from ring_plugins.keras.shard import Order
from ring_plugins.keras.state import accumulation_steps, optimizers_of, value_of


class WholeSteps:
    """Takes the steps of a `fit` whose samples are those of the job.

    Args:
        model: that is trained.
        order: by which its data is divided.
        full: samples of a full batch, None if batches do not count by their samples.

    Raises:
        ArgumentError: a step could not be divided into other parts.
    """

    def __init__(self, model: Any, order: Order, full: int | None) -> None:
        self._model, self._order = model, order
        self._data, iterator = argument_of_fit("x"), argument_of_fit("epoch_iterator")
        passes = map(accumulation_steps, optimizers_of(model))
        if full is None or iterator is None or max([model.steps_per_execution, *passes]) > 1:
            raise ArgumentError(
                'shard(global_batch_size=...) with on_failure="continue" needs parts of steps that may differ in size: '
                'leave gradient_accumulation_steps, steps_per_execution, sync_every, uneven="error" and '
                "average_gradients=False out, or on_failure."
            )
        if not order.is_for_all(current().topology.size):
            raise ArgumentError(
                'shard(global_batch_size=..., remainder="keep") with on_failure="continue": the last step of an epoch '
                'has fewer samples than there are ranks. Pass remainder="drop" or "pad".'
            )
        # Keras 3.15.1, data_adapters/py_dataset_adapter.py: what makes (x, y, sample_weight) of a batch.
        self._standardized = iterator.data_adapter._standardize_batch
        self._ranks, self._have_changed = current().world_ranks, False
        self._items: Any = None  # of the order that is being read
        self._number = 0  # of the step in it

    def stepping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A train function that takes whole steps by this one."""

        @functools.wraps(step)
        def run(*arguments: Any) -> Any:
            *state, iterator = arguments  # on JAX a step gets the state and returns it
            if self._order._order is not self._items:
                self._items, self._number = self._order._order, 0
            kept = self._kept(state)
            self._note_ranks()
            batches = iterator
            is_read = isinstance(iterator, list)  # on torch, a step gets its batch in a list
            if self._have_changed:
                batches = self._own(is_read)
                if not is_read:
                    next(iterator)
            while True:
                losses = current().elastic.recovery.recoveries
                result = step(*state, batches)
                for leaf in keras.tree.flatten(result):  # JAX returns before it has computed
                    getattr(leaf, "block_until_ready", bool)()
                if losses == current().elastic.recovery.recoveries:
                    break
                self._note_ranks()
                state, batches = self._put_back(kept, state), self._own(is_read)
            self._number += 1
            return result

        return run

    def _note_ranks(self) -> None:
        self._have_changed |= current().world_ranks != self._ranks

    def _own(self, is_read: bool) -> list[Any] | Iterator[Any]:
        """This rank's part of the step, in a list or an iterator."""
        batch = self._standardized(self._data[self._number])
        found = [keras.tree.map_structure(lambda one: None if one is None else _tensor(one), batch)]
        return found if is_read else iter(found)

    def _variables(self) -> list[Any]:
        of_optimizers = [variable for one in optimizers_of(self._model) for variable in one.variables]
        every = [*self._model.variables, *of_optimizers, *self._model.metrics_variables]
        return list({id(variable): variable for variable in every}.values())

    def _kept(self, state: list[Any]) -> Any:
        if state:
            return keras.tree.map_structure(np.array, state)
        return [(variable, np.array(value_of(variable))) for variable in self._variables()]

    def _put_back(self, kept: Any, state: list[Any]) -> list[Any]:
        if state:
            return [*keras.tree.map_structure(_tensor, kept)]
        known = {id(variable) for variable, _ in kept}
        for variable, value in kept:
            variable.assign(value)
        for variable in self._variables():  # that the step has made
            if id(variable) not in known:
                variable.assign(keras.ops.zeros_like(variable))
        return state


def _tensor(array: Any) -> Any:
    return keras.ops.convert_to_tensor(array)
