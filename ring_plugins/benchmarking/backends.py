"""All-reduce backends to measure: ring_plugins, and the libraries it is compared with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.linux.interfaces import interfaces
from ring_plugins.core.net.network_choice import choose, own_interfaces
from ring_plugins.core.world import current

#: Takes the bytes of a message. Returns a function that all-reduces one in place on all ranks, and blocks until done.
Backend = Callable[[int], Callable[[], object]]


def ordinary(nbytes: int) -> Callable[[], object]:
    """ring_plugins, in memory that numpy allocated."""
    array = np.ones(nbytes // 4, np.float32)
    return lambda: ring.all_reduce(array, out=array)


def bucket(nbytes: int) -> Callable[[], object]:
    """ring_plugins, in memory that the communicator allocated, as for the buckets of small gradients."""
    communicator = current().communicator
    buffer = communicator.allocate(nbytes)
    shared = buffer.array.view(np.float32)
    shared[:] = 1
    return _Releasing(lambda: ring.all_reduce(shared, out=shared), lambda: communicator.release(buffer))


def plain_copy(nbytes: int) -> Callable[[], object]:
    """`numpy.copyto` of the same bytes, a lower bound for an all-reduce of ordinary memory."""
    source, target = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    return lambda: np.copyto(target, source)


def mpi(nbytes: int) -> Callable[[], object]:
    """`MPI_Allreduce` of the MPI that mpi4py uses."""
    from mpi4py import MPI

    array = np.ones(nbytes // 4, np.float32)
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


def gloo(nbytes: int) -> Callable[[], object]:
    """torch.distributed's gloo."""
    import torch
    import torch.distributed as dist

    start_gloo()
    tensor = torch.ones(nbytes // 4)
    return lambda: dist.all_reduce(tensor)


class _Releasing:
    """A reduction whose memory `close` releases. Collective."""

    def __init__(self, reduce: Callable[[], object], release: Callable[[], None]) -> None:
        self._reduce, self.close = reduce, release

    def __call__(self) -> object:
        return self._reduce()


def close(reduction: Callable[[], object]) -> None:
    """Release the memory that a backend's reduction holds."""
    if isinstance(reduction, _Releasing):
        reduction.close()


HOST: dict[str, Backend] = {
    "ring": ordinary,
    "ring bucket": bucket,
    "plain copy": plain_copy,
    "MPI": mpi,
    "gloo": gloo,
}


def check_names(names: Iterable[str]) -> None:
    """Check names of host backends before starting ranks.

    Raises:
        ArgumentError: a name is unknown.
    """
    for name in names:
        if name not in HOST:
            raise ArgumentError(f"{name!r} is not one of {', '.join(HOST)}.")


def host_backends(names: Iterable[str] | None = None) -> dict[str, Backend]:
    """Backends that reduce host memory and can run in this job.

    Args:
        names: names of the wanted backends; by default all that are available.

    Raises:
        ArgumentError: a name is unknown, or its backend cannot run here.
    """
    available = [
        name
        for name in HOST
        if (name != "MPI" or current().launcher.uses_mpi)
        and (name != "gloo" or importlib.util.find_spec("torch") is not None)
    ]
    wanted = available if names is None else list(names)
    check_names(wanted)
    for name in wanted:
        if name not in available:
            raise ArgumentError(f"{name} cannot be measured here: MPI needs mpirun, gloo needs torch.")
    return {name: HOST[name] for name in wanted}


def ring_on_gpu(nbytes: int) -> Callable[[], object]:
    """ring_plugins in GPU memory, through its torch.distributed backend."""
    import ring_plugins.torch  # noqa: F401 - registers the backend

    return _on_gpu(nbytes, "ring")


def nccl_of_torch(nbytes: int) -> Callable[[], object]:
    """torch.distributed's own NCCL backend."""
    return _on_gpu(nbytes, "nccl")


_groups: dict[str, Any] = {}


def _on_gpu(nbytes: int, backend: str) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    start_gloo()
    torch.cuda.set_device(ring.local_rank() % torch.cuda.device_count())
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    tensor = torch.ones(nbytes // 4, device="cuda")

    def reduce() -> None:
        dist.all_reduce(tensor, group=_groups[backend])
        torch.cuda.synchronize()

    return reduce


DEVICE: dict[str, Backend] = {"ring (GPU)": ring_on_gpu, "NCCL (torch)": nccl_of_torch}


def device_backends() -> dict[str, Backend]:
    """Backends that reduce GPU memory; none if torch sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    return DEVICE if torch.cuda.is_available() else {}


def start_gloo() -> None:
    """Make gloo torch.distributed's default group of all ranks of this job, unless it has one. Collective."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it unmarked

    if dist.is_initialized():
        return
    offers = ring.all_gather_object(own_interfaces(ring.rank()))
    address = choose(offers).addresses[ring.rank()]
    mine = next(one.name for one in interfaces() if one.address == address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", mine)
    store: Any = TCPStore(address, 0, is_master=True, wait_for_workers=False) if ring.rank() == 0 else None
    address, port = ring.broadcast_object((address, store.port if store else 0))
    store = store or TCPStore(address, port)
    dist.init_process_group("gloo", store=store, rank=ring.rank(), world_size=ring.size())
