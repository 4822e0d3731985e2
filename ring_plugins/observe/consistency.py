"""Whether all ranks still train one model: checks whose numbers travel with the gradients, and comparisons of weights.

**Problem.** Averaged gradients keep weights equal only if every rank makes the same update of them. A rank that skips a
batch and steps its scheduler all the same has another learning rate from then on. A rank that leaves out `step()`, adds
noise of its own, draws other random numbers or has a memory error has other weights. Nobody says so; the loss just
gets slowly worse.

**Idea.** Each `Check` has a number that is equal on all ranks as long as these do the same. `Checks` mixes the numbers
of one averager into a checksum, and puts the bits of that among the control numbers of the last bucket
(`core.gradients.fusion`), and the inverted bits behind them. After the reduction, a bit and its inverse are both above
zero only if ranks differ in it. So the comparison needs no message of its own, and no more precision than the flags of
gradients: it works in 16 bits and among any number of ranks. A sum of checksums, beside the number of ranks times the
own one, would not do: it finds nothing on a rank whose value is the average of all, as in 1 + 3 = 2 + 2. Only if the
numbers differ are the checks asked one by one, on all ranks, and the first one whose values differ says how.

**Weights** are read after 1, 2, 4, 8... up to 1024 steps, and after each 1024 from there: so seldom that it cannot be
measured. Of each weight a checksum is computed, and one reduction of two integers tells whether ranks differ, where no
pass does. Only then do they exchange all checksums, to name the first weight that differs. `DriftCheck` does that every
RING_DRIFT_CHECK steps, if the user asks for it.

The file is a few lines longer than others: what travels with a pass and what is compared between passes share checksums
and words.
"""

from __future__ import annotations

import hashlib
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, DeviceError, DriftError, MismatchError, name_ranks
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.joining.join import checksum_of
from ring_plugins.core.world import current, is_initialized

#: From here on, weights are compared after each so many steps.
_MOST_BETWEEN = 1024
#: After so many updates their count begins anew, so that the numbers are the same again and again.
_COUNTED = 16
#: How many names an error lists for each rank.
_LISTED = 4
#: Bits of a checksum, and the control numbers that tell whether it is the same on all ranks.
_BITS = 32
COUNT = 2 * _BITS
_number_of = operator.attrgetter("number")
#: Names and checksums of all weights, in an order that is equal on all ranks.
Checksums = Callable[[], tuple[Sequence[str], Sequence[int]]]
#: What ends errors about weights.
SWITCH = "If they differ on purpose, RING_WEIGHT_CHECK=0 switches this comparison off."


# Checks that travel with the gradients -------------------------------------------------------------


class Check(Protocol):
    """Something in which ranks must not differ.

    Attributes:
        number: what the next pass compares, in 32 bits; None if it compares nothing, the same on all ranks.
    """

    number: int | None

    def say(self, communicator: Communicator[Any]) -> None:
        """Raise on all ranks, or warn on one, if ranks differ in this; else return. Collective."""


class Reading(Check, Protocol):
    """A check that reads its number from elsewhere."""

    def look(self, passes: int) -> None:
        """Compute the number anew if it may have changed, after so many passes."""


class Trained:
    """The parameters whose gradients a rank averages. Each set of them has its buckets, which may have equal sizes.

    Attributes:
        names: of these parameters.
        noted: what else this rank's script has done with parameters; "" as a rule.
    """

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self.noted = ""
        self.number: int | None = None

    def take(self, names: Sequence[str], number: int, noted: str) -> None:
        """From now on compare these; the number is that of the names."""
        self.names, self.noted = names, noted
        self.number = zlib.crc32(noted.encode(), number) if noted else number

    def say(self, communicator: Communicator[Any]) -> None:
        """See the protocol."""
        told = communicator.all_gather_object((list(self.names), self.noted), "parameters that are trained")
        names, notes = zip(*told, strict=True)
        if error := trained_error(names, notes, communicator.ranks):
            raise error


