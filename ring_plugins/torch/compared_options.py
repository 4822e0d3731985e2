"""Whether all ranks make the same updates, told by numbers that travel with the gradients anyway.

**Problem.** Averaged gradients keep weights equal only if every rank makes the same update of them. A rank that skips a
batch and steps its scheduler all the same, or whose `ReduceLROnPlateau` looks at its own loss, has another learning
rate from then on. A rank that leaves out `step()` where its own loss is too large has other weights. Nobody says so.

**Idea.** Each rank puts the bits of a checksum of its learning rates and of its number of updates among the control
numbers of its last bucket (`core.gradients.fusion`), and the inverted bits behind them. After the reduction, a bit and
its inverse are both above zero only if ranks differ in it. So the comparison needs no message of its own, and no more
precision than the flags of gradients: it works in 16 bits and among any number of ranks. The checksum of the rates is
computed only when a value has changed, and updates count up to 16, so that the numbers are the same arrays again and
again. A step takes 5 µs more, and 10 µs where a scheduler changes one group's learning rate.

What schedulers do not change, such as `eps` or `nesterov`, is compared at once, in `check_equal_options`, and again,
together with the weights themselves, after 2, 4, 8... steps (`torch.drift`).

**Which parameters** a rank trains in a step is compared in the same way. Each set of parameters has its buckets, and
those of two sets may have the same sizes: ranks that draw the layer to be trained, each by its own seed, would average
the gradient of one layer with that of another.

**Places in the script** are compared in the same way, once a process has joined a job that others have begun: it may go
on in another batch or epoch than the others (torch/training_state.py). The integers that say where a rank is go into
the same checksum. A sum of checksums, beside the number of ranks times the own one, would not do: it finds nothing on
a rank whose value is the average of all, as in 1 + 3 = 2 + 2, which then steps alone. A bit and its inverse tell all
ranks, and their sums cannot cancel out.

Values count as float32: hosts with different math libraries may compute schedules that differ in the last bit.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim import Optimizer

from ring_plugins.core.base.errors import DriftError, MismatchError, name_ranks
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.joining.join import checksum_of
from ring_plugins.observe.drift import is_check_wanted
from ring_plugins.torch.drift import WeightsInStep, likely_causes

#: What schedulers change.
_NAMES = ("lr", "momentum", "betas", "weight_decay")
#: Which code computes the update, and what schedulers note: no part of the update itself.
_NOT_COMPARED = (*_NAMES, "params", "initial_lr", "foreach", "fused", "capturable", "differentiable")
_BITS = 32
#: After so many updates their count begins anew.
_COUNTED = 16
#: How many parameters an error names for each rank.
_NAMED = 4
#: Control numbers.
COUNT = 2 * _BITS

Groups = Callable[[], Iterable[Mapping[str, Any]]]


class ComparedPlace:
    """Where the script is in its training, which the next pass of gradients compares; nowhere until a process joins.

    Attributes:
        values: integers that say where, by name.
        checksum: of these; None if there is nothing to compare.
        is_compared: whether a pass has compared them. It is the same on all ranks, if they include how often the script
            has taken a place: a rank that has taken one more or less than the others differs in the pass.
    """

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.checksum: int | None = None
        self.is_compared = False

    def take(self, values: dict[str, int]) -> None:
        """From now on compare these."""
        self.values, self.checksum, self.is_compared = values, checksum_of(values), False


#: That of this process: its script is at one place, however many averagers it has.
common_place = ComparedPlace()


class _Job(Protocol):
    """What counts the changes of a job's ranks; a `core.members.members.Elastic`."""

    @property
    def view(self) -> int: ...


