"""Finds mpirun, identifies its implementation, builds its command line, and follows it to its end.

Three MPI implementations are known. Their launchers have different options for the same things:

- Open MPI 4 starts its daemons with ORTE, Open MPI 5 with PRRTE. Parameters of the daemons changed from `--mca` to
  `--prtemca`, and some options were renamed; parameters of MPI itself stay `--mca`.
- MPICH's launcher is called Hydra. It hands the whole environment to every rank.
- Intel MPI's is a descendant of Hydra, with its own options for pinning and hosts.

**A hung mpirun.** Open MPI 5's mpirun now and then does not end when the last rank has ended, and would wait for ever
(https://github.com/openpmix/prrte/issues/1839). Two signs show that nothing is left to wait for:

- All ranks run on this host, where mpirun is their parent, and nothing below it has been alive for some seconds, though
  something was before.
- A rank has failed, and half a minute later mpirun still runs, on whatever hosts. It ends the others itself, and the
  ranks give each other five seconds.

Considered and rejected: asking other hosts by ssh whether ranks still run there. It took a hundred lines, which had to
tell ranks from other processes, and from hosts that show none.

**A lost host.** Open MPI kills the other hosts' ranks then, and ends with status 0. Its banner on standard error is the
only sign, if mpirun is faster than the ranks, whose own connections notice a lost host too. So what it prints there
passes through this process, unchanged.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.control.parent_notifier import ParentNotifier
from ring_plugins.core.linux.process import as_status, children, descendants, state
from ring_plugins.launcher.hosts import Share
from ring_plugins.launcher.processes import Processes

Flavor = Literal["Open MPI", "MPICH", "Intel MPI"]

_VERSION_SECONDS = 20
_DEAF = "ended every rank because the thread that reads mpirun's errors died; its traceback is above."
#: Seconds without a living process below mpirun. It ends within one second of its last rank otherwise.
IDLE_SECONDS = 10.0
#: Seconds after the first failure of a rank.
FAILED_SECONDS = 30.0
#: Seconds between two looks, of some milliseconds each.
_LOOK_EVERY = 1.0
_OVER = ("Z", "X", "")
#: In the help texts of PRRTE (Open MPI 5) and ORTE (Open MPI 4).
_LOST = b"has lost communication with a remote daemon"
_READ = 1 << 16
#: Seconds to wait for the end of the pipe, which a process that a rank left behind may keep open.
_END = 5.0
#: In the version texts of both libraries and launchers. Intel's come first: they mention MPICH too.
_PATTERNS = (
    ("Intel MPI", r"Intel\(R\) MPI Library.*?(\d{4}[.\d]*)"),
    ("Open MPI", r"(?:Open ?MPI\)?|OpenRTE\)?)\s*v?(\d[\w.]*)"),
    ("MVAPICH", r"MVAPICH2? Version\s*:?\s*(\d[\w.]*)"),
    ("MPICH", r"(?:MPICH Version|HYDRA build details.*?Version)\s*:?\s*(\d[\w.]*)"),
)


class Implementation(NamedTuple):
    """An MPI implementation and its version, such as "Open MPI" and "5.0.11"."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Mpirun:
    """An mpirun.

    Attributes:
        path: of the program.
        flavor: the implementation whose options it takes. Every other descendant of Hydra counts as MPICH.
        version: as it reports it.
    """

    path: str
    flavor: Flavor
    version: str

    @property
    def uses_prrte(self) -> bool:
        """Whether its daemons are PRRTE's, as of Open MPI 5, rather than ORTE's."""
        return self.flavor == "Open MPI" and int(self.version.split(".")[0]) >= 5


