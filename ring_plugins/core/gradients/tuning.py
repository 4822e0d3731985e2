"""Bucket sizes chosen by trying them in the first steps of a training, opt-in.

The choice is made in three rounds of trials, each followed by one decision of rank 0 that all ranks take over: which
capacity makes steps shortest, which crossover does (the size from which a tensor is no small message any more and is
reduced alone), and whether the two together are really faster than the defaults. The last one is a measurement of its
own, because the best of several noisy candidates looks better than it is. Inside a round the candidates take turns, so
that a machine that gets slower or faster favours none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ring_plugins.core.base import config
from ring_plugins.core.gradients.fusion import MIB, Bucket, BucketSizes

#: Capacities and crossovers that are tried beside the configured ones.
_CAPACITIES = (4 * MIB, 10 * MIB, 64 * MIB)
_CROSSOVERS = (MIB // 4, 8 * MIB)
#: Steps before the first trial, in which caches, allocators and compilers settle.
_WARM_UP = 5
#: A turn is one step that does not count, as it builds buckets, and these.
_STEPS = 3
_TURNS, _FINAL_TURNS = 4, 8
#: A candidate must make steps this much shorter in the middle of its turns, and shorter in all but one of them.
_GAIN = 0.02


class BucketTuner:
    """Says which sizes the next step uses. Makes no calls to other ranks: `decide` is fed with everyone's times.

    Args:
        default: sizes to start from, to compare with, and to fall back to.
        buckets: the buckets that sizes lead to; candidates that lead to the same ones are tried once.

    Attributes:
        sizes: for the next step.
        finished: whether they are final.
        verdict: a line for the user, once finished.
    """

    def __init__(self, default: BucketSizes, buckets: Callable[[BucketSizes], Sequence[Bucket]]) -> None:
        self.sizes = self._default = default
        self.finished, self.verdict = False, ""
        self._buckets = buckets
        self._best = default
        self._rounds = 0
        self._skip = _WARM_UP
        self._last: float | None = None
        self._candidates: list[BucketSizes] = []
        self._times: list[list[float]] = []
        self._turn: list[float] = []
        self._taken = self._position = 0
        self._next_round()

    def step_ended(self, now: float) -> bool:
        """Take note of the end of a step.

        Args:
            now: seconds on any clock.

        Returns:
            Whether a round of trials is over and a decision is due, on all ranks in the same step.
        """
        elapsed = None if self._last is None else now - self._last
        self._last = now
        if self._skip:
            self._skip -= 1
            return False
        if elapsed is not None:
            self._turn.append(elapsed)
        if len(self._turn) < _STEPS:
            return False
        self._times[self._position].append(statistics.median(self._turn))
        self._turn, self._skip = [], 1
        self._taken += 1
        turn, place = divmod(self._taken, len(self._candidates))
        # Every other turn runs backwards: who comes after whom changes.
        self._position = place if turn % 2 == 0 else len(self._candidates) - 1 - place
        self.sizes = self._candidates[self._position]
        return turn == (_FINAL_TURNS if self._rounds == 3 else _TURNS)

    @property
    def times(self) -> list[list[float]]:
        """This rank's seconds a step of the round that is over, by candidate and turn."""
        return self._times

    def decide(self, everyones: Sequence[list[list[float]]]) -> tuple[BucketSizes, str]:
        """What the times of all ranks say; for rank 0 to call and to send to the others.

        Args:
            everyones: `times` of each rank. A step has taken as long as it took the slowest.

        Returns:
            The best sizes so far, and a text for the user.
        """
        slowest = [
            [max(turn) for turn in zip(*(times[i] for times in everyones), strict=True)]
            for i in range(len(self._candidates))
        ]
        medians = [statistics.median(turns) for turns in slowest]
        if self._rounds < 3:
            return self._candidates[medians.index(min(medians))], ""
        ratios = [new / old for old, new in zip(*slowest, strict=True)]
        gain = 1 - statistics.median(ratios)
        wins = sum(ratio < 1 for ratio in ratios)
        said = f"{medians[1] * 1e3:.2f} ms a step against {medians[0] * 1e3:.2f} ms with the default"
        if gain >= _GAIN and wins >= len(ratios) - 1:
            return self._candidates[1], f"{self._candidates[1]}; {said}, shorter in {wins} of {len(ratios)} trials"
        return self._default, f"the default stays: {self._default}; {self._candidates[1]} took {said}"

    def adopt(self, decision: tuple[BucketSizes, str]) -> None:
        """Take over what rank 0 decided, and go on to the next round."""
        self._best, self.verdict = decision
        self._next_round()

    def _next_round(self) -> None:
        self._rounds += 1
        default, best = self._default, self._best
        if self._rounds == 1:
            wanted = [default, *(default._replace(capacity=c, first=min(default.first, c)) for c in _CAPACITIES)]
        elif self._rounds == 2:
            wanted = [best, *(best._replace(crossover=c) for c in _CROSSOVERS)]
        else:
            wanted = [default, best]
        if self._rounds > 3:
            self.finished, self.sizes = True, best
            return
        distinct: dict[object, BucketSizes] = {}
        for sizes in wanted:
            distinct.setdefault(self._layout(sizes), sizes)
        self._candidates = list(distinct.values())
        if len(self._candidates) == 1:
            if self._rounds == 3:
                self._best, self.verdict = default, f"the default stays: {default}; nothing else was faster"
            self._next_round()
            return
        self._times, self._turn = [[] for _ in self._candidates], []
        self._taken = self._position = 0
        self._skip = max(self._skip, 1)
        self.sizes = self._candidates[0]

    def _layout(self, sizes: BucketSizes) -> object:
        return tuple((bucket.entries, bucket.direct) for bucket in self._buckets(sizes))


def is_wanted(argument: bool | None) -> bool:
    """Whether to tune: as the argument says, or RING_AUTOTUNE where it says nothing.

    Raises:
        ArgumentError: RING_AUTOTUNE is neither 0 nor 1.
    """
    if argument is not None:
        return bool(argument)
    return config.AUTOTUNE.get()
