"""Injects an error into one rank of a job, again and again: `faults.py RANKS FUNCTION:CALL:STATUS ...`.

torch is imported once; each job is forked from this process, which never uses a device. The fault hits the last rank.
Reports for each fault what became of the ranks, as texts: "trained HASH", "ClassName: text", "ended with status N",
"killed by SIGNAL", "hangs". A class name with a "!" is an error of ours. With TEST_STAYS=seconds a rank that raised
stays alive for a while, as a script that caught the error would.
"""

import ctypes
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # here, not in every rank: making an optimizer imports it
from torch import nn

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters

LIMIT = float(os.environ.get("TEST_LIMIT", "90"))
STAYS = float(os.environ.get("TEST_STAYS", "0"))
STEPS = 5


def train() -> str:
    ring.init()
    device = torch.device("cuda", ring.local_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(ring.rank())
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    broadcast_parameters(model)
    inner = torch.optim.Adam(model.parameters())
    optimizer = DistributedOptimizer(
        inner, model.named_parameters(), shard=bool(os.environ.get("TEST_SHARD")), bucket_bytes=1 << 10
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + ring.rank()))
        model(inputs.to(device)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    optimizer.averager.check()
    ring.barrier()
    optimizer.close()
    ring.shutdown()
    assert weights.isfinite().all(), "weights that are not finite"
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]


def rank_of_job(writes: int, variables: dict[str, str]) -> None:
    """What a forked rank does; never returns."""
    try:
        os.environ.update(variables)
        os.setpgid(0, 0)
        ctypes.CDLL("libsimulated_devices.so").simulated_reset()
        text = f"trained {train()}"
    except BaseException as error:
        ours = "!" if isinstance(error, ring.RingError) else ""
        text = f"{type(error).__name__}{ours}: {error}"
        if os.environ.get("TEST_TRACEBACKS"):
            traceback.print_exc()
    os.write(writes, text.encode()[:2000])
    os.close(writes)
    time.sleep(STAYS if not text.startswith("trained") else 0)
    sys.stdout.flush()
    os._exit(0 if text.startswith("trained") else 1)


def outcome(ranks: int, fault: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids, pipes = [], []
    for rank in range(ranks):
        reads, writes = os.pipe()
        variables = {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{port}",
            "RING_SIMULATED_FAULTS": fault if rank == ranks - 1 and fault != "none" else "",
        }
        pid = os.fork()
        if not pid:
            os.close(reads)
            rank_of_job(writes, variables)
        os.close(writes)
        pids.append(pid)
        pipes.append(reads)
    texts: list[str] = []
    ends = time.monotonic() + LIMIT
    statuses = dict.fromkeys(pids, -1)
    for pid in pids:
        while time.monotonic() < ends:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = status
                break
            time.sleep(0.02)
    for pid, pipe in zip(pids, pipes, strict=True):
        if statuses[pid] == -1:
            os.kill(pid, signal.SIGUSR1 if os.environ.get("TEST_TRACEBACKS") else signal.SIGKILL)
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.set_blocking(pipe, False)
        try:
            text = os.read(pipe, 4000).decode(errors="replace")
        except BlockingIOError:
            text = ""
        os.close(pipe)
        if statuses[pid] == -1 and not STAYS:
            text = f"hangs {text}"
        elif os.WIFSIGNALED(statuses[pid]) and statuses[pid] != -1:
            text = f"killed by {os.WTERMSIG(statuses[pid])}"
        elif not text and statuses[pid] != -1:  # the job's own end of a rank whose thread waits for a device
            text = f"ended with status {os.WEXITSTATUS(statuses[pid])}"
        texts.append(text or "hangs")
    return texts


for fault in sys.argv[2:]:
    began = time.monotonic()
    found = outcome(int(sys.argv[1]), fault)
    line = json.dumps([0, fault, found])
    with (Path(os.environ["TEST_REPORTS"]) / "faults.jsonl").open("a") as file:
        file.write(line + "\n")
    if os.environ.get("TEST_TRACEBACKS") is not None:
        print(f"{time.monotonic() - began:.1f} s {fault}: " + " | ".join(text[:300] for text in found), flush=True)
