"""A rank of the soak: `soak_worker.py SECONDS SEED`. All ranks draw the same actions, and check every result.

Every rank can compute every rank's input, so each result is compared with numpy's on all inputs, and each training with
training of one process on the concatenated batch. From time to time the ranks report the memory, threads, files and
mappings that they hold.
"""

import ctypes
import gc
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np

import ring_plugins as ring

if __name__ == "__main__" and os.environ.get("TEST_SPAWN"):
    ring.init(ranks=int(os.environ["TEST_RANKS"]))

import torch
import torch.distributed as dist

import ring_plugins.torch as ring_torch
from tests.worker import report, report_pid

FLOATS = ["float16", "float32", "float64"]
NUMBERS = [*FLOATS, "int8", "int16", "int32", "int64", "uint8"]
REDUCTIONS: dict[ring.Op, Callable[[list[Any]], Any]] = {
    ring.SUM: lambda parts: np.sum(parts, 0),
    ring.MIN: lambda parts: np.min(parts, 0),
    ring.MAX: lambda parts: np.max(parts, 0),
    ring.AVERAGE: lambda parts: np.mean(parts, 0),
}


class Draw:
    """What one action draws: the same on all ranks, but for `values`."""

    def __init__(self, seed: int, number: int) -> None:
        self.seed, self.number = seed, number
        self.chance = random.Random(f"{seed}:{number}")
        self.choice = self.chance.choice

    def shape(self) -> tuple[int, ...]:
        size = self.choice([0, 1, 7, 100, 5_000, 70_000, 1_000_000])
        return self.choice([(size,), (size, 1), (1, size), (size // 5, 5), ()])

    def dtype(self, choices: list[str] = NUMBERS) -> str:
        return self.choice(choices)

    def values(self, shape: tuple[int, ...], dtype: str) -> list[Any]:
        """The input of every rank: small whole numbers, whose sums are exact in every dtype."""
        return [
            np.random.default_rng([self.seed, 1000 + self.number, rank]).integers(0, 8, shape).astype(dtype)
            for rank in range(ring.size())
        ]

    def laid_out(self, array: Any) -> Any:
        """The same values in memory that is laid out in some other way, as numpy's or torch's."""
        kind = self.choice(["plain", "strided", "fortran", "reversed"])
        if kind == "strided":
            wide = np.zeros((*array.shape, 2), array.dtype)
            wide[..., 1] = array
            array = wide[..., 1]
        elif kind == "fortran":
            array = np.asarray(array, order="F")
        elif kind == "reversed" and array.ndim:
            array = array[::-1].copy()[::-1]
        if self.choice([True, False]) and not any(stride < 0 for stride in array.strides):
            return torch.from_numpy(array)
        return array


def check(found: Any, right: Any, what: str) -> None:
    found, right = np.asarray(found), np.asarray(right)
    tolerance = 1e-3 if found.dtype == np.float16 else 1e-6
    if found.shape != right.shape or not np.allclose(found.astype(float), right.astype(float), tolerance, tolerance):
        raise AssertionError(f"{what}: {found.shape} {found.reshape(-1)[:4]} instead of {right.reshape(-1)[:4]}")


def finish(draw: Draw, call: Callable[..., Any]) -> Any:
    """The result of a collective, waited for at once or later."""
    return call() if draw.choice([True, False]) else call(wait=False).wait()


def all_reduce(draw: Draw) -> None:
    op = draw.choice(list(REDUCTIONS))
    inputs = draw.values(draw.shape(), draw.dtype(FLOATS if op is ring.AVERAGE else NUMBERS))
    right = REDUCTIONS[op](inputs)
    mine = draw.laid_out(inputs[ring.rank()])
    if draw.choice([True, False]) and mine.shape:
        finish(draw, lambda **more: ring.all_reduce(mine, op, out=mine, **more))
        check(mine, right, f"all_reduce {op} in place")
    else:
        check(finish(draw, lambda **more: ring.all_reduce(mine, op, **more)), right, f"all_reduce {op}")


def several_at_once(draw: Draw) -> None:
    inputs = [draw.values(draw.shape(), draw.dtype(FLOATS)) for _ in range(draw.choice([2, 5, 20]))]
    works = [ring.all_reduce(parts[ring.rank()], ring.SUM, wait=False) for parts in inputs]
    for work, parts in reversed(list(zip(works, inputs, strict=True))):
        check(work.wait(), np.sum(parts, 0), "several all_reduce")


def broadcast(draw: Draw) -> None:
    inputs = draw.values(draw.shape(), draw.dtype())
    root = draw.chance.randrange(ring.size())
    mine = draw.laid_out(inputs[ring.rank()])
    check(finish(draw, lambda **more: ring.broadcast(mine, root, **more)), inputs[root], "broadcast")


def all_gather(draw: Draw) -> None:
    dtype, columns = draw.dtype(), draw.choice([1, 3])
    rows = [draw.choice([0, 1, 50, 20_000]) for _ in range(ring.size())]
    inputs = [draw.values((rows[rank], columns), dtype)[rank] for rank in range(ring.size())]
    mine = draw.laid_out(inputs[ring.rank()])
    check(finish(draw, lambda **more: ring.all_gather(mine, **more)), np.concatenate(inputs), "all_gather")


def reduce_scatter(draw: Draw) -> None:
    inputs = draw.values((draw.choice([0, 1, 5, 1000]), draw.choice([1, 40])), draw.dtype())
    mine = draw.laid_out(inputs[ring.rank()])
    right = np.array_split(np.sum(inputs, 0), ring.size())[ring.rank()]
    check(finish(draw, lambda **more: ring.reduce_scatter(mine, ring.SUM, **more)), right, "reduce_scatter")


def all_to_all(draw: Draw) -> None:
    dtype = draw.dtype()
    splits = [[draw.choice([0, 1, 30, 3000]) for _ in range(ring.size())] for _ in range(ring.size())]
    inputs = [draw.values((sum(splits[rank]), 2), dtype)[rank] for rank in range(ring.size())]
    parts = [np.split(inputs[rank], np.cumsum(splits[rank])[:-1])[ring.rank()] for rank in range(ring.size())]
    mine = draw.laid_out(inputs[ring.rank()])
    found = finish(draw, lambda **more: ring.all_to_all(mine, splits[ring.rank()], **more))
    check(found, np.concatenate(parts), "all_to_all")


def objects(draw: Draw) -> None:
    root = draw.chance.randrange(ring.size())
    assert ring.broadcast_object({"from": ring.rank(), "n": draw.number}, root) == {"from": root, "n": draw.number}
    assert ring.all_gather_object("x" * ring.rank()) == ["x" * rank for rank in range(ring.size())]
    ring.barrier()


def mismatch(draw: Draw) -> None:
    """Ranks that call different operations hear of it; what follows is a communicator of its own, so it goes on."""
    group = dist.new_group(list(range(ring.size())), backend="ring")
    try:
        dist.all_reduce(torch.ones(10 + (ring.rank() == 1)), group=group)
    except Exception as error:
        assert "rank" in str(error), error
    else:
        raise AssertionError("a mismatch was not noticed")
    finally:
        dist.destroy_process_group(group)


def process_group(draw: Draw) -> None:
    ranks = sorted(draw.chance.sample(range(ring.size()), draw.chance.randint(1, ring.size())))
    group = dist.new_group(ranks, backend="ring")
    if ring.rank() in ranks:
        tensor = torch.full((draw.choice([1, 1000, 200_000]),), float(ring.rank()))
        dist.all_reduce(tensor, group=group)
        check(tensor, np.full(tensor.shape, float(sum(ranks))), "all_reduce of a group")
        dist.destroy_process_group(group)


def messages(draw: Draw) -> None:
    """Each rank sends to the next one, with a tag of its own each time."""
    count, tag = draw.choice([1, 100, 300_000]), draw.number % 1000
    behind, ahead = (ring.rank() - 1) % ring.size(), (ring.rank() + 1) % ring.size()
    received = torch.empty(count)
    sending = dist.isend(torch.full((count,), float(ring.rank())), ahead, tag=tag)
    dist.recv(received, behind, tag=tag)
    assert sending is not None
    sending.wait()
    check(received, np.full(count, float(behind)), "recv")


def training(draw: Draw) -> None:
    """A model with its own averager, that is dropped afterwards."""
    seed, width, accumulated = draw.chance.randrange(10**6), draw.choice([3, 50, 400]), draw.choice([1, 2])

    def model() -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.BatchNorm1d(width, affine=False, momentum=0.0),
            torch.nn.Linear(width, 2),
        ).eval()  # fmt: skip

    def batches(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed + step)
        return [torch.randn(4, 8, generator=generator) for _ in range(ring.size())]

    ours, alone = model(), model()
    ring_torch.broadcast_parameters(ours)
    optimizer = ring_torch.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9),
        ours.named_parameters(),
        backward_passes_per_step=accumulated,
    )
    # Not Adam, which makes the rounding of a gradient near zero as large as a step.
    reference = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(accumulated):
            every = batches(step * accumulated + part)
            ours(every[ring.rank()]).square().mean().backward()
            alone(torch.cat(every)).square().mean().backward()
        optimizer.step()
        reference.step()
    for mine, right in zip(ours.parameters(), alone.parameters(), strict=True):
        if not torch.allclose(mine, right, rtol=1e-4, atol=1e-5):
            raise AssertionError(f"training: {mine.flatten()[:4]} instead of {right.flatten()[:4]}")
    digests = ring.all_gather_object([parameter.detach().sum().item() for parameter in ours.parameters()])
    assert digests == digests[:1] * ring.size(), digests


