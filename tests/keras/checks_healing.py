"""A `fit` of which ranks are killed, as TEST_DEATHS says: {rank: [step, point]}. Reports what the survivors have."""

import json
import os
from typing import Any

import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.keras import BroadcastCallback, MetricAverageCallback
from tests.keras.test_healing import EPOCHS, STEPS, gradient
from tests.mortal import die, die_in_barrier
from tests.worker import report

UNITS = 300_000  # so that one gradient is large and the other small


class Dies(keras.callbacks.Callback):
    """Kills this rank before its batch, and notes who is left after each."""

    def __init__(self, step_of_death: int | None, point: str) -> None:
        super().__init__()
        self.step_of_death, self.point = step_of_death, point
        self.step = 0
        self.history: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.step == self.step_of_death:
            if self.point.startswith("barrier"):
                _, number, when = self.point.split()
                die_in_barrier(int(number), when)
            else:
                die()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.history.append(current().world_ranks)
        self.step += 1


def main() -> None:
    ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue")
    me = ring.rank()
    dies = Dies(*json.loads(os.environ["TEST_DEATHS"]).get(str(me), (None, "")))
    changes = []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(UNITS, kernel_initializer="zeros")])
    # The gradient of a mean of so many outputs would be small: the sum over the units of one sample.
    model.compile(
        keras.optimizers.SGD(0.5, momentum=0.5),
        loss=lambda wanted, found: keras.ops.sum(wanted * found, axis=-1),
        metrics=["mae"],
        jit_compile=False,
    )
    ring.on_membership_change(lambda change: changes.append([list(change.lost), ring.all_gather_object(dies.step)]))
    steps = np.array([gradient(step, me) for step in range(STEPS)], np.float32)[:, None]
    fitted = model.fit(
        np.ones((STEPS, 1), np.float32),
        steps,
        batch_size=1,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[dies, BroadcastCallback(), MetricAverageCallback()],
    )
    weights = [sorted(set(np.ravel(weight).tolist())) for weight in model.get_weights()]
    found = {"weights": weights, "history": dies.history, "changes": changes, "metrics": fitted.history}
    report("found", {**found, "left": ring.all_gather_object(me)}, me)


if __name__ == "__main__":
    main()
