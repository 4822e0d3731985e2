"""What members and joiners tell each other before a joiner joins, and how that is checked and put to use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import SharedMemoryError
from ring_plugins.core.base.member import Member
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.control.liveness import RUNNING, Liveness
from ring_plugins.core.control.mesh_admission import NotAdmitted
from ring_plugins.core.linux.shared_memory import Address, Segment
from ring_plugins.core.rendezvous.slots import Slots


class Invitation(NamedTuple):
    """Who takes part in an attempt.

    Attributes:
        everyone: members and joiners, in the order of their slots.
        joiners: world ranks of those that join.
    """

    everyone: list[Member]
    joiners: list[int]

    @property
    def ranks(self) -> list[int]:
        """World ranks in the order of slots."""
        return [one.rank for one in self.everyone]


def joiners_here(slots: Slots) -> list[Member]:
    """Processes of this host that wait to join, as each has announced itself.

    Args:
        slots: of this host.
    """
    found = []
    for one in slots.waiting():
        try:
            liveness = Liveness.open(one.liveness or (0, 0, 0), one.rank)
        except SharedMemoryError:  # it has just ended
            continue
        if liveness.announced and liveness.state == RUNNING and not liveness.has_died():
            # The kernel has found it in this process, whatever that says of itself: it may have to be killed.
            found.append(Member.read(json.loads(liveness.announced))._replace(rank=one.rank, pid=liveness.pid))
    return found


class Renewal(NamedTuple):
    """Memory and counters with which a communicator continues after a join.

    Attributes:
        segments: fresh control pages of the ranks of this host; empty if nobody joins on this host.
        parts: the parts of each shared buffer, by rank of this host; None if every rank frees its buffers, because a
            joiner's differ.
        key, operations: as in `HostCommunicator.renew`.
    """

    segments: list[Segment]
    parts: list[list[Segment]] | None
    key: int
    operations: int


class DifferentScript(NotAdmitted):
    """A joiner has reached another place in the script than the members; the text says how that shows."""


def descriptor_of(communicator: HostCommunicator, segment: Segment | None) -> dict[str, Any]:
    """Describes a communicator of this process, and fresh memory for it if the others can map that."""
    return {
        "name": communicator.name,
        "key": communicator.groups.key,
        "operations": communicator.statistics.operations,
        "pages": segment.address if segment is not None else None,
        "buffers": communicator.groups.own_buffers,
        "layout": communicator.groups.layout,
    }


# Reading what others have told: a mistake in it ends this attempt, on all ranks, and nothing else ------------------

#: Exceptions that malformed input raises.
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)


def _number(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 1 << 63:
        raise ValueError(found)
    return found


def _address(found: Any) -> Address:
    pid, file, nbytes = found
    return _number(pid), _number(file), _number(nbytes)


def _check_like(member: Mapping[str, Any], found: Mapping[str, Any], is_new: bool) -> None:
    """Check that a descriptor has the form of a member's, or of the part that joiners have."""
    for name in {"place", "descriptors"}.intersection(member) if is_new else member:
        wanted, value = member[name], found[name]
        if type(value) is not type(wanted) or (isinstance(wanted, list) and len(value) != len(wanted)):
            raise ValueError(name)


def _checked_descriptor(found: Any) -> dict[str, Any]:
    """What `descriptor_of` made, after its way through JSON."""
    first, second = found["layout"]
    return {
        "name": str(found["name"]),
        "key": _number(found["key"]),
        "operations": _number(found["operations"]),
        "pages": _address(found["pages"]) if found["pages"] is not None else None,
        "buffers": [_address(buffer) for buffer in found["buffers"]],
        "layout": [str(first), str(second)],
    }


def _check_places(places: Mapping[int, str], invitation: Invitation) -> None:
    """Check that joiners have come to the place in the script at which the members are.

    Raises:
        DifferentScript: one has not, as all find alike.
    """
    wanted = next(places[rank] for rank in invitation.ranks if rank not in invitation.joiners)
    for rank in invitation.joiners:
        if places[rank] != wanted:
            raise DifferentScript(
                f"rank {rank} cannot join: its script has come to another place ({places[rank]}) than the others "
                f"({wanted}). All ranks must run the same script, and make the same objects in the same order."
            )


