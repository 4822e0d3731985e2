"""Autotuning: choose bucket sizes by trying them in the first steps of training. Opt-in.

Which sizes are fastest depends on model, network and machine, and step times are noisy. There are three rounds of
trials, and after each one rank 0 decides for all ranks: which `bucket_bytes` makes steps shortest, which `direct_bytes`
does, and whether both together are really faster than the defaults. The last round measures anew, because the best of
several noisy candidates looks better than it is. Within a round the candidates take turns, so that a machine that
becomes slower or faster favors none.

Bayesian optimization (Horovod's autotuner) was rejected: with so few candidates it needs more steps than trying all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ring_plugins.core.base import config
from ring_plugins.core.gradients.fusion import MIB, Bucket, BucketSizes

#: Sizes that are tried besides the configured ones.
_BUCKET_BYTES = (4 * MIB, 10 * MIB, 64 * MIB)
_DIRECT_BYTES = (MIB // 4, 8 * MIB)
#: Steps before the first trial, in which caches, allocators and compilers settle.
_WARM_UP = 5
#: Steps of a turn that count. One step before them does not, since it builds the buckets.
_STEPS = 3
_TURNS, _FINAL_TURNS = 4, 8
#: A candidate must shorten the median step by this share, and be faster in all its turns but one.
_GAIN = 0.02


class BucketTuner:
    """Chooses the sizes of the next step. It does not communicate: the caller passes all ranks' times to `decide`.

    Args:
        default: sizes to start from, to compare with, and to fall back to.
        buckets: returns the buckets of given sizes; candidates with equal buckets are tried once.

    Attributes:
        sizes: for the next step.
        finished: whether they are final.
        summary: a line for the user, once finished.
    """

    def __init__(self, default: BucketSizes, buckets: Callable[[BucketSizes], Sequence[Bucket]]) -> None:
        self.sizes = self._default = default
        self.finished, self.summary = False, ""
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
        """Record the end of a step.

        Args:
            now: time in seconds, of any clock.

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
        # Every other turn runs backwards, so that no candidate always follows the same one.
        self._position = place if turn % 2 == 0 else len(self._candidates) - 1 - place
        self.sizes = self._candidates[self._position]
        return turn == (_FINAL_TURNS if self._rounds == 3 else _TURNS)

    @property
    def times(self) -> list[list[float]]:
        """This rank's seconds per step in the round that is over, by candidate and turn."""
        return self._times

    def decide(self, times_by_rank: Sequence[list[list[float]]]) -> tuple[BucketSizes, str]:
        """Choose the best sizes so far; rank 0 calls this and sends the result to the others.

        Args:
            times_by_rank: `times` of each rank, in rank order. The slowest rank's time of a step counts.

        Returns:
            The sizes, and a line for the user.
        """
        slowest = [
            [max(turn) for turn in zip(*(times[i] for times in times_by_rank), strict=True)]
            for i in range(len(self._candidates))
        ]
        medians = [statistics.median(turns) for turns in slowest]
        if self._rounds < 3:
            return self._candidates[medians.index(min(medians))], ""
        ratios = [new / old for old, new in zip(*slowest, strict=True)]
        gain = 1 - statistics.median(ratios)
        wins = sum(ratio < 1 for ratio in ratios)
        compared = f"{medians[1] * 1e3:.2f} ms per step against {medians[0] * 1e3:.2f} ms with the default"
        if gain >= _GAIN and wins >= len(ratios) - 1:
            return self._candidates[1], f"{self._candidates[1]}; {compared}, shorter in {wins} of {len(ratios)} trials"
        return self._default, f"the default stays ({self._default}): {self._candidates[1]}, took {compared}"

    def adopt(self, decision: tuple[BucketSizes, str]) -> None:
        """Adopt what rank 0 decided, and begin the next round."""
        self._best, self.summary = decision
        self._next_round()

    def _next_round(self) -> None:
        self._rounds += 1
        default, best = self._default, self._best
        if self._rounds == 1:
            first = default.first_bucket_bytes
            wanted = [
                default,
                *(default._replace(bucket_bytes=n, first_bucket_bytes=min(first, n)) for n in _BUCKET_BYTES),
            ]
        elif self._rounds == 2:
            wanted = [best, *(best._replace(direct_bytes=n) for n in _DIRECT_BYTES)]
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
                self._best, self.summary = default, f"the default stays ({default}): nothing else was faster"
            self._next_round()
            return
        self._times, self._turn = [[] for _ in self._candidates], []
        self._taken = self._position = 0
        self._skip = max(self._skip, 1)
        self.sizes = self._candidates[0]

    def _layout(self, sizes: BucketSizes) -> object:
        return tuple((bucket.entries, bucket.direct) for bucket in self._buckets(sizes))


def is_wanted(argument: bool | None) -> bool:
    """Whether to tune: `argument`, or RING_AUTOTUNE where it is None.

    Raises:
        ArgumentError: RING_AUTOTUNE is neither 0 nor 1.
    """
    if argument is not None:
        return bool(argument)
    return config.AUTOTUNE.get()
