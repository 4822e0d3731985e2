"""What a joiner and the members make for each other, and how all go on with it once they have agreed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import SharedMemoryError
from ring_plugins.core.base.member import Member
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.shm_group import create_segment
from ring_plugins.core.control.consensus import Decision
from ring_plugins.core.control.liveness import Liveness
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.mesh_admission import NotAdmitted
from ring_plugins.core.control.rounds import OFFERS, READY
from ring_plugins.core.job import World
from ring_plugins.core.members.join_descriptors import Invitation, Renewal, descriptor_of, map_descriptors


class Agreement(NamedTuple):
    """What all are ready to go on with.

    Attributes:
        invitation: who takes part.
        told: what each told, by world rank.
        peers: liveness of those others on this host that this process has mapped now.
        mapped: with what each communicator goes on.
    """

    invitation: Invitation
    told: Mapping[int, Mapping[str, Any]]
    peers: Sequence[Liveness]
    mapped: Mapping[HostCommunicator, Renewal]


class Entrance(NamedTuple):
    """How a joiner becomes a member.

    Attributes:
        mesh: of this process, which takes over these:
        backlog: messages that have arrived already, each with its sender.
        decision: that this process joins.
    """

    mesh: Mesh
    backlog: Sequence[tuple[int, bytes]]
    decision: Decision


def _introduction(world: World) -> dict[str, Any]:
    """What a member tells a joiner of the job; nothing from the joiner."""
    if world.is_joining:
        return {}
    return {
        "view": world.members.view, "made": world.made, "secret": world.secret.decode(),
        "shards": world.members.shards, "pending": sorted(world.elastic.pending),
        "slots": world.members.told_of_slots(),
    }  # fmt: skip


def prepare(
    world: World,
    members: Sequence[Member],
    joiner: Member,
    place: str,
    gather: Callable[[int, Mapping[str, Any]], dict[int, Any]],
) -> Agreement:
    """Exchange with all members and the joiner what each has made for the others, and map it.

    Raises:
        NotAdmitted: the joiner does not join now.
    """
    everyone = sorted([*members, joiner], key=lambda one: one.slot)
    own = next(one for one in everyone if one.rank == world.world_rank)
    invitation = Invitation(everyone, [joiner.rank])
    here = [one.rank for one in everyone if one.node == own.node]
    is_here = joiner.rank in here
    communicators = world.recovering_communicators()
    try:
        segments = {key: create_segment() for key in communicators} if is_here else {}
        near = [one for one in everyone if one.domain == own.domain and one.rank != own.rank]
        new = near if world.is_joining else [one for one in near if one is joiner]
        peers = [Liveness.open(one.liveness or (0, 0, 0), one.rank) for one in new]
        descriptors = {key: descriptor_of(one, segments.get(key)) for key, one in communicators.items()}
        told = gather(OFFERS, {**_introduction(world), "place": place, "descriptors": descriptors})
        mapped = map_descriptors(told, invitation, communicators, segments, own.rank, here if is_here else [])
    except SharedMemoryError as error:
        raise NotAdmitted(f"rank {own.rank} {error}") from None
    gather(READY, {})
    for segment in segments.values():
        segment.close_file()
    return Agreement(invitation, told, peers, mapped)


def go_on(world: World, agreement: Agreement, entrance: Entrance | None = None) -> None:
    """Go on with everyone; nothing of this fails.

    Args:
        world: of this process.
        agreement: of all.
        entrance: in the joiner.
    """
    (everyone, joined), told, peers, mapped = agreement
    of_members = next(one for one in told.values() if "view" in one)
    if world.local_peers is not None:
        world.local_peers.add(peers)
    if entrance is not None:
        world.members.learn_of_slots(of_members["slots"])
        world.secret, world.made = of_members["secret"].encode(), of_members["made"]
        world.elastic.pending = frozenset(of_members["pending"])  # who may join later, as all members have agreed
        monitor = world.watch(records=False)
        world.begin_to_recover(entrance.mesh)
        world.is_joining = False
    world.members.divide_among(max(of_members["shards"], 1 + everyone[-1].slot))
    for communicator, (segments, parts, key, operations) in mapped.items():
        communicator.renew(everyone, key, segments, parts, operations, world.failure_detector)
    if entrance is not None:
        entrance.mesh.go_on_from(*entrance[1:])
    world.elastic.follow_joined(joined)
    world.write_join_info()
    if entrance is not None:
        monitor.start()
        world.elastic.preemption_notice.install()
