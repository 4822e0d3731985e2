"""A `fit` of which ranks are killed, as TEST_DEATHS says: {rank: [step, point]}. Reports what the survivors have.

With TEST_FILES, callbacks write to that directory; with TEST_RATE, the rate warms up, and is reported after each step.
TEST_COUNTS says how many batches each rank has.
"""

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.keras import BroadcastCallback, LearningRateWarmupCallback, MetricAverageCallback
from tests.keras.test_recovery import EPOCHS, STEPS, gradient
from tests.mortal import die, end_at
from tests.worker import report

UNITS = 300_000  # so that one gradient is large and the other small
RATES: dict[str, Any] = {
    "": lambda: 0.5,
    "number": lambda: 0.5,
    "schedule": lambda: keras.optimizers.schedules.PiecewiseConstantDecay([100], [0.5, 0.1]),
}


class Dies(keras.callbacks.Callback):
    """Kills this rank before its batch, and notes who is left after each."""

    def __init__(self, step_of_death: int | None, point: str) -> None:
        super().__init__()
        self.step_of_death, self.point = step_of_death, point
        self.step = 0
        self.history: list[Any] = []
        self.rates: list[float] = []
        if point == "while saving":
            self._die_while_saving()

    def _die_while_saving(self) -> None:
        save = keras.Model.save

        def half(model: Any, path: Any, **options: Any) -> None:
            if self.step == self.step_of_death:
                Path(path).write_bytes(b"half a file")
                die()
            save(model, path, **options)

        keras.Model.save = half

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.step == self.step_of_death and self.point != "while saving":
            end_at(self.point)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.history.append(current().world_ranks)
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
        self.step += 1


def main() -> None:
    ring.init(ranks=int(os.environ["TEST_RANKS"]), on_failure="continue")
    me = ring.rank()
    dies = Dies(*json.loads(os.environ["TEST_DEATHS"]).get(str(me), (None, "")))
    changes = []
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(UNITS, kernel_initializer="zeros")])
    # The gradient of a mean of so many outputs would be small: the sum over the units of one sample.
    model.compile(
        keras.optimizers.SGD(RATES[os.environ.get("TEST_RATE", "")](), momentum=0.5),
        loss=lambda wanted, found: keras.ops.sum(wanted * found, axis=-1),
        metrics=["mae"],
        jit_compile=keras.backend.backend() == "jax",
    )
    ring.on_membership_change(
        lambda change: changes.append([[*change.lost, *change.left], ring.all_gather_object(dies.step)])
    )
    count = json.loads(os.environ.get("TEST_COUNTS", "{}")).get(str(me), STEPS)
    steps = np.array([gradient(step, me) for step in range(count)], np.float32)[:, None]
    callbacks: list[Any] = [dies, BroadcastCallback(), MetricAverageCallback()]
    if "TEST_RATE" in os.environ:
        callbacks.append(LearningRateWarmupCallback(1))
    files = os.environ.get("TEST_FILES")
    if files and (me == 0 or "TEST_LONE" not in os.environ):
        callbacks += [
            keras.callbacks.ModelCheckpoint(f"{files}/{{epoch}}.keras"),
            keras.callbacks.ModelCheckpoint(f"{files}/best.keras", monitor="mae", mode="max", save_best_only=True),
            keras.callbacks.BackupAndRestore(f"{files}/backup", delete_checkpoint=False),
            keras.callbacks.CSVLogger(f"{files}/log.csv"),
        ]
    fitted = model.fit(
        np.ones((count, 1), np.float32),
        steps,
        batch_size=1,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    weights = [sorted(set(np.ravel(weight).tolist())) for weight in model.get_weights()]
    found = {"weights": weights, "history": dies.history, "changes": changes, "metrics": fitted.history}
    found["rates"] = dies.rates
    if files and ring.rank() == 0 and "TEST_LONE" not in os.environ:
        saved = keras.models.load_model(f"{files}/{EPOCHS}.keras", compile=False)
        same = [(a == b).all() for a, b in zip(saved.get_weights(), model.get_weights(), strict=True)]
        report("saved", [all(same), *sorted(os.listdir(files))], me)
    report("found", {**found, "left": ring.all_gather_object(me)}, me)


if __name__ == "__main__":
    main()
