"""Started by mpirun, mpiexec, or a scheduler that speaks MPI's start-up protocol (PMI, PMIx).

MPI connects the ranks; net/transport_choice.py then decides whether MPI or sockets move data between hosts.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable
from typing import Any

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.net import mpi
from ring_plugins.core.net.tcp import open_transport
from ring_plugins.core.net.transport import Transport
from ring_plugins.core.net.transport_choice import choose_transport
from ring_plugins.core.rendezvous.mpi_arrivals import ShownArrivals
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
        library = mpi_transport.library_version()
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
