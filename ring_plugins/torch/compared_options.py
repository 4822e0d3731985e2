"""The options of optimizers, as far as they decide on updates: compared among ranks.

What schedulers change, such as learning rates, is compared in every pass (`ring_plugins.observe.consistency`). Its
checksum is computed only when a value has changed: that takes 10 µs where a scheduler changes one group's learning
rate. What schedulers do not change, such as `eps` or `nesterov`, is compared at once, in `check_equal_options`, and
again together with the weights.

Values count as float32: hosts with different math libraries may compute schedules that differ in the last bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from ring_plugins.core.base.errors import MismatchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.observe.consistency import by_value

#: What schedulers change.
_NAMES = ("lr", "momentum", "betas", "weight_decay")
#: Which code computes the update, and what schedulers note: no part of the update itself.
_NOT_COMPARED = (*_NAMES, "params", "initial_lr", "foreach", "fused", "capturable", "differentiable")

Groups = Callable[[], Iterable[Mapping[str, Any]]]


class Options:
    """The options of the optimizers that use one averager's gradients, as far as schedulers change them.

    Attributes:
        number: see `Check`; None without optimizers.
        groups: returns parameter groups, as torch's optimizers have them; nothing without optimizers.
        remedy: what a script can do about options that differ before its second step, which is a warning then; "" if it
            is an error, as later.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.groups: Groups = tuple
        self.remedy, self._is_told, self._passes = "", False, 0
        self._given: list[Any] | None = []
        self._values: list[Any] = []

    def look(self, passes: int) -> None:
        """Compute the number anew if a value has changed."""
        self._passes = passes
        given: list[Any] = []
        for group in self.groups():
            given += map(group.get, _NAMES)
        if given == self._given:
            return
        #: Those whose values cannot change in place, so that equal ones need no other look.
        self._given = given if all(map(_is_fixed, given)) else None
        values = list(map(_plain, given))
        if values != self._values:
            self._values = values
            with np.errstate(over="ignore"):
                self.number = zlib.crc32(repr(_rounded(tuple(values))).encode())

    def say(self, communicator: Communicator[Any]) -> None:
        """See `Check`."""
        found = communicator.all_gather_object((self.number, self.texts), "options that differ")
        numbers, texts = zip(*found, strict=True)
        if len(set(numbers)) > 1:
            self.reject(options_error(texts, communicator.ranks), communicator.rank, self._passes)

    def reject(self, error: MismatchError, rank: int, passes: int) -> None:
        """Raise an error, or warn of it once on rank 0, after so many passes."""
        if passes or not self.remedy:
            raise error
        if rank == 0 and not self._is_told:
            logger.warning(f"{error} {self.remedy}")
        self._is_told = True

    def check_others(self, groups: Iterable[Mapping[str, Any]], communicator: Communicator[Any]) -> None:
        """`check_equal_options` before the first step."""
        try:
            check_equal_options(groups, communicator)
        except MismatchError as error:
            self.reject(error, communicator.rank, 0)

    @property
    def texts(self) -> list[str]:
        """The options that were last compared, a text for each group."""
        by_group = zip(*[iter(self._values)] * len(_NAMES), strict=True)
        return [
            ", ".join(f"{name}={_text(value)}" for name, value in zip(_NAMES, values, strict=True) if value is not None)
            for values in by_group
        ]

    def use(self, parameters: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Those of these (name, parameter) pairs that the optimizers have; all if there are none."""
        if self.groups is tuple:
            return list(parameters)
        used = {id(one) for group in self.groups() for one in group.get("params", ())}
        return [(name, one) for name, one in parameters if id(one) in used]


def options_error(texts: Sequence[list[str]], ranks: Sequence[int]) -> MismatchError:
    """The error that all ranks raise.

    Args:
        texts: of each rank, or only of this one.
        ranks: the ranks' numbers.
    """
    group, where = "s", f"rank {ranks[0]}: {'; '.join(texts[0])}), or their numbers of updates do"
    for number, of_group in enumerate(zip_longest(*texts, fillvalue="no such group")):
        if len(set(of_group)) > 1:
            group, where = f" {number}", f"{by_value(of_group, ranks)})"
            break
    return MismatchError(
        f"the options of parameter group{group} differ among ranks ({where}. Equal gradients would become different "
        "updates. Has a rank stepped its scheduler for a batch that it skipped, or by a loss that is only its own?"
    )


def check_equal_options(groups: Iterable[Mapping[str, Any]], communicator: Communicator[Any]) -> None:
    """Check what schedulers do not change: the names of all options, and the values of the others. Collective.

    Raises:
        MismatchError: they differ among ranks.
    """
    if found := other_options(groups, communicator):
        raise MismatchError(
            f"the optimizers differ among ranks: {found}. Equal gradients would become different updates. Make the "
            "same optimizer on all ranks, and set its options alike."
        )


def other_options(groups: Iterable[Mapping[str, Any]], communicator: Communicator[Any]) -> str:
    """The first such option that differs among ranks, as part of a sentence; "" if none does. Collective."""
    by_rank = communicator.all_gather_object(fixed_options(groups), "options of optimizer")
    for number, of_group in enumerate(zip_longest(*by_rank, fillvalue={})):
        for name in dict.fromkeys(name for options in of_group for name in options):
            texts = [f"{name}={options[name]}" if name in options else f"no {name}" for options in of_group]
            if len(set(texts)) > 1:
                where = "; ".join(f"rank {rank}: {text}" for rank, text in zip(communicator.ranks, texts, strict=True))
                return f"parameter group {number} has other options ({where})"
    return ""


def fixed_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """For each group the names of all options, with the values, as texts, of those that schedulers do not change."""
    return [
        {
            name: "" if name in _NAMES else _text(value)
            for name, value in group.items()
            if name in _NAMES or name not in _NOT_COMPARED
        }
        for group in groups
    ]


def _is_fixed(value: Any) -> bool:
    """Whether the value of an option stays what it is: a number, None, or a tuple of such."""
    return value is None or isinstance(value, (float, int)) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


def _plain(value: Any) -> Any:
    """The value as a float; None for one that could only be read by waiting for a GPU."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, (int, float)) else None


def _rounded(value: Any) -> Any:
    return tuple(map(_rounded, value)) if isinstance(value, tuple) else value and float(np.float32(value))


def _text(value: Any) -> str:
    """The value of an option as text, "" for one that is no plain value."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, float):
        return str(np.float32(value)).removesuffix(".0")
    return str(value) if value is None or isinstance(value, (bool, int, str)) else ""
