"""The setting of every script here: two ranks that share one card, and a file for what they find.

    TEST_RANKS=2 python tests/gpu/equals_ddp.py            # tests/gpu/run.sh runs all of them

tests/gpu_rehearsal runs them on simulated cards.

NCCL reads its variables at its first call in a process, and torch's NCCL is the same library. So the ranks agree to
share the card before torch is imported.
"""

# ruff: noqa: E402  # the variables are set before torch is imported

import json
import os
from pathlib import Path
from typing import Any

import ring_plugins as ring

RANKS = int(os.environ.get("TEST_RANKS", "2"))
ring.init(ranks=RANKS)
RANK = ring.rank()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which makes cuBLAS deterministic

import torch
import torch.distributed as dist

from ring_plugins.core.gpu import load_nccl
from ring_plugins.core.gpu.peers import allow_shared_gpu
from ring_plugins.torch.rendezvous import store_from_world

CUDA = torch.cuda.is_available()
#: Of tests/gpu_rehearsal, where nothing compiles for a card.
SIMULATED = CUDA and torch.cuda.get_device_name(0).startswith("Simulated")
DEVICE = torch.device("cuda", RANK % torch.cuda.device_count()) if CUDA else torch.device("cpu")
if CUDA:
    if torch.cuda.device_count() < RANKS:
        os.environ["RING_SHARE_GPU"] = "1"
        allow_shared_gpu(load_nccl().version, RANK)
    torch.cuda.set_device(DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def needs_a_card() -> None:
    """End a script that the CPU cannot run."""
    if not CUDA:
        print("not run here: torch sees no CUDA GPU", flush=True)
        raise SystemExit


def synchronize() -> None:
    """Wait for the card: a kernel that fills it could keep a peer's, on the same card, from starting."""
    if CUDA:
        torch.cuda.synchronize()


def fact(**found: Any) -> None:
    """Print what rank 0 found as a line of JSON, and add it to $OUT/facts.jsonl at once."""
    if RANK != 0:
        return
    where = "a simulated card" if SIMULATED else "a card" if CUDA else "the CPU"
    line = json.dumps(found | {"on": where})
    print("FACT", line, flush=True)
    if "OUT" in os.environ:
        with (Path(os.environ["OUT"]) / "facts.jsonl").open("a") as file:
            file.write(line + "\n")


def init_torch_group() -> None:
    """Give DDP torch's own backend among the same ranks."""
    store, rank, size = store_from_world()
    dist.init_process_group("nccl" if CUDA else "gloo", store=store, rank=rank, world_size=size)


def flat(module: torch.nn.Module) -> torch.Tensor:
    """All weights in one tensor on the CPU."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).cpu()
