"""Started by mpirun, mpiexec, or a scheduler that speaks MPI's start-up protocol (PMI, PMIx)."""

from __future__ import annotations

import os
import socket
import sys

from ring_plugins.core import mpi
from ring_plugins.core.errors import LaunchError
from ring_plugins.core.launch.carrier import decide
from ring_plugins.core.launch.record import Connection, LaunchRecord, integer
from ring_plugins.core.launch.sockets import open_plane
from ring_plugins.core.launch.versions import differences, own_versions
from ring_plugins.core.plane import Plane

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
    if mpi.world_size_if_initialised() > 1:
        return LaunchRecord("mpi", "MPI")
    return None


def connect(record: LaunchRecord) -> Connection:
    """Meet the other ranks.

    Raises:
        MissingDependency: no mpi4py, no libmpi.
        LaunchError: MPI sees another number of ranks than the launcher started, or the ranks' installations differ.
    """
    mpi_plane = mpi.MpiPlane()
    gather = mpi_plane.all_gather_object
    if record.size is not None and record.size != mpi_plane.size:
        library = mpi_plane.mpi.Get_library_version().splitlines()[0].strip()
        raise LaunchError(
            f"{record.by} started {record.size} ranks, but mpi4py's MPI sees {mpi_plane.size}: mpirun and mpi4py "
            f"belong to different MPI libraries. Use the mpirun of {library}, or install mpi4py for this one."
        )
    hosts = gather([socket.gethostname(), own_versions()])
    wrong = differences({rank: (host, versions) for rank, (host, versions) in enumerate(hosts)})
    if wrong:
        raise LaunchError(wrong)
    if mpi_plane.size == 1:
        return Connection(0, 1, gather, mpi_plane, mpi_plane.close, abort=mpi_plane.abort)
    carrier = decide(mpi_plane.rank, gather)
    if carrier.text and mpi_plane.rank == 0:
        print(f"ring_plugins: {carrier.text}.", file=sys.stderr, flush=True)
    plane: Plane = mpi_plane
    if carrier.listen:
        plane = open_plane(mpi_plane.rank, carrier.hosts, carrier.listen, gather)

    def close() -> None:
        if plane is not mpi_plane:
            plane.close()
        mpi_plane.close()

    return Connection(mpi_plane.rank, mpi_plane.size, gather, plane, close, carrier.rank_0, mpi_plane.abort)
