"""A process of a job, where it stands among the others, and the one list of those that are its members now.

A process has three numbers:

- *World rank*: the number with which it started. No other process of the job ever has it.
- *Slot*: its place in the order of ranks. For a process of the start, that is its world rank; for one that takes the
  place of a lost rank, that rank's slot.
- *Rank*: its position among the present members, in the order of their slots.

Scripts see ranks. Whatever outlives a loss goes by world ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ring_plugins.core.base.arguments import read_address, read_as, read_record
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.facts import Facts


class Cores(NamedTuple):
    """The cores that a process may use. May travel as JSON.

    Attributes:
        kernel: equal for processes that share cores.
        container: equal for processes that share a quota.
        cores: ranges of their numbers, as in "0-3,8"; one number for both hardware threads of a core.
        quota: how many of them the container may keep busy, None without a limit.
    """

    kernel: str
    container: str
    cores: str
    quota: float | None


class Member(NamedTuple):
    """A process of a job: which one it is, where it runs, and how others reach it. May travel as JSON.

    Whoever makes one knows what it needs; the rest keeps its defaults.

    Attributes:
        rank: world rank.
        slot: its place in the order of ranks.
        host, pid: name of its host, and process id there.
        domain: shared-memory domain: processes with equal ones can map each other's memory.
        node: key of its real or virtual host: members with equal ones share memory.
        address, port: where it listens for the others; numeric, of the network that the job uses, or a unix socket.
        liveness: address of its liveness segment; None where memory cannot be shared.
        addresses: of its host; empty if all members are on one.
        cores: that it may use.
    """

    rank: int
    slot: int = -1
    host: str = ""
    pid: int = 0
    domain: str = ""
    node: str = ""
    address: str = ""
    port: int = 0
    liveness: tuple[int, int, int] | None = None
    addresses: tuple[str, ...] = ()
    cores: Cores = Cores("", "", "0", None)

    @classmethod
    def read(cls, item: Sequence[Any]) -> Member:
        """One that has traveled.

        Raises:
            TypeError, ValueError: it is none.
        """
        found = cls(*item)
        cores = read_record(Cores, found.cores)
        if not re.fullmatch(r"\d{1,5}([-,]\d{1,5})*", cores.cores):
            raise ValueError("it names no cores")
        liveness = None if found.liveness is None else read_address(found.liveness)
        addresses = tuple(read_as(str, address) for address in found.addresses)
        return read_record(cls, found._replace(liveness=liveness, addresses=addresses, cores=cores))


@dataclass(frozen=True)
class Topology:
    """Where this process stands.

    Attributes:
        rank, size: in the job.
        local_rank, local_size: on its host.
        node_rank, num_nodes: of its host among the hosts.
        hosts: the hosts' names in node order; empty where nobody asks for them.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    hosts: tuple[str, ...] = ()

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


