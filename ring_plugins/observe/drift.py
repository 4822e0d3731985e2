"""The drift check: do all ranks still have the same weights?

Replicas that start equal and step on the same averages stay equal to the last bit, unless a rank takes an extra step,
draws other random numbers in an update, or has a memory error. Nothing else notices; the loss just gets slowly worse.

At each check every rank computes a checksum of each of its weights and hashes the checksums into one number. One
all-reduce of two integers tells whether those numbers are equal. Only if they differ do the ranks exchange all
checksums, to name the first weight that differs.

`DriftCheck` does that every RING_DRIFT_CHECK steps, if the user asks for it. `differing_weights` does it once, after
the first step, without being asked: a beginner's script may start the ranks with different weights, or average nothing,
and nothing else would show it. Averaged metrics even make it look right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, DriftError, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.world import current, is_initialized

#: From here on, weights are compared after each so many steps.
_MOST_BETWEEN = 1024
#: Names and checksums of all weights, in an order that is equal on all ranks.
Checksums = Callable[[], tuple[Sequence[str], Sequence[int]]]


def checksum(array: np.ndarray[Any, Any]) -> int:
    """The sum of the array's memory as 64-bit words: any single flipped bit changes it, at the cost of one read."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    total = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % (1 << 64)


def chosen_interval(every: int | None) -> int:
    """Steps between checks, 0 for never.

    Args:
        every: what the caller chose; None leaves it to RING_DRIFT_CHECK.

    Raises:
        ArgumentError: it is not a number of steps.
    """
    chosen: Any = every if every is not None else config.DRIFT_CHECK.text() or 0
    try:
        interval = int(chosen)
    except (TypeError, ValueError):
        interval = -1
    if interval < 0 or isinstance(every, (bool, float)):
        name = "drift_check_every" if every is not None else "RING_DRIFT_CHECK"
        raise ArgumentError(f"{name}={chosen!r} is not a number of steps; 0 switches the check off.")
    return interval


def drift_check(every: int | None, checksums: Checksums) -> DriftCheck | None:
    """Make a drift check, None if it is off or the job has one rank; all ranks call it with the same interval.

    Args:
        every: steps between checks; None leaves it to RING_DRIFT_CHECK, 0 is never.
        checksums: returns those of this rank's weights.

    Raises:
        ArgumentError: `every` is not a number of steps.
    """
    interval = chosen_interval(every)
    if interval == 0 or not is_initialized() or current().topology.size == 1:
        return None
    return DriftCheck(interval, checksums, current().new_communicator("drift check"))


class DriftCheck:
    """Compares the weights of all ranks every `every` steps; made by `drift_check`."""

    def __init__(self, every: int, checksums: Checksums, communicator: Communicator) -> None:
        self._every, self._checksums, self._communicator = every, checksums, communicator
        self._steps, self._view = 0, membership_changes()

    def after_step(self) -> None:
        """Count a step, and compare the weights if a check is due.

        Raises:
            DriftError: the weights differ; raised on all ranks.
        """
        self._steps += 1
        if self._view != (view := membership_changes()):  # ranks that have joined begin to count
            self._view, self._steps = view, 1
        if self._steps % self._every == 0:
            self._compare()

    def _compare(self) -> None:
        names, sums = self._checksums()
        by_rank = _unequal(sums, self._communicator)
        if by_rank is not None:
            raise DriftError(difference(names, by_rank, self._communicator.ranks, self._steps))

    def close(self) -> None:
        """Close the communicator."""
        self._communicator.close()


def membership_changes() -> int:
    """How often the ranks of the job have changed."""
    return current().elastic.view if is_initialized() else 0


class FirstComparison:
    """Whether ranks have yet to compare their weights after their first step; all ranks find the same.

    They compare after each loss and each join anyway. So the first of these ends this wait, too: those that join then
    cannot know whether the others have taken a step.
    """

    def __init__(self) -> None:
        self._is_made, self._view = False, membership_changes()

    @property
    def is_over(self) -> bool:
        """Whether it is made, or no longer needed."""
        return self._is_made or self._view != membership_changes()

    def end(self) -> None:
        """Note that it is made, or not wanted."""
        self._is_made = True


