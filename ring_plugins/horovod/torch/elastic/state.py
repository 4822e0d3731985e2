"""Horovod's `TorchState`: models, optimizers and values of an elastic training."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

import ring_plugins as ring
from ring_plugins.horovod.elastic import State
from ring_plugins.torch import broadcast_optimizer_state, broadcast_parameters
from ring_plugins.torch.training_state import (
    Stateful,
    averaged_orders,
    share_state,
    take_trained_parts,
    trained_parts,
)


class TorchState(State):
    """What the ranks have reached in a training with PyTorch. Make it on all ranks, after the `DistributedOptimizer`.

        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
        state.register_reset_callbacks([adjust_learning_rate])

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                ...
                state.commit()

        train(state)

    Args:
        model, optimizer: of the training.
        values: further models, optimizers and what else has `state_dict` and `load_state_dict`, such as an
            `ElasticSampler`; and values that can be pickled, such as numbers. They become attributes.

    Raises:
        ArgumentError: a name is taken by a method or begins with an underscore, or a value cannot be pickled.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)

    def sync(self) -> None:
        """Give all ranks the models, optimizers and values of rank 0."""
        for name in self._names:
            part = getattr(self, name)
            if isinstance(part, nn.Module):
                broadcast_parameters(part)
            elif isinstance(part, Optimizer):
                broadcast_optimizer_state(part)
        self._load(ring.broadcast_object(self._state(others_only=True), 0))

    def _pickled(self, values: dict[str, Any]) -> list[str]:
        return [name for name, value in values.items() if not isinstance(value, Stateful)]

    def _described(self) -> str:
        return f"{super()._described()}{averaged_orders(self._parts())}"

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _state(self, others_only: bool = False) -> dict[str, Any]:
        """What `_load` takes.

        Args:
            others_only: leaves out models and optimizers, which broadcast tensors.
        """
        parts = self._parts()
        if others_only:
            parts = {name: part for name, part in parts.items() if not isinstance(part, nn.Module | Optimizer)}
        state = {name: part.state_dict() if isinstance(part, Stateful) else part for name, part in parts.items()}
        return state if others_only else {**state, "_trained": trained_parts(parts)}

    def _load(self, state: dict[str, Any]) -> None:
        if "_trained" in state:
            take_trained_parts(self._parts(), state.pop("_trained"))
        for name, value in state.items():
            mine = getattr(self, name)
            mine.load_state_dict(value) if isinstance(mine, Stateful) else setattr(self, name, value)

    def _share(self, joined: tuple[int, ...]) -> None:
        received = share_state(self._state, joined)
        if received is not None:
            self._load(received)