@dataclass(frozen=True)
class JobSpec:
    """A job, independent of the launcher.

    Attributes:
        command: program and arguments of every rank.
        ranks: number of ranks.
        shares: hosts and their numbers of ranks, in rank order; empty for this host, or if a scheduler chose the hosts.
        interface: network for the ranks: an interface's name, several, or a subnet; None leaves the choice to MPI.
        bind: "none", "core", "numa" or "socket".
        oversubscribed: some host gets more ranks than it has cores.
        as_root: this user is root, which Open MPI rejects unless told.
        agent: program that replaces ssh; gets the host and a command as arguments.
        environment: variables for every rank; None stands for the value that this process has.
        tag_output: put its rank in front of every line.
        output_directory: write each rank's output to files in this directory instead of the terminal.
        options: further options for mpirun.
    """

    command: tuple[str, ...]
    ranks: int
    shares: tuple[Share, ...] = ()
    interface: str | None = None
    bind: str = "none"
    oversubscribed: bool = False
    as_root: bool = False
    agent: str | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    tag_output: bool = False
    output_directory: str | None = None
    options: tuple[str, ...] = ()


def locate() -> str | None:
    """Path of the mpirun beside this Python, else of the first mpirun or mpiexec on PATH, else None."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")


def find(wanted: str | None = None) -> Mpirun | None:
    """The mpirun that the user wants, else the one that `locate` finds, else None.

    Raises:
        LaunchError: it does not run, or is of an unknown kind.
    """
    path = wanted or locate()
    if path is None:
        return None
    limit = max(_VERSION_SECONDS, config.START_TIMEOUT.get() if config.START_TIMEOUT.is_set() else 0.0)
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"{path} --version did not end within {limit:g} s. On a busy host, "
            f"{config.START_TIMEOUT.name}={4 * limit:.0f} waits longer; otherwise name another mpirun with --mpirun."
        ) from error
    except OSError as error:
        raise LaunchError(f"{path} --version does not run: {error}. Name another one with --mpirun.") from error
    return recognize(shutil.which(path) or path, answer.stdout + answer.stderr)


def identify(text: str) -> Implementation | None:
    """The MPI implementation that a library's or a launcher's version text names, None if it is unknown."""
    for name, pattern in _PATTERNS:
        if found := re.search(pattern, text, re.DOTALL):
            return Implementation(name, found[1].rstrip("."))
    return None


def recognize(path: str, text: str) -> Mpirun:
    """The mpirun at `path`, which prints `text` for `--version`.

    Raises:
        LaunchError: it is of an unknown kind.
    """
    found = identify(text)
    if found is not None:
        for flavor in get_args(Flavor):
            if found.name == flavor:
                return Mpirun(path, flavor, found.version)
    first_line = text.strip().splitlines()[0] if text.strip() else ""
    raise LaunchError(
        f"{path} is none of Open MPI, MPICH and Intel MPI: it answers --version with {first_line!r}. "
        "Name another one with --mpirun, or run it yourself; the script does not need `ring run`."
    )


def resolve_program(command: Sequence[str]) -> tuple[str, ...]:
    """The command with the full path of its program, because other hosts may have another PATH.

    A Python script that is not executable is run by this Python.

    Raises:
        LaunchError: there is no such program, or it is a Python that reads its script from standard input.
    """
    program, *arguments = command
    options = itertools.takewhile(lambda word: word.startswith("-") and word[:2] not in ("-c", "-m"), arguments)
    if Path(program).name.startswith("python") and (not arguments or "-" in options):
        raise LaunchError(
            f"{shlex.join(command)!r} reads its script from standard input, which reaches one rank at most, and the "
            "job would wait for the others for ever: save the script as a file, and name that."
        )
    found = shutil.which(program)
    if found:
        # A path that the user gave stays as it is; one found on PATH may be relative to this directory.
        return (found if "/" in program else str(Path(found).absolute()), *arguments)
    if program.endswith(".py") and Path(program).is_file():
        return (sys.executable, program, *arguments)
    raise LaunchError(
        f"there is no program {program!r} here; the words after the options are the command of each rank."
    )


def command_line(mpirun: Mpirun, job: JobSpec) -> list[str]:
    """The command that starts the job."""
    return _open_mpi_command(mpirun, job) if mpirun.flavor == "Open MPI" else _hydra_command(mpirun, job)


def _open_mpi_command(mpirun: Mpirun, job: JobSpec) -> list[str]:
    prrte = mpirun.uses_prrte
    daemons = "--prtemca" if prrte else "--mca"
    line = [mpirun.path]
    if job.as_root:
        line += ["--allow-run-as-root"]
    line += ["-n", str(job.ranks)]
    if job.shares:
        line += ["-H", ",".join(f"{share.host}:{share.ranks}" for share in job.shares)]
    if job.agent:
        line += [daemons, "plm_ssh_agent" if prrte else "plm_rsh_agent", job.agent]
    line += ["--map-by", "slot:OVERSUBSCRIBE" if job.oversubscribed else "slot"]
    line += ["--bind-to", "package" if prrte and job.bind == "socket" else job.bind]
    if job.interface:
        line += ["--mca", "btl_tcp_if_include", job.interface]
        line += [daemons, "prte_if_include" if prrte else "oob_tcp_if_include", job.interface]
    if job.shares:
        # The daemons notice a lost network a second after the ranks, whose error says more.
        for parameter, seconds in {"time": 1, "intvl": 1, "probes": round(config.NETWORK_TIMEOUT.get()) + 1}.items():
            line += [daemons, f"oob_tcp_keepalive_{parameter}", str(seconds)]
    if prrte:
        words = ["tag"] * job.tag_output + ([f"dir={job.output_directory}"] if job.output_directory else [])
        line += ["--output", ",".join(words)] if words else []
    else:
        line += ["--tag-output"] if job.tag_output else []
        line += ["--output-filename", job.output_directory] if job.output_directory else []
    for name, value in job.environment.items():
        line += ["-x", name if value is None else f"{name}={value}"]
    return [*line, *job.options, *job.command]


def _hydra_command(mpirun: Mpirun, job: JobSpec) -> list[str]:
    intel = mpirun.flavor == "Intel MPI"
    line = [mpirun.path]
    if job.agent:
        program, *words = shlex.split(job.agent)
        if words:  # Hydra takes a single word as the agent, and the agent's options from a variable
            variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" if intel else "HYDRA_LAUNCH_EXTRA_ARGS"
            line = ["env", f"{variable}={shlex.join(words)}", mpirun.path]
        line += ["-launcher", "ssh", "-launcher-exec", shutil.which(program) or program]
    if job.interface and not set("/,") & set(job.interface):  # Hydra takes the name of one interface, no subnet
        line += ["-iface", job.interface]
    if intel:
        pins = [] if job.bind == "none" else ["-genv", "I_MPI_PIN_DOMAIN", job.bind]
        line += ["-genv", "I_MPI_PIN", "on" if pins else "off", *pins]
    else:
        line += ["-bind-to", job.bind]
    if job.tag_output:
        line += ["-prepend-rank"]
    if job.output_directory:
        line += ["-outfile-pattern", f"{job.output_directory}/rank.%r.out"]
        line += ["-errfile-pattern", f"{job.output_directory}/rank.%r.err"]
    for name, value in job.environment.items():
        if value is not None:
            line += ["-genv", name, value]
    line += job.options
    if not job.shares:
        return [*line, "-n", str(job.ranks), *job.command]
    if not intel:
        hosts = ",".join(f"{share.host}:{share.ranks}" for share in job.shares)
        return [*line, "-hosts", hosts, "-n", str(job.ranks), *job.command]
    # Intel MPI does not understand `host:number`: each host gets its own set of arguments.
    for number, share in enumerate(job.shares):
        line += [":"] if number else []
        line += ["-host", share.host, "-n", str(share.ranks), *job.command]
    return line


def run(mpirun: Mpirun, job: JobSpec, is_local: bool, processes: Processes) -> tuple[int, str | None]:
    """Run a job by mpirun to its end; returns its exit status, and what the user should know of it.

    Args:
        mpirun, job: which one, and what it is to start.
        is_local: whether all ranks run on this host.
        processes: of this host.
    """
    with ParentNotifier() as notifier, contextlib.ExitStack() as stack:
        environment = {**os.environ, **notifier.environment}
        lost = stack.enter_context(LostHost()) if mpirun.flavor == "Open MPI" and not is_local else None
        # On SIGTERM mpirun ends its ranks on all hosts; whatever remains on this one is killed.
        process = processes.start(
            command_line(mpirun, job),
            environment,
            end_signal=signal.SIGTERM,
            stderr=None if lost is None else lost.stderr,
        )
        if lost is not None:
            lost.start()
        hangs = HungMpirun(process.pid, is_local, notifier.first_message)

        def find_trouble() -> str | None:
            return _DEAF if lost is not None and lost.has_died else hangs()

        why = processes.wait(lambda: [process] if process.poll() is None else [], find_trouble)
        stack.close()
        if processes.ending is not None:
            status = 128 + processes.ending
        else:
            status = as_status(process.returncode) or (1 if why else 0)
        if lost is not None and lost.has_died:
            return status or 1, _DEAF
        cause = notifier.first_message() if processes.signalled is None else None
        if cause is None and lost is not None and lost.found:
            cause = "mpirun lost a host and ended the ranks of the others"
        # Open MPI 5 exits with 0 after it has lost a host. The cause is repeated as the last line: what the ranks
        # printed stands above mpirun's own banners.
        return status or (1 if cause else 0), why or (cause and f"{cause.rstrip('.')}.")


class HungMpirun:
    """Tells why an mpirun has to be ended, once it has to.

    Args:
        pid: of mpirun.
        is_local: whether all of its ranks run on this host.
        failure: returns the first failure that a rank of this host has told, None if there is none.
    """

    def __init__(self, pid: int, is_local: bool, failure: Callable[[], str | None]) -> None:
        self._pid, self._is_local, self._failure = pid, is_local, failure
        self._next_look = self._idle_since = self._failed_since = 0.0
        self._had_processes = False

    def __call__(self) -> str | None:
        """A line for the user; None while mpirun may go on."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_EVERY
        if not self._failed_since and self._failure():
            self._failed_since = now
        if self._failed_since and now - self._failed_since > FAILED_SECONDS:
            return f"mpirun still ran {FAILED_SECONDS:g} s after a rank had failed; ended it."
        if any(state(pid) not in _OVER for pid in descendants(self._pid, children())):
            self._had_processes, self._idle_since = True, 0.0
            return None
        self._idle_since = self._idle_since or now
        if self._is_local and self._had_processes and now - self._idle_since > IDLE_SECONDS:
            return (
                f"mpirun still ran {IDLE_SECONDS:g} s after the last of its processes had ended; ended it. "
                "How they ended is unknown."
            )
        return None