class Members:
    """All processes that a job has had, as this one knows them, and which of them are its members now.

    Args:
        own: world rank of this process.
        known: all members, or this process alone if it is yet to join them.
        of_slot: the last process that had each slot, if that is not one of `known`.

    Attributes:
        own: as given.
        known: all of them by world rank; those that join are added. Any thread may read it.
        of_slot: by slot, the last process that had it.
        ranks: world ranks of the present members, in the order of slots.
        view: how often they have changed.
        facts: how others of them have ended, as far as this process knows.
        topology: where this process stands among them; before it joins, among all slots.
        shards, past_shards: into how many shards data is divided, one for each slot that has ever had a member, and all
            such numbers that this process has seen.
        is_added: whether the job is to grow by this process, since nobody had its slot when it started; known on
            several hosts.
    """

    def __init__(self, own: int, known: Iterable[Member], of_slot: Sequence[Member] = ()) -> None:
        self.own, self.known = own, {one.rank: one for one in known}
        self.of_slot = [*of_slot] or sorted(self.known.values(), key=lambda one: one.slot)
        self.ranks, self.view, self.facts = tuple(self.known), 0, Facts()
        self.shards, self.past_shards = len(self.of_slot), {len(self.of_slot)}
        self.is_added = False
        nodes, hosts = [one.node for one in self.of_slot], [one.host for one in self.of_slot]
        self.topology: Topology = find_topology(self.of_slot.index(self.here), nodes, hosts)

    @classmethod
    def before_joining(cls, own: Member, told: Sequence[Sequence[Any]], in_use: int) -> Members:
        """As a process knows them that is yet to join.

        Args:
            own: this process.
            told: what the members of its host, or of another one, have told of the slots.
            in_use: how many slots are, if nobody has had this one yet.
        """
        of_slot = _of_slots(told)
        known = len(of_slot)
        here = next((one.node for one in of_slot if _is_in(one.node, own.domain)), own.domain)
        if own.slot >= known:
            of_slot += [own._replace(slot=slot, node=here) for slot in range(known, max(in_use, own.slot + 1))]
        of_slot[own.slot] = own = own._replace(node=of_slot[own.slot].node)
        found = cls(own.rank, [own], of_slot)
        found.is_added = own.slot >= known
        return found

    @property
    def here(self) -> Member:
        """This process."""
        return self.known[self.own]

    def is_near(self, rank: int) -> bool:
        """Whether a process is on this host; so is one that was lost before this process joined."""
        return rank not in self.known or self.known[rank].domain == self.here.domain

    def are_on_several_hosts(self) -> bool:
        """Whether processes are, or were, on others."""
        return len({one.domain for one in self.known.values()}) > 1

    def add(self, joiners: Iterable[Member]) -> None:
        """Know of processes that are to join, or have; `follow` makes them members."""
        self.known = {**self.known, **{one.rank: one for one in joiners}}

    def follow(self, ranks: Iterable[int], view: int) -> None:
        """From now on, these are the members.

        Args:
            ranks: world ranks, in any order.
            view: their number.
        """
        present = sorted((self.known[rank] for rank in ranks), key=attrgetter("slot"))
        self.ranks, self.view = tuple([one.rank for one in present]), view
        for one in present:
            self.of_slot[one.slot : one.slot + 1] = [one]
        nodes, hosts = [one.node for one in present], [one.host for one in present]
        self.topology = find_topology(self.ranks.index(self.own), nodes, hosts)

    def divide_among(self, shards: int) -> None:
        """From now on, data is divided into so many shards."""
        self.shards = shards
        self.past_shards.add(shards)

    def can_be_replaced(self, ranks: Iterable[int]) -> bool:
        """Whether members are left on all hosts of these ranks."""
        left = {self.known[rank].node for rank in self.ranks}
        return all(self.known[rank].node in left for rank in ranks)

    @property
    def cores(self) -> tuple[int, list[Cores]]:
        """This process's slot, and what the processes of all slots may use."""
        return self.here.slot, [one.cores for one in self.of_slot]

    @property
    def taken_slots(self) -> list[int]:
        """Those of the members."""
        return [self.known[rank].slot for rank in self.ranks]

    def node_for(self, slot: int) -> str:
        """Key of this host, for a process that is to take a slot here: the slot's own, if it belongs here already."""
        node = self.of_slot[slot].node if slot < len(self.of_slot) else ""
        return node if _is_in(node, self.here.domain) else self.here.node

    # What processes that join learn of the slots -----------------------------------------------------

    def told_of_slots(self) -> list[list[Any]]:
        """(node key, host, cores) of each slot that ever had a member, in a form that JSON can hold."""
        return [[one.node, one.host, one.cores] for one in self.of_slot]

    def learn_of_slots(self, told: Sequence[Sequence[Any]]) -> None:
        """Take over what a member knows of the slots; see `told_of_slots`."""
        self.of_slot = _of_slots(told)
        for one in (self.known[rank] for rank in self.ranks):
            self.of_slot[one.slot : one.slot + 1] = [one]


def _of_slots(told: Sequence[Sequence[Any]]) -> list[Member]:
    return [
        Member(-1, slot, str(host), node=str(node), cores=Cores(*cores))
        for slot, (node, host, cores) in enumerate(told)
    ]


def _is_in(node: str, domain: str) -> bool:
    """Whether the key of a real or virtual host is one of this shared-memory domain; see `virtual_nodes`."""
    return node == domain or node.startswith(f"{domain}/virtual")
