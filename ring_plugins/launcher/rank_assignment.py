"""Assigns ranks to processes that a cluster's own scheduler has placed, as Spark and Ray do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ring_plugins.core.base import config


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
            # The scheduler itself may run under mpirun or srun, whose variables contradict these.
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
    """Assign a rank to every process, so that the ranks of one host follow each other.

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
