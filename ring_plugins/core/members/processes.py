"""The processes of a job: where each of them runs, and its three numbers.

- *World rank*: the number with which it started. No other process of the job ever has it.
- *Slot*: its place in the order of ranks. For a process of the start, that is its world rank; for one that takes the
  place of a lost rank, that rank's slot.
- *Rank*: its position among the present members, in the order of their slots.

Scripts see ranks. Whatever outlives a loss goes by world ranks.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.records import read_address, read_as, read_record
from ring_plugins.core.control.liveness import Liveness, LocalPeers
from ring_plugins.core.linux.shared_memory import shared_memory_domain
from ring_plugins.core.linux.thread_count import Cores, own_cores
from ring_plugins.core.rendezvous.slots import SlotOwner
from ring_plugins.core.rendezvous.topology import Topology, find_topology


class Entry(NamedTuple):
    """What a process tells of itself in the first exchange of the job, or when it joins. May travel as JSON.

    Attributes:
        domain: its shared-memory domain.
        host, pid: name of its host, and process id there.
        liveness: address of its liveness segment; None where memory cannot be shared.
        server: address of the control server, with its secret, from rank 0; None from the others.
        addresses: of its host; empty if all ranks are on one host.
        records: whether rank 0 writes a timeline of the whole job.
        kernel, container, cores, quota: as in `thread_count.Cores`.
        policy: its `FailurePolicy`.
        port: one that it has reserved, for other libraries; 0 if there is none.
    """

    domain: str
    host: str
    pid: int
    liveness: list[int] | None
    server: dict[str, Any] | None
    addresses: list[str]
    records: bool
    kernel: str
    container: str
    cores: str
    quota: float | None
    policy: list[Any]
    port: int

    @classmethod
    def own(
        cls,
        liveness: Liveness | None,
        server: dict[str, Any] | None,
        addresses: list[str],
        policy: Sequence[Any],
        port: int,
    ) -> Entry:
        """That of this process; arguments as the attributes."""
        return cls(
            shared_memory_domain(),
            socket.gethostname(),
            os.getpid(),
            list(liveness.address) if liveness else None,
            server,
            addresses,
            config.TIMELINE.is_set(),
            *own_cores(),
            list(policy),
            port,
        )

    @classmethod
    def read(cls, item: Sequence[Any]) -> Entry:
        """One that has traveled.

        Raises:
            TypeError, ValueError: it is none.
        """
        entry = read_record(cls, item)
        if entry.liveness is not None:
            read_address(entry.liveness)
        read_as(bool, entry.policy[0])
        if not re.fullmatch(r"\d{1,5}([-,]\d{1,5})*", entry.cores):
            raise ValueError("it names no cores")
        return entry

    @property
    def share_of_cores(self) -> Cores:
        """The cores that it may use."""
        return Cores(self.kernel, self.container, self.cores, self.quota)


class Processes:
    """All that the job has had, as this process knows them, and which of them are its ranks now.

    Args:
        own: world rank of this process.
        slot: its place in the order of ranks.
        entries: by world rank, in the order of slots: of all ranks, or of this process alone if it is yet to join them.
        nodes, hosts: keys and names of the hosts to which the slots belong; equal keys for those on one host.
        cores: that the first processes of the slots may use.

    Attributes:
        own, slot, entries, hosts, cores: as given; entries of those that join are added.
        ranks: world ranks of the present members, in the order of slots.
        topology: where this process stands among them; before it joins, among all slots.
        nodes: key of each process's host, by world rank.
        slots: of all processes, by world rank.
        shards, past_shards: into how many shards data is divided, one for each slot that has ever had a member, and all
            such numbers that this process has seen.
        is_added: whether the job is to grow by this process, since nobody had its slot when it started; known on
            several hosts.
    """

    def __init__(
        self,
        own: int,
        slot: int,
        entries: Mapping[int, Entry],
        nodes: Sequence[str],
        hosts: Sequence[str],
        cores: Sequence[Cores],
    ) -> None:
        self.own, self.slot, self.hosts, self.cores = own, slot, list(hosts), list(cores)
        self.entries = dict(entries)
        self.ranks = tuple(entries)
        self.slots = {**{rank: rank for rank in entries}, own: slot}
        self._node_of_slot = list(nodes)
        self.nodes = {rank: nodes[place] for rank, place in self.slots.items()}
        self.shards, self.past_shards = len(nodes), {len(nodes)}
        self.is_added = False
        self.topology: Topology = find_topology(slot, nodes, hosts)

    def add(self, everyone: Iterable[SlotOwner], entries: Mapping[int, Entry], nodes: Mapping[int, str]) -> None:
        """Note who and where all are that are members from now on, before `follow`.

        Args:
            everyone: all of them, in the order of slots.
            entries: by world rank.
            nodes: keys of their hosts, by world rank.
        """
        for slot, rank, _ in everyone:
            self.entries[rank], self.slots[rank] = entries[rank], slot
            self.nodes[rank] = nodes[rank]
            self._note_place(slot, nodes[rank], entries[rank].host, entries[rank].share_of_cores)

    def _note_place(self, slot: int, node: str, host: str, cores: Cores) -> None:
        self._node_of_slot[slot : slot + 1] = [node]
        self.hosts[slot : slot + 1] = [host]
        self.cores[slot : slot + 1] = [cores]

    def follow(self, ranks: Sequence[int]) -> None:
        """From now on, these world ranks are the members."""
        self.ranks = tuple(ranks)
        nodes, hosts = [self.nodes[rank] for rank in ranks], [self.entries[rank].host for rank in ranks]
        self.topology = find_topology(self.ranks.index(self.own), nodes, hosts)

    def divide_among(self, shards: int) -> None:
        """From now on, data is divided into so many shards."""
        self.shards = shards
        self.past_shards.add(shards)

    def can_be_replaced(self, ranks: Iterable[int]) -> bool:
        """Whether members are left on all hosts of these ranks."""
        left = {self.nodes[rank] for rank in self.ranks}
        return all(self.nodes[rank] in left for rank in ranks)

    def owners(self, peers: LocalPeers) -> list[SlotOwner]:
        """Who of these has which slot, this process first."""
        return [SlotOwner(self.slots[one.rank], one.rank, one.address) for one in (peers.own, *peers.others.values())]

    @property
    def pids(self) -> dict[int, int]:
        """Of all processes, by world rank."""
        return {rank: entry.pid for rank, entry in self.entries.items()}

    @property
    def taken_slots(self) -> list[int]:
        """Those of the members."""
        return [self.slots[rank] for rank in self.ranks]

    def node_of_slot(self, slot: int) -> str:
        """Key of the real or virtual host to which a slot belongs; that of this process's for one that nobody had."""
        return self._node_of_slot[slot] if slot < len(self._node_of_slot) else self.nodes[self.own]

    def node_here(self, slot: int) -> str:
        """Key of this host, for one that is to take a slot here: the slot's own, if it belongs here already."""
        domain = self.entries[self.own].domain
        here = {self.nodes[rank] for rank, entry in self.entries.items() if entry.domain == domain}
        return node if (node := self.node_of_slot(slot)) in here else self.nodes[self.own]

    # What processes of several hosts learn of the slots when they start (rendezvous/slots.py), and when they join ----

    def places(self) -> list[list[Any]]:
        """Of each slot that ever had a member: key and name of its host, and cores. JSON can hold it."""
        return list(map(list, zip(self._node_of_slot, self.hosts, self.cores, strict=True)))

    def take_places(self, places: Sequence[Sequence[Any]]) -> None:
        """Know of the slots what a member does; see `places`."""
        self._node_of_slot, self.hosts, self.cores = [], [], []
        for slot, (node, host, cores) in enumerate(places):
            self._note_place(slot, node, host, Cores(*cores))

    def join_info(self) -> dict[str, Any]:
        """What a new process of this host needs to look like one of all slots; JSON can hold it."""
        names, domain = list(dict.fromkeys(self._node_of_slot)), self.entries[self.own].domain
        here = min(names.index(self.nodes[rank]) for rank in self.ranks if self.entries[rank].domain == domain)
        nodes = [names.index(one) for one in self._node_of_slot]
        return {"nodes": nodes, "hosts": self.hosts, "cores": self.cores, "here": here}

    @classmethod
    def from_join_info(cls, own: int, slot: int, entry: Entry, join_info: Mapping[str, Any], in_use: int) -> Processes:
        """As a process knows them that is yet to join; arguments as above.

        Args:
            own, slot, entry, join_info: of this process and its host.
            in_use: how many slots are, if nobody has had this one yet.
        """
        known = len(join_info["nodes"])
        added = max(in_use - known, 0) if slot >= known else 0
        nodes = [f"{entry.domain}/{number}" for number in [*join_info["nodes"], *[join_info["here"]] * added]]
        cores = [Cores(*one) for one in join_info["cores"]] + [entry.share_of_cores] * added
        found = cls(own, slot, {own: entry}, nodes, [*join_info["hosts"], *[entry.host] * added], cores)
        found.is_added = added > 0
        return found
