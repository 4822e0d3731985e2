"""Whether all ranks still train the same model in the same way.

Averaged gradients keep weights equal only if they were equal before, and if nothing else changes them on one rank:
noise behind the averages, an option that one rank changes, a callback that sets weights. What the ranks compare is a
list of checks (`ring_plugins.observe.consistency`), whose numbers travel with what the ranks exchange anyway:

- with the gradients of each pass: the learning rate, and after 1, 2, 4, 8... steps weights and options;
- in a `fit` with `BroadcastCallback` with the exchange behind each step and epoch (`SynchronizedStop`), on all backends
  alike: weights and options after the same steps, and before they are saved, and the learning rates of each epoch.

A step that JAX compiles cannot read variables. In a `fit` they are read between two steps, and their number travels
with the gradients of the next. Other loops on JAX compare learning rates only.

Three things are compared at once: optimizers' options when a model's gradients are averaged for the first time; weights
after ranks were lost or have joined; and what callbacks have decided and set when `fit` ends. The survivors of a loss
average the step's gradients once more, from the memory in which the framework or `SavedInputs` still has them
(core/gradients/reducer.py), so a compiled step notices nothing.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.errors import DriftError, MismatchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.world import current, is_initialized
from ring_plugins.observe.consistency import (
    SWITCH,
    Checks,
    Checksums,
    checksum,
    differing_weights,
    is_check_wanted,
    raise_failure_of_gpus,
    what_differs,
)
from ring_plugins.other_names import HOROVODS_BROADCAST, as_in_script

#: The class and options of an optimizer, as texts by name; None where they cannot be known.
Options = dict[str, str] | None

#: Why weights may differ, if nothing else is known.
_LIKELY_CAUSES = (
    "A rank has changed its weights or averages in a way of its own: a callback or a train_step that sets weights, "
    "noise or clipping behind the averages, a condition that is true on some ranks only, an optimizer that draws "
    "random numbers, or a memory error. Continue from a checkpoint, or broadcast the weights of a rank you trust. "
    f"{SWITCH}"
)
#: What a callback decides from the numbers that its rank sees, by class.
_DECISIONS = {
    keras.callbacks.EarlyStopping: ("best_epoch", "stopped_epoch"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


def _other_starts() -> str:
    broadcast = as_in_script("ring_plugins.keras.BroadcastCallback()", HOROVODS_BROADCAST)
    return (
        f"Add {broadcast} to fit(callbacks=...) on all ranks, or call ring_plugins.keras.broadcast_variables(model) "
        "before the first step, if the ranks began with different weights."
    )


def all_equal(values: Sequence[Any]) -> bool:
    """Whether values are equal, with NaN equal to itself."""
    return all(value == values[0] or repr(value) == repr(values[0]) for value in values)


def by_rank(values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Values of ranks, in words."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, values, strict=True))


#: Attribute of a variable that each rank has for itself; its value says whether it is not broadcast either.
LOCAL = "_ring_local"


def checksums_of(variables: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Names and checksums of variables, but for those of each rank's own."""
    variables = [variable for variable in variables if not hasattr(variable, LOCAL)]
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    return [variable.path for variable in variables], list(map(checksum, values))


