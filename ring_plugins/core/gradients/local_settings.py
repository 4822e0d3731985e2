"""How ranks that train by themselves exchange what they have learned (local_updates.py): of what, when and by whom.

`Settings` are what a user asks for, and know what does not suit. `Weights` is what a framework brings, and `Told` what
ranks tell each other before they exchange.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ring_plugins.core.arrays.codec import AUTO, Compression
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array

#: What `outer="nesterov"` means: it won at 8 to 100 exchanges (docs/slow_networks.md), where the 0.7 and 0.9 of the
#: literature need hundreds.
NESTEROV = (0.9, 0.6)
#: A momentum m remembers 1 / (1 - m) exchanges. It needs so many times these to pay.
_TIMES_MEMORY = 10
#: Fewer steps than these between two exchanges tell a momentum little: 8 were worse than one rank alone.
_FEW_STEPS = 16
#: In place of a fragment's number: all of them, once nobody takes steps any more; what is due until then. And all at
#: once, since a rank wants a change.
ALL, NOW = -1, -2


class Settings(NamedTuple):
    """How ranks exchange; equal on all of them.

    Attributes:
        every: steps from one exchange of a fragment to the next; 0 if `seconds` count.
        seconds: the same as time.
        outer: learning rate and momentum of the outer optimizer; 1 and 0 average.
        fragments: how many there are.
        compression: of what is sent between hosts.
        delay: steps that a rank takes while an exchange is under way.
        within_host: whether the ranks of a host average every step.
    """

    every: int
    seconds: float
    outer: tuple[float, float]
    fragments: int
    compression: Compression | None
    delay: int = 0
    within_host: bool = True

    @classmethod
    def checked(
        cls,
        every: int | str,
        outer: Any = "average",
        fragments: int = 1,
        compression: Compression | None = None,
        steps: int | None = None,
        name: str = "every",
        delay: int = 0,
    ) -> Settings:
        """What a user asks for.

        Args:
            every: a number of steps, or a time such as "30s".
            outer: "average", "nesterov" or a learning rate and a momentum.
            fragments: how many parts of the weights take turns.
            compression: of what is sent.
            steps: how many steps the training has, if that is known.
            name: what the user calls `every`.
            delay: as above.

        Raises:
            ArgumentError: a value is impossible, or they do not suit each other.
        """
        by_time = re.fullmatch(r"(\d+(?:\.\d+)?) ?s", every) if isinstance(every, str) else None
        seconds = float(by_time[1]) if by_time else 0.0
        if not seconds and not _is_count(every):
            raise ArgumentError(f'{name}={every!r} must be a number of steps from 1, or a time such as "30s".')
        pair: Any = {"average": (1.0, 0.0), "nesterov": NESTEROV}.get(outer) if isinstance(outer, str) else outer
        try:
            lr, momentum = map(float, pair)
            is_right = 0 < lr < math.inf and 0 <= momentum < 1
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise ArgumentError(
                f'outer={outer!r} must be "average", "nesterov" (which is {NESTEROV}), or a learning rate above 0 and '
                "a momentum from 0 to below 1, such as (0.7, 0.9)."
            )
        if not _is_count(fragments):
            raise ArgumentError(f"fragments={fragments!r} must be a number from 1.")
        if fragments > 1 and (seconds or int(every) % fragments):
            raise ArgumentError(
                f"fragments={fragments} must divide {name}={every!r}, since fragments take turns in equal numbers of "
                f"steps. Take another of the two{', or a number of steps' if seconds else ''}."
            )
        if compression is not None and compression.name == AUTO:
            raise ArgumentError(
                'compression="auto" tries codecs in the first steps, and exchanges of local updates are too few for '
                'that: use "int8" up to 1 Gbit/s, "bf16", or None.'
            )
        gap = math.inf if seconds else int(every) // int(fragments)
        if delay != 0 and not (_is_count(delay) and delay < gap):
            raise ArgumentError(
                f"delay={delay!r} must be 0, or a number of steps below {name} / fragments = {gap:g}, since an "
                "exchange ends before the next one begins."
            )
        settings = cls(0 if seconds else int(every), seconds, (lr, momentum), int(fragments), compression, int(delay))
        if steps is not None and not _is_count(steps):
            raise ArgumentError(f"steps={steps!r} must be the number of steps of the training, or None.")
        if steps is not None and settings.every and momentum and steps // settings.every < round(1 / (1 - momentum)):
            raise ArgumentError(f"{settings.misfit(steps // settings.every)} {name} is {every}, and steps {steps}.")
        return settings

    def shown(self) -> dict[str, object]:
        """What ranks compare, by the names of a user's arguments."""
        values = self._asdict()
        seconds = values.pop("seconds")
        return values | ({"every": f"{seconds:g}s"} if seconds else {})

    @classmethod
    def wanted(
        cls,
        caller: str,
        sync_every: int | str | None,
        outer: Any,
        fragments: int,
        compression: Compression | None,
        steps: int | None = None,
        delay: int = 0,
    ) -> Settings | None:
        """As `checked`, of a `caller` that averages in every step unless `sync_every` is given: None then.

        Raises:
            ArgumentError: as `checked`, or an argument needs `sync_every`.
        """
        if sync_every is not None:
            return cls.checked(sync_every, outer, fragments, compression, steps, "sync_every", delay)
        for name, value, without in (("outer", outer, "average"), ("fragments", fragments, 1), ("delay", delay, 0)):
            if value != without:
                raise ArgumentError(f"{caller}({name}={value!r}) needs sync_every, such as sync_every=64.")
        return None

    def misfit(self, exchanges: float) -> str:
        """What is wrong with the momentum for so many exchanges of each fragment, and what to do; "" if nothing is."""
        momentum = self.outer[1]
        needed = round(_TIMES_MEMORY / (1 - momentum)) if momentum else 0
        if exchanges < needed:
            remedy = 'outer="average"' if momentum <= NESTEROV[1] else f'outer={NESTEROV} or "average"'
            return (
                f"outer={self.outer} with {exchanges:.0f} exchanges: a momentum of {momentum:g} needs about {needed}, "
                f"else weights may become worse than those of one host alone. Use {remedy}, or exchange more often."
            )
        if momentum and 0 < self.every < _FEW_STEPS:
            return (
                f"outer={self.outer} with {self.every} steps between exchanges: a momentum needs {_FEW_STEPS} or more, "
                'else weights may become worse than those of one host alone. Use outer="average", or exchange less '
                "often."
            )
        return ""


class Weights(Protocol):
    """All numbers of a model in one order, which is the same on all ranks.

    Attributes:
        dtype: "float32" or "float64", in which they are exchanged.
        trained: how many an optimizer trains; whole cache lines.
        averaged: how many are only averaged; they are the last.
    """

    dtype: str
    trained: int
    averaged: int

    def read(self, start: int, out: Array) -> None:
        """Copy those from `start` on."""

    def write(self, start: int, values: Array) -> None:
        """Overwrite those from `start` on."""


class Told(NamedTuple):
    """What a rank says before an exchange.

    Attributes:
        turn: the fragment that is due, ALL or NOW.
        since: steps since its last exchange, by fragment.
        checksum: of what the last exchange gave.
        team: see `OuterSteps.wants_change`.
        pace: seconds of a step; 0 if there was none.
        wants_change: see `OuterSteps.wants_change`.
    """

    turn: int
    since: tuple[int, ...]
    checksum: int
    team: int
    pace: float
    wants_change: int


def wanted_by(told: Sequence[Told]) -> int:
    """All that any of them wants."""
    return functools.reduce(operator.or_, [one.wants_change for one in told])


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, np.integer)) and int(value) >= 1
