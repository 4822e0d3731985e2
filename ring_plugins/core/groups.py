"""Groups: some ranks of the job that communicate among themselves.

A group has a communicator of its own, so its operations have an order of their own, and disjoint groups work at once.
Its members alone make it: they meet over the control channel (core/control/meetings.py). On the others the same call
returns at once, so a script may make all groups on all ranks, as it does with torch's `new_group`, or each rank makes
its own. Whatever needs further communicators, such as the buckets of an optimizer, makes them within the group.

A group has what of a `World` makes communicators. So a function with `group=` asks `group or current()` for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import index
from typing import Any, NoReturn

from ring_plugins.core.base.errors import ArgumentError, RingError, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.collectives.validation import check_rank, rejections_told
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gpu.stream import Streams
from ring_plugins.core.job import World
from ring_plugins.core.world import current

#: Each returns the ranks in the job of another library's group, or None for what is none of its groups; none for a
#: group that this rank is not in. Plugins append theirs.
group_readers: list[Callable[[Any], Sequence[int] | None]] = []


class Group:
    """Some ranks of the job, which communicate among themselves: the `group=` of collectives and optimizers.

    All members call this, with equal `ranks`; members of several groups make these in one order. The other ranks may
    call it too, and wait for nobody. Its collectives are called by its members only, and run in the order of their
    calls. Results in rank order are in the order of `ranks`.

    Args:
        ranks: of the job, in the order in which they are numbered in the group; those of a set are sorted.
        purpose: what this package makes it for, which may be on another thread.

    Attributes:
        ranks: as given.
        size: how many these are.
        rank: this process's place among them, None if it is not one.

    Raises:
        ArgumentError: `ranks` are not distinct ranks of the job; or some ranks only, with `on_failure="continue"` or
            "replace", which groups of scripts do not support.
        NotInitialized: `init()` has not been called.
        RingError: this process was forked from a rank.
        PeerFailed: another member is gone.
        DeadlockError: members make different groups.
    """

    def __init__(self, ranks: Iterable[int], *, purpose: str = "") -> None:
        self._world = world = current()
        given = _checked(ranks, world)
        #: For messages.
        self.name = f"{purpose or 'group'} of {name_ranks(given, 8)}" if given else "empty group"
        self._given, self._is_closed = given, False
        self._of_devices: dict[int, DeviceCommunicator] = {}
        self._communicator: Communicator | None = None
        if world.recovers and given == (*range(world.topology.size),) and not purpose:
            self.name = "group of all ranks"  # also to processes that join when there are more or fewer
            self._communicator = world.new_communicator(self.name)
            return
        if world.recovers and purpose and given == (world.topology.rank,):  # while others make one of several
            world.communicator.all_gather_object(None)
            self._communicator = SingleCommunicator(self.name, world.world_rank)
            return
        world_ranks = tuple(world.world_ranks[rank] for rank in given)
        if world.recovers and purpose:  # of ranks that no other host waits for
            told = partial(_gathered_by_all, world.communicator, world_ranks)
            self._communicator = world.new_communicator(
                self.name, world_ranks, told, within=world.communicator, within_host=world.recovery_within_host()
            )
            return
        world.refuse_to_recover("ring_plugins.Group, unless of all ranks in order,")
        if world.topology.rank in given:
            gather = partial(world.meetings.gather, self.name, world_ranks) if world.meetings is not None else None
            self._communicator = world.new_communicator(self.name, world_ranks, gather)

    @classmethod
    def split(cls, color: Any, key: int = 0, *, group: Group | None = None) -> Group:
        """Make one group for each color, of the ranks that give it; collective among all ranks.

        Args:
            color: tells the groups apart: equal ones, such as numbers or texts, are one group's. None for no group: an
                empty one is returned.
            key: ranks of a color are numbered by this, and those of equal keys in the order of the job.
            group: whose ranks are split, by default all. Only its members call then.

        Raises:
            ArgumentError: `color` cannot be sent, or differs from itself then; or `key` is not a number.
        """
        among = communicator_of(group)
        with rejections_told(among, "Group.split"):
            try:
                hash(color)
                place = index(key)
            except TypeError as error:
                raise ArgumentError(
                    f"color={color!r:.60}, key={key!r:.60}: color must be hashable, such as a number or a text, and "
                    "key a whole number."
                ) from error
            if not _equals_its_copy(color):
                raise ArgumentError(
                    f"color={color!r:.60} does not equal its copy, which is what other ranks get of it, so it cannot "
                    "tell who is of one group: pass a number or a text."
                )
        told = among.all_gather_object((color, place), "Group.split")
        order = (current().communicator if group is None else among).ranks
        mine = [(other[1], i) for i, other in enumerate(told) if color is not None and other[0] == color]
        return cls([current().world_ranks.index(order[i]) for _, i in sorted(mine)])

    @classmethod
    def of(cls, other: Any) -> Group:
        """Make a group of the ranks of another library's group; collective among its members.

        Args:
            other: a process group of torch.distributed, of whatever backend, or a communicator of mpi4py; a `Group` is
                returned as it is.

        Raises:
            ArgumentError: it is none of these.
        """
        if isinstance(other, Group):
            return other
        for read in group_readers:
            if (ranks := read(other)) is not None:
                return cls(ranks)
        raise ArgumentError(
            f"{type(other).__module__}.{type(other).__qualname__} is not a group that ring_plugins knows. Import the "
            "plugin of its framework first, or call ring_plugins.Group(ranks)."
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the job, in the order of the group."""
        if not self._world.recovers or self._communicator is None:
            return self._given
        return tuple(map(self._world.world_ranks.index, self._communicator.ranks))

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int | None:
        """This process's number in the group, None outside."""
        return None if self._communicator is None else self._communicator.rank

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def __copy__(self) -> Group:
        return self  # a copied model or callback communicates among the same ranks

    def __deepcopy__(self, _: object) -> Group:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            f"the {self.name} cannot be pickled or sent, since it is a connection among these ranks: pass on "
            f"{list(self._given)}, and call ring_plugins.Group with these in the ranks, after init()."
        )

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def close(self) -> None:
        """End its communication and release its memory; what was made within it stays. All members call this."""
        if not self._is_closed and self._communicator is not None:
            for of_device in self._of_devices.values():
                of_device.close()
            self._communicator.close()
        self._is_closed = True

    # What a `World` has, too ------------------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:
        """Of its members, for the public functions.

        Raises:
            ArgumentError: this rank is not one of them.
            RingError: the group, or the job that it was made in, has been closed.
        """
        if self._communicator is None:
            raise ArgumentError(
                f"rank {self._world.topology.rank} is not in the {self.name}, and takes no part in what its members "
                "do. Call this only where `ring_plugins.rank() in group`."
            )
        if self._is_closed or self._world.is_closed:
            raise RingError(
                f"rank {self._world.topology.rank} uses the {self.name} after "
                f"{'it has been closed' if self._is_closed else 'shutdown()'}: make one again, by ring_plugins.Group."
            )
        return self._communicator

    def new_communicator(self, name: str) -> Communicator:
        """A further communicator of its members, whose operations have an order of their own; collective.

        Args:
            name: of what it is for; messages add the group.
        """
        within = self.communicator
        return self._world.new_communicator(f"{name} of {self.name}", within.ranks, within=within)

    def new_device_communicator(self, name: str, device: int, streams: Streams) -> DeviceCommunicator:
        """As `World.new_device_communicator`, among its members."""
        within = self.communicator
        name = f"{name} of {self.name}"
        return self._world.new_device_communicator(name, device, streams, within.ranks, within=within)

    def device_communicator(self, device: int, streams: Streams) -> DeviceCommunicator:
        """As `World.device_communicator`, of its members."""
        within = self.communicator
        if device not in self._of_devices:
            self._of_devices[device] = self._world.new_device_communicator(
                f"{self.name} on GPUs", device, streams, within.ranks, within=within
            )
        return self._of_devices[device]


