"""Processes that take the places of lost ones join a job: `on_failure="replace"`.

1. **It starts.** `ring run`, or the supervisor of a host, starts such a process like any rank. It runs the script from
   its first line, while the others train. Until it joins, it is a job of its own that looks like one of all slots:
   `rank()` is its slot, and collectives that could only return what it has itself are rejected. Since all run the same
   script, whatever it makes has its counterpart among the members. It reads the host's join info
   (rendezvous/slots.py), with the job's secret and network, and listens.
2. **It waits** at the place from which it can go on with the others' state (torch/training_state.py). It says so in the
   row of its slot, and where it listens in its liveness segment. The members of its host see that, and tell all others
   in the next pass.
3. **It joins.** At the end of a step, every member connects to the *joiner*. Over these connections all exchange what
   they have made for each other, and agree on a view of the job that has it (control/mesh_admission.py). It shards
   memory with the members of its host only. These take fresh memory into use, and members of several hosts make new
   connections for data, as after a loss. A joiner's world rank is beyond those of the start; its slot is the lost
   rank's. So once all slots are taken, everyone has the rank with which the job began.

A job grows in the same way: an added rank takes a slot that nobody has had. As no shard of the data belongs to that
slot yet, it joins only where the script divides data anew, at the beginning of an epoch. Until then, the size that it
sees is the number of slots in use.

On a host that has no member, nobody sees a process that waits. Its supervisor tells the coordinator in `ring run`,
which tells the supervisors of all hosts, and these tell their members: such a process is a *remote joiner*. From
point 3 on, all is the same.

Considered and rejected: to let `init` wait for the others, which would then wait for the joiner while it loads its
data; to stop the others' scripts and start them again at a common point, as torchrun and Horovod do; and that the
joiner connects to a member and asks. All members that it knows of may be lost by then, and it would have to find
others.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import MismatchError, PeerFailed, SharedMemoryError, name_ranks, quoted
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import Member
from ring_plugins.core.base.progress_line import ProgressLine
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.shm_group import create_segment
from ring_plugins.core.control.consensus import Decision
from ring_plugins.core.control.liveness import RUNNING, Liveness, LocalPeers
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.mesh_admission import Candidate, MeshAdmission, NotAdmitted, begin_together
from ring_plugins.core.control.rounds import CALL, OFFERS, READY
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.job import World
from ring_plugins.core.members.changes import who_joined
from ring_plugins.core.members.join_descriptors import (
    DifferentScript,
    Invitation,
    Renewal,
    descriptor_of,
    joiners_here,
    map_descriptors,
)
from ring_plugins.core.net.listener import Listener
from ring_plugins.core.rendezvous.slots import OwnSlot
from ring_plugins.core.world import current

#: Seconds between two looks of a joiner at the members, and attempts in which it cannot map memory.
_LOOK, _ATTEMPTS = 0.01, 5


def admit(place: str = "", lost: bool = True, added: bool = False) -> tuple[int, ...]:
    """Let those join that wait; all members call this at the same place, outside of operations.

    Args:
        place: label of this place in the script; joiners must have called `join` with the same one.
        lost: whether replacements of lost ranks may join here.
        added: whether added ranks may join here: the data is divided anew after this place.

    Returns:
        The world ranks of those that joined; none if they have ended meanwhile. The caller gives them the state of its
        training, and calls `Elastic.tell_changes` then.
    """
    return _admit_all(current(), _JoinBarrier(place, lost, added, []))


class _JoinBarrier(NamedTuple):
    """Where in the script members let processes join, and who has joined there; may travel as JSON.

    Attributes:
        place, lost, added: as in `admit`.
        joined: world ranks of those that have joined there.
    """

    place: str
    lost: bool
    added: bool
    joined: list[int]


def _admit_all(world: World, join_barrier: _JoinBarrier) -> tuple[int, ...]:
    """Let one process after the other join.

    Args:
        world: of this process, which may have joined just before.
        join_barrier: of all.
    """
    mesh, joined, elastic = _mesh(world), join_barrier.joined, world.elastic
    while True:
        began, shards = time.monotonic(), world.members.shards
        with _peers(world).own.ready_to_admit():
            by_member = world.communicator.all_gather_object(_waiting_here(world), "admit")
        taken = world.members.taken_slots
        waiting = [one for told in by_member for one in told if one.slot not in taken]
        # Data has no shards that nobody ever had, so slots beyond those are taken in order.
        lost, added = range(shards * join_barrier.lost), range(shards, shards + join_barrier.added)
        next_one = min((one for one in waiting if one.slot in lost or one.slot in added), default=None)
        elastic.pending = frozenset(one.slot for one in waiting if next_one is None or one.slot != next_one.slot)
        if next_one is None:  # members that have the result of the gather find a loss in it in their next operation
            break
        if mesh.pending is not None:  # they have found it here, since they have begun to let the process join
            elastic.agree()
            break
        if not _admit_one(world, next_one, join_barrier):
            break
        joined.append(next_one.rank)
        # If only such are left that have just joined, none has the state, and the transfer of it raises that.
        if world.world_rank == min((rank for rank in world.world_ranks if rank not in joined), default=None):
            logger.warning(who_joined([next_one.rank], world.members, time.monotonic() - began, shards))
    return tuple(joined)


def _waiting_here(world: World) -> list[Member]:
    """Pending joiners on this host and on hosts without members."""
    slot, members = _slot(world), world.members
    here = [one._replace(node=members.node_for(one.slot), domain=members.here.domain) for one in joiners_here(slot)]
    elsewhere = [one._replace(node=one.domain, host=quoted(one.host, 64)) for one in slot.remote_joiners()]
    return here + [one for one in elsewhere if one.domain != members.here.domain]


def _admit_one(world: World, joiner: Member, join_barrier: _JoinBarrier) -> bool:
    """Let a process join; returns whether it has."""
    mesh, listener, slot = _mesh(world), _listener(world), _slot(world)
    everyone = [world.members.known[rank] for rank in world.world_ranks]
    is_near = joiner.domain == world.members.here.domain
    is_of_this_supervisor = joiner.rank in [one.rank for one in slot.waiting()]
    wait = Wait("admission", world.failure_detector)
    admission = MeshAdmission(mesh, joiner.rank, joiner.pid if is_near else 0, world.members.view + 1, wait)
    listener.add(joiner)
    told = {"everyone": everyone, "joiner": joiner, "join_barrier": join_barrier}
    agreement: Agreement | None = None
    try:
        with mesh.admitting(joiner):
            admission.call(listener, told)
            agreement = prepare(world, everyone, joiner, join_barrier.place, admission.gather)
    except NotAdmitted:  # the joiner tells if it does not try again
        pass
    world.elastic.agree(joining=[joiner.rank] if agreement is not None else ())
    if joiner.rank not in mesh.joined:
        admission.give_up(listener)
        return False
    assert agreement is not None
    go_on(world, agreement)
    if is_of_this_supervisor:
        peer = _peers(world).others[joiner.rank]
        begin_together([peer], lambda: [one.rank for one in slot.members()])
    return True


def _mesh(world: World) -> Mesh:
    assert world.elastic.mesh is not None
    return world.elastic.mesh


def _slot(world: World) -> OwnSlot:
    assert world.own_slot is not None
    return world.own_slot


def _peers(world: World) -> LocalPeers:
    assert world.local_peers is not None
    return world.local_peers


def _listener(world: World) -> Listener:
    assert world.listener is not None
    return world.listener


def join(place: str = "", until: str = "let it join") -> tuple[int, ...]:
    """Wait until the members let this process join, and go on as one of them.

    Args:
        place: of the script, for the error if the members are at another one.
        until: what the members have to do before that, for the line that says what this process waits for.

    Returns:
        The world ranks of all that joined together. The members give them the state of their training next.

    Raises:
        SystemExit: no member is left.
        MismatchError: this process has come to another place than the members, or has made other communicators.
        PeerFailed: the members take this process for lost.
        SharedMemoryError: memory could not be mapped in several attempts.
    """
    world = current()
    slot, listener, own = _slot(world), _listener(world), _peers(world).own
    assert world.channel is not None
    candidate = Candidate(world.world_rank, listener, world.channel.peers)
    entry = world.members.here
    own.announce(json.dumps(entry))
    problems = list[str]()
    while len(problems) < _ATTEMPTS:
        slot.wait_to_join(entry)
        found = _wait_for_invitation(world, candidate, until)
        if found is None:
            logger.info(
                f"process {os.getpid()} ends before it could join: all ranks of this host have ended, and only those "
                "let it join."
            )
            world.exit_from_job(0)
        view, invitation = found
        try:
            agreement, entrance = _join_at(world, candidate, view, invitation, place)
        except DifferentScript as reason:
            candidate.withdraw(view)
            raise MismatchError(str(reason)) from None
        except NotAdmitted as reason:  # perhaps since a process has died, whose memory could not be mapped
            candidate.withdraw(view)
            if candidate.is_lost:
                raise PeerFailed(
                    f"the other ranks could not reach this process (process {os.getpid()} on {entry.host}), which "
                    f"waits to join, for {config.NETWORK_TIMEOUT.get():g} s, and count it as lost. Another one may "
                    "take its place.",
                    world.world_rank,
                ) from None
            problems += filter(None, [str(reason)])
            continue
        go_on(world, agreement, entrance)
        slot.take_part(entry)
        join_barrier = _JoinBarrier(*invitation["join_barrier"])
        join_barrier.joined.append(world.world_rank)
        return _admit_all(world, join_barrier)
    raise SharedMemoryError(f"this process cannot join the others: {problems[-1]}")


def _wait_for_invitation(world: World, candidate: Candidate, until: str) -> tuple[int, dict[str, Any]] | None:
    """Wait until members call this process; returns None if none is left on this host."""
    slot = _slot(world)
    how = "is to become" if world.elastic.is_added else "takes the place of"
    who = f"process {os.getpid()}, which {how} rank {world.shard[0]}, waits for"
    known: dict[Member, Liveness] = {}
    with ProgressLine() as line:
        while True:
            if (found := candidate.called()) is not None:
                return found
            members = _members_here(slot, known)
            if not slot.others_let_join and not members:
                return None
            line.show(lambda found=members: f"{who} {_what_it_waits_for(found, until)}")  # type: ignore[misc]
            time.sleep(_LOOK)


def _members_here(slot: OwnSlot, known: dict[Member, Liveness]) -> list[Liveness]:
    """The members that are left on this host; `known` are those that have been looked at before."""
    found = []
    for one in slot.members():
        try:
            if one not in known:
                known[one] = Liveness.open(one.liveness or (0, 0, 0), one.rank)
        except SharedMemoryError:  # it has just ended
            continue
        if known[one].state == RUNNING and not known[one].has_died():
            found.append(known[one])
    return found


def _what_it_waits_for(members: Sequence[Liveness], until: str) -> str:
    """Which members of this host a process waits for that is to join, and what they have to do."""
    ready = [member.rank for member in members if member.is_ready_to_admit]
    others = [member.rank for member in members if member.rank not in ready]
    if ready and not others:
        return f"{name_ranks(ready)} to let it join"
    have = f", as {name_ranks(ready)} {'has' if len(ready) == 1 else 'have'}" if ready else ""
    return f"{name_ranks(others)} to {until}{have}"


def _join_at(
    world: World, candidate: Candidate, view: int, invitation: Mapping[str, Any], place: str
) -> tuple[Agreement, Entrance]:
    """Join in the attempt that ends with this view.

    Raises:
        NotAdmitted: this process does not join.
    """
    listener = _listener(world)
    try:
        everyone, joiner = [Member.read(one) for one in invitation["everyone"]], Member.read(invitation["joiner"])
        _JoinBarrier(*invitation["join_barrier"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotAdmitted(f"a rank sent an invalid invitation: {str(invitation)[:200]!r}.") from None
    members = [one.rank for one in everyone]

    def gather(number: int, payload: Mapping[str, Any]) -> dict[int, Any]:
        told: dict[int, Any] = candidate.gather(view, number, members, payload)
        return told

    candidate.gather(view, CALL, members)  # all have connected
    agreement = prepare(world, everyone, joiner, place, gather)
    decision = candidate.decision(view, members)
    for one in everyone:
        listener.add(one)
    world.members.add([*everyone, joiner])
    world.members.follow(decision.members, view)
    mesh = world.elastic.new_mesh(decision.committed)
    return agreement, Entrance(mesh, candidate.backlog, decision)


def checksum_of(integers: Mapping[str, int]) -> int:
    """A checksum in 32 bits of integers of any size; other integers have the same one in one of 4 billion cases."""
    return zlib.crc32(",".join(f"{name}={int(value):x}" for name, value in integers.items()).encode())


def if_different(value: Any) -> dict[int, Any] | None:
    """What each rank has, by world rank, if it is not the same on all; collective.

    Args:
        value: of this rank; can be pickled and compared.
    """
    communicator = current().communicator
    by_rank = communicator.all_gather_object(value, "comparison of what ranks have")
    is_same = all(one == by_rank[0] for one in by_rank)
    return None if is_same else dict(zip(communicator.ranks, by_rank, strict=True))


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
