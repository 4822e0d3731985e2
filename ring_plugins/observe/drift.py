"""Whether all ranks still have the same weights.

Replicas that start alike and step on the same averages stay alike to the last bit, unless a rank steps alone, draws
other random numbers in an update, or has memory that lost a bit. Nothing else notices: the loss only gets slowly worse.
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
from ring_plugins.core.world import current, is_initialized

#: Names and checksums of all weights, in an order that is equal on all ranks.
Checksums = Callable[[], tuple[Sequence[str], Sequence[int]]]


def checksum(array: np.ndarray[Any, Any]) -> int:
    """The sum of the array's memory as 64-bit words: one flipped bit always changes it, and reading takes as long."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    total = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % (1 << 64)


def chosen_interval(every: int | None) -> int:
    """Steps between checks, 0 for never.

    Args:
        every: what the caller chose; None leaves it to RING_DRIFT_CHECK.

    Raises:
        ArgumentError: no number of steps.
    """
    said: Any = every if every is not None else config.DRIFT_CHECK.text() or 0
    try:
        interval = int(said)
    except (TypeError, ValueError):
        interval = -1
    if interval < 0 or isinstance(every, (bool, float)):
        name = "drift_check_every" if every is not None else "RING_DRIFT_CHECK"
        raise ArgumentError(f"{name}={said!r} is not a number of steps; 0 switches the check off.")
    return interval


def drift_check(every: int | None, checksums: Checksums) -> DriftCheck | None:
    """A check, or None where there is nothing to do; all ranks call it with the same interval.

    Args:
        every: steps from one check to the next; None leaves it to RING_DRIFT_CHECK, 0 is never.
        checksums: of this rank's weights.

    Raises:
        ArgumentError: `every` is no number of steps.
    """
    interval = chosen_interval(every)
    if interval == 0 or not is_initialized() or current().topology.size == 1:
        return None
    return DriftCheck(interval, checksums, current().new_communicator("drift check"))


class DriftCheck:
    """Compares the weights of all ranks every so many steps; see `drift_check`."""

    def __init__(self, every: int, checksums: Checksums, communicator: Communicator) -> None:
        self._every, self._checksums, self._communicator = every, checksums, communicator
        self._steps = 0

    def after_step(self) -> None:
        """A step was taken.

        Raises:
            DriftError: it is time to compare, and the weights differ; on all ranks.
        """
        self._steps += 1
        if self._steps % self._every == 0:
            self._compare()

    def _compare(self) -> None:
        """One number a rank travels; the checksums of single weights do only where those numbers differ."""
        names, sums = self._checksums()
        digest = hashlib.blake2b(repr(list(sums)).encode(), digest_size=7).digest()
        mine = int.from_bytes(digest, "little")
        # The greatest of (-x) is minus the least, so one reduction tells whether all are equal.
        ends = np.array([mine, -mine], np.int64)
        self._communicator.all_reduce(HostMemory(ends, "int64"), Op.MAX)
        if ends[0] != -ends[1]:
            everyones = self._communicator.all_gather_object([int(value) for value in sums])
            raise DriftError(difference(names, everyones, self._communicator.ranks, self._steps))

    def close(self) -> None:
        """Give the communicator back."""
        self._communicator.close()


def difference(names: Sequence[str], everyones: Sequence[Sequence[int]], ranks: Sequence[int], step: int) -> str:
    """What the error says.

    Args:
        names: of the weights.
        everyones: checksums by rank and weight.
        ranks: who they are.
        step: after which this is.
    """
    different = [i for i in range(len(names)) if len({sums[i] for sums in everyones}) > 1]
    first = different[0]
    groups: dict[int, list[int]] = {}
    for rank, sums in zip(ranks, everyones, strict=True):
        groups.setdefault(sums[first], []).append(rank)
    by_size = sorted(groups.values(), key=len)
    odd = " and ".join(name_ranks(group) for group in by_size[:-1])
    return (
        f"after {step} steps the weights of {odd} are not those of {name_ranks(by_size[-1])}: "
        f"first in {names[first]}, in "
        f"{len(different)} of {len(names)} parameters in all. A rank took a step of its own (a condition that is true "
        "on some ranks only, an optimizer that draws random numbers), or its memory lost a bit. Go on from a "
        "checkpoint, or broadcast the weights of a rank you trust."
    )
