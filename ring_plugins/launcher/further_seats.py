"""Which hosts have the further seats of a job on several hosts that grows: asked by `ring add-ranks`.

The process that `ring run` is keeps one list: whose each seat behind the first ones is. All supervisors get the whole
list whenever it changes, start processes for the seats that are theirs, and end those for seats that are theirs no
more. So the list is all that they have to agree on. They say which of these processes have joined.

Data has no shares that nobody ever had, so processes join in the order of their seats, whatever their hosts. If the
process of one cannot join, all behind it wait. Hence if a host is lost before its process has joined, that seat and all
behind it are given out anew, among the hosts that are left. And if a host gives a seat up, since its script fails again
and again, it and all behind it are taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ring_plugins.core.base.errors import name_ranks


class FurtherSeat(NamedTuple):
    """Whose a seat is; may travel as JSON.

    Attributes:
        host: number of the host.
        turn: how often the seat was given out before. The first process of a seat has its number for a world rank; that
            number may be used up later.
    """

    host: int
    turn: int


class FurtherSeats:
    """Gives out the seats behind those of the first ranks.

    Args:
        size: number of ranks at the start.
        most: up to how many the job may grow; 0 for no more.
        ranks: how many each host has at the start, by number.
        publish: tells all supervisors the list, whose first seat is `size`.
    """

    def __init__(
        self, size: int, most: int, ranks: Sequence[int], publish: Callable[[Sequence[FurtherSeat]], object]
    ) -> None:
        self._size, self._most, self._ranks, self._publish = size, max(most, size), list(ranks), publish
        self._seats: list[FurtherSeat] = []
        self._turns: Counter[int] = Counter()  # how often each seat was given out
        self._joined: set[int] = set()

    def add(self, number: int, hosts: Mapping[int, str]) -> str:
        """Give out so many more seats, if there are as many; returns an answer for the user.

        Args:
            number: how many.
            hosts: numbers and names of those that may get them; each seat goes to one that has the fewest then.
        """
        free = self._most - self._size - len(self._seats)
        if self._most == self._size:
            return "no: the job was started without --max-ranks, so it has no seats for further ranks"
        if number > free:
            return (
                f"no: {free} of the job's {self._most} seats {'is' if free == 1 else 'are'} free "
                f"(--max-ranks {self._most}), which is less than {number}"
            )
        given = self._give_out(number, list(hosts))
        self._publish(self._seats)
        told = " and ".join(f"{name_ranks(seats)} on {hosts[host]}" for host, seats in given.items())
        return f"ok: {told} will join where an epoch begins"

    def _give_out(self, number: int, hosts: Sequence[int]) -> dict[int, list[int]]:
        """Give out the next seats; returns those of each host."""
        counts = Counter({host: self._ranks[host] for host in hosts})
        counts.update(one.host for one in self._seats if one.host in hosts)
        chosen: list[int] = []
        for _ in range(number):
            chosen.append(min(hosts, key=lambda one: (counts[one], one)))
            counts[chosen[-1]] += 1
        given: dict[int, list[int]] = {}
        for host in sorted(chosen):  # the ranks of one host follow each other
            seat = self._size + len(self._seats)
            self._seats.append(FurtherSeat(host, self._turns[seat]))
            self._turns[seat] += 1
            given.setdefault(host, []).append(seat)
        return given

    def note_joined(self, seats: Sequence[int]) -> None:
        """The processes of these seats have joined."""
        self._joined.update(seats)

    def take_back(self, seat: int) -> None:
        """A host has given up a seat, whose processes end before they join."""
        if seat not in self._joined:
            self._shorten(seat)
            self._publish(self._seats)

    def note_end(self, host: int, left: Sequence[int]) -> list[int]:
        """A host is lost, or all of its ranks are; returns the seats that others have got instead.

        Args:
            host: its number.
            left: numbers of those that are left.
        """
        mine = [seat for seat, one in enumerate(self._seats, self._size) if one.host == host]
        waiting = [seat for seat in mine if seat not in self._joined]
        number = self._size + len(self._seats) - min(waiting, default=0)
        if not waiting:
            return []
        self._shorten(waiting[0])
        self._publish(self._seats)
        if left:
            self._give_out(number, left)
            self._publish(self._seats)
        return list(range(waiting[0], waiting[0] + number))

    def _shorten(self, seat: int) -> None:
        del self._seats[max(seat - self._size, 0) :]
