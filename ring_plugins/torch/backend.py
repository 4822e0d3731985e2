"""Registers the "ring" backend with torch.distributed, and connects the members of each new process group."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch re-exports them unmarked

from ring_plugins.core import rendezvous as launch
from ring_plugins.core import world
from ring_plugins.core.base.errors import ArgumentError, LaunchError, PeerFailed, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.pair_executor import PairExecutor
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.groups import group_readers
from ring_plugins.core.job import World
from ring_plugins.core.rendezvous.tcp import register_store_provider
from ring_plugins.torch import rendezvous
from ring_plugins.torch.device import streams
from ring_plugins.torch.point_to_point import Ends, PointToPoint
from ring_plugins.torch.process_group import RingProcessGroup
from ring_plugins.torch.rendezvous import adopt, replace_env_rendezvous
from ring_plugins.torch.store import GroupStore

#: How often this process created a group of each name. All members count alike, so a group that is destroyed and
#: created again uses fresh keys in a store that still holds the old ones.
_created: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
#: What a job cannot have that is to go on after losses.
_WHAT = 'torch.distributed with the backend "ring"'


def register() -> None:
    """Register the "ring" backend and the rendezvous that serves it; harmless to call again."""
    register_store_provider(rendezvous)
    if ranks_of not in group_readers:
        group_readers.append(ranks_of)
    if not dist.is_available() or "ring" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("ring", create_process_group, extended_api=True, devices=["cpu", "cuda"])
    # From 2.15 on, torch records every group whose backend is not in a set of names; it can do so only in C++. The set
    # is private. Environment variables can only turn the recorder off for all groups.
    without = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(without, set):
        without.add("ring")
    replace_env_rendezvous()


def ranks_of(group: Any) -> Sequence[int] | None:
    """The ranks in the job of a process group of whatever backend; None for what is none.

    Raises:
        ArgumentError: torch numbers the ranks in another way than the job, and the group is not ours.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns on other ranks
        return ()
    if isinstance(group, RingProcessGroup):
        return group.job_ranks
    if not isinstance(group, dist.ProcessGroup):
        return None
    own = world.current().topology
    if (dist.get_rank(), dist.get_world_size()) != (own.rank, own.size):
        raise ArgumentError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} for torch.distributed, and rank "
            f"{own.rank} of {own.size} for ring_plugins, so Group.of cannot know whom the group means: call "
            "ring_plugins.Group(ranks)."
        )
    return dist.get_process_group_ranks(group)


def create_process_group(options: Any, _backend_options: Any = None) -> RingProcessGroup:
    """Create a process group; torch calls this on every member.

    Args:
        options: torch's `_DistributedBackendOptions`: store, group_rank, group_size, group_id.

    Raises:
        LaunchError: the group is larger than the job that ring_plugins sees.
    """
    rank, size, group_id = options.group_rank, options.group_size, options.group_id
    if world.is_initialized():  # first of all: the store is gone where another rank has been rejected already
        world.current().refuse_to_recover(_WHAT)
    # A separate connection, where torch can clone one (2.5), so that our threads never wait while the script uses it.
    base = options.store.clone() if hasattr(options.store, "clone") else options.store
    prefix = f"ring/{next(_created[group_id])}"
    store = PrefixStore(prefix, base)
    if not world.is_initialized():
        record = launch.detect()
        # The script started its processes itself and gave torch their ranks. Or torch made this store from the
        # variables by which our ranks would meet, and its rank 0 now listens at the port where ours would.
        is_job = record.launcher.uses_master and (rank, size) == (record.rank, record.size)
        if is_job or (record.launcher.is_none and size > 1):
            adopt(PrefixStore("world", store), rank, size)
    own = world.init()
    own.refuse_to_recover(_WHAT)
    if size > own.topology.size:
        raise LaunchError(
            f"torch.distributed was asked for {size} ranks, but ring_plugins runs {own.topology.size} "
            f"(launch: {own.launcher}). Start the script with mpirun or torchrun, or call ring_plugins.init(ranks=...) "
            "first with that number."
        )
    secret = own.derive_secret(f"process group {group_id}, {prefix}")
    members = GroupStore(store, rank, size, secret, own.failure_detector)
    try:
        connections = _Connections(own, members, group_id, tuple(members.exchange("ranks", own.topology.rank)))
        point_to_point = PointToPoint(rank, size, connections)
        return RingProcessGroup(store, connections.for_host(), point_to_point, connections.for_gpu)
    except BaseException as error:
        members.tell(own.topology.rank, f"process group {group_id}", error)
        raise


class _Connections:
    """Makes the communicators of one process group; their members connect through the group's store.

    Args:
        own: the world that the group is part of.
        members: of the group.
        group_id: torch's name of the group.
        ranks: of all members in the world.
    """

    def __init__(self, own: World, members: GroupStore, group_id: str, ranks: tuple[int, ...]) -> None:
        self._world, self._members, self._group_id, self._ranks = own, members, group_id, ranks

    def for_host(self) -> Communicator:
        name, gather = f"process group {self._group_id}", self._members.gather(self._group_id)
        return self._world.new_communicator(name, self._ranks, gather, self._members.check)

    def for_gpu(self, index: int) -> DeviceCommunicator:
        name = f"{self._group_id} on GPUs"
        gather = self._members.gather(name)
        return self._world.new_device_communicator(f"process group {name}", index, streams(index), self._ranks, gather)

    def executor(self, ends: Ends) -> PairExecutor:
        name = self._name_of(ends)
        if not self._world.is_mine():
            raise RingError(f"{name}: this process was forked from a rank; messages are for the ranks themselves.")
        return PairExecutor(name, Wait(name, self._world.failure_detector), callers_run=ends.tag is None)

    def connect(self, ends: Ends, index: int | None, executor: PairExecutor) -> Communicator[Any]:
        name, members = self._name_of(ends), (self._ranks[ends.sender], self._ranks[ends.receiver])
        position, group = int(ends.receiver == self._members.rank), self._members
        both = GroupStore(
            PrefixStore(name, group.store), position, 2, group.secret + name.encode(), self._world.failure_detector
        )

        def wait(other: int, has_come: Callable[[], bool]) -> None:
            def ready() -> bool:
                both.check()
                try:
                    return has_come()
                except dist.DistError as error:
                    text = f"{name}: cannot reach the store of torch.distributed: {error}"
                    raise PeerFailed(text, members[other]) from error

            executor.meet(ready, lambda: [members[other]], _pauses())

        gather = both.gather("ends", wait)
        try:
            if index is None:
                return self._world.new_communicator(name, members, gather, both.check, executor)
            return self._world.new_device_communicator(name, index, streams(index), members, gather, own_stream=True)
        except BaseException as error:
            both.tell(members[position], name, error)
            raise

    def _name_of(self, ends: Ends) -> str:
        between_gpus = "" if ends.tag is None else f", tag {ends.tag}, between GPUs"
        return f"process group {self._group_id}, {ends.sender} to {ends.receiver}{between_gpus}"


def _pauses() -> Callable[[float], None]:
    """Sleeps that grow, between two looks at a store."""
    pauses = itertools.chain((0.001 * step for step in range(1, 20)), itertools.repeat(0.02))
    return lambda seconds: time.sleep(next(pauses))
