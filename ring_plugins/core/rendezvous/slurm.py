"""Started by srun without an MPI start-up protocol: turns its variables into torchrun's."""

from __future__ import annotations

import os
import re

from ring_plugins.core.rendezvous.record import Launcher, LaunchRecord, integer
from ring_plugins.core.rendezvous.tcp import launchers_value


def find(launcher: Launcher) -> LaunchRecord | None:
    """The record of a task of a step that srun started; else None."""
    # A shell inside `salloc` or `sbatch` has SLURM_NTASKS too, but is not a step's task.
    if integer("SLURM_PROCID") is None or not os.environ.get("SLURM_STEP_ID"):
        return None
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    rank, size = integer("SLURM_PROCID"), integer("SLURM_STEP_NUM_TASKS") or integer("SLURM_NTASKS") or 1
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    local_size = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": launchers_value("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": launchers_value("MASTER_PORT")
        or str(port(integer("SLURM_JOB_ID") or 0, integer("SLURM_STEP_ID") or 0)),
    }
    on_host = int(local_size.group()) if local_size else None
    return LaunchRecord(launcher, rank, size, integer("SLURM_LOCALID"), on_host, variables)


def half_started(ranks: int | None) -> str:
    """What is wrong with a process of an allocation of several tasks that srun did not start; "" if it is none."""
    tasks = integer("SLURM_NTASKS") or 1
    is_in_job, is_step = bool(os.environ.get("SLURM_JOB_ID")), (integer("SLURM_STEP_NUM_TASKS") or 1) > 1
    if ranks is not None or tasks == 1 or not is_in_job or is_step:
        return ""
    return (
        f"SLURM allocated {tasks} tasks (SLURM_NTASKS), but this process is none of them, since srun did not start "
        "it: it would be a job of one rank. Start it with `srun python ...`, with `ring run` or with mpirun; "
        "init(ranks=...) starts ranks on this host alone"
    )


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list, this one for an empty list."""
    return next(iter(expand(nodelist)), "127.0.0.1")


def expand(nodelist: str) -> list[str]:
    """The hosts of SLURM's compressed list.

    `"a1,a2"` gives `["a1", "a2"]`, `"rack[03-05,12]-gpu"` gives `["rack03-gpu", "rack04-gpu", "rack05-gpu",
    "rack12-gpu"]`; several brackets multiply.
    """
    hosts = []
    for pattern in re.findall(r"(?:[^\[,]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", pattern):
            names = [name + part for name in names for part in ([text] if text else _numbers(ranges))]
        hosts += names
    return hosts


def _numbers(ranges: str) -> list[str]:
    """`"03-05,12"` gives `["03", "04", "05", "12"]`."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(counts: str) -> list[int]:
    """Expands SLURM's counts per node: `"4(x2),1"` gives `[4, 4, 1]`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def port(job: int, step: int) -> int:
    """A port that is equal for all tasks of a step, and that other jobs on the host are unlikely to use."""
    return 15000 + (job * 31 + step) % 15000