class Updates:
    """How many updates a rank has made with averages.

    Attributes:
        count: since the ranks of the job last changed.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number: int | None = 0

    def set(self, count: int) -> None:
        """Note how many there are."""
        self.count, self.number = count, count % _COUNTED

    def add(self) -> None:
        """Note another one."""
        self.count += 1
        self.number = self.count % _COUNTED

    def say(self, communicator: Communicator[Any]) -> None:
        """See the protocol."""
        counts = communicator.all_gather_object(self.count, "numbers of updates")
        if len(set(counts)) > 1:
            raise MismatchError(
                "the ranks have made different numbers of updates with averaged gradients "
                f"({by_value(counts, communicator.ranks)}), so their weights differ. "
                "Has a rank left out step(), because of its own loss or an exception, or run a backward pass more or "
                "less than others before it? Decide by what is equal on all ranks, "
                "such as averaged gradients or ring_plugins.all_reduce(loss), and continue from a checkpoint."
            )


class Place:
    """Where the script is in its training; nowhere until a process joins, which may go on in another batch or epoch.

    Attributes:
        values: integers that say where, by name.
        is_compared: whether a pass has compared them. It is the same on all ranks, if they include how often the script
            has taken a place: a rank that has taken one more or less than the others differs in the pass.
    """

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.number: int | None = None
        self.is_compared = False

    def take(self, values: dict[str, int]) -> None:
        """From now on compare these."""
        self.values, self.number, self.is_compared = values, checksum_of(values), False

    def say(self, communicator: Communicator[Any]) -> None:
        """See the protocol."""
        places: list[Mapping[str, int]] = communicator.all_gather_object(self.values, "places in the training")
        if any(place != places[0] for place in places):
            raise MismatchError(
                "ranks are at different places of the training since a process has joined: "
                f"{dict(zip(communicator.ranks, places, strict=True))}. Iterate over state.batches(loader), or call "
                "commit() only where an epoch begins."
            )


#: That of this process: its script is at one place, however many averagers it has.
common_place = Place()


class Job(Protocol):
    """What counts the changes of a job's ranks; a `core.members.members.Elastic`."""

    @property
    def view(self) -> int: ...


class Checks:
    """What the passes of one averager compare.

    Args:
        job: counts how often its ranks have changed; None if they never do.
        place: where the script is.

    Attributes:
        list: of checks, in the order in which they are asked.
        read_always, read_when_due: those that are read before every pass, and before those that compare weights.
        trained, place, updates: three of them.
        passes: how many the averager has ended since the ranks of the job last changed.
        is_due: whether the next pass compares weights; the same on all ranks.
        has_ended: whether this rank has run out of data. It takes part in passes, and differs from nobody.
        weight: of this rank's gradients in the averages; those of the ranks have a mean of 1 in an ordinary pass.
    """

    def __init__(self, job: Job | None = None, place: Place = common_place) -> None:
        self.trained, self.place, self.updates = Trained(), place, Updates()
        self.list: list[Check] = [self.trained, place, self.updates]
        self.read_always, self.read_when_due = list[Reading](), list[Reading]()
        self.passes, self.is_due = 0, False
        self.has_ended, self.weight = False, 1.0
        self._job, self._view = job, 0 if job is None else job.view
        self._has_changed = False  # the job, since the last call of `follow_members`
        self._sent: tuple[int | None, ...] = ()

    def number(self) -> int:
        """A checksum of all numbers of this rank."""
        self._count_anew()
        for check in self.read_always:
            check.look(self.passes)
        if self.is_due or not self.passes:
            for check in self.read_when_due:
                check.look(self.passes)
        self._sent = tuple(map(_number_of, self.list))
        return zlib.crc32(repr(self._sent).encode())

    def _count_anew(self) -> None:
        """Begin to count anew if ranks were lost or have joined, which have counted nothing."""
        if self._job is not None and self._view != (view := self._job.view):
            self._view, self._has_changed, self.passes = view, True, 0
            self.updates.set(0)
            self.set_due(False)

    def follow_members(self) -> bool:
        """Begin to count anew if the ranks have changed; returns whether they have since the last call.

        `number` begins anew, too; the change is still reported here.
        """
        self._count_anew()
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def note_compared(self) -> None:
        """Note that a pass has compared everything."""
        self.place.is_compared = True
        self.passes += 1
        is_due = self.passes == 1 or is_compared_after(self.passes)
        if is_due or self.is_due:  # what was read for this pass says nothing about the next
            self.set_due(is_due)

    def set_due(self, is_due: bool) -> None:
        """Note whether the next pass compares weights."""
        self.is_due = is_due
        for check in self.read_when_due:
            check.number = None

    def say(self, communicator: Communicator[Any]) -> None:
        """Say in what ranks differ, by the checks whose numbers do. Weights may be equal by now. Collective.

        Raises:
            MismatchError: they have averaged, updated or set different things.
            DriftError: their weights differ.
        """
        by_rank = communicator.all_gather_object(None if self.has_ended else self._sent, "numbers that differ")
        try:
            for check, numbers in zip(self.list, zip(*filter(None, by_rank), strict=True), strict=True):
                if len(set(numbers)) > 1:
                    check.say(communicator)
        except MismatchError:
            self.updates.set(0)  # so that a script may go on from equal weights
            raise


