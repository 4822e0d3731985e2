"""Started by mpirun, mpiexec, or a scheduler that speaks MPI's start-up protocol (PMI, PMIx).

MPI connects the ranks; net/transport.py then decides whether MPI or sockets move data between hosts.

**Which ranks have come** while MPI_Init waits for the others is shown by a small process. MPI_Init returns when every
rank has called it, and mpi4py holds the interpreter's lock meanwhile, so no thread of a waiting rank can say anything.
So each rank of a host leaves a mark first, and the first of them starts that process. It looks for the marks after a
few seconds, says which are missing, and is ended when MPI_Init returns. A mark is a socket in Linux's abstract
namespace: it needs no file, and the kernel removes it with the process. Its name is random, and only sockets of this
user count (net/sockets.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ring_plugins.core.base import progress_line
from ring_plugins.core.base.errors import LaunchError, name_ranks
from ring_plugins.core.base.install import search_path
from ring_plugins.core.base.log import logger, writes_to_standard_error
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.net import mpi
from ring_plugins.core.net.sockets import connect_below, listen_below
from ring_plugins.core.net.tcp import open_transport
from ring_plugins.core.net.transport import Transport, choose_transport
from ring_plugins.core.rendezvous.record import (
    Launcher,
    LaunchRecord,
    Rendezvous,
    differences,
    integer,
    own_versions,
)

#: Seconds for a process manager to answer.
_ANSWERS = 2.0


def find_initialized(launcher: Launcher) -> LaunchRecord | None:
    """The record of a process whose script has initialized MPI itself, among others; else None."""
    return LaunchRecord(launcher) if mpi.world_size_if_initialized() > 1 else None


def connect(record: LaunchRecord, _ranks: int | None, _generation: int) -> Rendezvous:
    """Meet the other ranks.

    Raises:
        MissingDependency: mpi4py or libmpi is missing.
        LaunchError: MPI sees another number of ranks than the launcher started, or the ranks' installations differ.
    """
    with mpi.every_rank_must_come_in_time(), ShownArrivals(record):
        return _connect(record)


def exchange(record: LaunchRecord, payload: Any) -> list[Any]:
    """Every rank's payload, in rank order; leaves MPI, which this process cannot join again.

    Raises:
        MissingDependency, LaunchError: as for `connect`.
    """
    with mpi.every_rank_must_come_in_time(), ShownArrivals(record):
        transport, gather = _join(record)
        found = gather(payload)
    transport.close()
    mpi.finalize()
    _leave_process_manager()
    return found


def _leave_process_manager() -> None:
    """Tell MPICH's process manager that this process has left MPI; MPICH itself does so only when it exits.

    A process that becomes another program never would, and the manager would end all others when it ends. The line is
    one of PMI's first version.
    """
    manager = integer("PMI_FD")
    with contextlib.suppress(OSError):  # another MPI has closed it
        if manager is not None and os.readlink(f"/proc/self/fd/{manager}").startswith("socket:"):
            os.write(manager, b"cmd=finalize\n")
            select.select([manager], [], [], _ANSWERS)


def _join(record: LaunchRecord) -> tuple[mpi.MpiTransport, Callable[[Any], list[Any]]]:
    """Join MPI, and check that the ranks fit each other."""
    mpi_transport = mpi.MpiTransport()
    size, gather = mpi_transport.size, mpi_transport.all_gather_object
    if record.size is not None and record.size != size:
        library = mpi_transport.mpi.Get_library_version().splitlines()[0].strip()
        raise LaunchError(
            f"{record.by} started {record.size} ranks, but mpi4py's MPI sees {size}: mpirun and mpi4py belong to "
            f"different MPI libraries. Use the mpirun of {library}, or install mpi4py for this one."
        )
    hosts = gather([socket.gethostname(), own_versions()])
    problem = differences({rank: (host, versions) for rank, (host, versions) in enumerate(hosts)})
    if problem:
        raise LaunchError(problem)
    return mpi_transport, gather


def _connect(record: LaunchRecord) -> Rendezvous:
    mpi_transport, gather = _join(record)
    rank, size = mpi_transport.rank, mpi_transport.size
    if size == 1:
        return Rendezvous(0, 1, gather, mpi_transport, mpi_transport.close, abort=mpi_transport.abort)
    choice = choose_transport(rank, gather)
    if choice.text and rank == 0:
        logger.info(f"{choice.text}.")
    transport: Transport = mpi_transport
    if choice.listen:
        transport = open_transport(rank, choice.hosts, choice.listen, gather)

    def close() -> None:
        if transport is not mpi_transport:
            transport.close()
        mpi_transport.close()

    def gather_in_time(item: Any) -> list[Any]:
        """MPI does not tell that a rank has given up to join and goes on with its script."""
        with mpi.every_rank_must_come_in_time():
            return gather(item)

    return Rendezvous(rank, size, gather_in_time, transport, close, choice.rank_0, mpi_transport.abort)


#: What the small process runs, isolated from the current directory (base/install.py): nothing of this package is
#: imported before there is something to say.
_CODE = """
import json, os, sys, time
path, parent, seconds, *arguments = json.loads(sys.argv[1])
while seconds > 0 and os.getppid() == parent:
    seconds -= 0.1
    time.sleep(0.1)
