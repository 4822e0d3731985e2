"""The same loop with Fabric over DDP and over ours, in the same processes; reports how the weights compare."""

import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ring_plugins as ring
from ring_plugins.lightning import RingEnvironment, RingFabricStrategy
from ring_plugins.torch.rendezvous import store_from_world
from tests.lightning.models import CLASSES, FEATURES, dealt
from tests.worker import report

PACKAGE = os.environ.get("TEST_PACKAGE", "lightning.fabric")
fabric_package = import_module(PACKAGE)
strategies = import_module(f"{PACKAGE}.strategies")
RANKS = int(os.environ["TEST_RANKS"])


def make(strategy: Any, **kwargs: Any) -> Any:
    fabric = fabric_package.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, **kwargs)
    fabric.launch()
    return fabric


def train(fabric: Any) -> dict[str, torch.Tensor]:
    """Accumulation over two batches, clipping, a second module, a checkpoint in the middle."""
    fabric.seed_everything(4, verbose=False)
    network = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16))
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.01))
    head = nn.Linear(16, CLASSES)
    head, head_optimizer = fabric.setup(head, torch.optim.SGD(head.parameters(), lr=0.1))
    data = fabric.setup_dataloaders(dealt(fabric.global_rank, fabric.world_size), use_distributed_sampler=False)
    for index, (x, y, _) in enumerate(data):
        accumulates = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates), fabric.no_backward_sync(head, enabled=accumulates):
            fabric.backward(nn.functional.cross_entropy(head(model(x)), y))
        if accumulates:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        fabric.clip_gradients(head, head_optimizer, clip_val=0.05)
        for each in (optimizer, head_optimizer):
            each.step()
            each.zero_grad()
        if index == 3:
            file = Path(os.environ["TEST_REPORTS"]) / "fabric.ckpt"
            fabric.save(file, {"model": model, "optimizer": optimizer})
            fabric.load(file, {"model": model, "optimizer": optimizer})
    return {name: value.detach().clone() for each in (model, head) for name, value in each.state_dict().items()}


def ask(fabric: Any) -> dict[str, Any]:
    """The results of Fabric's own collectives."""
    rank = fabric.global_rank
    fabric.barrier()
    with fabric.rank_zero_first():
        pass
    return {
        "place": [fabric.local_rank, fabric.node_rank, fabric.world_size],
        "mean_of_integers": fabric.all_reduce(rank).item(),
        "sum": fabric.all_reduce(torch.tensor([float(rank)]), reduce_op="sum").tolist(),
        "unequal": [
            part.untyped_storage().tolist()[::8] for part in fabric.all_gather(torch.full((9,), rank)[: rank + 1])
        ],
        "gathered": fabric.all_gather({"rank": torch.tensor([rank])})["rank"].tolist(),
        "broadcast": fabric.broadcast(f"from {rank}", src=RANKS - 1),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    if RANKS == 1:
        fabric = make("ring")
        alone = train(make(strategies.SingleDeviceStrategy("cpu")))
        report("same", all(torch.equal(value, alone[name]) for name, value in train(fabric).items()))
        report("launcher", fabric.strategy.launcher is None and not dist.is_initialized())
        return
    fabric = make("ring")  # starts the other rank
    rank = fabric.global_rank
    by_name, answers = train(fabric), ask(fabric)
    by_class = train(make(RingFabricStrategy()))
    half = train(make("ring", precision="bf16-mixed"))
    dist.destroy_process_group()

    store, _, _ = store_from_world()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ddp = strategies.DDPStrategy
    kwargs = {"process_group_backend": "gloo"}
    reference = train(make(ddp(cluster_environment=RingEnvironment(), **kwargs)))
    half_reference = train(make(ddp(cluster_environment=RingEnvironment(), **kwargs), precision="bf16-mixed"))
    report("answers", answers, rank)
    for name, own, other in (
        ("name", by_name, reference),
        ("class", by_class, reference),
        ("half", half, half_reference),
    ):
        report(name, max(float((own[key] - other[key]).abs().max()) for key in other), rank)
    report("same_on_all", len({str(weights) for weights in ring.all_gather_object(digest(by_name))}) == 1, rank)


def digest(weights: dict[str, torch.Tensor]) -> bytes:
    return b"".join(value.numpy().tobytes() for value in weights.values())


if __name__ == "__main__":
    main()
