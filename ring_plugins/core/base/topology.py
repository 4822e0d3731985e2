"""Where a process stands among the ranks and hosts of its job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ring_plugins.core.base.errors import LaunchError


@dataclass(frozen=True)
class Topology:
    """Where this process stands.

    Attributes:
        rank, size: in the job.
        local_rank, local_size: on its host.
        node_rank, num_nodes: of its host among the hosts.
        hosts: the hosts' names in node order.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    hosts: tuple[str, ...]

    @property
    def summary(self) -> str:
        """For messages: "2 ranks on 1 host"."""
        ranks, hosts = ("" if number == 1 else "s" for number in (self.size, self.num_nodes))
        return f"{self.size} rank{ranks} on {self.num_nodes} host{hosts}"


def virtual_nodes(domains: Sequence[str], setting: Sequence[int]) -> list[str]:
    """A key for each rank; ranks with equal keys count as being on one host.

    Args:
        domains: of the ranks, in rank order; equal for ranks that can share memory.
        setting: RING_VIRTUAL_NODES. Empty for the real hosts; (2,) splits the ranks of every host into two nodes;
            (1, 2) into a node of one rank and a node of two, and so on.

    Raises:
        LaunchError: the setting does not fit the ranks.
    """
    if not setting:
        return list(domains)
    keys = list(domains)
    for host in dict.fromkeys(domains):
        members = [rank for rank, other in enumerate(domains) if other == host]
        sizes = list(setting)
        if len(sizes) == 1 and sizes[0] <= len(members):
            nodes = sizes[0]
            sizes = [len(members) * (i + 1) // nodes - len(members) * i // nodes for i in range(nodes)]
        if sum(sizes) != len(members):
            raise LaunchError(
                f"RING_VIRTUAL_NODES={','.join(map(str, setting))} does not fit {len(members)} ranks of a host: give "
                'a number of nodes, or ranks per node that add up, as in "1,2".'
            )
        labels = [node for node, size in enumerate(sizes) for _ in range(size)]
        for rank, label in zip(members, labels, strict=True):
            keys[rank] = f"{host}/virtual{label}"
    return keys


def find_topology(rank: int, nodes: Sequence[str], hosts: Sequence[str]) -> Topology:
    """The topology as one rank sees it.

    Args:
        rank: of this process.
        nodes: key of the host of every rank.
        hosts: name of the host of every rank.
    """
    order = list(dict.fromkeys(nodes))
    mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    names = tuple(hosts[nodes.index(node)] for node in order)
    return Topology(rank, len(nodes), mine.index(rank), len(mine), order.index(nodes[rank]), len(order), names)
