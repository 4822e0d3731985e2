"""Loss against time between two slow hosts: compression, local updates, PowerSGD and torchft's DiLoCo.

    python benchmarks/time_to_loss.py                 # two test hosts at 100 Mbit/s, 1 and 10 Gbit/s, as root
    python benchmarks/time_to_loss.py --rate 10gbit   # printed only

The character GPT of local_updates.py, wider (3 million parameters), on the sources of the standard library. Weights,
batches and AdamW's learning rate are the same in every run. The loss is that of text that nobody trains on, after
every 16 steps, with the weights that all ranks have in common; the clock stands still meanwhile. The target is what
synchronous training has reached after three quarters of its steps. PowerSGD (Vogels et al., 2019) is DDP's own hook,
over "ring", with error feedback and a warm start from the tenth step on. torchft is measured where it is installed,
over gloo, with the outer optimizer that `LocalUpdates` has here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import local_updates
import torch
import torch.distributed as dist
from measure import init_under_mpirun, machine, on_test_hosts, save, used_by_others
from tables import step_and_target, target
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ring_plugins as ring
from ring_plugins.torch import DistributedOptimizer, LocalUpdates

local_updates.WIDTH, local_updates.LAYERS, local_updates.RATE = 256, 4, 1e-3
#: Steps between two exchanges of local updates, and between two measurements of the loss; and the outer optimizer.
EVERY, OUTER = 16, (0.9, 0.6)
TORCHFT = "torchft, DiLoCo"
#: By name a codec, the rank of PowerSGD's matrices, or options of `LocalUpdates`.
RUNS: dict[str, Any] = {
    "synchronous": None,
    'compression="bf16"': "bf16",
    'compression="int8"': "int8",
    "PowerSGD, rank 4": 4,
    "PowerSGD, rank 16": 16,
    "LocalUpdates": {},
    'LocalUpdates, compression="int8"': {"compression": "int8"},
    f"LocalUpdates, delay={EVERY // 2}": {"delay": EVERY // 2},
    TORCHFT: {},
}
STEPS, AFTER, PORT = 160, 10, 29533
RANKS = "one rank of one thread per test host, which share these cores"


def wrapped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> tuple[torch.nn.Module, Any]:
    """The model to call and the optimizer to step of a run that averages gradients, or weights now and then."""
    if isinstance(run, int):
        dist.init_process_group("ring")
        ddp = DistributedDataParallel(model)
        state = PowerSGDState(None, matrix_approximation_rank=run, start_powerSGD_iter=AFTER)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, optimizer
    if isinstance(run, dict):
        return model, LocalUpdates(optimizer, model, every=EVERY, outer=OUTER, **run)
    return model, DistributedOptimizer(optimizer, model.named_parameters(), compression=run)


def torchft_manager(model: torch.nn.Module, optimizer: torch.optim.Optimizer, address: str) -> Any:
    """torchft's manager for a replica group of one process; rank 0's host runs the lighthouse."""
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo

    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    if rank == 0:
        command = [str(Path(sys.executable).parent / "torchft_lighthouse"), "--min_replicas", str(size)]
        subprocess.Popen([*command, "--bind", f"0.0.0.0:{PORT}", "--join_timeout_ms", "10000"])
    host = os.uname().nodename
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=lambda state: (model.load_state_dict(state["m"]), optimizer.load_state_dict(state["o"])),
        state_dict=lambda: {"m": model.state_dict(), "o": optimizer.state_dict()},
        min_replica_size=size,
        use_async_quorum=False,
        init_sync=False,  # the weights are equal
        replica_id=f"host_{rank}",
        timeout=timedelta(seconds=120),
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{address}:{PORT}",
        store_addr=host,
        store_port=store.port,
        hostname=host,
    )
    manager.store = store  # which serves as long as it lives
    return manager


def train(model: torch.nn.Module, called: torch.nn.Module, optimizer: Any, rank: int, steps: int) -> dict[str, Any]:
    """The loss after every few steps, the seconds until then, and the seconds of each step."""
    data = local_updates.text()
    kept, data = data[-len(data) // 20 :], data[: -len(data) // 20]
    rows = local_updates.pieces(kept, 256, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1000 + rank)
    losses, ends, seconds = [], list[float](), list[float]()
    for step in range(1, steps + 1):
        began = time.perf_counter()
        optimizer.zero_grad()
        called(local_updates.pieces(data, local_updates.BATCH, generator)).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if step % EVERY == 0:
            with torch.no_grad():
                losses.append(float(model(rows)))
            ends.append(sum(seconds))
    return {"losses": losses, "ends": ends, "seconds": seconds}


def worker(options: argparse.Namespace) -> None:
    """One run among the ranks that mpirun has started."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = local_updates.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), local_updates.RATE)
    run = RUNS[options.run]
    steps = 2 * STEPS if isinstance(run, dict) else STEPS
    if options.run == TORCHFT:
        from torchft.local_sgd import DiLoCo

        manager = torchft_manager(model, optimizer, options.address)
        outer = torch.optim.SGD(model.parameters(), OUTER[0], OUTER[1], nesterov=True)
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        with DiLoCo(manager, [model], optimizer, outer, sync_every=EVERY):
            found = train(model, model, optimizer, rank, steps)
        shared = 0.0
    else:
        init_under_mpirun(options.address)
        rank = ring.rank()
        found = train(model, *wrapped(model, optimizer, run), rank, steps)
        shared = used_by_others(float(ring.all_reduce(time.process_time(), ring.SUM)))
    if rank == 0:
        Path(options.out).write_text(json.dumps({"run": options.run, "shared": shared, **found}))
    if options.run == TORCHFT:
        time.sleep(2 if rank else 4)  # let the others end before rank 0's lighthouse does
        os.system(f"kill $(pgrep -P {os.getpid()})") if rank == 0 else None
        os._exit(0)


def report(records: list[dict[str, Any]]) -> None:
    """Print the seconds of a step, the last loss, and the seconds to the target."""
    loss = target(records)
    for one in records:
        step, seconds = step_and_target(one, loss)
        reached = "not reached" if seconds is None else f"{seconds:.1f} s"
        print(
            f"  {one['run']}: {step * 1e3:.0f} ms a step, loss {one['losses'][-1]:.3f} after {len(one['seconds'])} "
            f"steps, {loss:.3f} after: {reached}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rate", help="rate of each link, such as 10gbit; 1gbit, 100mbit and 10gbit by default, which are kept"
    )
    parser.add_argument("--run", choices=RUNS, action="append", help="only this run; may be repeated; printed only")
    parser.add_argument("--here", action="store_true", help="one run among the ranks that mpirun started")
    parser.add_argument("--address", help="address of rank 0's host, with --here")
    parser.add_argument("--out", help="file for the result, with --here")
    options = parser.parse_args()
    if options.here:
        options.run = options.run[0]
        worker(options)
        return
    names = options.run or [name for name in RUNS if name != TORCHFT or importlib.util.find_spec("torchft")]
    kept = {}
    for rate in [options.rate] if options.rate else ["1gbit", "100mbit", "10gbit"]:
        records = [json.loads(on_test_hosts(__file__, 2, rate, ["--run", name], ranks=1)) for name in names]
        print(f"2 hosts at {rate}", flush=True)
        report(records)
        kept[rate] = records
    shared = max(float(one["shared"]) for records in kept.values() for one in records)
    if not options.rate and not options.run:
        save("time_to_loss", {"every": EVERY, "outer": OUTER, "rates": kept}, RANKS, shared)
    print(machine(RANKS, shared))


if __name__ == "__main__":
    main()
