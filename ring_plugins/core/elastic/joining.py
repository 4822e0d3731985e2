"""Processes that take the places of lost ones join a job: `on_failure="replace"`.

1. **It starts.** `ring run` starts such a process like any rank. It runs the script from its first line, while the
   others train. Until it joins, it is a job of its own that looks like one of all slots: `rank()` is its slot, and
   collectives that could only return what it has itself are rejected. Since all run the same script, whatever it makes
   has its counterpart among the members.
2. **It waits** at the place from which it can go on with the others' state (torch/training_state.py). It says so in the
   row of its slot (rendezvous/slots.py). A member that sees this tells all others in the next pass.
3. **It joins.** At the end of a step, all members call the processes that wait, the *joiners*. All of them together
   exchange what they need (`take_part`, control/admission.py). A joiner's world rank is beyond those of the start;
   its slot is the lost rank's. So once all slots are taken, everyone has the rank with which the job began.

A job grows in the same way: an added rank takes a slot that nobody has had. As no shard of the data belongs to that
slot yet, it joins only where the script divides data anew, at the beginning of an epoch. Until then, the size that it
sees is the number of slots in use.

Considered and rejected: to let `init` wait for the others, which would then wait for the joiner while it loads its
data; and to stop the others' scripts and start them again at a common point, as torchrun and Horovod do.
"""

from __future__ import annotations

import itertools
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ring_plugins.core.base.errors import MismatchError, SharedMemoryError, name_ranks
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.progress_line import ProgressLine
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.host_groups import Member
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.collectives.shm_group import create_segment
from ring_plugins.core.control.admission import Admission, NotAdmitted, begin_together, told_by
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.liveness import RUNNING, Liveness
from ring_plugins.core.elastic import joining_between_hosts
from ring_plugins.core.elastic.changes import MembershipChange
from ring_plugins.core.elastic.join_descriptors import (
    DifferentScript,
    Invitation,
    Renewal,
    descriptor_of,
    map_descriptors,
)
from ring_plugins.core.elastic.wording import who_joined
from ring_plugins.core.linux.shared_memory import Address, Segment
from ring_plugins.core.rendezvous.slots import SlotOwner, Slots
from ring_plugins.core.rendezvous.spawn import slots
from ring_plugins.core.world import World, current

#: Seconds between two looks of a joiner at the members.
_LOOK = 0.01
#: Rounds of an attempt to let ranks join, and some more; and attempts in which somebody cannot map memory.
_ROUNDS, _ATTEMPTS = 16, 5


def admit(place: str = "", lost: bool = True, added: bool = False) -> tuple[int, ...]:
    """Let those join that wait; all members call this at the same place, outside of operations.

    Args:
        place: of the script, as `join` gets it in processes that are to come to the same one.
        lost: whether those may join here that take the places of lost ranks.
        added: whether those may by which the job grows: data is divided anew behind this place.

    Returns:
        The world ranks of those that joined; none if they have ended meanwhile. The caller gives them the state of its
        training, and calls `Elastic.tell_changes` then.
    """
    world, places, began = current(), slots(), time.monotonic()
    if world.elastic.mesh is not None:
        return joining_between_hosts.admit(world, place, lost, added)
    assert places is not None
    peers, shards_before = world.local_peers, world.processes.shards
    with peers.own.ready_to_admit():
        start, waiting = repeated(
            lambda: world.communicator.broadcast_object(
                (peers.own.last_round + _ROUNDS, [one for one in places.waiting() if one.is_there()]),
                operation="admit",
            )
        )
    members = world.processes.owners(peers)
    taken, ranks = {one.slot for one in members}, {one.world_rank for one in members}
    waiting = [one for one in waiting if one.slot not in taken and one.world_rank not in ranks]
    world.elastic.pending = frozenset(one.slot for one in waiting)
    # Data has no shards that nobody ever had, so slots beyond those are taken in order.
    last = next(slot for slot in itertools.count(shards_before) if slot not in world.elastic.pending or not added)
    waiting = [one for one in waiting if (lost or one.slot >= shards_before) and one.slot < last]
    world.elastic.pending -= {one.slot for one in waiting}
    if not waiting:
        return ()
    invitation = Invitation(start, sorted([*members, *waiting]), [one.world_rank for one in waiting])
    entry = {**world.introduction(), "place": place}
    try:
        joined = take_part(invitation, peers.own, peers.others, world.recovering_communicators(), entry)
    except NotAdmitted:  # the joiner tells if it does not try again
        return ()
    joined.go_on(world)
    new = [peers.others[rank] for rank in invitation.joiners]
    begin_together(new, lambda: [one.world_rank for one in places.members()])
    if world.world_rank == next(rank for rank in world.world_ranks if rank not in invitation.joiners):
        slot_of, pids = {one.world_rank: one.slot for one in waiting}, world.processes.pids
        logger.warning(who_joined(slot_of, pids, world.world_ranks, time.monotonic() - began, shards_before))
    return tuple(invitation.joiners)


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
        SharedMemoryError: memory could not be mapped in several attempts.
    """
    world, places = current(), slots()
    if world.own_slot is not None:
        return joining_between_hosts.join(world, place, until)
    assert places is not None
    peers = world.local_peers
    own = world.processes.owners(peers)[0]
    problems = list[str]()
    while len(problems) < _ATTEMPTS:
        places.take(own, as_member=False)
        invitation = wait_for_invitation(own, peers.own.last_round, places, until)
        if invitation is None:
            logger.info(f"process {os.getpid()} ends: the job has ended before it could join.")
            world.exit_from_job(0)
        entry = {**world.introduction(), "place": place}
        try:
            joined = take_part(invitation, peers.own, {}, world.recovering_communicators(), entry)
        except DifferentScript as reason:
            raise MismatchError(str(reason)) from None
        except NotAdmitted as reason:  # perhaps since a process has died, whose memory could not be mapped
            problems += filter(None, [str(reason)])
            continue
        joined.go_on(world)
        places.take(own, as_member=True)
        return tuple(invitation.joiners)
    raise SharedMemoryError(f"this process cannot join the others: {problems[-1]}")


def untold_changes() -> list[MembershipChange]:
    """Changes that a member's script is yet to be told of; the state that it gives to joiners lacks them, too."""
    return list(current().elastic.changes.untold)