if os.getppid() == parent:
    sys.path[:] = path
    from ring_plugins.core.rendezvous.mpi import show
    show(parent, *arguments)
"""
_EVERY = 0.2
#: Fields of /proc/PID/stat behind the name: the parent, and when the process started, since ids are used again.
_PARENT, _START = 1, 19


class ShownArrivals:
    """A context in which a rank has a mark, and the first rank of a host says which marks are missing.

    Args:
        record: what the launcher has told this process.
    """

    def __init__(self, record: LaunchRecord) -> None:
        self._record = record
        self._mark: socket.socket | None = None
        self._helper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> None:
        one = self._record
        job = _job()
        if not job or one.size is None or one.size < 2 or one.local_rank is None or one.local_size is None:
            return
        self._mark = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # the rank comes without one
            listen_below(self._mark, _name(job, one.local_rank), 128)
        if one.local_rank == 0 and writes_to_standard_error():
            first = progress_line.FIRST_SECONDS
            words = search_path(), os.getpid(), first, job, one.size, one.local_size, time.monotonic(), first
            with contextlib.suppress(OSError):
                self._helper = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _CODE, json.dumps(words)],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the ranks
                )

    def __exit__(self, *_: object) -> None:
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
        if self._mark is not None:
            self._mark.close()


def show(parent: int, job: str, size: int, local_size: int, began: float, first: float) -> None:
    """Show which ranks of this host are missing, as long as a process lives.

    Args:
        parent: the process, which has started this one.
        job: the launcher's name for it.
        size, local_size: ranks of the job, and of this host.
        began: when the process began to wait, as `time.monotonic` counts.
        first: seconds after which to show the first line.
    """
    marks: dict[int, socket.socket] = {}  # of ranks that have come; nobody accepts these connections
    with ProgressLine(began, first) as line:
        while os.getppid() == parent:
            for rank in [rank for rank in range(local_size) if rank not in marks]:
                if (mark := connect_below(_name(job, rank))) is not None:
                    marks[rank] = mark
            came = sorted(marks)
            line.show(lambda came=came: _text(came, size, local_size))  # type: ignore[misc]
            time.sleep(_EVERY)


def _text(came: Sequence[int], size: int, local_size: int) -> str:
    if local_size == size:
        return arrivals(dict.fromkeys(came, ""), size, " to reach init()")
    missing = [rank for rank in range(local_size) if rank not in came]
    rest = f"local {name_ranks(missing)} and for" if missing else "the ranks of"
    here = f"{len(came)} of the {local_size} ranks on {socket.gethostname()} have come"
    return f"{here}, waiting for {rest} other hosts to reach init()"


def _job() -> str:
    """What tells this job from others on this host, "" if nothing does.

    Open MPI's mpirun gives its ranks a name. Hydra, which MPICH and Intel MPI have, does not, but the ranks of a host
    descend from one proxy.
    """
    if name := os.environ.get("PMIX_NAMESPACE"):
        return name
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):  # another user's /proc, or an ancestor that has ended
        while pid > 1:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            fields = rest.split()
            if name == "hydra_pmi_proxy":
                return f"{name} {pid} {fields[_START]}"
            pid = int(fields[_PARENT])
    return ""


def _name(job: str, rank: int) -> str:
    key = hashlib.sha256(f"{os.getuid()}/{job}/{rank}".encode()).hexdigest()
    return f"ring_plugins/{key[:32]}"