class ComparedOptions:
    """The options of the optimizers that use one averager's gradients. Without any, the numbers are zeros.

    Args:
        job: counts how often its ranks have changed; None if they never do.
        place: compared, too.
        weights: compared, too, where that is due.

    Attributes:
        updates: how many these optimizers have made since the ranks of the job last changed.
    """

    def __init__(
        self,
        job: _Job | None = None,
        place: ComparedPlace = common_place,
        weights: WeightsInStep | None = None,
    ) -> None:
        self.updates = 0
        self.weights = weights
        self.place, self._seen_checksum = place, place.checksum
        self._job, self._view = job, 0 if job is None else job.view
        self._groups: Groups | None = None
        self._given: list[Any] | None = []
        self._values: list[Any] = []
        self._compared_weights: int | None = None  # with all options; None if this pass does not compare them
        self._checksum = 0
        self._nothing: Array = np.zeros(COUNT, np.uint8)
        self._numbers: dict[tuple[int, int | None], Array] = {}  # by count of updates and by parameters

    def follow(self, groups: Groups, names: Mapping[Any, str] | None = None) -> None:
        """From now on compare these.

        Args:
            groups: returns parameter groups, as torch's optimizers have them.
            names: of all parameters that the script has named.
        """
        self._groups = groups
        if self.weights is not None:
            self.weights.names = names or {}

    @property
    def groups(self) -> Iterable[Mapping[str, Any]]:
        """The parameter groups; nothing if there are no optimizers."""
        return () if self._groups is None else self._groups()

    def uses(self, parameters: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Those of these (name, parameter) pairs that the optimizers have; all if there are none."""
        if self._groups is None:
            return list(parameters)
        used = {id(one) for group in self.groups for one in group.get("params", ())}
        return [(name, one) for name, one in parameters if id(one) in used]

    def update(self, trained: int | None = None) -> Array:
        """Look at the options, and return the control numbers of this rank: the same array while these are the same.

        Args:
            trained: a checksum of the parameters whose gradients are averaged, to be compared, too.
        """
        if self._groups is None and self.place.checksum is None and trained is None:
            return self._nothing
        if self._job is not None and self._view != (view := self._job.view):  # ranks that have joined begin to count
            self._view, self.updates = view, 0
            if self.weights is not None:
                self.weights.count(0)
        weights = None
        if self.weights is not None and (self.weights.is_due or not self.weights.passes):
            weights = self.weights.number()
            if weights is not None:
                weights = zlib.crc32(repr(self._fixed()).encode(), weights)
        self._compared_weights = weights
        given = [group.get(name) for group in self._groups() for name in _NAMES] if self._groups is not None else []
        if given != self._given:
            self._take(given)
        if self._seen_checksum != self.place.checksum:
            self._seen_checksum, self._numbers = self.place.checksum, {}
        count = self.updates % _COUNTED
        if weights is not None or (numbers := self._numbers.get((count, trained))) is None:
            mixed = zlib.crc32(bytes([count]), self._checksum)
            for more in (self._seen_checksum, trained, weights):
                if more is not None:
                    mixed = zlib.crc32(more.to_bytes(4, "little"), mixed)
            numbers = np.unpackbits(np.array([mixed, mixed ^ 0xFFFFFFFF], np.uint32).view(np.uint8))
            if weights is None:
                self._numbers[count, trained] = numbers
        return numbers

    def _take(self, given: list[Any]) -> None:
        """Compute the checksum of these values of options, if they are not the same numbers as before."""
        #: Those whose values cannot change in place, so that equal ones need no other look.
        self._given = given if all(map(_is_fixed, given)) else None
        values = [tuple(map(_plain, given[i : i + len(_NAMES)])) for i in range(0, len(given), len(_NAMES))]
        if values != self._values:
            self._values = values
            with np.errstate(over="ignore"):
                rounded = np.array(_flat(values, []), np.float32)
            rounded[np.isnan(rounded)] = np.nan  # there are several, which only their bits tell apart
            self._checksum = zlib.crc32(rounded.tobytes())
            self._numbers = {}

    def note_compared(self) -> None:
        """Note that a pass has compared these."""
        self.place.is_compared = True
        if self.weights is not None:
            self.weights.count(self.weights.passes + 1)

    def raise_difference(self, communicator: Communicator[Any], trained: Sequence[str] = (), noted: str = "") -> None:
        """Raise on all ranks, because they differ; not if only weights did, and are equal by now. Collective.

        Args:
            communicator: of all ranks.
            trained: names of the parameters whose gradients this rank has averaged.
            noted: what else its script has done with parameters.

        Raises:
            MismatchError: they have averaged, updated or set different things.
            DriftError: their weights differ.
        """
        told = communicator.all_gather_object(
            (self.place.values, self.updates, self.text, trained, noted, self._compared_weights),
            "options that differ",
        )
        (places, updates, texts, names, notes, weights), ranks = zip(*told, strict=True), communicator.ranks
        error = trained_error(names, ranks, notes) or place_error(places, ranks) or updates_error(updates, ranks)
        if error is None and self.weights is not None and len(set(weights)) > 1 and len(set(map(tuple, texts))) == 1:
            self.check_weights(f"after {self.updates or self.weights.passes - 1} steps", communicator)
            check_equal_options(self.groups, communicator)
            return
        self.updates = 0  # so that a script may go on from equal weights
        raise error or options_error(texts, ranks)

    def check_weights(self, when: str, communicator: Communicator[Any]) -> None:
        """Compare the weights of all ranks as they are now. Collective.

        Args:
            when: begins the text, such as "after 8 steps".
            communicator: of all ranks.

        Raises:
            DriftError: on all ranks, if they differ. Not if RING_WEIGHT_CHECK=0.
        """
        if self.weights is not None and is_check_wanted() and (found := self.weights.difference(communicator)):
            raise DriftError(f"{when} {found}. {self.likely_causes(communicator)}")

    def likely_causes(self, communicator: Communicator[Any]) -> str:
        """Why weights differ, as far as the ranks know, and what to do. Collective."""
        assert self.weights is not None
        fixed, hints = zip(
            *communicator.all_gather_object((self._fixed(), self.weights.hints()), "causes of differences"), strict=True
        )
        other = other_options(fixed, communicator.ranks)
        return f"The optimizers differ: {other}. Set the same on all ranks." if other else likely_causes(hints)

    def _fixed(self) -> list[dict[str, str]]:
        return fixed_options(self.groups)

    @property
    def text(self) -> list[str]:
        """The options that were last compared, a text for each group."""
        return [
            ", ".join(f"{name}={_text(value)}" for name, value in zip(_NAMES, values, strict=True) if value is not None)
            for values in self._values
        ]


def differ(shares: Sequence[float]) -> bool:
    """Whether ranks differ.

    Args:
        shares: the averages of all ranks' `numbers`; 0 for those that no rank has.
    """
    return any(map(min, shares[:_BITS], shares[_BITS:]))


def options_error(texts: Sequence[list[str]], ranks: Sequence[int]) -> MismatchError:
    """The error that all ranks raise.

    Args:
        texts: of each rank, or only of this one.
        ranks: the ranks' numbers.
    """
    longest = max(map(len, texts))
    for group in range(longest):
        found: dict[str, list[int]] = {}
        for rank, text in zip(ranks, texts, strict=True):
            found.setdefault(text[group] if group < len(text) else "no such group", []).append(rank)
        if len(found) > 1:
            where = "; ".join(f"{name_ranks(some)}: {text}" for text, some in found.items())
            return MismatchError(f"the options of parameter group {group} differ among ranks ({where}). {_REMEDY}")
    own = "; ".join(texts[0])
    return MismatchError(
        f"the options of parameter groups differ among ranks (rank {ranks[0]}: {own}), or their numbers of updates do. "
        f"{_REMEDY}"
    )


def updates_error(updates: Sequence[int], ranks: Sequence[int]) -> MismatchError | None:
    """The error that all ranks raise if their numbers of updates differ.

    Args:
        updates: of each rank.
        ranks: the ranks' numbers.
    """
    found: dict[int, list[int]] = {}
    for rank, count in zip(ranks, updates, strict=True):
        found.setdefault(count, []).append(rank)
    if len(found) == 1:
        return None
    where = "; ".join(f"{name_ranks(some)}: {count}" for count, some in found.items())
    return MismatchError(
        f"the ranks have made different numbers of updates with averaged gradients ({where}), so their weights differ. "
        "Has a rank left out step(), because of its own loss or an exception, or run a backward pass more or less "
        "than others before it? Decide by what is equal on all ranks, "
        "such as averaged gradients or ring_plugins.all_reduce(loss), and continue from a checkpoint."
    )


def listed(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def trained_error(
    trained: Sequence[Sequence[str]], ranks: Sequence[int], notes: Sequence[str] = ()
) -> MismatchError | None:
    """The error that all ranks raise if they have averaged the gradients of different parameters.

    Args:
        trained: names of each rank.
        ranks: the ranks' numbers.
        notes: what else the script of each has done with parameters.
    """
    found: dict[str, list[int]] = {}
    if all(names == trained[0] for names in trained):
        for rank, note in zip(ranks, notes, strict=False):
            found.setdefault(note or "has done no such thing", []).append(rank)
        if len(found) < 2:
            return None
        where = "; ".join(f"{name_ranks(some)} {text}" for text, some in found.items())
        return MismatchError(
            f"the ranks train different parameters in this step ({where}). Replace, freeze and unfreeze the same "
            "parameters on all ranks, between the same two steps, and give new ones to the optimizer."
        )
    shared = set(trained[0]).intersection(*trained)
    for rank, names in zip(ranks, trained, strict=True):
        own = [name for name in names if name not in shared]
        found.setdefault(listed(own) or "none that others do not train", []).append(rank)
    where = "; ".join(f"{name_ranks(some)}: {text}" for text, some in found.items())
    return MismatchError(
        f"the ranks train different parameters in this step ({where}), so the gradients of some were averaged with "
        "those of others. Freeze and unfreeze (requires_grad) the same parameters on all ranks, between the same two "
        "steps: if they are drawn at random, from a generator that has the same seed on all ranks."
    )


def place_error(places: Sequence[Mapping[str, int]], ranks: Sequence[int]) -> MismatchError | None:
    """The error that all ranks raise if they are at different places.

    Args:
        places: the integers of each rank.
        ranks: the ranks' numbers.
    """
    if all(place == places[0] for place in places):
        return None
    told = dict(zip(ranks, places, strict=True))
    return MismatchError(
        f"ranks are at different places of the training since a process has joined: {told}. Iterate over "
        "state.batches(loader), or call commit() only where an epoch begins."
    )


def check_equal_options(groups: Iterable[Mapping[str, Any]], communicator: Communicator[Any]) -> None:
    """Check what schedulers do not change: the names of all options, and the values of the others. Collective.

    Raises:
        MismatchError: they differ among ranks.
    """
    if found := other_options(
        communicator.all_gather_object(fixed_options(groups), "options of optimizer"), communicator.ranks
    ):
        raise MismatchError(
            f"the optimizers differ among ranks: {found}. Equal gradients would become different updates. Make the "
            "same optimizer on all ranks, and set its options alike."
        )


def fixed_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each group the names of all options, with the values, as texts, of those that schedulers do not change."""
    return [
        {
            name: "" if name in _NAMES else _fixed_text(value)
            for name, value in group.items()
            if name in _NAMES or name not in _NOT_COMPARED
        }
        for group in groups
    ]


def other_options(by_rank: Sequence[Sequence[Mapping[str, str]]], ranks: Sequence[int]) -> str:
    """The first option that differs among ranks, as part of a sentence; "" if none does.

    Args:
        by_rank: of each rank, what `fixed_options` returns.
        ranks: the ranks' numbers.
    """
    for number in range(max(map(len, by_rank))):
        of_group = [options[number] if number < len(options) else {} for options in by_rank]
        for name in dict.fromkeys(name for options in of_group for name in options):
            texts = [f"{name}={options[name]}" if name in options else f"no {name}" for options in of_group]
            if any(text != texts[0] for text in texts):
                where = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True))
                return f"parameter group {number} has other options ({where})"
    return ""


_REMEDY = (
    "Equal gradients would become different updates. Has a rank stepped its scheduler for a batch that it skipped, or "
    "by a loss that is only its own?"
)


def groups_of(optimizer: Optimizer) -> Groups:
    """The parameter groups of an optimizer, which this does not keep alive."""
    reference = weakref.ref(optimizer)
    return lambda: () if (found := reference()) is None else found.param_groups


def _is_fixed(value: Any) -> bool:
    """Whether the value of an option stays what it is: a number, None, or a tuple of such."""
    return value is None or isinstance(value, (float, int)) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


def _plain(value: Any) -> Any:
    """The value as a float; None for one that could only be read by waiting for a GPU."""
    if type(value) is float or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, (int, float)) else None


def _flat(value: Any, to: list[float]) -> list[float]:
    """Append all numbers of nested sequences, None as NaN."""
    if isinstance(value, (tuple, list)):
        for one in value:
            _flat(one, to)
    else:
        to.append(math.nan if value is None else value)
    return to


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    return "None" if value is None else f"{value:.7g}"


def _fixed_text(value: Any) -> str:
    """The value of an option as text, "" for one that is no plain value."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_fixed_text, value))})"
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value) if value is None or isinstance(value, (bool, int, str)) else ""
