"""Who is which rank when a cluster's own scheduler has placed the processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """A rank's place in its job, as the variables of torchrun say it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int

    def environment(self, address: str, port: int) -> dict[str, str]:
        """What the rank is told.

        Args:
            address, port: where rank 0 can be met.
        """
        return {
            # A scheduler may itself have been started by mpirun or srun, whose variables would contradict these.
            "RING_LAUNCHER": "rendezvous",
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def seats(hosts: Sequence[str]) -> list[Seat]:
    """A seat for every process, so that ranks of one host follow each other.

    Args:
        hosts: where each process runs, in the scheduler's order.
    """
    nodes = list(dict.fromkeys(hosts))
    order = sorted(range(len(hosts)), key=lambda process: (nodes.index(hosts[process]), process))
    found: dict[int, Seat] = {}
    for rank, process in enumerate(order):
        local = [other for other in order if hosts[other] == hosts[process]]
        found[process] = Seat(
            rank, len(hosts), local.index(process), len(local), nodes.index(hosts[process]), len(nodes)
        )
    return [found[process] for process in range(len(hosts))]