class Rates:
    """The learning rates of the next update, as one of the checks.

    Attributes:
        number: see `Check`; None where none is taken: schedules compute them, or sharded updates compare them.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._rates: tuple[float, ...] = ()

    def take(self, *rates: float) -> None:
        """Compare these next."""
        self._rates, self.number = rates, zlib.crc32(np.array(rates, np.float32).tobytes())

    def say(self, communicator: Communicator[Any]) -> None:
        """See `Check`."""
        told = communicator.all_gather_object(self._rates, "learning rates")
        if all_equal(told):
            return
        texts = [", ".join(f"{rate:.7g}" for rate in rates) or "none" for rates in told]
        raise MismatchError(
            f"learning rates differ among ranks ({by_rank(texts, communicator.ranks)}), so equal gradients would "
            "become different updates. Has a rank set its rate by a loss that is only its own, as ReduceLROnPlateau "
            "does? Decide by what is equal on all ranks, such as ring_plugins.all_reduce(loss); in fit(), add "
            "MetricAverageCallback()."
        )


class Weights:
    """The weights that are trained and the options of their optimizers, as one of the checks.

    Args:
        checksums: returns names and checksums of this rank's weights.
        options: returns those of their optimizers; called afterwards, since on JAX `checksums` gives the optimizer's
            variables their values, too.
        start: a checksum of the weights before the first step, None if it is not known yet.

    Attributes:
        number: see `Check`; None where no comparison is due.
        is_readable: whether a pass can read them.
        has_told: whether a warning has said that they differ.
    """

    def __init__(self, checksums: Checksums, options: Callable[[], list[Options]], start: int | None = None) -> None:
        self.number: int | None = None
        self.is_readable, self.has_told = True, False
        self._checksums, self._options, self._start = checksums, options, start
        self._when, self._warns, self._names = "", False, list[str]()
        self._read: tuple[list[int], list[Options]] | None = None

    def begin(self) -> None:
        """Read them before the first step: sent only if they differ later."""
        self._start = zlib.crc32(repr(self._checksums()[1]).encode())

    def look(self, when: str, warns: bool = False) -> None:
        """Read them, to be compared next.

        Args:
            when: begins the text about a difference, such as "after 4 steps".
            warns: whether a difference is a warning on rank 0, and no error.
        """
        names, sums = self._checksums()
        self._when, self._warns, self._names = when, warns, list(names)
        self._read = list(sums), self._options()
        self.number = zlib.crc32(repr(self._read).encode())

    def forget(self) -> None:
        """Say nothing of what was read for an earlier pass."""
        self._read = None

    def say(self, communicator: Communicator[Any]) -> None:
        """See `Check`. It says of what was read, since a compiled step cannot read again."""
        told = communicator.all_gather_object((self._start, self._read), "weights that differ")
        starts, read = zip(*told, strict=True)
        if None in read:  # a process that has just joined, or has RING_WEIGHT_CHECK=0
            return
        sums, options = zip(*read, strict=True)
        different = differing_options(options, communicator.ranks)
        if all(of_rank == sums[0] for of_rank in sums):
            if different:
                raise MismatchError(f"{different}, so their weights would drift apart. Set the same on all ranks.")
            return
        raise_failure_of_gpus(communicator)
        cause = _cause(different) or _LIKELY_CAUSES
        if len(set(starts)) > 1 or None in starts:
            cause = f"{_other_starts()} {SWITCH if None not in starts else cause}"
        text = f"{self._when} {what_differs(self._names, sums, communicator.ranks)}. {cause}"
        if not self._warns:
            raise DriftError(text)
        self.has_told = True
        if communicator.rank == 0:
            logger.warning(text)


class KerasChecks(Checks):
    """What the passes of one optimizer compare, or the exchanges of a `fit`.

    Args:
        checksums, options, start: as for `Weights`; nothing by default.
        reads_in_pass: whether passes read the weights where that is due; a `BroadcastCallback` does so between them.

    Attributes:
        rates, weights: two of the checks.
        reads_in_pass: as given.
    """

    def __init__(
        self,
        checksums: Checksums = lambda: ((), ()),
        options: Callable[[], list[Options]] = list,
        start: int | None = None,
        reads_in_pass: bool = True,
    ) -> None:
        super().__init__(current().elastic if is_initialized() else None)
        self.rates, self.weights = Rates(), Weights(checksums, options, start)
        self.list += [self.rates, self.weights]
        self.reads_in_pass = reads_in_pass

    def number(self) -> int:
        """A checksum of all numbers of this rank."""
        is_due = self.reads_in_pass and self.weights.is_readable and self.weights.number is None
        if is_due and (self.is_due or not self.passes) and is_check_wanted():
            self.look(self.passes)
        if self.weights.number is None:
            self.weights.forget()
        return super().number()

    def begin_anew(self) -> None:
        """Count from 0 on all ranks, whose last passes an exception may have ended in different places."""
        self.passes = 0
        self.set_due(False)
        self.rates.number = self.weights.number = None

    def look(self, steps: int) -> None:
        """Read the weights after so many steps."""
        if steps == 0:
            self.weights.begin()
        else:
            self.weights.look("after the first step" if steps == 1 else f"after {steps} steps", warns=steps == 1)

    def note_compared(self) -> None:
        """See the base class; what was read for one pass says nothing about the next."""
        super().note_compared()
        self.rates.number = self.weights.number = None

    def compare(self, communicator: Communicator[Any]) -> None:
        """End a pass that carries no numbers, on GPUs: where weights are due, compare them at once. Collective then."""
        is_due, number = self.is_due, self.number()
        self.note_compared()
        if is_due and len(set(communicator.all_gather_object(number, "numbers that differ"))) > 1:
            self.say(communicator)


def check_equal_starts(variables: Sequence[Any], communicator: Communicator[Any]) -> None:
    """Check that all ranks begin with the same weights, since parts of different models would be put together.

    Raises:
        MismatchError: they do not.
    """
    if any(variable._value is None for variable in variables):  # during `fit` on JAX Keras has them elsewhere
        return
    if found := differing_weights(lambda: checksums_of(variables), "before the first step", communicator):
        raise MismatchError(
            f"{found} A sharded optimizer would put parts of different models together. {_other_starts()}"
        )


def check_end_of_fit(
    callbacks: Any, checksums: Checksums | None, optimizers: Sequence[Any], communicator: Communicator[Any]
) -> str:
    """Compare what the callbacks may have set when `fit` ends, each on its own rank. Collective.

    Args:
        callbacks: the `CallbackList` of `fit`, None if it is unknown.
        checksums: returns those of this rank's weights; None if they need not be equal.
        optimizers: whose options may be the cause.
        communicator: of all ranks.

    Returns:
        What they decided differently, as a warning; "" if nothing.

    Raises:
        DriftError: the weights differ.
    """
    own = {
        f"{type(callback).__name__}.{name}": vars(callback).get(name)
        for callback in ([] if callbacks is None else callbacks.callbacks)
        for kind, names in _DECISIONS.items()
        if isinstance(callback, kind)
        for name in names
    }
    told = communicator.all_gather_object(own, "end of epoch")
    decided = []
    for name in dict.fromkeys(name for made in told for name in made):  # among the ranks that have made it
        made = {rank: of_rank[name] for rank, of_rank in zip(communicator.ranks, told, strict=True) if name in of_rank}
        if not all_equal([*made.values()]):
            decided.append(f"{name} ({by_rank([*made.values()], [*made])})")
    found = ", ".join(decided)
    remedy = (
        "Callbacks that watch a metric see that of their own rank's data: add MetricAverageCallback() on all ranks."
    )
    differs = checksums and differing_weights(checksums, "when fit() ended", communicator)
    if differs:
        told = communicator.all_gather_object(list(map(options_of, optimizers)), "optimizers")
        cause = _cause(differing_options(told, communicator.ranks)) or f"{_LIKELY_CAUSES} {remedy}"
        if found:
            cause = f"Callbacks decided differently: {found}. {remedy}"
        raise DriftError(f"{differs} {cause}")
    return found and f"callbacks decided differently on the ranks: {found}. {remedy}"


def updating_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that update: those of a `MultiOptimizer`, or the one inside any LossScaleOptimizer."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return list(getattr(optimizer, "optimizers", [optimizer]))


def rates_of(optimizer: Any) -> list[float]:
    """The learning rates of those that update."""
    return [float(keras.ops.convert_to_numpy(one.learning_rate)) for one in updating_optimizers(optimizer)]


def check_equal_optimizers(optimizer: Any, communicator: Communicator[Any]) -> None:
    """Check that the optimizer and its options, such as the learning rate, are the same on all ranks. Collective.

    Does nothing where a rank cannot know them: in a step that JAX traces, the rate is a value without a number.

    Raises:
        MismatchError: they differ.
    """
    told = communicator.all_gather_object([options_of(optimizer)], "optimizers")
    if found := differing_options(told, communicator.ranks):
        raise MismatchError(f"{found}, so their weights would drift apart. Make the same optimizer on all ranks.")


def _cause(options: str) -> str:
    return options and f"The cause is likely that {options}. Set the same on all ranks. {SWITCH}"


def differing_options(told: Sequence[Sequence[Options]], ranks: Sequence[int]) -> str:
    """The first option that differs among ranks, as the beginning of a sentence; "" if none is known to.

    Args:
        told: by rank and optimizer.
        ranks: the ranks' numbers.
    """
    for found in zip(*told, strict=False):
        known = [options for options in found if options is not None]
        for name in dict.fromkeys(name for options in known for name in options) if len(known) == len(found) else ():
            values = [options.get(name, "none") for options in known]
            if len(set(values)) > 1:
                return f"the optimizer's {name} differs among ranks ({by_rank(values, ranks)})"
    return ""


def options_of(optimizer: Any) -> Options:
    """The class and the options of an optimizer by name, those inside options too; None if they are not known now."""
    try:
        parts = getattr(optimizer, "optimizers", None)  # of a `MultiOptimizer`
        if parts is None:
            options = optimizer.get_config()
        else:
            options = {f"optimizers.{i}": options_of(part) for i, part in enumerate(parts)}
    except Exception:  # of any framework: a value that is traced has no number, a rate may be any function
        return None
    return {"class": type(optimizer).__name__, **_flattened(options, "")}


def _flattened(options: dict[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            found |= _flattened(value, f"{prefix}{name}.")
        elif name not in ("name", "registered_name"):  # which may count the optimizers of a process
            found[prefix + name] = re.sub(" at 0x[0-9a-f]+", "", repr(value))  # of a function
    return found
