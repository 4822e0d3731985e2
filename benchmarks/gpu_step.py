"""Training steps on GPUs: ring_plugins beside no communication and torch's DDP over NCCL.

    python benchmarks/gpu_step.py                          # one GPU: the cost of our hooks, copies and NCCL calls
    mpirun -n 8 python benchmarks/gpu_step.py              # one GPU per rank
    python benchmarks/gpu_step.py --models gpt2 --batch 8 --seconds 5 --trace step.json

ResNet-50, a transformer of GPT-2 small's size, and a perceptron of 1,000 small parameters, whose steps are mostly
launches; in bfloat16 by autocast, with SGD. Every repetition runs all variants one after the other; the time of a step
is that of the slowest rank, including its GPU. DDP runs with its defaults, and with gradients that are views of its
buckets, as ours are. "on the host" is the time until Python has enqueued a step, without waiting for the GPU; the
difference to no communication is the cost of our hooks. With one rank, our hooks and NCCL calls are forced, as DDP's
always are. --trace writes a few of our steps for chrome://tracing or ui.perfetto.dev, which show NCCL's kernels beside
those of backward; with several models, into one file for each.

Prints "not measured here" if there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measure import save
from torch import nn
from torch.nn import functional as F

import ring_plugins as ring
from ring_plugins.core.base import config
from ring_plugins.core.gpu import load_nccl
from ring_plugins.core.gpu.connection import allow_shared_gpu
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, GradientAverager, broadcast_parameters
from ring_plugins.torch.device import streams
from ring_plugins.torch.rendezvous import store_from_world


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut (He et al. 2016), the stride on the middle one."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """25.6 million parameters in 161 tensors."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        inside = 64
        for stage, blocks in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            for block in range(blocks):
                layers.append(Bottleneck(inside, width, 2 if stage and not block else 1))
                inside = 4 * width
        self.body, self.head = nn.Sequential(*layers), nn.Linear(inside, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x), y)

    @staticmethod
    def batch(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
        return x, torch.randint(0, 1000, (rows,), device=device)


class Block(nn.Module):
    """A pre-norm transformer block: attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.join, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.join(self.first(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.network(self.second(x))


class GPT2(nn.Module):
    """124 million parameters: 12 layers of width 768, a vocabulary of 50,257, and tied embeddings."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, tokens: int = 50257, length: int = 1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places.weight[: x.shape[1]]
        return F.linear(self.norm(self.blocks(self.tokens(x) + places)), self.tokens.weight)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    @staticmethod
    def batch(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(0, 50257, (rows, 1025), device=device)
        return x[:, :-1], x[:, 1:]


class Perceptron(nn.Module):
    """500 layers of width 64: 1,000 parameters, 2 million numbers."""

    def __init__(self, width: int = 64, layers: int = 500) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x), y)

    @staticmethod
    def batch(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 64, device=device), torch.randint(0, 64, (rows,), device=device)


MODELS: dict[str, tuple[type[nn.Module], int]] = {
    "resnet50": (ResNet50, 64),
    "gpt2": (GPT2, 8),
    "perceptron": (Perceptron, 64),
}


