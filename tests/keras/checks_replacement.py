"""A `fit` in which other processes take the places of ranks that are killed. Reports what all have in the end.

TEST_DEATHS and TEST_PENDING: see tests/torch/checks_replacement.py. Points "in validation" and "while saving" are of an
epoch instead of a step. With TEST_FILES, callbacks write to that directory. TEST_COUNTS has batches by slot.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

if os.environ["KERAS_BACKEND"] == "torch":
    sys.modules["tensorflow"] = None  # type: ignore[assignment] # which `set_random_seed` imports for its own, slowly

import keras
import numpy as np

import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.keras import BroadcastCallback, LearningRateWarmupCallback, MetricAverageCallback, shard
from tests.keras.test_replacement import BATCHES, EPOCHS, gradient
from tests.mortal import die
from tests.torch.checks_replacement import begin_step, own_deaths, prepare_joiner, slots_taken
from tests.worker import report

UNITS = 300_000  # so that one gradient is large and the other small


@keras.saving.register_keras_serializable()
def ones(x: Any) -> Any:
    return keras.ops.ones_like(x)


class Follows(keras.callbacks.Callback):
    """Kills this rank when it is time, and notes who is there."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.slot = ranks, ring.rank()
        self.mine = own_deaths(self.slot, ranks)
        prepare_joiner(self.mine)
        self.epoch, self.step = 0, 0
        self.history: list[Any] = []
        self.rates: list[float] = []
        save = keras.Model.save

        def half(model: Any, path: Any, **options: Any) -> None:
            if (self.epoch, "while saving") in self.mine:
                Path(path).write_bytes(b"half a file")
                die()
            save(model, path, **options)

        keras.Model.save = half

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "history": list(self.history), "rates": list(self.rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (0, "load raises") in self.mine:
            raise KeyError("a callback that cannot load")
        vars(self).update(state)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        assert self.step == self.epoch * BATCHES + batch
        begin_step(self.step, self.mine, self.ranks)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.history.append(slots_taken())
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
        self.step += 1

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, "in validation") in self.mine:
            die()


def main() -> None:
    ranks = int(os.environ["TEST_RANKS"])
    ring.init(ranks=ranks, on_failure="replace", min_ranks=int(os.environ.get("TEST_MIN", "1")))
    assert (ring.rank(), ring.size()) == (current().shard[0], ranks)
    is_new = current().is_joining
    if os.environ.get("TEST_ACCELERATOR") == "gpu":
        import torch

        torch.cuda.set_device(current().shard[0])
    keras.utils.set_random_seed(7)
    model = keras.Sequential([
        keras.Input((1,)), keras.layers.BatchNormalization(center=False, scale=False),
        keras.layers.Lambda(ones), keras.layers.Dense(UNITS, kernel_initializer="zeros"),
    ])  # fmt: skip
    if is_new:
        model.set_weights([weight + 1 for weight in model.get_weights()])  # which the others' state overwrites
    model.compile(
        keras.optimizers.SGD(0.5, momentum=0.5),
        # The gradient of a mean of so many outputs would be small: the sum over the units of one sample.
        loss=lambda wanted, found: keras.ops.sum(wanted * found, axis=-1),
        metrics=["mae"],
        jit_compile=keras.backend.backend() == "jax",
    )
    follows = Follows(ranks)
    # Samples of a step are those of the slots, in order; their targets are the gradients.
    samples = np.arange(BATCHES * ranks, dtype=np.float32)[:, None]
    targets = np.array([gradient(i // ranks, i % ranks) for i in range(len(samples))], np.float32)[:, None]
    stops = keras.callbacks.EarlyStopping("val_mae", min_delta=0.25, mode="min", patience=100)
    callbacks: list[Any] = [follows, stops, BroadcastCallback(), MetricAverageCallback()]
    if "TEST_WARMUP" in os.environ:
        callbacks.append(LearningRateWarmupCallback(float(os.environ["TEST_WARMUP"])))
    files = os.environ.get("TEST_FILES")
    best = keras.callbacks.ModelCheckpoint(f"{files}/best.keras", monitor="val_mae", mode="max", save_best_only=True)
    if files:
        callbacks += [
            best,
            keras.callbacks.ModelCheckpoint(f"{files}/{{epoch}}.keras"),
            keras.callbacks.BackupAndRestore(f"{files}/backup", delete_checkpoint=False),
            keras.callbacks.CSVLogger(f"{files}/log.csv"),
        ]
    training: dict[str, Any] = {"x": shard((samples, targets), batch_size=1, shuffle=False)}
    if counts := json.loads(os.environ.get("TEST_COUNTS", "{}")):
        count = counts.get(str(follows.slot), BATCHES)
        training = {"x": samples[follows.slot :: ranks][:count], "y": targets[follows.slot :: ranks][:count]}
    fitted = model.fit(
        **training, batch_size=1 if counts else None, epochs=EPOCHS, shuffle=False, verbose=0,
        validation_data=shard((samples, targets), batch_size=2, shuffle=False), callbacks=callbacks,
    )  # fmt: skip
    weights = [sorted(set(np.ravel(weight).tolist())) for weight in model.get_weights()]
    found = {
        "weights": weights,
        "optimizer": [sorted(set(np.ravel(keras.ops.convert_to_numpy(v)).tolist())) for v in model.optimizer.variables],
        "history": follows.history,
        "rates": follows.rates,
        "fitted": [fitted.epoch, fitted.history],
        "stopping": [stops.wait, float(stops.best)],
        "best": float(best.best) if files else None,
        "ranks": ring.all_gather_object([ring.rank(), ring.size(), follows.slot]),
    }
    report("found", found, follows.slot)
    report("number", current().world_rank, follows.slot)
    report("min_delta", stops.min_delta, follows.slot)
    if files and ring.rank() == 0:
        saved = keras.models.load_model(f"{files}/{EPOCHS}.keras", compile=False, safe_mode=False)
        same = [(a == b).all() for a, b in zip(saved.get_weights(), model.get_weights(), strict=True)]
        report("saved", [all(map(bool, same)), *sorted(os.listdir(files))], follows.slot)


if __name__ == "__main__":
    main()