def hear_of(changes: Sequence[MembershipChange]) -> None:
    """In a joiner, have the script told of changes before it joined, as a member told them.

    All are told at the same place, and equally often. So one that has joined behind another hears of that, too.
    """
    own, rank, known = current().world_rank, current().topology.rank, current().elastic.changes.untold
    before = list(itertools.takewhile(lambda change: own not in change.joined, changes))
    known.extendleft(change._replace(rank_before=rank, rank=rank) for change in reversed(before))


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


class Joined:
    """What all have agreed on.

    Args:
        invitation: who takes part.
        told: what each told in the second round, by world rank.
        peers: liveness of all others.
        mapped: with what each communicator goes on.
    """

    def __init__(
        self,
        invitation: Invitation,
        told: Mapping[int, Mapping[str, Any]],
        peers: Sequence[Liveness],
        mapped: Mapping[HostCommunicator, Renewal],
    ) -> None:
        self._invitation, self._told, self._peers, self._mapped = invitation, told, peers, mapped

    def go_on(self, world: World) -> None:
        """Go on with everyone."""
        world.extend(self._invitation.everyone, self._told, self._peers, self._renew_communicators)

    def _renew_communicators(self, failure_detector: FailureDetector) -> None:
        for communicator, (segments, parts, key, operations) in self._mapped.items():
            members = [Member(rank, "", None, key) for rank in self._invitation.ranks]
            communicator.renew(members, segments, parts, operations, failure_detector)


def wait_for_invitation(own: SlotOwner, last_round: int, slots: Slots, until: str = "let it join") -> Invitation | None:
    """Wait until the members call this process; returns None if none of them is left.

    Args:
        own: this process, which has said that it waits.
        last_round: of the attempts in which it took part.
        slots: where to find the members.
        until: what members have to do before they call, for the line that says what this process waits for.
    """
    known: dict[Address, Liveness] = {}
    with ProgressLine() as line:
        while True:
            living = []
            for owner in slots.members():
                if owner.address not in known:
                    try:
                        known[owner.address] = Liveness.open(owner.address, owner.world_rank)
                    except SharedMemoryError:  # it has just ended
                        continue
                peer = known[owner.address]
                if peer.state != RUNNING or peer.has_died():
                    continue
                living.append(peer)
                invitation = _invitation_of(peer) if peer.last_round > last_round else None
                if invitation is not None and own.world_rank in invitation.joiners:
                    return invitation
            if not living:
                return None
            line.show(lambda found=living: what_is_pending(own, found, until))  # type: ignore[misc]
            time.sleep(_LOOK)


def what_is_pending(own: SlotOwner, members: Sequence[Liveness], until: str) -> str:
    """What a process that is to join waits for, without a full stop: which members, and what they have to do.

    Args:
        own: that process.
        members: those that live.
        until: see `wait_for_invitation`.
    """
    ready = [member.rank for member in members if member.is_ready_to_admit]
    others = [member.rank for member in members if member.rank not in ready]
    who = f"process {own.address[0]}, which takes the place of rank {own.slot}, waits"
    if not others:
        return f"{who} for {name_ranks(ready)} to let it join"
    have = f", as {name_ranks(ready)} {'has' if len(ready) == 1 else 'have'}" if ready else ""
    return f"{who} for {name_ranks(others)} to {until}{have}"


def _invitation_of(member: Liveness) -> Invitation | None:
    try:
        return Invitation.of(told_by(member, member.last_round))
    except NotAdmitted:
        return None


def take_part(
    invitation: Invitation,
    own: Liveness,
    known: Mapping[int, Liveness],
    communicators: Mapping[int, HostCommunicator],
    entry: Mapping[str, Any],
) -> Joined:
    """Let joiners join: all that the invitation names call this at the same place.

    Args:
        invitation: who takes part.
        own: of this process.
        known: liveness of others that this process has mapped.
        communicators: that it has, by creation order.
        entry: what else to tell the others.

    Raises:
        NotAdmitted: nobody joins, as all find. Nothing has changed then.
    """
    peers, problem = [], ""
    for owner in invitation.everyone:
        if owner.world_rank != own.rank:
            try:
                peer = known.get(owner.world_rank) or Liveness.open(owner.address, owner.world_rank)
                peers.append(peer)
            except SharedMemoryError as error:
                problem = str(error)
    admission = Admission(own, peers, invitation.start, invitation.joiners)
    admission.gather({**invitation._asdict(), "problem": problem})
    segments: dict[int, Segment] = {}
    try:
        segments = {key: create_segment() for key in communicators}
    except SharedMemoryError as error:
        problem = f"rank {own.rank} {error}"
    descriptors = {key: descriptor_of(communicators[key], segment) for key, segment in segments.items()}
    told = admission.gather({**entry, "descriptors": descriptors, "problem": problem})
    mapped: dict[HostCommunicator, Renewal] = {}
    try:
        mapped = map_descriptors(told, invitation, communicators, segments, own.rank, invitation.ranks)
    except SharedMemoryError as error:
        problem = f"rank {own.rank} {error}"
    admission.gather({"problem": problem})
    for segment in segments.values():
        segment.close_file()
    return Joined(invitation, told, peers, mapped)
