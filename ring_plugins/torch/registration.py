"""Makes `torch.distributed.init_process_group("ring")` known to torch.

How often any module got a parameter or a submodule: a cheap sign that a model may have grown.

Walking through a model of thousands of parameters at every step would cost milliseconds; torch offers
hooks on registration instead.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch re-exports these unmarked
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ring_plugins.core import rendezvous as launch
from ring_plugins.core import world
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.rendezvous.tcp import register_store_provider
from ring_plugins.torch import rendezvous
from ring_plugins.torch.device import streams
from ring_plugins.torch.point_to_point import PointToPoint, Stream
from ring_plugins.torch.process_group import RingProcessGroup
from ring_plugins.torch.rendezvous import adopt, exchange_through_store, replace_env_rendezvous

_count = 0


def _registered(module: Any, name: str, value: Any) -> None:
    global _count
    _count += 1


register_module_parameter_registration_hook(_registered)
register_module_module_registration_hook(_registered)


def registrations() -> int:
    """Registrations in this process so far."""
    return _count


#: How often this process created a group of a name. All members count alike, so a group that is created again after
#: it was destroyed finds keys of its own in a store that still holds the old ones.
_created: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def register() -> None:
    """Register the "ring" backend and the rendezvous that serves it; harmless to call again."""
    register_store_provider(rendezvous)
    if not dist.is_available() or "ring" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("ring", create_process_group, extended_api=True, devices=["cpu", "cuda"])
    replace_env_rendezvous()


def create_process_group(options: Any, _backend_options: Any = None) -> RingProcessGroup:
    """What torch calls on every member of a new group.

    Args:
        options: torch's `_DistributedBackendOptions`: store, group_rank, group_size, group_id.

    Raises:
        LaunchError: the group is larger than the job that ring_plugins sees.
    """
    rank, size, group_id = options.group_rank, options.group_size, options.group_id
    # A connection of our own where torch has that (2.5): its threads must not wait for the script's use of the store.
    base = options.store.clone() if hasattr(options.store, "clone") else options.store
    store = PrefixStore(f"ring/{next(_created[group_id])}", base)
    if size > 1 and not world.is_initialized() and launch.detect().kind == "alone":
        # The script started its processes itself and gave torch their ranks.
        adopt(PrefixStore("world", store), rank, size)
    own = world.init()
    if size > own.topology.size:
        raise LaunchError(
            f"torch.distributed was asked for {size} ranks, but ring_plugins runs {own.topology.size} "
            f"(launch: {own.launcher}). Start the script with mpirun or torchrun, or call ring_plugins.init(ranks=...) "
            "first with that number."
        )
    world_ranks = exchange_through_store(store, "ranks", rank, size, own.topology.rank)

    def meeting(
        name: str, position: int, ranks: tuple[int, ...], cancelled: Callable[[], bool] = lambda: False
    ) -> Callable[[Any], list[Any]]:
        rounds = itertools.count()

        def gather(payload: Any) -> list[Any]:
            key = f"{name}/{next(rounds)}"
            return exchange_through_store(store, key, position, len(ranks), payload, cancelled)

        return gather

    def meet(
        name: str, position: int, ranks: tuple[int, ...], cancelled: Callable[[], bool] = lambda: False
    ) -> Communicator:
        return own.new_communicator(f"process group {name}", ranks, meeting(name, position, ranks, cancelled))

    def connect_gpu(index: int) -> DeviceCommunicator:
        ranks = tuple(world_ranks)
        gather = meeting(f"{group_id} on GPUs", rank, ranks)
        name = f"process group {group_id} on GPUs"
        return own.new_device_communicator(name, index, streams(index), ranks, gather)

    def connect(stream: Stream, index: int | None, cancelled: Callable[[], bool]) -> Communicator[Any]:
        sender, receiver, tag, _ = stream
        position = 0 if sender == rank else 1
        ends = (world_ranks[sender], world_ranks[receiver])
        name = f"{group_id}, {sender} to {receiver}, tag {tag}"
        if index is None:
            return meet(name, position, ends, cancelled)
        gather = meeting(f"{name}, between GPUs", position, ends, cancelled)
        name = f"process group {name}, between GPUs"
        return own.new_device_communicator(name, index, streams(index), ends, gather, own_stream=True)

    communicator = meet(group_id, rank, tuple(world_ranks))
    return RingProcessGroup(store, communicator, PointToPoint(rank, size, connect), connect_gpu)
