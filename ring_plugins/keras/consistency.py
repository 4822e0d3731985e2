"""Whether all ranks still train the same model in the same way.

Averaged gradients keep weights equal only if they were equal before, and if nothing else changes them on one rank:
noise behind the averages, an option that one rank changes, a callback that sets weights. So the ranks compare

- their optimizers' options, when a model's gradients are averaged for the first time;
- their weights, before the first step if parts of them are put together, and after it;
- weights and options after 2, 4, 8... steps, which reads all weights, but so seldom that it cannot be measured;
- learning rates at the end of each epoch, and weights and what callbacks have decided at the end of `fit`;
- weights after ranks were lost or have joined. The survivors average the step's gradients once more, from the memory in
  which the framework or `SavedInputs` still has them (core/gradients/reducer.py), so a compiled step notices
  nothing.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import keras

from ring_plugins.core.base.errors import DriftError, MismatchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.world import current
from ring_plugins.keras.backends import backend
from ring_plugins.observe.consistency import (
    SWITCH,
    Checksums,
    checksum,
    differing_weights,
    is_check_wanted,
    is_compared_after,
    membership_changes,
)

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


def all_equal(values: Sequence[Any]) -> bool:
    """Whether values are equal, with NaN equal to itself."""
    return all(value == values[0] or repr(value) == repr(values[0]) for value in values)


def by_rank(values: Sequence[Any], ranks: Sequence[int]) -> str:
    """Values of ranks, in words."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, values, strict=True))


class LossWatch:
    """Notices once that ranks were lost or have joined, at a place to which all ranks come."""

    def __init__(self) -> None:
        self._view = membership_changes()

    def has_changed(self) -> bool:
        """Whether ranks were lost or have joined since the last call."""
        before, self._view = self._view, membership_changes()
        return self._view != before


def check_equal_after_losses(checksums: Checksums, communicator: Communicator[Any]) -> None:
    """Compare weights or averages among the ranks that are left. Collective.

    Raises:
        DriftError: on all ranks, if they differ. Not if RING_WEIGHT_CHECK=0.
    """
    found = differing_weights(checksums, "after ranks were lost or joined", communicator)
    if found:
        raise DriftError(f"{found} Continue from a checkpoint.")


def checksums_of(variables: Sequence[Any]) -> tuple[list[str], list[int]]:
    """Names and checksums of variables."""
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    return [variable.path for variable in variables], list(map(checksum, values))


class WeightComparison:
    """Compares the weights that one optimizer updates, before its first step and after some of the others.

    Attributes:
        is_equal: whether the ranks' weights are known to be equal, so that parts of them fit together.
        is_wanted: whether steps compare weights; a `BroadcastCallback` does so between them.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.is_equal, self.is_wanted = False, True
        self._start = 0  # a checksum of the weights in the first step

    def before_first_step(self, variables: Sequence[Any], communicator: Communicator[Any]) -> None:
        """Check that all ranks begin with the same weights, since parts of different models would be put together.

        Raises:
            MismatchError: they do not.
        """
        self.is_equal = True
        with backend().at_once():
            if any(variable._value is None for variable in variables):  # during `fit` on JAX Keras has them elsewhere
                return
            found = differing_weights(lambda: checksums_of(variables), "before the first step", communicator)
        if found:
            raise MismatchError(
                f"{found} A sharded optimizer would put parts of different models together. Call "
                "ring_plugins.keras.broadcast_variables(model) before the first step, or add BroadcastCallback() to "
                "fit(callbacks=...)."
            )

    def after_step(self, steps: int, used: Sequence[Any], communicator: Communicator[Any]) -> None:
        """Compare them where that is due, in a step that runs eagerly or in a host call of one; else do nothing.

        Args:
            steps: before this one.
            used: variables that have gradients.
            communicator: of all ranks.

        Raises:
            DriftError, MismatchError: as for `check_drift`.
        """
        if not self.is_wanted or not (steps <= 0 or is_compared_after(steps)) or not is_check_wanted():
            return
        if current().recovers or membership_changes():  # ranks that have come later have taken other numbers of steps
            return
        with backend().at_once():
            if steps <= 0:
                self._start = zlib.crc32(repr(checksums_of(used)[1]).encode())  # sent only if weights differ later
                return
            try:
                check_drift(lambda: checksums_of(used), [self._optimizer], f"after {steps} steps", communicator)
            except DriftError as error:
                if len(set(communicator.all_gather_object(self._start))) == 1:
                    raise
                raise DriftError(
                    f"{str(error).split('. ')[0]}. The ranks began with different weights: call "
                    "ring_plugins.keras.broadcast_variables(model) before the first step, or add BroadcastCallback() "
                    f"to fit(callbacks=...). {SWITCH}"
                ) from None


def check_drift(checksums: Checksums, optimizers: Sequence[Any], when: str, communicator: Communicator[Any]) -> None:
    """Check that weights and options are the same on all ranks; collective. RING_WEIGHT_CHECK=0 switches it off.

    Args:
        checksums: returns those of this rank's weights.
        optimizers: whose options are compared.
        when: begins the text of the error, such as "after the 4th step".
        communicator: of all ranks.

    Raises:
        DriftError: the weights differ; raised on all ranks.
        MismatchError: only options differ; raised on all ranks.
    """

    def with_options() -> tuple[list[str], list[int]]:
        names, sums = checksums()  # first, since on JAX it gives the optimizer's variables their values, too
        return [*names, "options"], [*sums, zlib.crc32(repr(list(map(_options_of, optimizers))).encode())]

    if not differing_weights(with_options, when, communicator):
        return
    found = differing_weights(checksums, when, communicator)
    options = _differing_options(optimizers, communicator)
    if found:
        raise DriftError(f"{found} {_cause(options) or _LIKELY_CAUSES}")
    if options:
        raise MismatchError(f"{options}, so their weights would drift apart. Set the same on all ranks.")


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
    own = _decisions_of(callbacks.callbacks if callbacks is not None else ())
    found = _differing_decisions(communicator.all_gather_object(own, "end of epoch"), communicator.ranks)
    remedy = (
        "Callbacks that watch a metric see that of their own rank's data: add MetricAverageCallback() on all ranks."
    )
    differs = checksums and differing_weights(checksums, "when fit() ended", communicator)
    if differs:
        cause = _cause(_differing_options(optimizers, communicator)) or f"{_LIKELY_CAUSES} {remedy}"
        if found:
            cause = f"Callbacks decided differently: {found}. {remedy}"
        raise DriftError(f"{differs} {cause}")
    return found and f"callbacks decided differently on the ranks: {found}. {remedy}"


def warn_if_different(checksums: Checksums, when: str, communicator: Communicator[Any], is_here: bool) -> bool:
    """Warn, where `is_here`, if the ranks' weights differ although their gradients are averaged; returns whether so."""
    found = differing_weights(checksums, when, communicator)
    if found and is_here:
        logger.warning(
            f"{found} A rank made a different update: a train_step or an optimizer that draws random numbers, or "
            f"weights that no averaged optimizer updates. {SWITCH}"
        )
    return bool(found)