class LostHost:
    """Passes on what mpirun prints to standard error, and reads it.

    Leaving the context waits until everything has been passed on.

    Attributes:
        stderr: for mpirun, as Popen takes it.
        found: whether mpirun has lost a host; final once the context is left.
        has_died: whether its thread has died, so that nobody reads what mpirun prints.
    """

    def __init__(self) -> None:
        self.found = self.has_died = False
        self._reading, self.stderr = os.pipe()
        self._thread = HelperThread(self._copy, "ring:mpirun's errors", outside_a_job=self._note_death)

    def __enter__(self) -> LostHost:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def start(self) -> None:
        """Begin to read, once mpirun has its end."""
        os.close(self.stderr)
        self.stderr = -1
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self.stderr >= 0:  # mpirun could not be started
            self.start()
        self._thread.join(_END)

    def _copy(self) -> None:
        before, shown = b"", True
        with os.fdopen(self._reading, "rb", buffering=0) as pipe:
            while data := pipe.read(_READ):
                self.found = self.found or _LOST in before + data
                before = (before + data)[-len(_LOST) :]
                try:
                    while shown and data:
                        data = data[os.write(2, data) :]
                except OSError:
                    shown = False  # standard error is closed; mpirun must not wait for it

    def _note_death(self) -> None:
        self.has_died = True
