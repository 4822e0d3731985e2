"""What private names of Lightning are taken for: a version that changes one fails here, not in somebody's fit."""

import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch import callbacks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Seen(lightning.Callback):
    """Calls of methods that the strategy replaces on their owners, and what holds within `fit`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.epochs: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        for owner, name in (
            (loop, "_broadcast_sigterm_tensor"),
            (loop.val_loop, "run"),
            (connector, "epoch_end_reached"),
            (connector, "_evaluation_epoch_end"),
        ):
            self._count(owner, name)

    def _count(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda: self.calls.append(name) or original())

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        handler: Any = signal.getsignal(signal.SIGTERM)
        connector = trainer._signal_connector
        assert connector._sigterm_notifier_fn in handler.signal_handlers and not connector.received_sigterm
        assert callable(connector._slurm_sigusr_handler_fn) and callable(connector._register_signal)
        assert hasattr(sys.modules[type(connector).__module__].SLURMEnvironment, "detect")
        assert hasattr(sys.modules[type(trainer.fit_loop.epoch_loop).__module__], "SIGTERMException")
        assert trainer._accelerator_connector._cluster_environment_flag is None

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        fit_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
        assert fit_loop._combined_loader.flattened == [trainer.train_dataloader]
        assert fit_loop._data_fetcher.combined_loader is fit_loop._combined_loader
        self.epochs.append(
            (
                fit_loop._last_train_dl_reload_epoch,
                val_loop._last_val_dl_reload_epoch,
                val_loop._combined_loader is None,
            )
        )


@pytest.mark.filterwarnings("ignore")
def test_private_names_of_the_trainer(tmp_path: Path) -> None:
    seen, saving = Seen(), callbacks.ModelCheckpoint(tmp_path, save_last=True)
    logger = CSVLogger(tmp_path)
    assert logger._experiment is None and logger._version is None
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, callbacks=[seen, saving], logger=logger, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    assert trainer._checkpoint_connector._loaded_checkpoint == {}
    assert trainer._val_check_time_interval is None
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        assert loop._combined_loader is None
    assert trainer.fit_loop._last_train_dl_reload_epoch == float("-inf")
    assert trainer.strategy._accelerator is trainer.accelerator
    data, model, models = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2), Model(), []
    strategy, set_up = trainer.strategy, trainer.strategy._setup_model
    strategy._setup_model = lambda model: models.append(model) or set_up(model)
    trainer.fit(model, data, data)
    assert models == [model]
    assert "epoch_end_reached" in seen.calls
    assert [seen.calls.count(name) for name in ("run", "_evaluation_epoch_end")] == [2, 2]
    # Lightning broadcasts before every batch, or, since 2.6, only where there are several ranks.
    assert seen.calls.count("_broadcast_sigterm_tensor") in (0, 4)
    assert seen.epochs == [(0, 0, False), (1, 0, False)]
    assert saving._last_global_step_saved == trainer.global_step == 4
    assert saving._last_checkpoint_saved in (str(tmp_path / "last.ckpt"), saving.best_model_path)
    assert saving._defer_save_until_validation is False
    connector = trainer._logger_connector
    assert connector._callback_metrics.keys() >= {"loss", "val_loss"} and "loss" in connector._logged_metrics
    assert isinstance(connector._progress_bar_metrics, dict)
    assert logger._experiment is logger.experiment


def test_private_names_of_callbacks_and_wrappers() -> None:
    finetuning, averaging = callbacks.BackboneFinetuning(), callbacks.StochasticWeightAveraging(0.1)
    assert finetuning._internal_optimizer_metadata == {} and finetuning._restarting is False
    assert (averaging._scheduler_state, averaging._swa_scheduler, averaging._initialized) == (None, None, False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    assert LightningOptimizer(optimizer)._optimizer is optimizer
    module = torch.nn.Linear(1, 1)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    wrapped = fabric.setup(module)
    assert isinstance(wrapped, _FabricModule) and wrapped._forward_module is module
    metric = torchmetrics.MeanMetric()
    assert metric._is_synced is False
    metric.update(1.0)
    sum_of_two = {"dist_sync_fn": lambda value, group: [value, value], "distributed_available": lambda: True}
    with metric.sync_context(**sum_of_two):
        assert metric._is_synced is True