def _decisions_of(callbacks: Sequence[Any]) -> dict[str, Any]:
    """What callbacks have decided on this rank, by a name for each."""
    return {
        f"{type(callback).__name__}.{name}": vars(callback).get(name)
        for callback in callbacks
        for kind, names in _DECISIONS.items()
        if isinstance(callback, kind)
        for name in names
    }


def _differing_decisions(of_ranks: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    """Those that differ among the ranks that have made them, in words; "" if none does."""
    found = []
    for name in dict.fromkeys(name for made in of_ranks for name in made):
        made = {rank: decisions[name] for rank, decisions in zip(ranks, of_ranks, strict=True) if name in decisions}
        if not all_equal([*made.values()]):
            found.append(f"{name} ({by_rank([*made.values()], [*made])})")
    return ", ".join(found)


def updating_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that update: those of a `MultiOptimizer`, or the one inside any LossScaleOptimizer."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return list(getattr(optimizer, "optimizers", [optimizer]))


def check_equal_learning_rates(optimizer: Any, communicator: Communicator[Any]) -> None:
    """Check that the learning rate, or each of several, is the same on all ranks. Collective.

    Raises:
        MismatchError: the rates differ.
    """
    own = [float(keras.ops.convert_to_numpy(one.learning_rate)) for one in updating_optimizers(optimizer)]
    rates = communicator.all_gather_object(own[0] if len(own) == 1 else tuple(own), "learning rates")
    if not all_equal(rates):
        raise MismatchError(
            f"learning rates differ among ranks: {rates}, in rank order. A callback such as ReduceLROnPlateau used "
            "metrics of its own rank; add MetricAverageCallback()."
        )


def check_equal_optimizers(optimizer: Any, communicator: Communicator[Any]) -> None:
    """Check that the optimizer and its options, such as the learning rate, are the same on all ranks. Collective.

    Does nothing where a rank cannot know them: in a step that JAX traces, the rate is a value without a number.

    Raises:
        MismatchError: they differ.
    """
    if found := _differing_options([optimizer], communicator):
        raise MismatchError(f"{found}, so their weights would drift apart. Make the same optimizer on all ranks.")


def _cause(options: str) -> str:
    return options and f"The cause is likely that {options}. Set the same on all ranks."


def _differing_options(optimizers: Sequence[Any], communicator: Communicator[Any]) -> str:
    """The first option that differs among ranks, as the beginning of a sentence; "" if none is known to. Collective."""
    for own in map(_options_of, optimizers):
        found = communicator.all_gather_object(own, "optimizers")
        if None in found:
            continue
        for name in dict.fromkeys(name for options in found for name in options):
            values = [options.get(name, "none") for options in found]
            if len(set(values)) > 1:
                return f"the optimizer's {name} differs among ranks ({by_rank(values, communicator.ranks)})"
    return ""


def _options_of(optimizer: Any) -> dict[str, str] | None:
    """The class and the options of an optimizer by name, those inside options too; None if they are not known now."""
    try:
        with backend().at_once():
            parts = getattr(optimizer, "optimizers", None)  # of a `MultiOptimizer`
            if parts is None:
                options = optimizer.get_config()
            else:
                options = {f"optimizers.{i}": _options_of(part) for i, part in enumerate(parts)}
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
