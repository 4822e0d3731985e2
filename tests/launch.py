"""Starts a script on several ranks, collects its output and reports, and leaves nothing behind.

Every process of a launch inherits the variable TEST_LAUNCH. It identifies stragglers even after they have changed
session, process group or parent. Processes are killed by process id, never by name.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.launchers import Launcher, clean_environment, launcher_command

REPOSITORY = Path(__file__).resolve().parent.parent
# Under `pytest -n`, a file that no process of this launch was seen to map may belong to another launch.
RUNS_PARALLEL = "PYTEST_XDIST_WORKER" in os.environ
# torchrun and mpirun need a moment after the last rank to take down their own helpers.
GRACE_SECONDS = 5.0
#: How long a file may outlive its launch.
FILE_SECONDS = 2.0
#: Between two looks at the files that the launch maps. A look costs 10 ms, which the ranks lack.
_LOOK_SECONDS = 0.5
#: Seconds in which multiprocessing's trackers end once the processes that they serve are killed.
TRACKER_SECONDS = 10.0


class LaunchFailed(AssertionError):
    """A launch did not end as the test wanted; the text holds everything that the ranks printed."""


@dataclass(frozen=True)
class Result:
    """How a launch ended.

    Attributes:
        seconds: from the start to the end of the last process.
        ended: time of that end, as `time.time` counts.
        reports: rank to key to the last value that the rank reported.
    """

    command: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    ended: float
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


_shared_launches: list[Any] = []


def shared(launch: Callable[..., Result]) -> Callable[..., Result]:
    """Make tests share what this function launched; a test that failed and runs once more launches anew."""
    cached = functools.cache(launch)
    _shared_launches.append(cached)
    return cached


def forget_shared_launches() -> None:
    for launch in _shared_launches:
        launch.cache_clear()


def run_ranks(
    script: str | Path,
    ranks: int = 2,
    launcher: Launcher = "spawned",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    check: bool = True,
    ignore_files: Sequence[str] = (),
) -> Result:
    """Run `script` on `ranks` processes and wait until all of them have ended.

    Args:
        script: Python source text, or the path of a script. TEST_RANKS holds the number of ranks, for
            `ring.init(ranks=int(os.environ["TEST_RANKS"]))`; `tests.worker.report` hands results back.
        ranks: World size.
        launcher: "spawned" starts plain `python script`, which spawns the other ranks itself.
        args: The script's arguments.
        env: Variables added to the environment.
        timeout: Seconds on a machine that is not overloaded (see `slowness`); beyond them the stacks of all processes
            are written out and everything is killed.
        check: Whether a non-zero status fails the test.
        ignore_files: As of `Job.wait`.

    Raises:
        LaunchFailed: On a non-zero status (with `check`), a time-out, a process left alive, or a file left in
            shared memory or the temporary directory.
    """
    with start_ranks(script, ranks, launcher, args, env) as job:
        result = job.wait(timeout, ignore_files)
    if check and result.returncode != 0:
        raise LaunchFailed(f"the launch ended with status {result.returncode}\n{result}")
    return result


@contextlib.contextmanager
def start_ranks(
    script: str | Path,
    ranks: int = 2,
    launcher: Launcher | Sequence[str] = "spawned",
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator["Job"]:
    """As `run_ranks`, for tests that interfere: yields the running `Job`, and kills what still runs at the end.

    A launcher may also be the words before the script's name.
    """
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
    """A running launch."""

    def __init__(
        self,
        directory: Path,
        script: str | Path,
        ranks: int,
        launcher: Launcher | Sequence[str],
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
        starting = launcher if not isinstance(launcher, str) else launcher_command(launcher, ranks)
        self.command = [*starting, str(path), *args]
        self._files_before = _shared_files()
        self._files_seen: set[Path] = set()
        self._next_look = 0.0
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
        own = clean_environment()
        paths = [str(REPOSITORY), str(REPOSITORY / "tests" / "python_path"), own.get("PYTHONPATH", "")]
        return {
            **own,
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

    def pids(self, timeout: float = 60) -> dict[int, int]:
        """Rank to process id, once every rank has called `tests.worker.report_pid()`."""
        return self.wait_for("pid", timeout)

    def wait_for(self, key: str, timeout: float = 60) -> dict[int, Any]:
        """Rank to its last `report(key, ...)`, once every rank has made one."""
        began = time.monotonic()
        while True:
            reports = self.reports()
            found = {rank: values[key] for rank, values in reports.items() if key in values}
            if len(found) == self.ranks:
                return found
            if self.process.poll() is not None or time.monotonic() - began > timeout * slowness():
                why = "the launch ended" if self.process.poll() is not None else f"{timeout:.0f} s passed"
                stacks = "" if self.process.poll() is not None else self._dump_stacks()
                self.kill()
                raise LaunchFailed(f"{why} before every rank reported {key!r}\n{self._result()}{stacks}")
            self._look_at_files()
            time.sleep(0.02)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank, which must have reported its pid."""
        os.kill(self.pids()[rank], number)

    def signal_parent(self, number: signal.Signals) -> None:
        """Send a signal to the process that a user would have started, such as mpirun."""
        self._next_look = 0.0
        self._look_at_files()  # which that process cannot remove if it is killed
        self.process.send_signal(number)

    def interrupt(self) -> None:
        """Do what Ctrl-C in a terminal does: send SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def reports(self) -> dict[int, dict[str, Any]]:
        return read_reports(self.directory / "reports")

    def wait(self, timeout: float = 60, ignore_files: Sequence[str] = (), grace: float | None = None) -> Result:
        """Wait until the launched process and everything it started have ended.

        Args:
            timeout: Seconds for all of that.
            ignore_files: Patterns of files of others that may stay in shared memory, such as Open MPI's segments after
                mpirun was killed. They are removed.
            grace: Seconds that other processes may take to end after the launched one; GRACE_SECONDS by default.
        """
        began = time.monotonic()
        while self.process.poll() is None:
            if time.monotonic() - began > timeout * slowness():
                stacks = self._dump_stacks()
                self.kill()
                raise LaunchFailed(f"still running after {timeout:.0f} s\n{self._result()}{stacks}")
            self._look_at_files()
            time.sleep(0.02)
        grace = GRACE_SECONDS if grace is None else grace
        slow = slowness()
        if left := self._wait_for_stragglers(min(began + timeout * slow, time.monotonic() + grace * slow)):
            names = "\n".join(f"  pid {process.pid}: {_command_line(process)}" for process in left)
            stacks = self._dump_stacks()
            self.kill()
            raise LaunchFailed(f"processes left alive after the launch ended:\n{names}\n{self._result()}{stacks}")
        result = self._result()
        if files := self._files_left(ignore_files):
            raise LaunchFailed(f"files left behind: {', '.join(map(str, files))}\n{result}")
        return result

    def processes(self) -> list[psutil.Process]:
        """Every running process of this launch, even if its parent has ended."""
        return processes_with("TEST_LAUNCH", self.identity)

    def kill(self) -> None:
        """Kill every process of this launch that still runs."""
        kill_all(self.processes)
        self.process.wait()
        self._stdout.close()
        self._stderr.close()

    def _wait_for_stragglers(self, deadline: float) -> list[psutil.Process]:
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _look_at_files(self) -> None:
        """Note which files in shared memory the launch maps, so that it is not blamed for those of others."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        with contextlib.suppress(psutil.Error):
            launched = psutil.Process(self.process.pid)
            for process in [launched, *launched.children(recursive=True)]:
                self._files_seen |= _mapped_shared_files(process.pid)

    def _files_left(self, ignore: Sequence[str]) -> list[Path]:
        deadline = time.monotonic() + FILE_SECONDS
        while True:
            new = {
                path
                for path in _shared_files() - self._files_before
                if path in self._files_seen or (path.name.startswith("ring") and not RUNS_PARALLEL)
            }
            tolerated = {path for path in new if any(path.match(pattern) for pattern in ignore)}
            left = sorted(new - tolerated) + sorted((self.directory / "tmp").glob("ring*"))
            if not left or time.monotonic() > deadline:
                for path in tolerated:
                    path.unlink(missing_ok=True)
                return left
            time.sleep(0.1)

    def _dump_stacks(self) -> str:
        asked = []
        for process in self.processes():
            file = self.directory / "stacks" / f"{_name_on_its_host(process.pid)}.txt"
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
            ended=time.time(),
            reports=self.reports(),
        )