def communicator_of(group: Group | None) -> Communicator:
    """For the public functions: that of a group, or of all ranks.

    Raises:
        ArgumentError: `group` is not a group, or this rank is not in it.
    """
    if group is None:
        return current().communicator
    if not isinstance(group, Group):
        raise ArgumentError(
            f"group={group!r:.60} is not a ring_plugins.Group; make one by ring_plugins.Group(ranks), or of another "
            "library's group by ring_plugins.Group.of(group)."
        )
    return group.communicator


def _gathered_by_all(communicator: Communicator[Any], ranks: Sequence[int], item: Any) -> list[Any]:
    """What these ranks offer, while all others offer something to their own."""
    told = dict(zip(communicator.ranks, communicator.all_gather_object(item), strict=True))
    return [told[rank] for rank in ranks if rank in told]


def root_in(root: int, communicator: Communicator[Any], world: World) -> int:
    """The place in a communicator of a root, which is numbered among the ranks of the job.

    Raises:
        ArgumentError: it is not a rank, or not one of the communicator.
    """
    if communicator is world.communicator:
        return check_rank(root, communicator)
    rank = world.communicator.ranks[check_rank(root, world.communicator)]
    if rank not in communicator.ranks:
        raise ArgumentError(f"root={root} is not in the {communicator.name}; it is a rank of the job.")
    return communicator.ranks.index(rank)


def _checked(ranks: Iterable[int], world: World) -> tuple[int, ...]:
    if isinstance(ranks, AbstractSet):  # whose order depends on how it was filled
        ranks = sorted(ranks)
    try:
        given = tuple([-1 if isinstance(rank, bool) else index(rank) for rank in ranks])
    except TypeError:
        given = (-1,)
    size = world.topology.size
    if len(set(given)) != len(given) or not set(given) <= set(range(size)):
        raise ArgumentError(f"ranks={ranks!r:.200} are not distinct ranks of a job of {size}, such as [0, 1].")
    return given


def _equals_its_copy(color: Any) -> bool:
    """Whether other ranks get something that equals `color`; neither NaN does, nor an object without `__eq__`."""
    try:
        copied = copy.deepcopy(color)
    except Exception:
        return True  # the gathering says why
    try:
        return bool(copied == color)
    except Exception:  # as that of a tensor of several elements
        return False


def _of_mpi(other: Any) -> Sequence[int] | None:
    if type(other).__module__.partition(".")[0] != "mpi4py" or not current().launcher.uses_mpi:
        return None
    from mpi4py import MPI

    return MPI.Group.Translate_ranks(other.Get_group(), list(range(other.Get_size())), MPI.COMM_WORLD.Get_group())


group_readers.append(_of_mpi)
