"""What an all-reduce can be measured with, and beside what."""

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

#: Given the bytes of a message, what to call to reduce one on all ranks, in place and until it is done.
Contestant = Callable[[int], Callable[[], object]]


def ordinary(nbytes: int) -> Callable[[], object]:
    """ring_plugins, in memory that numpy allocated."""
    array = np.ones(nbytes // 4, np.float32)
    return lambda: ring.all_reduce(array, out=array)


def bucket(nbytes: int) -> Callable[[], object]:
    """ring_plugins, in memory from the communicator, as small gradients live in."""
    communicator = current().communicator
    buffer = communicator.allocate(nbytes)
    shared = buffer.array.view(np.float32)
    shared[:] = 1
    return _Releasing(lambda: ring.all_reduce(shared, out=shared), lambda: communicator.release(buffer))


def plain_copy(nbytes: int) -> Callable[[], object]:
    """`numpy.copyto` of as many bytes, which no all-reduce of ordinary memory can beat."""
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
    """A call, and what to give back when nobody calls it any more; all ranks drop it at the same place."""

    def __init__(self, call: Callable[[], object], release: Callable[[], None]) -> None:
        self._call, self._release = call, release

    def __call__(self) -> object:
        return self._call()

    def close(self) -> None:
        self._release()


def close(call: Callable[[], object]) -> None:
    """Give back what a contestant's call holds."""
    if isinstance(call, _Releasing):
        call.close()


HOST: dict[str, Contestant] = {
    "ring": ordinary,
    "ring bucket": bucket,
    "plain copy": plain_copy,
    "MPI": mpi,
    "gloo": gloo,
}


def check_names(names: Iterable[str]) -> None:
    """Whether these are host contestants, before ranks are started for them.

    Raises:
        ArgumentError: one is not.
    """
    for name in names:
        if name not in HOST:
            raise ArgumentError(f"{name!r} is none of {', '.join(HOST)}.")


def host_contestants(names: Iterable[str] | None = None) -> dict[str, Contestant]:
    """Those of host memory that can run in this job.

    Args:
        names: which; all that are there by default.

    Raises:
        ArgumentError: a name is not known, or cannot run here.
    """
    there = [
        name
        for name in HOST
        if (name != "MPI" or current().launcher == "mpi")
        and (name != "gloo" or importlib.util.find_spec("torch") is not None)
    ]
    wanted = there if names is None else list(names)
    check_names(wanted)
    for name in wanted:
        if name not in there:
            raise ArgumentError(f"{name} cannot be measured here: MPI needs mpirun, gloo needs torch.")
    return {name: HOST[name] for name in wanted}


def ring_on_gpu(nbytes: int) -> Callable[[], object]:
    """ring_plugins in GPU memory, through its torch.distributed backend."""
    import ring_plugins.torch  # noqa: F401 - which makes the backend known

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


DEVICE: dict[str, Contestant] = {"ring (GPU)": ring_on_gpu, "NCCL (torch)": nccl_of_torch}


def device_contestants() -> dict[str, Contestant]:
    """Those of GPU memory; none where torch sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    return DEVICE if torch.cuda.is_available() else {}


def start_gloo() -> None:
    """Let torch.distributed's default group be gloo among the ranks of this job, if there is none yet; collective."""
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
