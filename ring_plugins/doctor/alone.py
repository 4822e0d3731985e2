"""The examination of one host, by itself."""

from __future__ import annotations

from collections.abc import Iterator

from ring_plugins.doctor.devices import gpus, nccl
from ring_plugins.doctor.findings import Check, Finding, perform
from ring_plugins.doctor.host import cores, limits, memory
from ring_plugins.doctor.mpi import mpi
from ring_plugins.doctor.network import names, networks
from ring_plugins.doctor.packages import packages
from ring_plugins.doctor.settings import settings

CHECKS: tuple[Check, ...] = (packages, mpi, nccl, gpus, cores, memory, networks, names, limits, settings)


def examine_host() -> Iterator[Finding]:
    """Everything that can be said without other ranks. Takes a few seconds; initialises neither MPI nor CUDA."""
    for check in CHECKS:
        yield from perform(check)
