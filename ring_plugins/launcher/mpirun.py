"""The mpirun that is there, and the command line by which it does what was asked for.

Hydra's mpiexec, which is MPICH's, and Intel MPI's child of it.

Open MPI's mpirun: version 5, which stands on PRRTE, and version 4, which stands on ORTE.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.control.tcp_liveness import patience
from ring_plugins.launcher.hosts import Share


def _hydra_command_line(mpirun: Mpirun, request: Request) -> list[str]:
    """The options of Hydra that a request needs. It hands the whole environment on by itself."""
    intel = mpirun.flavour == "Intel MPI"
    line = [mpirun.path]
    if request.agent:
        program, *words = shlex.split(request.agent)
        if words:  # Hydra takes one word as the agent, and its options from a variable
            variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" if intel else "HYDRA_LAUNCH_EXTRA_ARGS"
            line = ["env", f"{variable}={shlex.join(words)}", mpirun.path]
        line += ["-launcher", "ssh", "-launcher-exec", shutil.which(program) or program]
    if request.interface and not set("/,") & set(request.interface):  # Hydra knows one interface, by its name
        line += ["-iface", request.interface]
    if intel:
        line += ["-genv", "I_MPI_PIN", "off"] if request.bind == "none" else _intel_pinning(request.bind)
    else:
        line += ["-bind-to", request.bind]
    if request.tag_output:
        line += ["-prepend-rank"]
    if request.output_directory:
        line += ["-outfile-pattern", f"{request.output_directory}/rank.%r.out"]
        line += ["-errfile-pattern", f"{request.output_directory}/rank.%r.err"]
    for name, value in request.exports.items():
        if value is not None:
            line += ["-genv", name, value]
    line += request.options
    if not request.shares:
        return [*line, "-n", str(request.ranks), *request.command]
    if not intel:
        hosts = ",".join(f"{share.host}:{share.ranks}" for share in request.shares)
        return [*line, "-hosts", hosts, "-n", str(request.ranks), *request.command]
    # Intel MPI knows no `host:number`: every host gets an argument set of its own.
    for number, share in enumerate(request.shares):
        line += [":"] if number else []
        line += ["-host", share.host, "-n", str(share.ranks), *request.command]
    return line


def _intel_pinning(bind: str) -> list[str]:
    return ["-genv", "I_MPI_PIN", "on", "-genv", "I_MPI_PIN_DOMAIN", bind]


def _open_mpi_command_line(mpirun: Mpirun, request: Request) -> list[str]:
    """The options of Open MPI that a request needs."""
    new = mpirun.flavour == "Open MPI 5"
    daemons = "--prtemca" if new else "--mca"
    line = [mpirun.path]
    if request.as_root:
        line += ["--allow-run-as-root"]
    line += ["-n", str(request.ranks)]
    if request.shares:
        line += ["-H", ",".join(f"{share.host}:{share.ranks}" for share in request.shares)]
    if request.agent:
        line += [daemons, "plm_ssh_agent" if new else "plm_rsh_agent", request.agent]
    line += ["--map-by", "slot:OVERSUBSCRIBE" if request.crowded else "slot", "--bind-to", _bind(request, new)]
    if request.interface:
        line += ["--mca", "btl_tcp_if_include", request.interface]
        line += [daemons, "prte_if_include" if new else "oob_tcp_if_include", request.interface]
    if request.shares:
        # A lost network is noticed a little later than by the ranks, which have more to say about it.
        for word, number in {"time": 1, "intvl": 1, "probes": round(patience()) + 1}.items():
            line += [daemons, f"oob_tcp_keepalive_{word}", str(number)]
    line += _output(request, new)
    for name, value in request.exports.items():
        line += ["-x", name if value is None else f"{name}={value}"]
    return [*line, *request.options, *request.command]


def _bind(request: Request, new: bool) -> str:
    return "package" if new and request.bind == "socket" else request.bind


def _output(request: Request, new: bool) -> list[str]:
    if not new:
        line = ["--tag-output"] if request.tag_output else []
        return [*line, "--output-filename", request.output_directory] if request.output_directory else line
    wishes = ["tag"] if request.tag_output else []
    if request.output_directory:
        wishes.append(f"dir={request.output_directory}")
    return ["--output", ",".join(wishes)] if wishes else []


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
    return recognize(shutil.which(path) or path, said.stdout + said.stderr)


def recognize(path: str, text: str) -> Mpirun:
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
    if mpirun.flavour in ("MPICH", "Intel MPI"):
        return _hydra_command_line(mpirun, request)
    return _open_mpi_command_line(mpirun, request)


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
