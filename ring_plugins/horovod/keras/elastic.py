"""`hvd.elastic` of `import ring_plugins.horovod.keras as hvd`: training goes on when ranks are lost or added."""

from __future__ import annotations

from typing import Any

import keras

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.world import current
from ring_plugins.horovod.common.exceptions import HostsUpdatedInterrupt
from ring_plugins.horovod.elastic import State, run
from ring_plugins.keras.averaging import averaging_of
from ring_plugins.keras.joining import joined_between_fits, kind_of_state, share_state
from ring_plugins.keras.running_fit import end_on_all
from ring_plugins.keras.state import broadcast_all, build_optimizer, optimizers_among, state_and_seeds, value_of

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(State):
    """What the ranks have reached in a training with Keras. Make it on all ranks, before the training function.

        state = hvd.elastic.KerasState(model, batch=0, epoch=0)

        @hvd.elastic.run
        def train(state):
            model.fit(data, epochs=24 - state.epoch, callbacks=[
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ])

    Args:
        model: built.
        optimizer: if it is not that with which the model was compiled.
        backend: has no effect.
        values: that can be pickled, such as numbers; they become attributes.

    Raises:
        ArgumentError: the model is not built, a name is taken, a value cannot be pickled, or Keras runs on JAX.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        if not model.built:
            raise ArgumentError(
                f"the model {model.name!r} is not built, so ranks could give each other no weights: begin it "
                "with keras.Input(...), or call it once."
            )
        if keras.backend.backend() == "jax":
            raise ArgumentError(
                "hvd.elastic does not work on JAX, where fit() keeps the weights to itself until it ends: use "
                "ring_plugins.keras.TrainingState and a fit() for each epoch (docs/fault_tolerance.md)."
            )
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        super().__init__(**values)
        build_optimizer(model)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        if current().replaces:
            joined_between_fits.append(current())  # processes join in `commit`, not where `fit` would let them
            for averaging in filter(None, map(averaging_of, optimizers_among(self._parts()))):
                averaging.prepare(averaging.variables)  # which the others have made by then, in the same order

    def check_host_updates(self) -> None:
        """`commit()`."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:  # on all ranks
            end_on_all()
            raise

    def _let_join(self, added: bool) -> bool:
        elastic = current().elastic
        if elastic.is_pending or (added and elastic.pending):
            end_on_all()  # the new process has nothing of what callbacks have made
            self._view = -1  # so the function begins again, also if it cannot join after all
        return super()._let_join(added)

    def sync(self) -> None:
        """Give all ranks the variables and values of rank 0."""
        broadcast_all(state_and_seeds(*self._parts())[0], 0)
        super()._load(ring.broadcast_object(super()._state(), 0))
        self.save()

    def _described(self) -> str:
        return f"{super()._described()} and {kind_of_state(*self._parts())}"

    def _parts(self) -> list[Any]:
        of_model = self.optimizer is getattr(self.model, "optimizer", None)
        return [self.model] if of_model else [self.model, self.optimizer]

    def _variables(self) -> list[Any]:
        return [variable for variables in state_and_seeds(*self._parts()) for variable in variables]

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "_arrays": [value_of(variable) for variable in self._variables()]}

    def _load(self, state: dict[str, Any]) -> None:
        for variable, array in zip(self._variables(), state.pop("_arrays", ()), strict=False):
            variable.assign(array)
        super()._load(state)

    def _share(self, joined: tuple[int, ...]) -> None:
        received = share_state(self._parts(), [], super()._state(), joined, current().communicator)
        super()._load(received or {})


if not hasattr(keras.optimizers.Optimizer, "lr"):  # Horovod's scripts set it where ranks have changed
    keras.optimizers.Optimizer.lr = property(
        lambda optimizer: optimizer.learning_rate,
        lambda optimizer, rate: setattr(optimizer, "learning_rate", rate),
        doc="The learning rate, by its name before Keras 3.",
    )


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A callback that has the state of an elastic training."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Calls `state.commit()` after every so many batches, and at the end of each epoch.

    Args:
        state: of the training.
        batches_per_commit: after how many batches.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._since += 1
        if self._since == self.batches_per_commit:
            self._since = 0
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Sets `state.batch` to the number of the last batch, and to 0 at the end of an epoch.

    `fit` always begins an epoch with its first batch, so the one in which ranks were lost or added is begun anew.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch  # type: ignore[attr-defined]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0  # type: ignore[attr-defined]


class UpdateEpochStateCallback(_StateCallback):
    """Sets `state.epoch` to the number of epochs that are done, over all calls of `fit`."""

    def on_train_begin(self, logs: Any = None) -> None:
        self._first = self.state.epoch  # type: ignore[attr-defined]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._first + epoch + 1  # type: ignore[attr-defined]
