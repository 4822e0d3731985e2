"""`hvd.elastic` of `import ring_plugins.horovod.tensorflow as hvd`: training goes on when ranks are lost or added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.world import current
from ring_plugins.horovod.elastic import State, run
from ring_plugins.horovod.keras.elastic import KerasState
from ring_plugins.horovod.tensorflow.tape import prepare_tape
from ring_plugins.keras.averaging import averaging_of
from ring_plugins.keras.state import broadcast_all, optimizers_among, value_of

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowKerasState(KerasState):
    """`KerasState`, for a loop with `hvd.DistributedGradientTape`."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        super().__init__(model, optimizer, backend, **values)
        if current().replaces and not any(map(averaging_of, optimizers_among(self._parts()))):
            prepare_tape(model.trainable_variables)  # which a process that joins later has to have, too


class TensorFlowState(State):
    """What the ranks have reached in a training of some variables.

    Args:
        variables: all that the training changes, those of optimizers included.
        session: has no effect.
        values: that can be pickled, such as numbers; they become attributes.

    Raises:
        ArgumentError: there are no variables, a name is taken, or a value cannot be pickled.
    """

    def __init__(self, variables: Iterable[Any] = (), session: Any = None, **values: Any) -> None:
        self.variables = list(variables or ())
        if not self.variables:
            raise ArgumentError("variables is empty; pass those of the model and of its optimizer.")
        super().__init__(**values)
        if current().replaces:
            prepare_tape([variable for variable in self.variables if variable.trainable])

    def sync(self) -> None:
        """Give all ranks the variables and values of rank 0."""
        broadcast_all(self.variables, 0)
        super()._load(ring.broadcast_object(super()._state(), 0))
        self.save()

    def _described(self) -> str:
        return f"{super()._described()} and {len(self.variables)} variables"

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "_arrays": [value_of(variable) for variable in self.variables]}

    def _load(self, state: dict[str, Any]) -> None:
        for variable, array in zip(self.variables, state.pop("_arrays", ()), strict=False):
            variable.assign(array)
        super()._load(state)
