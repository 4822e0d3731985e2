"""The mpirun that is there, and the command line by which it does what was asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ring_plugins.core.errors import LaunchError
from ring_plugins.launching.hosts import Share

Flavour = Literal["Open MPI 5", "Open MPI 4", "MPICH", "Intel MPI"]


@dataclass(frozen=True)
class Mpirun:
    """An mpirun.

    Attributes:
        path: of the program.
        flavour: whose options it takes. Hydra of any other origin counts as MPICH's.
        version: as it says itself.
    """

    path: str
    flavour: Flavour
    version: str


@dataclass(frozen=True)
class Request:
    """What a job is to be, whatever starts it.

    Attributes:
        command: program and arguments of every rank.
        ranks: how many.
        shares: the hosts and their ranks, in rank order; empty for this host, or for what a scheduler allocated.
        interface: network that the ranks use: an interface's name, several, or a subnet; None for the MPI's own choice.
        bind: "none", "core", "numa" or "socket".
        crowded: some host gets more ranks than it has cores.
        as_root: this user is root, which Open MPI wants to be told.
        agent: what is run in place of ssh, with the host and a command as arguments.
        exports: variables for every rank; None as the value stands for that of this process.
        tag_output: put its rank in front of every line.
        output_directory: write each rank's output to files in there instead of the terminal.
        options: further options, in mpirun's own words.
    """

    command: tuple[str, ...]
    ranks: int
    shares: tuple[Share, ...] = ()
    interface: str | None = None
    bind: str = "none"
    crowded: bool = False
    as_root: bool = False
    agent: str | None = None
    exports: Mapping[str, str | None] = field(default_factory=dict)
    tag_output: bool = False
    output_directory: str | None = None
    options: tuple[str, ...] = ()


def find(wanted: str | None = None) -> Mpirun | None:
    """The mpirun to use: the one wanted, else the one beside this Python, else the first on PATH.

    Raises:
        LaunchError: it does not run, or nobody knows its options.
    """
    beside = Path(sys.executable).parent / "mpirun"
    path = wanted or (str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec"))
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not run: {error}. Name another one with --mpirun.") from error
    return recognise(shutil.which(path) or path, said.stdout + said.stderr)


def recognise(path: str, text: str) -> Mpirun:
    """Whose mpirun says `text` when it is asked for its version.

    Raises:
        LaunchError: nobody's that is known here.
    """
    if found := re.search(r"\(Open ?MPI\) (\d+)(\S*)|\(OpenRTE\) (\d+)(\S*)", text):
        major, rest = (found[1], found[2]) if found[1] else (found[3], found[4])
        return Mpirun(path, "Open MPI 5" if int(major) >= 5 else "Open MPI 4", major + rest)
    if found := re.search(r"Intel\(R\) MPI Library.*?Version (\S+)", text, re.DOTALL):
        return Mpirun(path, "Intel MPI", found[1])
    if found := re.search(r"HYDRA build details:\s*Version:\s*(\S+)", text):
        return Mpirun(path, "MPICH", found[1])
    said = text.strip().splitlines()[0] if text.strip() else "nothing"
    raise LaunchError(
        f"{path} is none of Open MPI, MPICH and Intel MPI: asked for its version it says {said!r}. "
        "Name another one with --mpirun, or run it yourself; the script needs no `ring run`."
    )


def command_line(mpirun: Mpirun, request: Request) -> list[str]:
    """The command that starts the job."""
    from ring_plugins.launching import hydra, open_mpi

    if mpirun.flavour in ("MPICH", "Intel MPI"):
        return hydra.command_line(mpirun, request)
    return open_mpi.command_line(mpirun, request)


def program_and_arguments(command: Sequence[str]) -> tuple[str, ...]:
    """The command with its program's full path, because other hosts search other directories.

    A Python script that is not a program by itself is run by this Python.

    Raises:
        LaunchError: there is no such program.
    """
    program, *arguments = command
    found = shutil.which(program)
    if found:
        # A path that was given is left as it is; what was found on PATH may be relative to here.
        return (found if "/" in program else str(Path(found).absolute()), *arguments)
    if program.endswith(".py") and Path(program).is_file():
        return (sys.executable, program, *arguments)
    raise LaunchError(f"there is no program {program!r} here; what stands behind the options is run on every rank.")