def _agreed(
    descriptors: Mapping[int, Mapping[int, dict[str, Any]]], invitation: Invitation
) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """Descriptors of the communicators that all ranks have, by creation order, and which of them free their buffers.

    Raises:
        DifferentScript: a joiner has others than the members, as all find alike.
        NotAdmitted: the members' differ, as all find alike.
    """
    members = [rank for rank in invitation.ranks if rank not in invitation.joiners]
    # One that a member has dropped is of no use to the others, which have not collected it yet.
    common = [key for key in sorted(descriptors[members[0]]) if all(key in descriptors[rank] for rank in members)]
    first = {key: descriptors[members[0]][key] for key in common}
    wanted = {key: _shape(descriptor) for key, descriptor in first.items()}
    for rank in members[1:]:
        if any(_shape(descriptors[rank][key]) != shape for key, shape in wanted.items()):
            raise NotAdmitted(f"ranks {members[0]} and {rank} do not have the same buffers now.")
    dropped = set[int]()
    for rank in invitation.joiners:
        found = {key: _shape(descriptor) for key, descriptor in descriptors[rank].items()}
        differ = {key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)}
        if not all(_can_be_made_alike(found.get(key), wanted.get(key)) for key in differ):
            raise DifferentScript(
                f"rank {rank} cannot join: its script has come to another place. It has made {_listed(found)}, and the "
                f"others have {_listed(wanted)}. Make the same model on all ranks, and optimizers and averagers in the "
                "same order, before the TrainingState, and with all parameters that they will ever train, frozen ones "
                "too: no process can join once the others have added parameters or made a further optimizer."
            )
        dropped |= differ
    return first, dropped


def _shape(descriptor: Mapping[str, Any]) -> tuple[Any, ...]:
    """What ranks must have alike, or can make alike: the name, and the layout and bytes of each shared buffer."""
    return (descriptor["name"], *descriptor["layout"], *(nbytes for _, _, nbytes in descriptor["buffers"]))


def _can_be_made_alike(found: tuple[Any, ...] | None, wanted: tuple[Any, ...] | None) -> bool:
    """Whether processes with these shapes will have the same buffers once all have dropped theirs."""
    return found is not None and wanted is not None and found[:2] == wanted[:2] and bool(wanted[1])


def _listed(shapes: Mapping[int, tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} ({sum(nbytes)} bytes)" for name, _, _, *nbytes in shapes.values())


# What all do with it ------------------------------------------------------------------------------


def map_descriptors(
    told: Mapping[int, Mapping[str, Any]],
    invitation: Invitation,
    communicators: Mapping[int, HostCommunicator],
    own: Mapping[int, Segment],
    rank: int,
    here: Sequence[int],
) -> dict[HostCommunicator, Renewal]:
    """Compare the descriptors of all ranks, and map the memory that they offer.

    Args:
        told: in the round of descriptors, by world rank.
        invitation: who takes part.
        communicators: of this process, by creation order.
        own: segments that this process offers, likewise.
        rank: its world rank.
        here: world ranks whose memory is mapped.

    Raises:
        NotAdmitted: nobody joins, as all find alike.
        SharedMemoryError: memory could not be mapped, on this rank; others may have succeeded.
    """
    first_member = next(one for one in invitation.ranks if one not in invitation.joiners)
    descriptors: dict[int, dict[int, dict[str, Any]]] = {}
    for one, of_rank in told.items():
        try:
            _check_like(told[first_member], of_rank, one in invitation.joiners)
            descriptors[one] = {
                int(key): _checked_descriptor(descriptor) for key, descriptor in of_rank["descriptors"].items()
            }
        except _UNREADABLE:
            raise NotAdmitted(f"rank {one} has told what nobody understands.") from None
    _check_places({one: of_rank["place"] for one, of_rank in told.items()}, invitation)
    mapped = {}
    agreed, dropped = _agreed(descriptors, invitation)
    for key, first in agreed.items():
        if (communicator := communicators.get(key)) is None:
            continue
        segments = [own[key] if one == rank else Segment.open(descriptors[one][key]["pages"], one) for one in here]
        parts = None
        if key not in dropped:
            count = len(first["buffers"])
            parts = [[Segment.open(descriptors[one][key]["buffers"][i], one) for one in here] for i in range(count)]
        mapped[communicator] = Renewal(segments, parts, first["key"], first["operations"])
    return mapped
