"""The record that each process of a starting job sends to all others in the first exchange."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.arguments import read_as, read_each, read_record
from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.member import Member, Members, virtual_nodes
from ring_plugins.core.control.liveness import Liveness
from ring_plugins.core.linux.interfaces import own_addresses
from ring_plugins.core.linux.shared_memory import shared_memory_domain
from ring_plugins.core.linux.thread_count import own_cores
from ring_plugins.core.members.policy import check_policies
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.net.tcp import TcpTransport
from ring_plugins.core.net.transport import Transport


class Introduction(NamedTuple):
    """What a process tells of itself in the first exchange of the job. Travels as JSON.

    Attributes:
        member: this process.
        server: from rank 0, where it listens if the others connect to it, and the secret of the job.
        records: whether rank 0 writes a timeline of the whole job.
        policy: its `FailurePolicy`.
        port: that it has reserved for other libraries; 0 if none.
    """

    member: Member
    server: dict[str, Any] | None
    records: bool
    policy: list[Any]
    port: int

    @classmethod
    def read(cls, item: Sequence[Any]) -> Introduction:
        """The introduction in a message.

        Raises:
            TypeError, ValueError: the message holds something else.
        """
        member, *rest = item
        found = read_record(cls, (Member.read(member), *rest))
        read_as(bool, found.policy[0])
        return found


def own_member(
    rank: int, slot: int, listener: Listener | None, liveness: Liveness | None, is_on_a_network: bool
) -> Member:
    """This process; its node is not known yet.

    Args:
        rank, slot: as in `Member`.
        listener, liveness: of this process, if it has them.
        is_on_a_network: whether ranks of other hosts may have to reach this one.
    """
    return Member(
        rank,
        slot,
        socket.gethostname(),
        os.getpid(),
        shared_memory_domain(),
        address=listener.address if listener is not None else "",
        port=listener.port if listener is not None else 0,
        liveness=liveness.address if liveness is not None else None,
        addresses=tuple(own_addresses()) if is_on_a_network else (),
        cores=own_cores(),
    )


def meet(
    rank: int, own: Introduction, gather: Callable[[Any], list[Any]], transport: Transport | None, has_slots: bool
) -> tuple[list[Introduction], Members]:
    """Exchange introductions with all ranks; returns them in rank order, and who the members are.

    Args:
        rank, own: of this process.
        gather: exchanges what JSON can hold.
        transport: between hosts.
        has_slots: whether supervisors of all hosts can start processes in the places of lost ones.

    Raises:
        LaunchError: a rank belongs to another job, or the ranks cannot reach each other.
        ArgumentError: the ranks' failure policies differ, or this job cannot go on after a loss.
    """
    told = read_each(gather(own), Introduction.read)
    nodes = virtual_nodes([one.member.domain for one in told], config.VIRTUAL_NODES.get())
    if len(set(nodes)) > 1 and transport is None:
        raise LaunchError(
            "RING_VIRTUAL_NODES needs a launcher that connects hosts: start the job with mpirun or torchrun."
        )
    members = Members(rank, [one.member._replace(node=node) for one, node in zip(told, nodes, strict=True)])
    if any(one.policy[0] for one in told):
        have_liveness = all(one.liveness for one in members.known.values())
        shares_memory = len(told) == 1 or (len(set(nodes)) == 1 and have_liveness)
        uses_sockets = isinstance(transport, TcpTransport) and have_liveness
        policies = [one.policy for one in told]
        check_policies(policies, shares_memory, uses_sockets, members.topology.summary, has_slots)
    return told, members
