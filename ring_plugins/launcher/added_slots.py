"""Which host has which added slot: slots that `ring add-ranks` has asked for, in a job on several hosts.

The coordinator in `ring run` keeps one list: the host of each such slot. Whenever the list changes, all supervisors get
the whole of it. They start processes for the slots of their host, end those for slots that are no longer theirs, and
say which have joined. So they have to agree on nothing but the list.

Two kinds of slots can be given out: those of hosts that have lost all ranks, and new ones behind all others, up to
`--max-ranks`. New slots are filled in order on all hosts, since data has no shard for a slot that nobody has had. While
one slot's process cannot join, those behind it wait. Hence:

- If a host is lost before its process has joined, that slot and all behind it are given out anew, among the hosts that
  are left.
- If a host gives a slot up, since its script fails again and again, that slot and all behind it are taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.control.liveness import MOST_MEMBERS

#: How many hosts may be added to a job, and the world ranks that their processes have from there on.
MOST_ADDED, _FIRST_OF_ADDED = 16, MOST_MEMBERS * 3 // 4


def world_ranks(host: int, hosts: int | None, used: int) -> range:
    """The world ranks for a host's processes in the places of others. No two hosts have the same.

    Args:
        host: its number.
        hosts: with how many the job began; None for a host that was added, which does not know.
        used: how many are used otherwise.
    """
    if hosts is None:
        return range(_FIRST_OF_ADDED + host % MOST_ADDED, MOST_MEMBERS, MOST_ADDED)
    return range(used + host, _FIRST_OF_ADDED, hosts)


class AddedSlot(NamedTuple):
    """An added slot and its owner; may travel as JSON.

    Attributes:
        slot: its number.
        host: number of the host.
        attempt: how often it was given out before. The first process of attempt 0 has the slot's number for a
            world rank; all others have numbers of their host's.
    """

    slot: int
    host: int
    attempt: int


@dataclass
class _Slot:
    """What is known of a slot.

    Attributes:
        host: number of the one that has it, None for none.
        attempt: as in `AddedSlot`; -1 before it is given out.
        has_joined: whether its process has joined.
        had_member: whether it ever had a member. Data has a shard for it then.
    """

    host: int | None = None
    attempt: int = -1
    has_joined: bool = False
    had_member: bool = False


class AddedSlots:
    """Gives out slots.

    Args:
        size: number of ranks at the start.
        most: up to how many the job may grow; 0 for no more.
        ranks: those that each host has at the start, by its number.

    Attributes:
        leaving: slots whose processes are to leave, until they have.
    """

    def __init__(self, size: int, most: int, ranks: Sequence[Sequence[int]]) -> None:
        self._size, self._most, self._in_use = size, max(most, size), size
        self._num_hosts, self.leaving = len(ranks), set[int]()
        self._slots = [_Slot() for _ in range(self._most)]
        for host, of_host in enumerate(ranks):
            for slot in of_host:
                self._slots[slot] = _Slot(host, 0, True, True)

    def told(self) -> dict[str, Any]:
        """What supervisors need to know; JSON can hold it."""
        given = [
            AddedSlot(number, slot.host, slot.attempt)
            for number, slot in enumerate(self._slots)
            if slot.host is not None and (number >= self._size or slot.attempt)  # else a first rank has it
        ]
        return {"in use": self._in_use, "slots": given}

    def of_host(self, host: int) -> list[int]:
        """The slots of a host."""
        return [number for number, slot in enumerate(self._slots) if slot.host == host]

    def joined(self, host: int) -> list[int]:
        """Those of them whose processes have joined."""
        return [slot for slot in self.of_host(host) if self._slots[slot].has_joined]

    def free(self) -> list[int]:
        """Slots in order that hosts may get: those whose hosts are lost, and new ones."""
        lost = [number for number, slot in enumerate(self._slots) if slot.had_member and slot.host is None]
        return [*lost, *range(self._in_use, self._most)]

    def add(self, number: int, hosts: Mapping[int, str]) -> str:
        """Give out `number` more slots if so many are free; returns an answer for the user.

        Args:
            number: how many.
            hosts: numbers and names of those that may get them; each slot goes to one that has the fewest then.
        """
        if rejection := self.rejection(number):
            return rejection
        given = self._give_out(self.free()[:number], list(hosts))
        is_named = self._num_hosts > 1 or max(given) > 0  # else the job has one host
        told = " and ".join(name_ranks(slots) + f" on {hosts[host]}" * is_named for host, slots in given.items())
        is_new = any(not self._slots[slot].had_member for slots in given.values() for slot in slots)
        return f"ok: {told} will join{' where an epoch begins' if is_new else ''}"

    def rejection(self, number: int) -> str:
        """Why so many slots cannot be given out, "" if they can."""
        free = len(self.free())
        if self._most == self._size and not free:
            return "no: the job was started without --max-ranks, so it has no slots for added ranks"
        if number > free:
            found = f"{free or 'none'} of the job's {self._most} slots (--max-ranks {self._most})"
            return f"no: {number} asked for, but {found} {'are' if free > 1 else 'is'} free"
        return ""

    def _divided(self, slots: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
        """Which of these slots each host is to have."""
        counts = Counter({host: len(self.of_host(host)) for host in hosts})
        chosen: list[int] = []
        for _ in slots:
            chosen.append(min(hosts, key=lambda one: (counts[one], one)))
            counts[chosen[-1]] += 1
        divided: dict[int, list[int]] = {}
        for slot, host in zip(slots, sorted(chosen), strict=True):  # the ranks of one host follow each other
            divided.setdefault(host, []).append(slot)
        return divided

    def _give_out(self, slots: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
        """Give out slots; returns those of each host."""
        given = self._divided(slots, hosts)
        for host, of_host in given.items():
            for number in of_host:
                slot = self._slots[number]
                slot.host, slot.attempt, slot.has_joined = host, slot.attempt + 1, False
                self._in_use = max(self._in_use, number + 1)
        return given

    def note_joined(self, slots: Sequence[int]) -> None:
        """The processes of these slots have joined."""
        for slot in slots:
            self._slots[slot].has_joined = self._slots[slot].had_member = True

    def let_leave(self, slots: Iterable[int]) -> None:
        """The processes of these slots are to leave; those that have not joined, and all behind them, end at once."""
        self.leaving.update(slot for slot in slots if self._slots[slot].has_joined)
        for slot in set(slots) - self.leaving:
            self.take_back(slot, self._slots[slot].host)

    def take_back(self, slot: int, host: int | None) -> None:
        """A host has given up a slot, whose processes end before they join, or leave."""
        if self._slots[slot].host == host is not None and slot in self.leaving:
            self.leaving.discard(slot)
            self._slots[slot].host = None
        elif self._slots[slot].host == host is not None and not self._slots[slot].has_joined:
            self._release(slot)

    def note_end(self, host: int, left: Sequence[int]) -> list[int]:
        """A host has lost all of its ranks. Those of its slots that had not joined are given out anew, and returned.

        Args:
            host: its number.
            left: numbers of those that get them.
        """
        mine = self.of_host(host)
        self.leaving.difference_update(mine)
        for slot in mine:
            if self._slots[slot].has_joined:
                self._slots[slot].host = None
        again = sorted({other for slot in mine for other in self._release(slot)})
        if left:
            self._give_out(again, left)
        return again

    def _release(self, slot: int) -> list[int]:
        """Take a slot from its host; if the job was to grow by it, also take the slots behind it."""
        released = [slot]
        if not self._slots[slot].had_member:
            released = [one for one in range(slot, self._in_use) if not self._slots[one].had_member]
            self._in_use = min(self._in_use, slot)
        released = [one for one in released if self._slots[one].host is not None]
        for one in released:
            self._slots[one].host = None
        return released