def read_reports(directory: Path) -> dict[int, dict[str, Any]]:
    """Rank to key to value, as `tests.worker.report` wrote them into this directory."""
    found: dict[int, dict[str, Any]] = {}
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                rank, key, value = json.loads(line)
                found.setdefault(rank, {})[key] = value
    return found


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Every running process with this variable in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(variable) == value:
                found.append(process)
    return found


def kill_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill the processes that `find` finds until there are none.

    multiprocessing's trackers come last: they end by themselves, and remove what the others left in /dev/shm.
    """
    deadline = time.monotonic() + TRACKER_SECONDS
    while left := find():
        others = [process for process in left if "multiprocessing.resource_tracker" not in _command_line(process)]
        if time.monotonic() > deadline + TRACKER_SECONDS:
            return
        for process in others if time.monotonic() < deadline else left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


def hear_interrupts() -> None:
    """Let launches hear Ctrl-C although a shell has started this process in the background, where it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def slowness() -> float:
    """How many times longer than alone a launch may take because of what else runs here; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


def _name_on_its_host(pid: int) -> str:
    """The name of the process's file in tests/python_path/sitecustomize.py: test hosts have their own process ids."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        inner = next((line.split()[-1] for line in status if line.startswith("NSpid:")), str(pid))
        return f"{os.stat(f'/proc/{pid}/ns/pid').st_ino}-{inner}"
    except OSError:
        return str(pid)


def _shared_files() -> set[Path]:
    directories = {Path("/dev/shm"): "*", Path(tempfile.gettempdir()): "ring*"}
    return {file for directory, pattern in directories.items() for file in directory.glob(pattern)}


def _mapped_shared_files(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # the process has ended meanwhile
        return set()
    return {Path(line[line.index("/dev/shm/") :].removesuffix(" (deleted)")) for line in lines if "/dev/shm/" in line}
