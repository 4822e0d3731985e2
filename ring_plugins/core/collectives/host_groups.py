"""Who the members of a communicator for host memory are, and the groups of them that do its work.

Members of one host share memory (`SharedMemoryGroup`). Between hosts, members of equal local rank form a rail, and
`HierarchicalAllReduce` and `HierarchicalCollectives` combine both kinds of groups.

**Members change** while the communicator is in use, where ranks may be lost (recovery.py) or join. Whoever holds the
communicator only sees its `rank`, `size` and `ranks` change. `keep` drops members: their pages, staging buffers, and
parts of shared buffers. What the others have mapped stays where it is, so a gradient that lives in
a bucket is still there. Connections between hosts carry parts of messages then, so they are closed, and new ones are
made under another tag. Barriers and operations go on from a number that is above all others and the same on all
members, since these may have given up at different places.

`renew` takes fresh memory of all members into use, those that join among them. A process that joins has made its
communicators while it was alone, in the order of the script, so each has its counterpart among the members. It may have
other shared buffers, though, where members have frozen or unfrozen parameters since. If their owner can make them anew
(`BufferOwner`), all drop them, and the next operation makes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.base.member import Member
from ring_plugins.core.collectives.api import REMEDY, BufferOwner, ByteCollectives, Reducer
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint
from ring_plugins.core.collectives.hierarchical import HierarchicalAllReduce, TwoLevels
from ring_plugins.core.collectives.hierarchical_collectives import HierarchicalCollectives
from ring_plugins.core.collectives.net_group import NetworkGroup
from ring_plugins.core.collectives.recovery import JobRecovery
from ring_plugins.core.collectives.shm_group import SharedMemoryGroup
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux.shared_memory import Address, Segment
from ring_plugins.core.net.transport import Transport

#: Bits of a tag, and of the number of a barrier or operation, below those that tell views apart; and below those that
#: tell losses apart which the ranks of a host have found alone in a view.
VIEW_SHIFT, LOSS_SHIFT = 40, 34


class HostGroups:
    """The members of one communicator; also how its executor reaches them (`executor.Members`).

    Args:
        name: of the communicator, for error texts.
        own: world rank of this process.
        members: all of them, in rank order.
        key: as the attribute.
        wait: for other members.
        failure_detector: watches the other ranks.
        transport: between hosts; None if all members are on one.
        recovery: how the job goes on when members are lost; None if it does not.

    Attributes:
        key: tells the communicator and its messages from others; equal on all members.
        ranks: the members' world ranks.
        rank: which of them this process is.
        is_on_one_host: whether all share memory.
        bytes: moves bytes among the members.
        reducer: combines their numbers.
        node: the members of this host; None if there is only one, or the communicator is closed.
    """

    bytes: ByteCollectives
    reducer: Reducer

    def __init__(
        self,
        name: str,
        own: int,
        members: Sequence[Member],
        key: int,
        wait: Wait,
        failure_detector: FailureDetector | None,
        transport: Transport | None,
        recovery: JobRecovery | None,
    ) -> None:
        self._name, self._own, self._wait = name, own, wait
        self._failure_detector, self._transport, self._recovery = failure_detector, transport, recovery
        self.key = key
        self.node: SharedMemoryGroup | None = None
        self._networks: list[NetworkGroup] = []
        self._owner: weakref.ref[BufferOwner] | None = None
        self._take(members)

    def _take(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self.ranks = tuple(member.rank for member in members)
        self.rank = self.ranks.index(self._own)
        self._nodes: dict[str, list[int]] = {}  # world ranks by host, both in order
        for member in members:
            self._nodes.setdefault(member.node, []).append(member.rank)
        self._here = self._nodes[members[self.rank].node]
        self.is_on_one_host = len(self._nodes) == 1

    def connect(self, segment: Segment | None, addresses: Mapping[int, Address | None]) -> None:
        """Make the groups; collective.

        Args:
            segment: this process's own.
            addresses: of all members' segments, by world rank.

        Raises:
            RingError: the members do not share memory, and there is no transport.
        """
        # A single one has shared memory, too, if others may join it, or its host may be left alone.
        if len(self._here) > 1 or self._recovery is not None:
            assert segment is not None
            here = [address for rank in self._here if (address := addresses[rank]) is not None]
            position, replaces = self._here.index(self._own), self._recovery is not None and self._recovery.replaces
            self.node = SharedMemoryGroup(segment, here, self._here, position, self._wait, self._name, replaces)
        self._combine(self.key, at_once=True)
        if not self.is_on_one_host:  # a connection is made without the other end's script, which may be interrupted
            self.bytes.barrier(fingerprint("connect"))

    def _combine(self, tag: int, at_once: bool) -> None:
        """Make what does the work: the group of this host, or groups between hosts; collective.

        Args:
            tag: for messages.
            at_once: whether to connect now, so that an unreachable member is found before training begins.
        """
        if self.is_on_one_host:
            assert self.node is not None
            self.bytes = self.reducer = self.node
            return
        name, wait, transport, ranks, by_node = self._name, self._wait, self._transport, self.ranks, self._nodes
        if transport is None:
            raise RingError(
                f"{name}: the ranks {ranks} do not share memory, and there is no transport between them; "
                "start the job with mpirun or torchrun."
            )
        node = self.node if self.node is not None and self.node.size > 1 else None
        local_rank = node.position if node is not None else 0
        rails, rail = min(map(len, by_node.values())), None
        interrupt = node.barriers.raise_reported if node is not None else None
        if local_rank < rails:
            of_rail = [of_node[local_rank] for of_node in by_node.values()]
            behind = list(by_node.values())
            rail = NetworkGroup(transport, of_rail, of_rail.index(self._own), tag, wait, name, behind, interrupt)
            self._networks = [rail]
            if at_once:
                rail.connect()
        hosts = [[ranks.index(rank) for rank in of_node] for of_node in by_node.values()]
        levels = TwoLevels(node, rail, hosts, self.rank)
        self.reducer = HierarchicalAllReduce(levels)
        if rail is not None and len(by_node) == len(ranks):
            self.bytes = rail
            return
        everyone = NetworkGroup(transport, ranks, self.rank, tag, wait, name, interrupt=interrupt)
        self._networks.append(everyone)
        self.bytes = HierarchicalCollectives(levels, everyone)

    def close(self) -> None:
        """Free the groups' shared memory and connections now; views that others hold stay valid."""
        self.node = None
        self.bytes = self.reducer = _CLOSED
        networks, self._networks = self._networks, []
        for network in networks:
            network.close()

    # When members change ------------------------------------------------------------------------------

    def keep(self, ranks: Sequence[int], view: int, losses: int = 0) -> None:
        """Continue with the members among these world ranks; none of them is in an operation.

        Args:
            ranks: of the job.
            view: their number; see core/control/mesh.py and consensus.py.
            losses: how many the ranks of this host have found alone in this view.
        """
        assert self.node is not None
        for network in self._networks:
            network.abandon()
        self._networks = []
        self._take([member for member in self._members if member.rank in ranks])
        self.node.keep(self._here, (view << VIEW_SHIFT) + (losses << LOSS_SHIFT))
        self._combine(self.key + (view << VIEW_SHIFT), at_once=False)

    def renew(
        self,
        members: Sequence[Member],
        key: int,
        segments: Sequence[Segment],
        parts: Sequence[Sequence[Segment]] | None,
        failure_detector: FailureDetector | None,
    ) -> None:
        """Go on with other members, and fresh memory; `keep` is next. All do so, and nothing of it fails.

        Args:
            members, key: as of the constructor.
            segments, parts: of this host's members, as in `SharedMemoryGroup.renew`; empty if these have not changed.
                No parts if all drop their buffers.
            failure_detector: watches them.
        """
        assert self.node is not None
        self.key, self._failure_detector = key, failure_detector
        self._take(members)
        if parts is None:
            if (owner := self._owner() if self._owner is not None else None) is not None:
                owner.drop_all()
            self.node.drop_buffers()
        if segments:
            self.node.renew(self._here, self._here.index(self._own), segments, parts or [])

    @property
    def own_buffers(self) -> list[Address]:
        """Where other processes find this member's part of each shared buffer."""
        return self.node.own_buffers if self.node is not None else []

    def buffers_belong_to(self, owner: BufferOwner) -> None:
        """Let processes join that have other shared buffers; the owner is not kept alive."""
        self._owner = weakref.ref(owner)

    @property
    def layout(self) -> tuple[str, str]:
        """The layout of the shared buffers; empty texts if nobody can make them anew."""
        owner = self._owner() if self._owner is not None else None
        return owner.layout if owner is not None else ("", "")

    # For the executor -----------------------------------------------------------------------------

    def tell(self, operation: str, cause: BaseException) -> None:
        """See the protocol."""
        if self._failure_detector is not None:
            self._failure_detector.break_communicator(self.key, self._text(operation, cause), self.ranks)

    def reject(self, number: int, before: int, operation: str, error: BaseException) -> None:
        """See the protocol."""
        if self._failure_detector is not None:
            if isinstance(error, ArgumentError):
                text = f"rank {self._own} rejected the arguments of {operation}: {error}"
            else:
                reason = f"{type(error).__name__}: {error}".rstrip(": .")
                text = f"rank {self._own} could not take part in {operation}: {reason}."
            self._failure_detector.reject(self.key, number, before, text)

    def rejection(self, number: int, before: int) -> str:
        """Why another member rejected an operation, "" if none did; arguments as in `reject`."""
        if self._failure_detector is None:
            return ""
        others = [rank for rank in self.ranks if rank != self._own]
        return self._failure_detector.rejection(self.key, number, before, others)

    def withdraw(self, operation: str, cause: BaseException) -> None:
        """See the protocol."""
        if self.node is not None:
            self.node.barriers.withdraw(self._text(operation, cause))

    def barrier(self, operation: Fingerprint) -> None:
        """See the protocol."""
        self.bytes.barrier(operation)

    def agree_on_lost(self, view: int, number: int, dead: Callable[[], AbstractSet[int]]) -> list[int]:
        """See the protocol."""
        assert self.node is not None
        return self.node.barriers.agree_on_lost(view, number, dead)

    def _text(self, operation: str, cause: BaseException) -> str:
        if isinstance(cause, RingError):
            what = f"rank {self._own} gave up {operation} ({cause})"
        else:
            what = f"rank {self._own} was interrupted in {operation} by {type(cause).__name__}"
        return f"{self._name}: {what} and is out of step with the other ranks; {REMEDY}."


class _Closed:
    """Stands in for the groups of a closed communicator, whose executor rejects every call before it gets here."""

    def __getattr__(self, name: str) -> Any:
        return None


_CLOSED: Any = _Closed()
