"""How ranks find each other: where they meet, what the environment of each says, and how far each has started.

The supervisor of a host (host.py) makes the memory in which the processes of its host say how far they are, and passes
it on to each of them. The ranks of a job on one host meet in that memory, too, and open no port. Those of several hosts
meet at an address of rank 0's host, as do those that Spark and Ray have placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.member import Topology, find_topology
from ring_plugins.core.linux.interfaces import address_towards
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.slots import STARTED, Slots, State
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from ring_plugins.launcher.coordinator_link import HostJob


def rank_environment(place: Topology, address: str, port: int, secret: str) -> dict[str, str]:
    """The variables by which `ring_plugins.init()` finds the other ranks, in the terms of torchrun.

    Args:
        place: of the process.
        address, port: where rank 0 listens.
        secret: a fresh one of the job, which must reach the ranks without becoming visible to others.
    """
    return {
        config.SECRET.name: secret,
        # A scheduler itself may run under mpirun or srun, whose variables contradict these.
        config.LAUNCHER.name: "rendezvous",
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def place_ranks(processes: Sequence[tuple[str, str, int]], secret: str) -> list[tuple[int, dict[str, str]]]:
    """Assign a rank to every process that a scheduler has placed, so that the ranks of one host follow each other.

    Args:
        processes: the host of each, its address and a port that is free there, in the scheduler's order.
        secret: as for `rank_environment`.

    Returns:
        The rank and the variables of each process, in the same order.
    """
    hosts = [host for host, _, _ in processes]
    nodes = list(dict.fromkeys(hosts))
    order = sorted(range(len(hosts)), key=lambda process: (nodes.index(hosts[process]), process))
    by_rank = [hosts[process] for process in order]
    places = [find_topology(order.index(process), by_rank, by_rank) for process in range(len(hosts))]
    _, address, port = processes[order[0]]
    return [(place.rank, rank_environment(place, address, port, secret)) for place in places]


class Meeting:
    """Where the ranks of a job meet: in the memory of their host, or at a port of rank 0's.

    Args:
        job: of this host.
        in_memory: whether all ranks run on this host, and meet in memory whose file they inherit. Otherwise the output
            of all ranks passes through their supervisors, and none reads standard input.

    Attributes:
        in_memory: see above.
        segment: the memory, which holds the slots also of ranks that meet elsewhere.
        slots: of this host's processes.
    """

    def __init__(self, job: HostJob, in_memory: bool = False) -> None:
        self.in_memory, self._job = in_memory, job
        self._in_use, self._number = job.size, max(job.size, job.most)
        rows = Slots.nbytes(self._number)
        self.segment = Segment.create(SharedMemoryRendezvous.nbytes(job.size, self._number) if in_memory else rows)
        self._rendezvous = SharedMemoryRendezvous(self.segment, 0, job.size, [], self._number) if in_memory else None
        self.slots = Slots(self.segment.array[:rows])
        self._start: Mapping[str, Any] = {}

    def begin(self, start: Mapping[str, Any]) -> None:
        """Take what the coordinator says about rank 0, and, on a host that was added, about the members of the job."""
        self._start = start
        if self._job.is_added:
            join_info = start["join info"]
            self.slots.join_info.write({**join_info, "address": address_towards(join_info["address"])})
            self.slots.others_let_join = True

    def environment(self, local: int | None, rank: int, number: int, is_new: bool) -> dict[str, str]:
        """Variables of a process.

        Args:
            local: its slot on this host, None for a standby.
            rank: what users call it.
            number: of slots of this host.
            is_new: whether the job has begun without it.
        """
        job, start = self._job, self._start
        if self.in_memory:
            size = max(job.size, self.slots.size_until_joined(local) if is_new and local is not None else 0)
            return child_environment(self.segment, local, size, 0, self._number)
        assert local is not None
        place = Topology(rank, self._in_use, local, number, job.index, job.hosts)
        found = rank_environment(place, start["address"], start["port"], start["secret"])
        return {**found, **Slots.environment(self.segment, self._number, local)}

    def note_in_use(self, number: int) -> None:
        """Note how many slots of the whole job are in use now."""
        self._in_use = number
        if self.in_memory:
            self.slots.in_use = number

    def is_awaited(self, local: int, was_killed: bool) -> str:
        """Whether others wait for an ended process to have "reached" or "completed" init(); "" if nobody waits."""
        slots = self.slots
        if self._rendezvous is None:
            states = [slots.state(slot) for slot in range(slots.number)]
            has_come = states[local] == State.STARTING
            is_awaited = (was_killed or State.STARTING in states) and states[local] not in STARTED
        elif local >= self._job.size:
            return ""
        else:
            most = max(map(self._rendezvous.rounds, range(self._job.size)))
            own = self._rendezvous.rounds(local)  # read last: it may have come meanwhile, and ended
            has_come, is_awaited = own > 0, own < most
        return "" if not is_awaited else "completed" if has_come else "reached"
