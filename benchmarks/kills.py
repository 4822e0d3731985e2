"""How much of a training is kept while its ranks are killed one after the other.

    python benchmarks/kills.py                                # three quarters of an hour
    python benchmarks/kills.py --seconds 180 60 --only replace torchrun
    python benchmarks/kills.py --torchft PYTHON               # also torchft, with the interpreter that has it

Each variant trains the same small network on three ranks, while one of its processes is killed with SIGKILL every few
seconds, in turn. A training counts by the samples that its weights have seen: a step that is done again after going
back to a checkpoint counts once, and a step in which a rank is missing counts less. "kept" is that number per second,
as a share of the same run's own where no kill is near (`undisturbed`).

    replace     ring_plugins with on_failure="replace": the others go on, and a new process takes the place
    spare       the same with `ring run --standbys 1`: a process that has imported torch takes the place
    restart     ring_plugins without: the job ends, and starts again from its last checkpoint
    torchrun    DDP over gloo with --max-restarts: all processes start again from the last checkpoint. It gets a store
                of its own for each start: in the store that torch 2.13 shares by default, new processes find the dead
                ones' addresses, and wait for them for 12 to 35 s
    torchft     DDP over gloo under torchft: the others drop the step, and a new process gets the state from them

Checkpoints are written every second. Most of what is lost is the time in which new processes import torch.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

SIZE, BATCH = 3, 32
CHECKPOINT_SECONDS = 1.0
#: torchft's lighthouse: how soon a replica counts as dead, in milliseconds; its default is 5000.
HEARTBEAT_MS = "1000"


# The training -------------------------------------------------------------------------------------


def network() -> tuple[Any, Any]:
    """3 MB of parameters, and a batch of its inputs."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(BATCH, 512)


class Log:
    """A file to which a process writes the number of each step that it has done, and when."""

    def __init__(self, slot: int) -> None:
        name = Path(os.environ["KILLS_LOGS"]) / f"{slot}-{os.getpid()}"
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, step: int) -> None:
        os.write(self._file, f"{time.monotonic():.4f} {step}\n".encode())


def train_replace() -> None:
    """With on_failure="replace"."""
    import torch

    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer, TrainingState, broadcast_parameters

    ring.init(ranks=SIZE, on_failure="replace")
    slot = ring.rank()
    model, inputs = network()
    broadcast_parameters(model)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    state = TrainingState(model=model, optimizer=optimizer, step=0)
    log = Log(slot)
    while True:
        train(model, inputs, optimizer)
        log.add(state.step)
        state.step += 1
        state.commit()


def train_restart() -> None:
    """With checkpoints, in a job that ends when a rank does."""
    import torch

    import ring_plugins as ring
    from ring_plugins.torch import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters

    ring.init()
    model, inputs = network()
    optimizer = torch.optim.Adam(model.parameters())
    step = resume(model, optimizer)
    broadcast_parameters(model)
    broadcast_optimizer_state(optimizer)
    averaged = DistributedOptimizer(optimizer, model.named_parameters())
    train_with_checkpoints(model, inputs, averaged, step, ring.rank())