def lightning_fit(draw: Draw) -> None:
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from ring_plugins.lightning import RingStrategy

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    torch.manual_seed(draw.number)
    model = Model()
    trainer = lightning.Trainer(
        strategy=RingStrategy(), accelerator="cpu", devices=ring.size(), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))
    weights = ring.all_gather_object(model.layer.weight.tolist())
    assert weights == weights[:1] * ring.size()


def keras_fit(draw: Draw) -> None:
    import keras

    from ring_plugins.keras import BroadcastCallback, MetricAverageCallback

    keras.utils.clear_session()
    keras.utils.set_random_seed(draw.number % 1000 + ring.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    data = np.random.default_rng(ring.rank()).standard_normal((32, 4)).astype("float32")
    callbacks = [BroadcastCallback(), MetricAverageCallback()]
    losses = model.fit(data, data[:, :2], batch_size=4, verbose=0, callbacks=callbacks).history["loss"]
    results = ring.all_gather_object([losses, [weight.tolist() for weight in model.get_weights()]])
    assert results == results[:1] * ring.size(), results


ACTIONS: dict[Callable[[Draw], None], float] = {
    all_reduce: 20,
    several_at_once: 5,
    broadcast: 8,
    all_gather: 8,
    reduce_scatter: 8,
    all_to_all: 8,
    objects: 5,
    process_group: 1,
    messages: 5,
    mismatch: 0.3,
    training: 2,
    lightning_fit: 0.2,
    keras_fit: 0.2,
}


def held() -> dict[str, float]:
    """What this process holds: MiB of memory, threads, files, mappings."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free between what is held differs by 80 MiB from one look to the next
    used = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return {
        "memory": round(used / 2**20, 1),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def main() -> None:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    report_pid()
    dist.init_process_group("ring")
    # In a short run, the import of Keras and Lightning would take longer than everything else.
    names = [action for action, weight in ACTIONS.items() if seconds > 30 or weight >= 0.3]
    for action in names:  # what is made once is made now
        action(Draw(seed, -1 - names.index(action)))
    counts: Counter[str] = Counter()
    began = time.monotonic()
    measured: list[dict[str, float]] = []
    number, going_on = 0, True
    while going_on:
        draw = Draw(seed, number)
        action = draw.chance.choices(names, [ACTIONS[name] for name in names])[0]
        action(draw)
        counts[action.__name__] += 1
        number += 1
        if number % 50 == 0:
            passed = time.monotonic() - began
            if passed > len(measured) * seconds / 20:
                measured.append({"second": round(passed), "actions": number, **held()})
                report("held", measured)
            going_on = bool(ring.broadcast_object(passed < seconds))
    measured.append({"second": round(time.monotonic() - began), "actions": number, **held()})
    report("held", measured)
    report("counts", counts)


if __name__ == "__main__":
    main()
