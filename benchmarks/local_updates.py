"""The loss of a small character GPT with local updates, and the bytes that leave a rank, beside synchronous training.

    python benchmarks/local_updates.py                             # 512 steps on four test hosts, as root
    python benchmarks/local_updates.py --steps 3072 --seeds 3      # hours
    mpirun -n 4 --hostfile hosts python benchmarks/local_updates.py --here --run synchronous  # on real hosts

The text is the standard library's sources. Each rank trains on 8 pieces of 48 characters a step, with AdamW. Weights,
batches and steps are the same in every run. Test hosts are network namespaces (tests/hosts), one rank of one thread
each, without a limit of their links: times tell nothing here, bytes and losses do. The loss is that of 1,024 pieces
that nobody trains on, with the weights that all ranks have in common.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from measure import count_bytes, init_under_mpirun, machine, on_test_hosts, save
from torch import nn
from torch.nn import functional as F

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, LocalUpdates

#: By name, options of `LocalUpdates`; None for one rank that trains alone, a codec for synchronous training.
RUNS: dict[str, Any] = {
    "one host alone": None,
    "synchronous": "",
    "synchronous, int8": "int8",
    "every 32, average": {"every": 32},
    "every 32, (0.9, 0.6)": {"every": 32, "outer": (0.9, 0.6)},
    "every 32, (0.7, 0.9)": {"every": 32, "outer": (0.7, 0.9)},
    "every 32, (0.9, 0.6), 4 fragments, int8": {
        "every": 32, "outer": (0.9, 0.6), "fragments": 4, "compression": "int8",
    },
    "every 128, (0.9, 0.6), int8": {"every": 128, "outer": (0.9, 0.6), "compression": "int8"},
}  # fmt: skip
HOSTS, BATCH, LENGTH, WIDTH, LAYERS, RATE = 4, 8, 48, 64, 2, 3e-3
RANKS = "one rank of one thread per test host, which share these cores"


class GPT(nn.Module):
    """A decoder of two layers with 110,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(96, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 96)
        for parameter in self.layers.parameters():  # the layers are copies of one
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.characters(rows[:, :-1]) + self.places.weight
        x = self.out(self.layers(x, self.mask, is_causal=True))
        return F.cross_entropy(x.reshape(-1, 96), rows[:, 1:].reshape(-1))


def text() -> torch.Tensor:
    """Characters of the standard library as numbers below 96; a line's end is 95."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long() - 32
    data[data == 10 - 32] = 95
    return data[(data >= 0) & (data < 96)]


def pieces(data: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(data) - LENGTH - 1, (number,), generator=generator)
    return data[starts[:, None] + torch.arange(LENGTH + 1)]


def train(run: Any, steps: int, seed: int) -> float:
    """Train, and return the loss on what nobody has trained on."""
    data = text()
    kept, data = data[-len(data) // 20 :], data[: -len(data) // 20]
    torch.manual_seed(seed)
    model = GPT()
    optimizer: Any = torch.optim.AdamW(model.parameters(), RATE)
    if isinstance(run, str):
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression=run or None)
    elif run is not None:
        optimizer = LocalUpdates(optimizer, model, **run)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps + 1, pct_start=0.05)
    generator = torch.Generator().manual_seed(1000 * seed + ring.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(pieces(data, BATCH, generator)).backward()
        optimizer.step()
        schedule.step()
    if isinstance(optimizer, LocalUpdates):
        optimizer.finish()
    with torch.no_grad():
        return float(model(pieces(kept, 1024, torch.Generator().manual_seed(0))))


def worker(options: argparse.Namespace) -> None:
    """One run among the ranks that mpirun has started."""
    torch.set_num_threads(1)
    init_under_mpirun(options.address)
    sent, began = count_bytes(), time.process_time()
    loss = train(RUNS[options.run], options.steps, options.seed)
    seconds = float(ring.all_reduce(time.process_time() - began, ring.SUM))
    ring.barrier()
    if ring.rank() == 0:
        record = {"run": options.run, "seed": options.seed, "loss": loss, "bytes": sent[0], "seconds": seconds}
        if options.out:
            Path(options.out).write_text(json.dumps(record))
        print(record)


def report(records: list[dict[str, Any]], steps: int) -> None:
    """Print the mean over seeds of the loss, of what is gained from the other hosts, and the bytes."""
    losses = {name: [one["loss"] for one in records if one["run"] == name] for name in RUNS}
    sent = {one["run"]: one["bytes"] for one in records}
    mean = {name: sum(found) / len(found) for name, found in losses.items() if found}
    alone, together = mean.get("one host alone", 0.0), mean.get("synchronous", 1.0)
    for name, loss in mean.items():
        spread = max(losses[name]) - min(losses[name])
        gain = (alone - loss) / (alone - together)
        fewer = sent.get("synchronous", 0) / sent[name] if name != "one host alone" else 0
        print(
            f"{name}: loss {loss:.3f} (spread {spread:.3f}), {gain:.0%} of the gain, {sent[name] / 1e6:.2f} MB, "
            f"{sent[name] / steps / 1e3:.2f} kB a step, {fewer:.0f}x fewer"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=512, help="of each rank")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--run", action="append", help="only this run; may be repeated")
    parser.add_argument("--here", action="store_true", help="run among the ranks that mpirun started")
    parser.add_argument("--seed", type=int, default=0, help="with --here")
    parser.add_argument("--address", help="address of rank 0's host, with --here")
    parser.add_argument("--out", help="file for the result, with --here")
    options = parser.parse_args()
    if options.here:
        options.run = options.run[0]
        worker(options)
        return
    records = []
    for seed in range(options.seeds):
        for name in options.run or RUNS:
            arguments = ["--steps", str(options.steps), "--seed", str(seed), "--run", name]
            records.append(json.loads(on_test_hosts(__file__, HOSTS, None, arguments, ranks=1)))
            print(records[-1], flush=True)
    report(records, options.steps)
    if not options.run:
        save("local_updates", {"steps": options.steps, "hosts": HOSTS, "runs": records}, RANKS, 0.0)
    print(machine(RANKS, 0.0))


if __name__ == "__main__":
    main()