def train_torchrun() -> None:
    """With checkpoints, DDP and gloo."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    model, inputs = network()
    optimizer = torch.optim.Adam(model.parameters())
    step = resume(model, optimizer)
    train_with_checkpoints(DistributedDataParallel(model), inputs, optimizer, step, torch.distributed.get_rank())


def train_torchft() -> None:
    """As a replica group of one process."""
    from datetime import timedelta

    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    slot = int(os.environ["REPLICA_GROUP_ID"])
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, inputs = network()
    optimizer = torch.optim.Adam(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda state: (model.load_state_dict(state["m"]), optimizer.load_state_dict(state["o"])),
        state_dict=lambda: {"m": model.state_dict(), "o": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"train_{slot}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["KILLS_LIGHTHOUSE"],
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    replicated, stepping = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    log, done = Log(slot), -1
    while True:
        train(replicated, inputs, stepping)
        if manager.current_step() != done:
            done = manager.current_step()
            log.add(done)


def train(model: Any, inputs: Any, optimizer: Any) -> None:
    """One step."""
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def train_with_checkpoints(model: Any, inputs: Any, optimizer: Any, step: int, rank: int) -> None:
    """Train from a step on; rank 0 writes a checkpoint every second."""
    import torch

    log, file, written = Log(rank), Path(os.environ["KILLS_CHECKPOINT"]), time.monotonic()
    bare = getattr(model, "module", model)
    while True:
        train(model, inputs, optimizer)
        log.add(step)
        step += 1
        if rank == 0 and time.monotonic() - written > CHECKPOINT_SECONDS:
            state = getattr(optimizer, "optimizer", optimizer).state_dict()
            torch.save({"step": step, "model": bare.state_dict(), "optimizer": state}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            written = time.monotonic()


def resume(model: Any, optimizer: Any) -> int:
    """Load the last checkpoint, if there is one; the number of the next step."""
    import torch

    file = Path(os.environ["KILLS_CHECKPOINT"])
    if not file.exists():
        return 0
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


# Starting it --------------------------------------------------------------------------------------


class Job:
    """A running variant, which starts again what is to start again.

    Args:
        commands: by name, with the environment of each; one that ends is started once more.
        logs: where the ranks write.
    """

    def __init__(self, commands: dict[str, tuple[list[str], dict[str, str]]], logs: Path) -> None:
        self._commands, self._logs = commands, logs
        self._processes = {name: self._start(name) for name in commands}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command, environment = self._commands[name]
        return subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def tick(self) -> None:
        """Start what has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                self._processes[name] = self._start(name)

    def kill(self, slot: int) -> bool:
        """Kill the process that trains at a slot; False if there is none."""
        for file in self._logs.glob(f"{slot}-*"):
            with contextlib.suppress(OSError):
                pid = int(file.name.partition("-")[2])
                if b"kills.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def close(self) -> None:
        """End all of it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes.values():
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, number)
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)


@contextlib.contextmanager
def started(variant: str, torchft: str | None) -> Iterator[tuple[Job, Path]]:
    """Start a variant in a directory of its own, and end it."""
    training = [str(Path(__file__).resolve()), "--train", variant]
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory) / "logs"
        logs.mkdir()
        common = {"KILLS_LOGS": str(logs), "KILLS_CHECKPOINT": f"{directory}/checkpoint", "OMP_NUM_THREADS": "1"}
        ring_run = [sys.executable, "-m", "ring_plugins", "run", "-n", str(SIZE)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
        port = 29611
        commands = {
            "replace": {"job": ([*ring_run, "--on-failure", "replace", sys.executable, *training], {})},
            "spare": {
                "job": ([*ring_run, "--on-failure", "replace", "--standbys", "1", sys.executable, *training], {})
            },
            "restart": {"job": ([*ring_run, sys.executable, *training], {})},
            "torchrun": {
                "job": ([*torchrun, "--max-restarts=100000", *training], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
            },
            "torchft": {
                "lighthouse": (
                    [str(Path(torchft or "").parent / "torchft_lighthouse"), "--min_replicas", "1", "--bind",
                     f"127.0.0.1:{port}", "--heartbeat_timeout_ms", HEARTBEAT_MS, "--join_timeout_ms", "1000"],
                    {},
                ),
                **{
                    f"replica {slot}": (
                        [torchft or "", *training],
                        {"REPLICA_GROUP_ID": str(slot), "KILLS_LIGHTHOUSE": f"http://127.0.0.1:{port}"},
                    )
                    for slot in range(SIZE)
                },
            },
        }[variant]  # fmt: skip
        job = Job({name: (command, common | environment) for name, (command, environment) in commands.items()}, logs)
        try:
            yield job, logs
        finally:
            job.close()


# Counting -----------------------------------------------------------------------------------------


def done(logs: Path) -> dict[tuple[int, int], float]:
    """When each slot did each step for the first time, by step and slot."""
    found: dict[tuple[int, int], float] = {}
    for file in logs.iterdir():
        slot = int(file.name.partition("-")[0])
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                when, step = line.split()
                found[int(step), slot] = min(float(when), found.get((int(step), slot), float("inf")))
    return found


def measure(variant: str, every: float, seconds: float, torchft: str | None) -> dict[str, Any]:
    """Train for some seconds.

    Args:
        variant: of those above.
        every: seconds from one kill to the next.
        seconds: to train, from when all ranks have done 20 steps.
        torchft: the interpreter that has it.

    Returns:
        samples: per second, of all ranks.
        kills: how many.
        longest: seconds in which no rank did a step that counts, the longest such time.
        curve: samples that count, up to the end of each half second.
    """
    with started(variant, torchft) as (job, logs):
        deadline = time.monotonic() + 120
        while sum(slot_has(logs, slot, 20) for slot in range(SIZE)) < SIZE:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{variant}: not all ranks train after two minutes")
            job.tick()
            time.sleep(0.1)
        begin = time.monotonic()
        end, kills = begin + seconds, 0
        while (now := time.monotonic()) < end:
            job.tick()
            if now - begin >= every * (kills + 0.5):
                kills += job.kill(kills % SIZE)
            time.sleep(0.02)
        times = sorted(when for when in done(logs).values() if begin <= when < end)
    gaps = [later - earlier for earlier, later in zip([begin, *times], [*times, end], strict=True)]
    curve = [BATCH * bisect.bisect(times, begin + half / 2) for half in range(1, round(2 * seconds) + 1)]
    return {"samples": len(times) * BATCH / seconds, "kills": kills, "longest": max(gaps), "curve": curve}


def undisturbed(runs: Mapping[str, Mapping[str, Any]]) -> float:
    """Samples per second of a variant where no kill is near: within 20 s before one, or 20 to 40 s behind it.

    All shares are of this speed, from the same start of the job, since a machine's speed changes between starts.

    Args:
        runs: what `measure` has returned, by the seconds from one kill to the next.
    """
    every = max(map(float, runs))
    curve, samples, seconds = [0, *runs[f"{every:g}"]["curve"]], 0, 0.0
    for kill in range(runs[f"{every:g}"]["kills"]):
        at = every * (kill + 0.5)
        for begin, end in ((at - 20, at), (at + 20, at + 40)):
            if begin >= 0 and 2 * end < len(curve):
                samples += curve[round(2 * end)] - curve[round(2 * begin)]
                seconds += end - begin
    return samples / seconds


def kept(runs: Mapping[str, Mapping[str, Any]], every: str) -> tuple[float, float]:
    """The share of its samples that a variant keeps with a kill every so many seconds, and the seconds a kill costs.

    Raises:
        ValueError: the share is above 1, so the runs cannot be compared.
    """
    run = runs[every]
    seconds = len(run["curve"]) / 2
    trained = run["curve"][-1] / undisturbed(runs)
    if trained > seconds:
        raise ValueError(f"kept {trained / seconds:.0%} with a kill every {every} s: the machine's speed has changed.")
    return trained / seconds, (seconds - trained) / run["kills"]


def slot_has(logs: Path, slot: int, steps: int) -> bool:
    """Whether a process of a slot has done some steps."""
    return any(file.read_text().count("\n") >= steps for file in logs.glob(f"{slot}-*"))


def main() -> None:
    """Measure and print; with --keep, also write benchmarks/results/kills.json."""
    trainings: dict[str, Callable[[], None]] = {
        "replace": train_replace, "spare": train_replace, "restart": train_restart, "torchrun": train_torchrun,
        "torchft": train_torchft,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--every",
        type=float,
        nargs="*",
        default=[60.0, 5.0],
        help="seconds from one kill to the next, 60 or more in one of them",
    )
    parser.add_argument("--seconds", type=float, nargs="*", default=[600.0, 60.0], help="to train, for each --every")
    parser.add_argument("--only", nargs="*", choices=trainings, help="these variants")
    parser.add_argument("--torchft", help="the interpreter of an environment that has torchft")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/kills.json")
    parser.add_argument("--train", choices=trainings, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        trainings[options.train]()
        return
    if len(options.every) != len(options.seconds):
        parser.error(
            f"--every has {len(options.every)} numbers and --seconds {len(options.seconds)}: give one for each"
        )
    from measure import save

    results: dict[str, Any] = {}
    for variant in options.only or [name for name in trainings if name != "torchft" or options.torchft]:
        runs: dict[str, dict[str, Any]] = {}
        for every, seconds in zip(options.every, options.seconds, strict=True):
            runs[f"{every:g}"] = measure(variant, every, seconds, options.torchft)
        results[variant] = {"kills": runs}
        for name, run in runs.items():
            share, cost = kept(runs, name)
            print(
                f"{variant:10} a kill every {name:>3} s {run['samples']:10,.0f} samples/s, {share:.0%} kept, "
                f"{run['kills']} kills, {cost:.1f} s lost a kill, longest pause {run['longest']:.2f} s",
                flush=True,
            )
    if options.keep:
        save("kills", {"variants": results}, f"{SIZE} ranks on 1 host, 1 thread each")


if __name__ == "__main__":
    main()
