"""The butterfly: with whom a member of a large group exchanges in each round, so that few rounds reach everyone.

The position of a member is written as a number of several digits, each with a radix of its own. In round d a member
exchanges with the members whose positions differ from its own in digit d only. After as many rounds as there are
digits, everyone's numbers have reached everyone. A single digit is a direct exchange among all members; digits of radix
2 are recursive halving and doubling (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005). For radices in between see Ruefenacht, Bull and Booth, "Generalisation of recursive
doubling for AllReduce", 2017.

The first digit has the largest radix and tells adjacent members apart. So most of the data moves between hosts that a
scheduler has numbered one after the other, which often hang at the same switch, and little crosses the network's core.
"""

from __future__ import annotations

import math
from functools import lru_cache

#: How many messages could be handled in the time that a round waits for its data to arrive. Measured between two test
#: hosts (benchmarks/many_hosts.py): a message takes 32 us of Python and system calls at its two ends, and a round 5 us
#: more. The switches of a data center add 20 to 60 us to a round.
_MESSAGES_PER_ROUND = 2


@lru_cache(maxsize=256)
def radices(members: int) -> tuple[int, ...]:
    """The radices, largest first, with which a message that is passed on in every round arrives soonest.

    Their product is the number of members, so a prime number has a single one.
    """
    best: tuple[int, ...] = (members,)
    for radix in range(2, math.isqrt(members) + 1):
        if members % radix == 0:
            split = tuple(sorted((radix, *radices(members // radix)), reverse=True))
            best = min(best, split, key=cost)  # of equal ones, the one with fewer rounds
    return best


def cost(split: tuple[int, ...]) -> int:
    """The time of all rounds with these radices, as a number of messages that could be handled in it."""
    return sum(_MESSAGES_PER_ROUND + radix - 1 for radix in split)


def rounds(members: int, position: int) -> list[list[int]]:
    """By round, the positions that exchange with each other, this member's included, in the order of their digits."""
    stride, found = 1, []
    for radix in radices(members):
        first = position - position // stride % radix * stride
        found.append([first + digit * stride for digit in range(radix)])
        stride *= radix
    return found
