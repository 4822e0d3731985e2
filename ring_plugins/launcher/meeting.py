"""How ranks find each other: where they meet, what the environment of each says, and how far each has come.

The supervisor of a host (host.py) makes the memory in which the processes of its host say how far they are, and passes
it on to each of them. The ranks of a job on one host meet in that memory, too, and open no port. Those of several hosts
meet at an address of rank 0's host, as do those that Spark and Ray have placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.slots import Slots
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from ring_plugins.launcher.coordinator_link import HostJob


@dataclass(frozen=True)
class RankAssignment:
    """A process's place in its job, in the terms of torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int

    def environment(self, address: str, port: int, secret: str) -> dict[str, str]:
        """The variables by which `ring_plugins.init()` finds the other ranks.

        Args:
            address, port: where rank 0 listens.
            secret: a fresh one of the job, which must reach the ranks without becoming visible to others.
        """
        return {
            config.SECRET.name: secret,
            # A scheduler itself may run under mpirun or srun, whose variables contradict these.
            config.LAUNCHER.name: "rendezvous",
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def assign_ranks(hosts: Sequence[str]) -> list[RankAssignment]:
    """Assign a rank to every process that a scheduler has placed, so that the ranks of one host follow each other.

    Args:
        hosts: the host of each process, in the scheduler's order.

    Returns:
        An assignment for each process, in the same order.
    """
    nodes = list(dict.fromkeys(hosts))
    order = sorted(range(len(hosts)), key=lambda process: (nodes.index(hosts[process]), process))
    found: dict[int, RankAssignment] = {}
    for rank, process in enumerate(order):
        local = [other for other in order if hosts[other] == hosts[process]]
        found[process] = RankAssignment(
            rank, len(hosts), local.index(process), len(local), nodes.index(hosts[process]), len(nodes)
        )
    return [found[process] for process in range(len(hosts))]


class InMemory:
    """Where the ranks of a job on one host meet: in shared memory.

    Args:
        size: number of ranks at the start.
        most: up to how many the job may grow.

    Attributes:
        segment: the memory, whose file they inherit.
        slots: the slots of this host's processes.
        join_info, remote_joiners: as in core/rendezvous/slots.py.
        is_at_an_address: whether rank 0 listens at a port of its host. The output of all ranks passes through their
            supervisors then, and none reads standard input.
    """

    is_at_an_address = False

    def __init__(self, size: int, most: int) -> None:
        self._size, self._number = size, max(size, most)
        self.segment = Segment.create(SharedMemoryRendezvous.nbytes(size, self._number))
        self._rendezvous = SharedMemoryRendezvous(self.segment, 0, size, [], self._number)
        rows = self.segment.array[: Slots.nbytes(self._number)]
        self.slots = Slots(rows)

    def begin(self, start: Mapping[str, Any]) -> None:
        """Take what the coordinator says about rank 0, and, on a host that was added, about the members of the job."""

    def environment(self, local: int | None, rank: int, number: int, is_new: bool) -> dict[str, str]:
        """Variables of a process.

        Args:
            local: its slot on this host, None for a standby.
            rank: what users call it.
            number: of slots of this host.
            is_new: whether the job has begun without it.
        """
        size = max(self._size, self.slots.size_until_joined(local) if is_new and local is not None else 0)
        return child_environment(self.segment, local, size, 0, self._number)

    def note_in_use(self, number: int) -> None:
        """Note how many slots of the whole job are in use now."""
        self.slots.in_use = number

    def is_awaited(self, local: int, was_killed: bool) -> str:
        """What others still wait for: that the ended process "reached" or "completed" init(); "" if nobody waits."""
        if local >= self._size:
            return ""
        most = max(map(self._rendezvous.rounds, range(self._size)))
        own = self._rendezvous.rounds(local)  # read last: it may have come meanwhile, and ended
        return "" if own >= most else "completed" if own else "reached"


class AtAnAddress:
    """Where the ranks of several hosts meet: at a port of rank 0's host. Methods and attributes as of `InMemory`.

    Args:
        job: of this host.
    """

    is_at_an_address = True

    def __init__(self, job: HostJob) -> None:
        self._job, self._number, self._in_use = job, max(job.size, job.most), job.size
        self.segment = Segment.create(Slots.nbytes(self._number))
        self.slots = Slots(self.segment.array)
        self._start: Mapping[str, Any] = {}

    def begin(self, start: Mapping[str, Any]) -> None:
        self._start = start
        if self._job.is_added:
            join_info = start["join info"]
            self.slots.join_info.write({**join_info, "address": address_towards(join_info["address"])})
            self.slots.others_let_join = True

    def environment(self, local: int | None, rank: int, number: int, is_new: bool) -> dict[str, str]:
        assert local is not None
        job, start = self._job, self._start
        place = RankAssignment(rank, self._in_use, local, number, job.index, job.hosts)
        found = place.environment(start["address"], start["port"], start["secret"])
        return {**found, **Slots.environment(self.segment, self._number, local)}

    def note_in_use(self, number: int) -> None:
        self._in_use = number

    def is_awaited(self, local: int, was_killed: bool) -> str:
        slots = self.slots
        is_awaited = was_killed or any(map(slots.is_starting, range(slots.number)))
        if slots.has_started(local) or not is_awaited:
            return ""
        return "completed" if slots.is_starting(local) else "reached"


Meeting = InMemory | AtAnAddress
