"""Whether gradients are averaged while backward still computes others, or in line, when it is over.

**Problem.** Overlap hides communication behind backward, if there is anything to hide it behind: a network, a core that
nobody computes on. On one host whose cores all compute there is not. The communication thread then takes its core from
backward, hands the interpreter's lock to and fro, and evicts what backward has in its caches. A script that merely
calls `all_reduce` for each gradient after backward was 16 ms of 70 faster (docs/performance.md).

**Idea.** What is known decides first: reductions overlap between hosts, and where every rank has a core more than it
has threads that compute. Some of the first steps then take turns: a few overlapped, a few in line. Unless the steps of
the other way are clearly shorter, what was known stands. The reductions are the same, so results do not depend on it.

**Rounds.** Where both ways take equally long, noise alone makes the other look clearly shorter in one round of five
(made-up times with 4 % of noise a step). Other programs, or page faults of memory that has yet to settle, can do so,
too, and they can hide a gain. So the other way has to win two rounds, or all turns of three together. One round is
enough only where the expected way is clearly shorter; two, where the other has gained too little in them. With made-up
times of five kinds (little noise, much, page faults, bursts of load, a slow start) and 10 % to gain, the gain is missed
in 0 to 12 % of jobs, in 0 to 34 % if one round decides. More rounds cost little: each way takes half of their steps.

**Agreement.** Ranks need not agree for the reductions' sake, since these are matched by their order alone. But a rank
that overlaps while others do not measures nothing. So all make the trial in the same steps, exchange their times by one
small all-reduce, and derive the same decision from the same numbers. It runs in the background, behind the step's
buckets, and is read after the next step: averagers may be finished in different orders on the ranks, so none may wait
here for what another rank has yet to call.

GPUs have streams. There, reductions always overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator, Work

#: How a user chooses.
Wanted = bool | Literal["auto"]

#: Steps before the first turn, in which caches, allocators and compilers settle. Fresh memory was still being touched
#: for the first time in the ninth step of a model with 67 MB of gradients.
_WARM_UP = 10
#: Steps of a turn, of which the first does not count. An even number: models that are trained in turns, as two of an
#: adversarial pair, have the same kinds of steps in each.
_STEPS = 4
#: Turns of each way in a round.
_TURNS = 4
#: Rounds after which all turns decide together.
_ROUNDS = 3
#: How many rounds the other way has to win before.
_WINS = 2
#: The other way wins if it shortens the median step by this share, and is shorter in three of four turns.
_GAIN = 0.02


class Overlap(Protocol):
    """Tells a reducer whether its reductions overlap backward.

    Attributes:
        now: whether they do in the pass that begins.
        finished: whether `now` stays as it is.
    """

    @property
    def now(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    def pass_ended(self, now: float) -> None:
        """Note the end of a pass, on all ranks in the same order; `now` is the time in seconds, of any clock."""


class FixedOverlap:
    """An `Overlap` that never changes."""

    finished = True

    def __init__(self, now: bool) -> None:
        self.now = now

    def pass_ended(self, now: float) -> None:
        """Do nothing."""


ALWAYS = FixedOverlap(True)


class MeasuredOverlap:
    """An `Overlap` that tries both ways in some of the first steps, in one to three rounds.

    Args:
        expected: the way that is kept unless the other is clearly faster; equal on all ranks.
        communicator: that of the reductions.

    Attributes:
        finished: whether the decision has been made.
    """

    def __init__(self, expected: bool, communicator: Communicator[Any]) -> None:
        self.now = self._expected = expected
        self.finished = False
        self._communicator = communicator
        self._passes = 0
        self._last = 0.0
        self._turn: list[float] = []
        #: Seconds of a step in each turn of this round: those of the expected way, then those of the other.
        self._times: tuple[list[float], list[float]] = ([], [])
        self._agreement: Work[Array] | None = None
        #: The slowest rank's, in all rounds so far.
        self._agreed: tuple[list[float], list[float]] = ([], [])
        self._wins = 0  # rounds that the other way has won

    def pass_ended(self, now: float) -> None:
        """See the protocol; a round's last pass starts the exchange, and the one after it decides."""
        if self.finished:
            return
        if self._agreement is not None:
            self._decide(self._agreement.wait())
            return
        elapsed, self._last = now - self._last, now
        turn, step = divmod(self._passes - _WARM_UP, _STEPS)
        self._passes += 1
        if turn < 0:
            return
        if step > 0:
            self._turn.append(elapsed)
        if step < _STEPS - 1:
            return
        self._times[_is_other(turn)].append(statistics.median(self._turn))
        self._turn = []
        self.now = self._expected != _is_other(turn + 1)
        if turn + 1 == 2 * _TURNS:
            self.now = self._expected
            self._exchange()

    def _exchange(self) -> None:
        communicator, times = self._communicator, np.array(self._times)

        def exchange() -> Array:
            communicator.all_reduce(HostMemory(times.reshape(-1), "float64"), Op.MAX)  # the slowest rank's
            return times

        self._agreement = communicator.start("times of steps with and without overlap", exchange)

    def _decide(self, times: Array) -> None:
        self._agreement = None
        expected, other = self._agreed
        for all_rounds, this_round in zip(self._agreed, times.tolist(), strict=True):
            all_rounds.extend(this_round)
        self._wins += is_better(other[-_TURNS:], expected[-_TURNS:])
        is_first, is_last = len(other) == _TURNS, len(other) == _ROUNDS * _TURNS
        has_won = self._wins == _WINS or (is_last and is_better(other, expected))
        has_lost = is_better(expected, other) if is_first else ratio(other, expected) > 1 - _GAIN
        if not (has_won or has_lost or is_last):
            self._passes, self._times = _WARM_UP, ([], [])
            return
        self.finished = True
        if has_won:
            self.now = not self._expected
        if self._communicator.rank == 0:
            times_of = {self._expected: statistics.median(expected), not self._expected: statistics.median(other)}
            kept, left = times_of[self.now] * 1e3, times_of[not self.now] * 1e3
            ways = "after backward", "while backward runs"
            doubt = ", which was not reliably shorter" if left < kept else ""
            logger.info(
                f"gradients are averaged {ways[self.now]}: {kept:.1f} ms a step, against {left:.1f} ms "
                f"{ways[not self.now]}{doubt}. To choose yourself, set `overlap` or RING_OVERLAP."
            )


