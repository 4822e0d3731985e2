"""Trainers with all kinds of counts under one launcher, and one training; reports each one's rank and sizes."""

import os
import sys
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import ring_plugins.lightning
from tests.worker import report

PACKAGE = os.environ.get("TEST_PACKAGE", "lightning.pytorch")
pl = import_module(PACKAGE)
boring = import_module(f"{PACKAGE}.demos.boring_classes")
rank_zero = import_module(f"{PACKAGE}.utilities.rank_zero")


class Model(boring.BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("loss", output["loss"], prog_bar=True, sync_dist=True)
        return output


def trainer(**kwargs: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    limits = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 2}
    return pl.Trainer(**{"accelerator": "cpu", "strategy": "ring"} | quiet | limits | kwargs)


def main() -> None:
    rank_before = rank_zero.rank_zero_only.rank
    strategies = {"class": ring_plugins.lightning.RingStrategy(), "name": "ring"}
    counts: list[dict[str, Any]] = [
        {"devices": 1},
        {"devices": "auto"},
        {"devices": 2},
        {"devices": 3},
        {"num_nodes": 2},
    ]
    if "--alone" in sys.argv:
        counts = []
    places, said = [], []
    for count in counts:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            own = trainer(**count)
            trainer(**count)  # which must not warn again
        places.append([own.global_rank, own.world_size, own.num_devices, own.num_nodes])
        said.append([str(warning.message) for warning in caught if "follows the" in str(warning.message)])

    for strategy in strategies.values():
        devices = 2 if "--alone" in sys.argv else 1
        torch.manual_seed(int(os.environ.get("RANK", rank_before)))
        model, fitted = Model(), trainer(devices=devices, strategy=strategy)
        fitted.fit(model)
    rank = fitted.global_rank
    rank_zero.rank_zero_info(f"rank-zero-info from {rank}")
    report("rank_before", rank_before, rank)
    report("places", places, rank)
    report("said", said, rank)
    report("weights", model.layer.weight.detach(), rank)
    report("strategy", [type(fitted.strategy).__qualname__, fitted.strategy.waited_seconds > 0], rank)
    report("group", [dist.get_backend(), dist.get_world_size()], rank)
    report("printed_by", os.getpid(), rank)


if __name__ == "__main__":
    main()