def is_compared_after(steps: int) -> bool:
    """Whether weights are compared after so many steps: 2, 4, 8... up to 1024, and from there after each 1024."""
    return steps > 1 and not (steps & (steps - 1) if steps < _MOST_BETWEEN else steps % _MOST_BETWEEN)


def is_check_wanted() -> bool:
    """Whether weights are compared after the first step and before checkpoints: unless RING_WEIGHT_CHECK=0."""
    return is_initialized() and current().topology.size > 1 and config.WEIGHT_CHECK.get()


def differing_weights(checksums: Checksums, when: str, communicator: Communicator[Any] | None = None) -> str:
    """Compare the weights of all ranks once. Collective.

    Args:
        checksums: returns those of this rank's weights.
        when: begins the text, such as "after the first step".
        communicator: of all ranks; by default that of the public functions.

    Returns:
        A sentence that says which ranks and weights differ, "" if none does or if the check is switched off.
    """
    if not is_check_wanted():
        return ""
    communicator = communicator or current().communicator
    names, sums = checksums()
    by_rank = _unequal(sums, communicator)
    return "" if by_rank is None else f"{when} {what_differs(names, by_rank, communicator.ranks)}."


def _unequal(sums: Sequence[int], communicator: Communicator[Any]) -> list[list[int]] | None:
    """The checksums of all ranks, None if they are equal. Collective."""
    digest = hashlib.blake2b(repr(list(sums)).encode(), digest_size=7).digest()
    mine = int.from_bytes(digest, "little")
    if isinstance(communicator, DeviceCommunicator):  # reduces the memory of its GPU only
        if len(set(communicator.all_gather_object(mine, "check of weights"))) == 1:
            return None
        return communicator.all_gather_object([int(value) for value in sums], "check of weights")
    # The maximum of -x is minus the minimum of x, so one reduction tells whether all are equal.
    extremes = np.array([mine, -mine], np.int64)
    with purpose("check of weights"):
        communicator.all_reduce(HostMemory(extremes, "int64"), Op.MAX)
    if extremes[0] == -extremes[1]:
        return None
    by_rank: list[list[int]] = communicator.all_gather_object([int(value) for value in sums], "check of weights")
    # With on_failure="continue", the rank that differed may have died since.
    return None if all(of_rank == by_rank[0] for of_rank in by_rank) else by_rank


def difference(names: Sequence[str], by_rank: Sequence[Sequence[int]], ranks: Sequence[int], step: int) -> str:
    """The error text.

    Args:
        names: of the weights.
        by_rank: checksums by rank and weight; at least two ranks differ.
        ranks: world ranks, in the order of `by_rank`.
        step: number of steps done.
    """
    return (
        f"after {step} steps {what_differs(names, by_rank, ranks)}. A rank made a different update (a condition that "
        "is true on some ranks only, an optimizer that draws random numbers), or has a memory error. Continue from a "
        "checkpoint, or broadcast the weights of a rank you trust."
    )


def what_differs(names: Sequence[str], by_rank: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    """Which ranks and weights differ, as part of a sentence; arguments as above."""
    if len(set(map(len, by_rank))) > 1:
        counts = ", ".join(f"rank {rank}: {len(sums)}" for rank, sums in zip(ranks, by_rank, strict=True))
        return f"the ranks train different numbers of weights ({counts})"
    different = [i for i in range(len(names)) if len({sums[i] for sums in by_rank}) > 1]
    first = different[0]
    groups: dict[int, list[int]] = {}
    for rank, sums in zip(ranks, by_rank, strict=True):
        groups.setdefault(sums[first], []).append(rank)
    *minorities, majority = sorted(groups.values(), key=len)
    odd = " and ".join(name_ranks(group) for group in minorities)
    return (
        f"the weights of {odd} differ from those of {name_ranks(majority)}: first in {names[first]}, in "
        f"{len(different)} of {len(names)} parameters in total"
    )
