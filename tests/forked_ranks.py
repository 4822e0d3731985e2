"""Jobs whose ranks are forked from this process, which has imported everything: a job takes less than a second.

For campaigns of hundreds of jobs, and measurements of hundreds of deaths. Nobody supervises the ranks but the caller,
as `ring run --on-failure continue` would, which lets the others go on when a rank is killed. This process must not have
computed with several threads, since OpenMP does not survive a fork.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ring_plugins.core import world
from ring_plugins.core.base import config
from ring_plugins.core.linux.process import children, descendants
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from tests.launch import read_reports

#: The number under which the status of a launcher stands in `Ended.codes`, if it is not 0.
LAUNCHER = -1
#: Printing where it hangs must not take longer.
_TRACES = 1.0


@dataclass
class Ended:
    """How the ranks of a job ended.

    Attributes:
        codes: by rank, the exit status, or minus the signal that killed it; None if it hung and was killed. Processes
            that took the places of lost ranks have further numbers.
        found: by rank, what its function returned; nothing for those that ended otherwise.
        output: what all ranks printed, and where those that hung were.
        seconds: from the first fork to the last end.
        left: processes and files that stayed behind.
        faults: by rank, what `tests.worker.report("fault", ...)` was told.
    """

    codes: dict[int, int | None]
    found: dict[int, Any]
    output: str
    seconds: float
    left: list[str] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)

    @property
    def killed(self) -> set[int]:
        """The ranks that were killed with SIGKILL."""
        return {rank for rank, code in self.codes.items() if code == -signal.SIGKILL}

    @property
    def departed(self) -> set[int]:
        """The ranks that left early, with exit status 0."""
        return {rank for rank, code in self.codes.items() if code == 0 and rank not in self.found}


def run_forked(
    ranks: int,
    function: Callable[[int], Any],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    resume_after: float | None = None,
    nodes: str = "",
) -> Ended:
    """Run `function(rank)` on forked ranks that call `init(on_failure="continue")`, and wait for all of them.

    Args:
        ranks: of the job.
        function: returns what JSON can hold.
        seconds: after which a job hangs, and is ended.
        environment: variables of the ranks.
        resume_after: seconds after which a rank that has stopped itself (SIGSTOP) gets SIGCONT.
        nodes: RING_VIRTUAL_NODES, for ranks that act as several hosts and that nobody else has started.
    """
    before, port = set(os.listdir("/dev/shm")), free_port()
    segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks))
    with TemporaryDirectory() as name:
        began, directory = time.monotonic(), Path(name)
        pids: dict[int, int] = {}
        for rank in range(ranks):
            own = child_environment(segment, rank, ranks, os.getpid()) | {config.LOSSES_TOLERATED.name: "1"}
            if nodes:
                own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                own[config.VIRTUAL_NODES.name] = nodes
            variables = {**(environment or {}), **own}
            pid = os.fork()
            if not pid:
                be_rank(rank, function, variables, directory)
            pids[pid] = rank
        codes = _wait(pids, began + seconds, resume_after)
        ended = collect(directory, codes, began)
    segment.close_file()
    ended.left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before if "ring" in name]
    return ended


def collect(directory: Path, codes: dict[int, int | None], began: float) -> Ended:
    """How the ranks ended that wrote into this directory; kills what is left of them."""
    seconds = time.monotonic() - began
    family = [pid for pid in descendants(os.getpid(), children()) if Path(f"/proc/{pid}/exe").exists()]
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    found = {int(file.stem): json.loads(file.read_text()) for file in directory.glob("*.json")}
    output = "".join(file.read_text(errors="replace") for file in sorted(directory.glob("*.txt")))
    faults = {rank: told["fault"] for rank, told in read_reports(directory).items() if "fault" in told}
    return Ended(codes, found, output, seconds, [f"process {pid}" for pid in family], faults)


def free_port() -> str:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def be_rank(rank: int, function: Callable[[int], Any], variables: Mapping[str, str], directory: Path) -> None:
    """Be a rank, in a forked child; does not return."""
    status = 1
    try:
        os.environ.update(variables, TEST_REPORTS=str(directory))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a campaign has a use of its own for it
        output = os.open(directory / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        try:
            found = function(rank)
            (directory / "new").mkdir(exist_ok=True)
            file = directory / "new" / f"{rank}.json"
            file.write_text(json.dumps(found))
            file.rename(directory / file.name)
            world.shutdown()
            status = 0
        except SystemExit as error:  # of a rank that leaves
            status = int(error.code or 0)
        except Exception:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            world.shutdown()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pids: Mapping[int, int], deadline: float, resume_after: float | None) -> dict[int, int | None]:
    """Wait for forked ranks, given by process id; returns how each ended."""
    codes: dict[int, int | None] = {}
    resumed: dict[int, float] = {}
    left = dict(pids)
    while left and time.monotonic() < deadline:
        for pid, rank in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if done and os.WIFSTOPPED(status):
                resumed[pid] = time.monotonic() + (resume_after or 0.0)
            elif done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del left[pid]
        for pid, when in list(resumed.items()):
            if time.monotonic() >= when:
                os.kill(pid, signal.SIGCONT)
                del resumed[pid]
        time.sleep(0.001)
    for pid in left:
        os.kill(pid, signal.SIGUSR1)
    if left:
        time.sleep(_TRACES)
    for pid, rank in left.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = None
    return dict(sorted(codes.items()))
