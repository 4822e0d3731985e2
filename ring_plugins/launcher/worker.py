"""What a process that `ring_plugins.run` started does: `python -c "... main(FD, PARENT, RANK)"`."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from ring_plugins.core.linux.process import end_with_parent


def main(fd: int, parent: int, rank: int) -> None:
    """Take the function from the connection `fd`, call it, send back how it ended.

    Args:
        fd: of the connection to the process that started this one.
        parent: its process id.
        rank: of this process.
    """
    end_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    connection: Connection = Connection(fd)
    sys.path[:] = connection.recv()
    packed = connection.recv_bytes()
    from ring_plugins.launcher.task import perform

    outcome = perform(packed, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(outcome)
    sys.exit(1 if outcome.failure is not None else 0)
