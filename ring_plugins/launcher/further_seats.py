"""Which host has which seat, for seats that `ring add-ranks` has asked for in a job on several hosts.

The coordinator in `ring run` keeps one list: the host of each such seat. Whenever the list changes, all supervisors get
the whole of it. They start processes for the seats of their host, end those for seats that are no longer theirs, and
say which have joined. So they have to agree on nothing but the list.

Two kinds of seats can be given out: those of hosts whose ranks are all lost, and new ones behind all others, up to
`--max-ranks`. New ones are taken in order on all hosts, since data has no share for a seat that nobody has had. While
the process of one cannot join, all behind it wait. Hence:

- If a host is lost before its process has joined, that seat and all behind it are given out anew, among the hosts that
  are left.
- If a host gives a seat up, since its script fails again and again, that seat and all behind it are taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.launcher.growth import refusal

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


class FurtherSeat(NamedTuple):
    """Whose a seat is; may travel as JSON.

    Attributes:
        seat: its number.
        host: number of the host.
        generation: how often it was given out before. The first process of generation 0 has the seat's number for a
            world rank; all others have numbers of their host's.
    """

    seat: int
    host: int
    generation: int


class FurtherSeats:
    """Gives out seats.

    Args:
        size: number of ranks at the start.
        most: up to how many the job may grow; 0 for no more.
        ranks: those that each host has at the start, by its number.
        publish: tells all supervisors what `told` returns.
    """

    def __init__(self, size: int, most: int, ranks: Sequence[Sequence[int]], publish: Callable[[], object]) -> None:
        self._size, self._most, self._publish = size, max(most, size), publish
        self._homes = {host: list(of_host) for host, of_host in enumerate(ranks)}
        self._hosts, self._again = len(ranks), Counter[int]()  # by host, seats it got that had been given out before
        self._given: dict[int, FurtherSeat] = {}
        self._generations = Counter(range(size))  # the first ranks have had theirs
        self._in_use = size
        self._had = set(range(size))  # seats that ever had a member
        self._free = set[int]()  # those of them whose hosts are lost
        self._joined = set[int]()  # those of `_given` that have a member, or had one there

    def told(self) -> dict[str, Any]:
        """What supervisors need to know; JSON can hold it."""
        return {"in use": self._in_use, "seats": sorted(self._given.values())}

    def of_host(self, host: int) -> list[int]:
        """The seats of a host."""
        return sorted([*self._homes.get(host, ()), *(one.seat for one in self._given.values() if one.host == host)])

    def add(self, number: int, hosts: Mapping[int, str]) -> str:
        """Give out so many more seats, if there are as many; returns an answer for the user.

        Args:
            number: how many.
            hosts: numbers and names of those that may get them; each seat goes to one that has the fewest then.
        """
        if refusal := self.refusal(number):
            return refusal
        given = self._give_out(self._next_ones(number), list(hosts))
        self._publish()
        told = " and ".join(f"{name_ranks(seats)} on {hosts[host]}" for host, seats in given.items())
        where = (
            " where an epoch begins" if any(seat not in self._had for seats in given.values() for seat in seats) else ""
        )
        return f"ok: {told} will join{where}"

    def refusal(self, number: int) -> str:
        """Why so many seats cannot be given out, "" if they can."""
        free = len(self._free) + self._most - self._in_use
        return refusal(number, free, self._most, may_grow=self._most > self._size or free > 0)

    def refusal_of(self, hosts: Mapping[int, str], number: int) -> str:
        """Why these hosts cannot have so many more seats, "" if they can.

        Args:
            hosts: as for `add`.
            number: for which there is no `refusal`.
        """
        for host, seats in self._divided(self._next_ones(number), list(hosts)).items():
            all_of_host = world_ranks(host, self._hosts if host < self._hosts else None, self._most)
            left = max(0, len(all_of_host) - self._again[host])
            wanted = sum(self._generations[seat] > 0 for seat in seats)
            if wanted > left:
                return (
                    f"no: {hosts[host]} can start at most {left} more processes in the places of lost ranks, not "
                    f"{wanted}: each needs a number that no other process of the job has had, and a host has few of "
                    "them. Start the others on another host"
                )
        return ""

    def _next_ones(self, number: int) -> list[int]:
        return [*sorted(self._free), *range(self._in_use, self._most)][:number]

    def _divided(self, seats: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
        """Which of these seats each host is to have."""
        counts = Counter({host: len(self.of_host(host)) for host in hosts})
        chosen: list[int] = []
        for _ in seats:
            chosen.append(min(hosts, key=lambda one: (counts[one], one)))
            counts[chosen[-1]] += 1
        divided: dict[int, list[int]] = {}
        for seat, host in zip(seats, sorted(chosen), strict=True):  # the ranks of one host follow each other
            divided.setdefault(host, []).append(seat)
        return divided

    def _give_out(self, seats: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
        """Give out seats; returns those of each host."""
        given = self._divided(seats, hosts)
        for host, of_host in given.items():
            for seat in of_host:
                self._given[seat] = FurtherSeat(seat, host, self._generations[seat])
                self._again[host] += self._generations[seat] > 0
                self._generations[seat] += 1
                self._free.discard(seat)
                self._in_use = max(self._in_use, seat + 1)
        return given

    def note_joined(self, seats: Sequence[int]) -> None:
        """The processes of these seats have joined."""
        self._joined.update(seats)
        self._had.update(seats)

    def take_back(self, seat: int) -> None:
        """A host has given up a seat, whose processes end before they join."""
        if seat in self._given and seat not in self._joined:
            self._release(seat)
            self._publish()

    def note_end(self, host: int, left: Sequence[int]) -> list[int]:
        """A host is lost, or all of its ranks are; returns the seats that had not joined, and are given out anew.

        Args:
            host: its number.
            left: numbers of those that get them.
        """
        mine = [one.seat for one in self._given.values() if one.host == host]
        waiting = sorted(seat for seat in mine if seat not in self._joined)
        self._free.update(self._homes.pop(host, ()))
        for seat in set(mine) - set(waiting):
            del self._given[seat]
            self._joined.discard(seat)
            self._free.add(seat)
        again = sorted({other for seat in waiting for other in self._release(seat)})
        if mine:
            self._publish()
        if left and again:
            self._give_out(again, left)
            self._publish()
        return again

    def _release(self, seat: int) -> list[int]:
        """Let nobody have a seat that nobody has joined by, nor any behind it by which the job was to grow."""
        if seat in self._had:
            self._free.add(seat)
            return [seat] if self._given.pop(seat, None) else []
        released = [one for one in self._given if one >= seat and one not in self._had]
        for one in released:
            del self._given[one]
        self._in_use = min(self._in_use, seat)
        return released
