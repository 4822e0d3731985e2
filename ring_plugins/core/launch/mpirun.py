"""Started by mpirun, mpiexec, or a scheduler that speaks MPI's start-up protocol (PMI, PMIx)."""

from __future__ import annotations

import os
import socket
import sys

from ring_plugins.core import mpi
from ring_plugins.core.errors import LaunchError
from ring_plugins.core.launch.mpi_network import compare
from ring_plugins.core.launch.network_choice import own_offer
from ring_plugins.core.launch.record import Connection, LaunchRecord, integer
from ring_plugins.core.launch.versions import differences, own_versions

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
    plane = mpi.MpiPlane()
    if record.size is not None and record.size != plane.size:
        raise LaunchError(
            f"{record.by} started {record.size} ranks, but mpi4py's MPI sees {plane.size}: mpirun and mpi4py belong to "
            f"different MPI libraries. Use the mpirun of {plane.mpi.Get_library_version().splitlines()[0].strip()}, "
            "or install mpi4py for this one."
        )
    hosts = plane.all_gather_object([socket.gethostname(), own_versions()])
    wrong = differences({rank: (host, versions) for rank, (host, versions) in enumerate(hosts)})
    if wrong:
        raise LaunchError(wrong)
    addresses: tuple[str, ...] = ()
    if plane.size > 1:
        addresses, text = compare(own_offer(plane.rank), plane.all_gather_object)
        if text and plane.rank == 0:
            print(f"ring_plugins: {text}.", file=sys.stderr, flush=True)
    return Connection(plane.rank, plane.size, plane.all_gather_object, plane, plane.close, addresses)
