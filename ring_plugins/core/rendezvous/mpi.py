"""Started by mpirun, mpiexec, or a scheduler that speaks MPI's start-up protocol (PMI, PMIx)."""

from __future__ import annotations

import os
import socket

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.net import mpi
from ring_plugins.core.net.tcp import open_transport
from ring_plugins.core.net.transport import Transport
from ring_plugins.core.net.transport_choice import decide
from ring_plugins.core.rendezvous.record import Connection, LaunchRecord, differences, integer, own_versions

#: (rank, size, local rank, local size), launcher. The first whose rank is set counts.
_VARIABLES = [
    (tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), "Open MPI"),
    (tuple(f"MV2_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")), "MVAPICH"),
    (("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "MPICH or Intel MPI"),
    (("PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID", ""), "PMIx"),
]  # fmt: skip


def detect() -> LaunchRecord | None:
    """The variables of an MPI launcher, or MPI that the script has initialised itself."""
    if os.environ.get("TORCHELASTIC_RUN_ID"):  # torchrun agents may themselves be started by mpirun, one a host
        return None
    for (rank, size, local_rank, local_size), by in _VARIABLES:
        if integer(rank) is not None:
            return LaunchRecord(
                "mpi", f"mpirun ({by})", integer(rank), integer(size), integer(local_rank), integer(local_size)
            )
    if mpi.world_size_if_initialized() > 1:
        return LaunchRecord("mpi", "MPI")
    return None


def connect(record: LaunchRecord) -> Connection:
    """Meet the other ranks.

    Raises:
        MissingDependency: no mpi4py, no libmpi.
        LaunchError: MPI sees another number of ranks than the launcher started, or the ranks' installations differ.
    """
    mpi_transport = mpi.MpiTransport()
    gather = mpi_transport.all_gather_object
    if record.size is not None and record.size != mpi_transport.size:
        library = mpi_transport.mpi.Get_library_version().splitlines()[0].strip()
        raise LaunchError(
            f"{record.by} started {record.size} ranks, but mpi4py's MPI sees {mpi_transport.size}: mpirun and mpi4py "
            f"belong to different MPI libraries. Use the mpirun of {library}, or install mpi4py for this one."
        )
    hosts = gather([socket.gethostname(), own_versions()])
    wrong = differences({rank: (host, versions) for rank, (host, versions) in enumerate(hosts)})
    if wrong:
        raise LaunchError(wrong)
    if mpi_transport.size == 1:
        return Connection(0, 1, gather, mpi_transport, mpi_transport.close, abort=mpi_transport.abort)
    carrier = decide(mpi_transport.rank, gather)
    if carrier.text and mpi_transport.rank == 0:
        logger.info(f"{carrier.text}.")
    transport: Transport = mpi_transport
    if carrier.listen:
        transport = open_transport(mpi_transport.rank, carrier.hosts, carrier.listen, gather)

    def close() -> None:
        if transport is not mpi_transport:
            transport.close()
        mpi_transport.close()

    return Connection(
        mpi_transport.rank, mpi_transport.size, gather, transport, close, carrier.rank_0, mpi_transport.abort
    )