def step(
    loss: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            value = loss(*batch)
        value.backward()
        optimizer.step()

    return run


DDP, DDP_VIEWS = "DDP (NCCL)", "DDP, bucket views"


def variants(name: str, rows: int, device: torch.device) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """The step of each variant, warmed up, and the peak of its memory in bytes."""
    made: dict[str, Callable[[], None]] = {}
    peaks: dict[str, int] = {}
    batch = MODELS[name][0].batch(rows, device)
    for variant in ("no communication", "ring_plugins", DDP, DDP_VIEWS):
        before = allocated()
        torch.manual_seed(0)
        model = MODELS[name][0]().to(device)
        if name == "resnet50":
            model = model.to(memory_format=torch.channels_last)
        loss = model.loss
        if variant.startswith("DDP"):
            wrapped = nn.parallel.DistributedDataParallel(
                model, None if device.index is None else [device.index], gradient_as_bucket_view=variant == DDP_VIEWS
            )
            whole = Loss(wrapped, name)
            loss = whole
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if variant == "ring_plugins":
            broadcast_parameters(model)
            if ring.size() == 1:  # an optimizer would put no hooks on the parameters
                index = device.index or 0
                communicator = current().new_device_communicator("gradients", index, streams(index))
                model.averager = GradientAverager(model, communicator=communicator)  # kept with the model
            else:
                optimizer = DistributedOptimizer(optimizer, model.named_parameters())
        made[variant] = step(loss, optimizer, batch)
        peaks[variant] = warmed_up(made[variant], before)
    return made, peaks


class Loss:
    """The loss computed through DDP's wrapper, because its `forward` must be called."""

    def __init__(self, wrapped: nn.Module, name: str) -> None:
        self.wrapped, self.flat = wrapped, name == "gpt2"

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.wrapped(x)
        return F.cross_entropy(out.flatten(0, 1) if self.flat else out, y.flatten())


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated(at_peak: bool = False) -> int:
    """Bytes of the GPU that torch uses now, or used at the peak."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.max_memory_allocated() if at_peak else torch.cuda.memory_allocated()


def warmed_up(run: Callable[[], None], before: int) -> int:
    """Run some steps; return the bytes that the variant takes at the peak of one.

    Args:
        run: a step.
        before: bytes in use before the variant was made. Those of other variants do not change meanwhile.
    """
    for _ in range(3):
        run()
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        run()
    synchronize()
    return allocated(at_peak=True) - before


def measure(made: dict[str, Callable[[], None]], seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step on the slowest rank, by variant: until Python has enqueued it, and until the GPU is done."""
    times: dict[str, dict[str, list[float]]] = {name: {"queued": [], "done": []} for name in made}
    started = time.perf_counter()
    while ring.broadcast_object(time.perf_counter() - started < seconds):
        for name, run in made.items():
            ring.barrier()
            began = time.perf_counter()
            run()
            queued = time.perf_counter() - began
            synchronize()
            slowest = ring.all_gather_object((queued, time.perf_counter() - began))
            times[name]["queued"].append(max(q for q, _ in slowest))
            times[name]["done"].append(max(d for _, d in slowest))
    return times


def trace(run: Callable[[], None], path: str) -> None:
    with torch.profiler.profile() as profile:
        for _ in range(3):
            run()
        synchronize()
    profile.export_chrome_trace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", type=int, help="rows per rank; 8 for gpt2 and 64 for the others by default")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to spend on each model")
    parser.add_argument("--trace", metavar="FILE", help="write some steps of ours on rank 0, for chrome://tracing")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("not measured here: torch sees no CUDA GPU")
        return
    ring.init()
    device = torch.device("cuda", ring.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store, rank, size = store_from_world()
    if config.SHARE_GPU.get():  # before torch's NCCL reads its variables
        allow_shared_gpu(load_nccl().version, rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    record: dict[str, object] = {"card": torch.cuda.get_device_name(device), "ranks": size}
    for name in arguments.models:
        made, peaks = variants(name, arguments.batch or MODELS[name][1], device)
        times = measure(made, arguments.seconds)
        if rank == 0:
            median = {v: {k: statistics.median(t) for k, t in both.items()} for v, both in times.items()}
            record[name] = {variant: {**both, "peak_bytes": peaks[variant]} for variant, both in median.items()}
            ours, none = median["ring_plugins"], median["no communication"]
            for variant, both in median.items():
                print(
                    f"{name}: {variant}: {both['done'] * 1e3:.2f} ms a step, {both['queued'] * 1e3:.2f} on the host, "
                    f"{peaks[variant] / 2**20:.0f} MiB at the peak"
                )
            print(
                f"{name}: ring / none {ours['done'] / none['done']:.3f}, "
                f"ring / DDP {ours['done'] / median[DDP]['done']:.3f} "
                f"({ours['done'] / median[DDP_VIEWS]['done']:.3f} with bucket views), "
                f"our hooks {(ours['queued'] - none['queued']) * 1e3:.2f} ms a step on the host"
            )
        if arguments.trace:
            others = trace if rank == 0 else lambda run, _: [run() for _ in range(3)]
            path = Path(arguments.trace)
            if len(arguments.models) > 1:
                path = path.with_stem(f"{path.stem}-{name}")
            others(made["ring_plugins"], str(path))
    if rank == 0:
        save("gpu_step", record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
