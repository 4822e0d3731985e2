"""Shows which ranks have come while MPI_Init waits for the others.

MPI_Init returns when every rank has called it, and mpi4py holds the interpreter's lock meanwhile, so no thread of a
waiting rank can say anything. So each rank of a host leaves a mark first, and the first of them starts a small process
that looks for the marks after a few seconds, says which are missing, and is ended when MPI_Init returns.

A mark is a socket in Linux's abstract namespace: it needs no file, and the kernel removes it with the process. Its name
is random, and only sockets of this user count (net/user_socket.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ring_plugins.core.base import progress_line
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.log import writes_to_standard_error
from ring_plugins.core.base.own_python import search_path
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.net.user_socket import connect_below, listen_below
from ring_plugins.core.rendezvous.record import LaunchRecord

#: What the small process runs, isolated from the current directory (own_python.py): nothing of this package is imported
#: before there is something to say.
_CODE = """
import json, os, sys, time
path, parent, seconds, *arguments = json.loads(sys.argv[1])
while seconds > 0 and os.getppid() == parent:
    seconds -= 0.1
    time.sleep(0.1)
if os.getppid() == parent:
    sys.path[:] = path
    from ring_plugins.core.rendezvous.mpi_arrivals import show
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
