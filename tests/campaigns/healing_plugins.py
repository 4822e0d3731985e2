"""What ranks do in the healing campaign that train with Lightning's Trainer, or with Keras.

Both train the weights of `healing.COUNTS` with the same gradients, in epochs of which each ends with a validation, in
which all ranks average a metric, and with a checkpoint that rank 0 writes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import ring_plugins as ring
from ring_plugins.core.world import current
from tests.passes import members_of_passes

EPOCH = 4


class Log:
    """What a rank finds: the members in each pass, after each step, and in each validation.

    Attributes:
        history: for each step, as `healing.train` returns it.
        passes: the members in the passes of this step.
        told: ranks that are gone, as `on_membership_change` tells them.
    """

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.passes = members_of_passes()
        self.told: list[int] = []
        ring.on_membership_change(lambda change: self.told.extend([*change.lost, *change.left]))

    def after_step(self) -> None:
        """Note who took part in a step, and who is left now."""
        assert len(self.passes) == 1, self.passes
        self.history.append([self.passes.pop(), current().world_ranks, None])

    def after_validation(self, mean: float) -> None:
        """Note the mean of all ranks' numbers, and over which ranks it was taken."""
        self.history[-1][2] = [current().world_ranks, mean]


def train_lightning(
    mortal: Any,
    me: int,
    steps: int,
    patterns: Sequence[Any],
    gradient: Callable[..., float],
    number: float,
    compressed: dict[str, Any],
) -> dict[str, Any]:
    """`Trainer.fit`; arguments as for `train_keras`."""
    import logging
    import warnings

    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader
    from torchmetrics import MeanMetric

    from ring_plugins.lightning import RingStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(len(one))) for one in patterns])
            self.register_buffer("seen", torch.zeros(1))
            self.mean = MeanMetric()

        def on_train_batch_start(self, *_: Any) -> None:
            mortal.step = self.global_step
            for point in ("healing", "forward", "SIGTERM", "reduction"):
                mortal.at(point)

        def training_step(self, batch: Any, index: int) -> Any:
            total = sum((part * factor).sum() for part, factor in zip(self.parts, patterns, strict=True))
            return gradient(self.global_step % EPOCH, me) * total

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            mortal.at("update")

        def on_train_batch_end(self, *_: Any) -> None:
            log.after_step()
            if self.global_step % EPOCH:
                mortal.over()
            else:
                mortal.at("epoch end")

        def validation_step(self, batch: Any, index: int) -> None:
            mortal.at("validation")
            self.mean.update(number)
            self.log("mean", self.mean, on_epoch=True)
            self.log("synced", number, sync_dist=True, on_epoch=True)

        def on_validation_epoch_end(self) -> None:
            log.after_validation(self.mean.compute().item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.5, momentum=0.5)

    class Ends(L.Callback):
        def on_save_checkpoint(self, *_: Any) -> None:
            mortal.at("checkpoint")

        def on_train_epoch_start(self, *_: Any) -> None:
            if model.global_step:
                mortal.over()

    ring.init(on_failure="continue")
    with tempfile.TemporaryDirectory() as directory:
        trainer = L.Trainer(
            strategy=RingStrategy(on_failure="continue", **compressed), accelerator="cpu", logger=False,
            max_epochs=steps // EPOCH, limit_train_batches=EPOCH, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
            default_root_dir=directory, callbacks=[Ends(), ModelCheckpoint(save_last=True)],
        )  # fmt: skip
        log, model = Log(), Model()
        trainer.fit(model, DataLoader(range(EPOCH * 6)), DataLoader(range(12), batch_size=2))  # type: ignore[arg-type]
        mortal.over()
    left = ring.all_gather_object(me)
    return {"history": log.history, "weights": list(model.parts), "left": left, "told": log.told}


def train_keras(
    mortal: Any,
    me: int,
    steps: int,
    patterns: Sequence[Any],
    gradient: Callable[..., float],
    number: float,
    compressed: dict[str, Any],
) -> dict[str, Any]:
    """`Model.fit`.

    Args:
        mortal: a `healing.Mortal`.
        me: rank.
        steps: to train.
        patterns: what the gradients of each weight are multiples of.
        gradient: their factor, by step in the epoch and rank.
        number: of this rank, whose mean is validated.
        compressed: `compression` and `error_feedback`.
    """
    import keras
    import numpy as np

    from ring_plugins.keras import BroadcastCallback, MetricAverageCallback

    class Weights(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.parts = [self.add_weight(shape=(len(one),), initializer="zeros") for one in patterns]
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
            self.factors = [keras.ops.convert_to_tensor(one.numpy()) for one in patterns]

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign(number)  # averaged at the end of each epoch
            return x * sum(keras.ops.sum(part * factor) for part, factor in zip(self.parts, self.factors, strict=True))

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            mortal.step = len(log.history)
            for point in ("healing", "forward", "SIGTERM", "reduction"):
                mortal.at(point)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            mortal.at("update")  # a compiled step has no such point
            log.after_step()
            if len(log.history) % EPOCH == 0:
                mortal.at("epoch end")

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            mortal.at("validation")

        def on_test_end(self, logs: Any = None) -> None:
            log.after_validation(float(logs["mean"]))

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                mortal.over()

    class Checkpoint(keras.callbacks.ModelCheckpoint):
        def _save_model(self, *args: Any, **options: Any) -> Any:
            mortal.at("checkpoint")
            return super()._save_model(*args, **options)

    ring.init(on_failure="continue")
    log = Log()
    model = keras.Sequential([keras.Input((1,)), Weights()])
    metric = keras.metrics.MeanMetricWrapper(lambda wanted, found: wanted * 0 + number, name="mean")
    model.compile(
        keras.optimizers.SGD(0.5, momentum=0.5), loss=lambda wanted, found: found, metrics=[metric],
        jit_compile=keras.backend.backend() == "jax",
    )  # fmt: skip
    batches = np.array([gradient(step, me) for step in range(EPOCH)], np.float32)[:, None]
    with tempfile.TemporaryDirectory() as directory:
        fitted = model.fit(
            batches, batches, batch_size=1, epochs=steps // EPOCH, shuffle=False, verbose=0,
            validation_data=(batches, batches), validation_batch_size=1,
            callbacks=[
                Steps(), BroadcastCallback(**compressed), MetricAverageCallback(), Checkpoint(f"{directory}/last.keras")
            ],
        )  # fmt: skip
        mortal.over()
    assert ring.all_gather_object(fitted.history) == [fitted.history] * ring.size()
    left, weights = ring.all_gather_object(me), [np.array(weight) for weight in model.get_weights()]
    return {"history": log.history, "weights": weights[: len(patterns)], "left": left, "told": log.told}