def _is_other(turn: int) -> bool:
    """Whether a turn is one of the other way. Pairs of turns alternate, so that neither way always comes first."""
    return turn % 4 in (1, 2)


def _ratios(new: Sequence[float], old: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(new, old, strict=True)]


def ratio(new: Sequence[float], old: Sequence[float]) -> float:
    """How long steps of `new` take relative to those of `old`, by their seconds in the same turns."""
    return statistics.median(_ratios(new, old))


def is_better(new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether steps of `new` are clearly shorter than those of `old`, by their seconds in the same turns."""
    shorter = sum(ratio < 1 for ratio in _ratios(new, old))
    return ratio(new, old) <= 1 - _GAIN and 4 * shorter >= 3 * len(new)


def choose_overlap(wanted: Wanted, has_room: bool, communicator: Communicator[Any]) -> Overlap:
    """The `Overlap` of an averager in host memory; collective.

    Args:
        wanted: the user's choice; "auto" leaves it to RING_OVERLAP, and that by default to what is measured. Rank 0's
            counts.
        has_room: whether this rank's communication has something to overlap with: a network, or a core of its own.
        communicator: that of the reductions.

    Raises:
        ArgumentError: `wanted`, or RING_OVERLAP, is none of the choices.
    """
    answers = communicator.all_gather_object((chosen_overlap(wanted), has_room), "choice of overlap")
    choice = answers[0][0]
    if choice == "auto":
        expected = all(room for _, room in answers)
        return MeasuredOverlap(expected, communicator) if communicator.size > 1 else FixedOverlap(expected)
    return FixedOverlap(bool(choice))


def chosen_overlap(wanted: Wanted) -> Wanted:
    """`wanted`, or what RING_OVERLAP says where it is "auto".

    Raises:
        ArgumentError: either is none of the choices.
    """
    if wanted not in ("auto", True, False):
        raise ArgumentError(f'overlap={wanted!r} must be "auto", True or False.')
    if wanted != "auto":
        return bool(wanted)
    return {"auto": "auto", "1": True, "0": False}[config.OVERLAP.get()]  # type: ignore[return-value]