def bits_of(checksum: int) -> Array:
    """The control numbers by which ranks find whether their checksums differ."""
    return np.unpackbits(np.array([checksum, checksum ^ 0xFFFFFFFF], np.uint32).view(np.uint8))


def differ(shares: Sequence[float]) -> bool:
    """Whether ranks differ.

    Args:
        shares: the averages of all ranks' `bits_of`; 0 for those that no rank has.
    """
    return any(map(min, shares[:_BITS], shares[_BITS:]))


def by_value(values: Sequence[Any], ranks: Sequence[int], between: str = ": ") -> str:
    """Which ranks have which value, as a text: "rank 0: 3; ranks 1, 2: 4".

    Args:
        values: of each rank.
        ranks: the ranks' numbers.
        between: the ranks and their value.
    """
    found: dict[Any, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return "; ".join(f"{name_ranks(some)}{between}{value}" for value, some in found.items())


def listed(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def trained_error(trained: Sequence[Sequence[str]], notes: Sequence[str], ranks: Sequence[int]) -> MismatchError | None:
    """The error that all ranks raise if they have averaged the gradients of different parameters.

    Args:
        trained: names of each rank.
        notes: what else the script of each has done with parameters.
        ranks: the ranks' numbers.
    """
    if all(names == trained[0] for names in trained):
        if len(set(notes)) < 2:
            return None
        where = by_value([note or "has done no such thing" for note in notes], ranks, between=" ")
        return MismatchError(
            f"the ranks train different parameters in this step ({where}). Replace, freeze and unfreeze the same "
            "parameters on all ranks, between the same two steps, and give new ones to the optimizer."
        )
    shared = set(trained[0]).intersection(*trained)
    own = [listed([name for name in names if name not in shared]) for names in trained]
    where = by_value([text or "none that others do not train" for text in own], ranks)
    return MismatchError(
        f"the ranks train different parameters in this step ({where}), so the gradients of some were averaged with "
        "those of others. Freeze and unfreeze (requires_grad) the same parameters on all ranks, between the same two "
        "steps: if they are drawn at random, from a generator that has the same seed on all ranks."
    )


# Weights -------------------------------------------------------------------------------------------


def checksum(array: np.ndarray[Any, Any]) -> int:
    """The sum of the array's memory as 64-bit words: any single flipped bit changes it, at the cost of one read."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    total = int(data[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % (1 << 64)


def membership_changes() -> int:
    """How often the ranks of the job have changed."""
    return current().elastic.view if is_initialized() else 0


def is_compared_after(steps: int) -> bool:
    """Whether weights are compared after so many steps: 2, 4, 8... up to 1024, and from there after each 1024."""
    return steps > 1 and not (steps & (steps - 1) if steps < _MOST_BETWEEN else steps % _MOST_BETWEEN)


def is_check_wanted() -> bool:
    """Whether weights are compared though the user has not asked for it: unless RING_WEIGHT_CHECK=0."""
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
    found = _difference(checksums, communicator or current().communicator)
    return f"{when} {found}." if found else ""


def check_equal_after_losses(checksums: Checksums, communicator: Communicator[Any]) -> None:
    """Compare weights or averages among the ranks that are left. Collective.

    Raises:
        DriftError: on all ranks, if they differ. Not if RING_WEIGHT_CHECK=0.
    """
    found = differing_weights(checksums, "after ranks were lost or joined", communicator)
    if found:
        raise DriftError(f"{found} Continue from a checkpoint.")


def _difference(checksums: Checksums, communicator: Communicator[Any]) -> str:
    """Which ranks and weights differ, as part of a sentence; "" if none does. Collective."""
    names, sums = checksums()
    by_rank = _unequal(sums, communicator)
    if by_rank is None:
        return ""
    raise_failure_of_gpus(communicator)
    return what_differs(names, by_rank, communicator.ranks)


def raise_failure_of_gpus(communicator: Communicator[Any]) -> None:
    """Raise why weights differ, if a GPU has failed that nobody has waited for since. Collective.

    Raises:
        DeviceError: on all ranks.
    """
    errors = filter(None, (one.failed() for one in current().device_executors())) if is_initialized() else ()
    own = next((str(error) for error in errors if isinstance(error, DeviceError)), "")
    told = communicator.all_gather_object(own, "failures of GPUs")
    for rank, text in zip(communicator.ranks, told, strict=True):
        if text:
            raise DeviceError(
                f"the weights of the ranks differ, because the GPU of rank {rank} failed: {text.rstrip('.')}. What "
                "they have computed since is wrong: continue from a checkpoint."
            )


def _unequal(sums: Sequence[int], communicator: Communicator[Any]) -> list[list[int]] | None:
    """The checksums of all ranks, None if they are equal. Collective."""
    digest = hashlib.blake2b(repr(list(sums)).encode(), digest_size=7).digest()
    mine = int.from_bytes(digest, "little")
    if isinstance(communicator, DeviceCommunicator):  # reduces the memory of its GPU only
        if len(set(communicator.all_gather_object(mine, "check of weights"))) == 1:
            return None
    else:
        # The maximum of -x is minus the minimum of x, so one reduction tells whether all are equal.
        extremes = np.array([mine, -mine], np.int64)
        with purpose("check of weights"):
            communicator.all_reduce(HostMemory(extremes, "int64"), Op.MAX)
        if extremes[0] == -extremes[1]:
            return None
    by_rank: list[list[int]] = communicator.all_gather_object([int(value) for value in sums], "check of weights")
    # With on_failure="continue", the rank that differed may have died since.
    return None if all(of_rank == by_rank[0] for of_rank in by_rank) else by_rank


def what_differs(names: Sequence[str], by_rank: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    """Which ranks and weights differ, as part of a sentence.

    Args:
        names: of the weights.
        by_rank: checksums by rank and weight; at least two ranks differ.
        ranks: world ranks, in the order of `by_rank`.
    """
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


def chosen_interval(every: int | None) -> int:
    """Steps between drift checks, 0 for never.

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


class DriftCheck:
    """Compares the weights of all ranks every so many steps.

    Args:
        every: steps between comparisons, the same on all ranks; 0 is never.

    Attributes:
        every: as given.
    """

    def __init__(self, every: int) -> None:
        self.every, self._steps, self._view = every, 0, membership_changes()

    def after_step(self, checksums: Checksums, communicator: Communicator[Any]) -> None:
        """Count a step, and compare the weights if a check is due. Collective then.

        Args:
            checksums: returns those of this rank's weights.
            communicator: of all ranks.

        Raises:
            DriftError: the weights differ; raised on all ranks.
        """
        if communicator.size == 1:
            return
        self._steps += 1
        if self._view != (view := membership_changes()):  # ranks that have joined begin to count
            self._view, self._steps = view, 1
        if self.every and self._steps % self.every == 0 and (found := _difference(checksums, communicator)):
            raise DriftError(
                f"after {self._steps} steps {found}. A rank made a different update (a condition that is true on some "
                "ranks only, an optimizer that draws random numbers), or has a memory error. Continue from a "
                "checkpoint, or broadcast the weights of a rank you trust."
            )
