"""The loss of three models after 200 steps with each codec, beside how much it differs between seeds.

    mpirun -n 4 python benchmarks/codec_losses.py        # ten minutes

A perceptron and a convolutional network on scanned digits, and the character GPT of local_updates.py on the sources of
the standard library. The ranks count as two hosts with two ranks each. With one seed, weights, batches and steps are
the same for all codecs. The loss is that of samples that nobody trains on; writes benchmarks/results.
"""

from __future__ import annotations

import os

os.environ.setdefault("RING_VIRTUAL_NODES", "2")

import statistics
from collections.abc import Callable

import half_wire
import local_updates
import torch
from measure import machine, save
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer

CODECS = {"none": None, "bf16": "bf16", "fp16": "fp16", "int8": "int8"}
STEPS, SEEDS, BATCH = 200, 5, 16
#: A model, and a function that returns the model's loss of samples that are kept (None) or drawn for a step.
Task = tuple[nn.Module, Callable[[torch.Generator | None], torch.Tensor], torch.optim.Optimizer]


def digits(network: Callable[[], nn.Module], rate: float) -> Callable[[], Task]:
    """Classify scanned digits, of which 400 are kept."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)

    def make() -> Task:
        model = network()

        def loss(generator: torch.Generator | None) -> torch.Tensor:
            rows = slice(-400, None)
            if generator is not None:
                rows = torch.randint(0, len(labels) - 400, (BATCH,), generator=generator)
            return F.cross_entropy(model(images[rows]), labels[rows])

        return model, loss, torch.optim.SGD(model.parameters(), rate, 0.9)

    return make


def characters() -> Task:
    """Predict the next character, of text of which a twentieth is kept."""
    data = local_updates.text()
    kept, data = data[-len(data) // 20 :], data[: -len(data) // 20]
    model = local_updates.GPT()

    def loss(generator: torch.Generator | None) -> torch.Tensor:
        if generator is None:
            return model(local_updates.pieces(kept, 512, torch.Generator().manual_seed(0)))
        return model(local_updates.pieces(data, local_updates.BATCH, generator))

    return model, loss, torch.optim.AdamW(model.parameters(), local_updates.RATE)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def convolutional() -> nn.Module:
    with torch.random.fork_rng():
        made = half_wire.network()  # which sets a seed of its own
    for module in made:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return made


MODELS = {
    "perceptron": digits(perceptron, 0.02),
    "convolutional network": digits(convolutional, 0.02),
    "character GPT": characters,
}


def train(make: Callable[[], Task], codec: str | None, seed: int) -> float:
    """Train, and return the loss of samples that nobody has trained on."""
    torch.manual_seed(seed)
    model, loss, optimizer = make()
    optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)
    generator = torch.Generator().manual_seed(1000 * seed + ring.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(generator).backward()
        optimizer.step()
    optimizer.close()
    with torch.no_grad():
        return float(loss(None))


def main() -> None:
    torch.set_num_threads(1)
    ring.init()
    found: dict[str, dict[str, list[float]]] = {}
    for name, make in MODELS.items():
        found[name] = {codec: [train(make, option, seed) for seed in range(SEEDS)] for codec, option in CODECS.items()}
        if ring.rank() == 0:
            for codec, losses in found[name].items():
                apart = statistics.mean(
                    abs(one - exact) for one, exact in zip(losses, found[name]["none"], strict=True)
                )
                print(
                    f"{name}, {codec}: {statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f} among {SEEDS} "
                    f"seeds, {apart:.4f} from none with the same seed",
                    flush=True,
                )
    if ring.rank() == 0:
        ranks = f"{ring.size()} ranks on {ring.num_nodes()} virtual hosts"
        save("codec_losses", {"steps": STEPS, "losses": found}, ranks)
        print(machine(ranks))


if __name__ == "__main__":
    main()
