"""A training loop without `fit` in which other processes take the places of ranks that are killed.

TEST_DEATHS and TEST_PENDING: see tests/torch/checks_replacement.py. TEST_FAULT is what is wrong with the script; "other
model" and "cannot load" are of the first joiner only.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.core.rendezvous.spawn import slots
from ring_plugins.core.world import current
from ring_plugins.keras import DistributedOptimizer, TrainingState, broadcast_variables
from tests.keras.test_replacement import BATCHES, EPOCHS, gradient
from tests.torch.checks_replacement import begin_step, own_deaths, slots_taken
from tests.worker import report

FAULT, BACKEND = os.environ.get("TEST_FAULT", ""), keras.backend.backend()


class Extra:
    """A value of the state that a process may be unable to unpickle."""

    def __reduce__(self) -> Any:
        return _load_extra, ()


def _load_extra() -> Extra:
    if FAULT == "cannot load" and current().world_rank == 3:
        raise KeyError("a value that cannot be loaded")
    return Extra()


def step_of(model: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    """As the guides write it: the loss is a sum of products, so gradients are what is wanted."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) * y)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        return step
    if BACKEND == "torch":
        import torch

        def step(x: Any, y: Any) -> None:
            model.zero_grad()
            (model(x, training=True) * torch.as_tensor(y)).sum().backward()
            with torch.no_grad():
                optimizer.apply([weight.value.grad for weight in model.trainable_weights], model.trainable_weights)

        return step
    import jax

    def loss(trainable: Any, others: Any, x: Any, y: Any) -> Any:
        outputs, others = model.stateless_call(trainable, others, x, training=True)
        return (outputs * y).sum(), others

    @jax.jit
    def compiled(trainable: Any, others: Any, of_optimizer: Any, x: Any, y: Any) -> Any:
        (_, others), gradients = jax.value_and_grad(loss, has_aux=True)(trainable, others, x, y)
        trainable, of_optimizer = optimizer.stateless_apply(of_optimizer, gradients, trainable)
        return trainable, others, of_optimizer

    def step(x: Any, y: Any) -> None:
        parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        found = compiled(*([variable.value for variable in part] for part in parts), x, y)
        for variables, values in zip(parts, found, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if FAULT != "not assigned":
                    variable.assign(value)

    return step


def main() -> None:
    ranks = int(os.environ["TEST_RANKS"])
    ring.init(ranks=ranks, on_failure="replace")
    slot, number = ring.rank(), current().world_rank
    mine = own_deaths(slot, ranks)
    units = 3 if FAULT == "other model" and number == 3 else 2
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(units, use_bias=False, kernel_initializer="zeros")])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    if FAULT != "not built":
        optimizer.build(model.trainable_variables)
    broadcast_variables(model)
    if number >= ranks:
        model.set_weights([weight + 1 for weight in model.get_weights()])  # which the others' state overwrites
    parts = {} if FAULT == "left out" else {"optimizer": optimizer}
    state = TrainingState(model, epoch=0, step=0, history=[], extra=Extra(), **parts)
    step = step_of(model, optimizer)
    began = state.step
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 - the range is made once
        state.commit()
        # The one that has just been rejected still says that it waits, until it has ended.
        while FAULT == "other model" and state.epoch == 1 and any(one.rank == 3 for one in slots().waiting()):
            time.sleep(0.01)
        for batch in range(BATCHES):
            begin_step(state.step, mine, ranks)
            step(np.ones((1, 1), np.float32), np.full((1, units), gradient(batch, slot), np.float32))
            state.history = [*state.history, slots_taken()]
            state.step += 1
    velocities = [keras.ops.convert_to_numpy(one) for one in optimizer.variables if "momentum" in one.path]
    found = {
        "weights": sorted(set(np.ravel(model.get_weights()[0]).tolist())),
        "velocity": sorted({float(value) for velocity in velocities for value in np.ravel(velocity)}),
        "history": state.history,
        "iterations": int(keras.ops.convert_to_numpy(optimizer.iterations)),
        "numbers": ring.all_gather_object(number),
    }
    report("found", found, slot)
    report("began", began, slot)


if __name__ == "__main__":
    main()
