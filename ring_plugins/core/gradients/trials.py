"""Trials in the first steps of training: several ways take turns, and the one with the shortest steps stays.

Three questions are answered so, since their answers depend on the model, the network and the machine: in how many bits
gradients travel between hosts (`choose_compression`, opt-in), whether they are averaged while backward still computes
others (`choose_overlap`), and which bucket sizes are best (`BucketTuner`, opt-in). They are answered one after the
other.

**Turns.** Step times are noisy, and machines become slower and faster. So the ways take turns, a few steps each, and
every other sequence of turns runs backwards, so that no way always follows the same one (`Turns`). The first step of a
turn does not count: it makes buckets, and finds caches that the other way has left.

**Agreement.** A rank that overlaps while others do not measures nothing, and buckets must be equal everywhere. So all
ranks try the same way in the same steps, exchange their times, and derive the same decision from the same numbers: the
slowest rank's time of a step counts. The exchange runs in the background, behind the step's buckets, and is read after
the next step: averagers may be finished in different orders on the ranks, so none may wait here for what another rank
has yet to call.

**Overlap.** It hides communication behind backward, if there is anything to hide it behind: a network, a core that
nobody computes on. On one host whose cores all compute there is not. The communication thread then takes its core from
backward, hands the interpreter's lock to and fro, and evicts what backward has in its caches. A script that merely
calls `all_reduce` for each gradient after backward was 16 ms of 70 faster (docs/performance.md). What is known decides
first: reductions overlap between hosts, and where every rank has a core more than it has threads that compute. Unless
the steps of the other way are clearly shorter, what was known stands. The reductions are the same, so results do not
depend on it. GPUs have streams. There, reductions always overlap.

Where both ways take equally long, noise alone makes the other look clearly shorter in one round of five (made-up times
with 4 % of noise a step). Other programs, or page faults of memory that has yet to settle, can do so, too, and they can
hide a gain. So the other way has to win two rounds, or all turns of three together. One round is enough only where the
expected way is clearly shorter; two, where the other has gained too little in them. With made-up times of five kinds
(little noise, much, page faults, bursts of load, a slow start) and 10 % to gain, the gain is missed in 0 to 12 % of
jobs, in 0 to 34 % if one round decides. More rounds cost little: each way takes half of their steps.

**Compression.** Fewer bits cost time to round, and gain time on the wire: how much, only the network knows. The most
exact way stays unless one with fewer bits has clearly shorter steps, in a first round of all, and in a second of both
unless the first has left no doubt. Each change of ways drops what rounding has lost in the step before it.

**Bucket sizes.** Three rounds: which `bucket_bytes` makes steps shortest, which `direct_bytes` does, and whether both
together are really faster than the defaults. The last round measures anew, because the best of several noisy candidates
looks better than it is. Bayesian optimization (Horovod's autotuner) was rejected: with so few candidates it needs more
steps than trying all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Literal, TypeVar

from ring_plugins.core.arrays.codec import AUTO, Compression
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator, Work
from ring_plugins.core.gradients.fusion import MIB, Bucket, BucketSizes

#: Seconds of a step, by candidate and turn.
Seconds = list[list[float]]
#: How a user chooses overlap.
Wanted = bool | Literal["auto"]

T = TypeVar("T")

#: Steps before the first turn, in which caches, allocators and compilers settle. Fresh memory was still being touched
#: for the first time in the ninth step of a model with 67 MB of gradients.
_WARM_UP = 10
#: Steps of a turn, of which the first does not count. An even number: models that are trained in turns, as two of an
#: adversarial pair, have the same kinds of steps in each.
_STEPS = 4
#: Turns of each candidate in a round, and in the round that confirms bucket sizes.
_TURNS, _FINAL_TURNS = 4, 8
#: A way wins if it shortens the median step by this share, and is shorter in three of four turns.
_GAIN = 0.02
#: Rounds after which all turns decide on overlap together, and how many rounds the other way has to win before.
_ROUNDS, _WINS = 3, 2
#: A way of which a step takes no more than this share of another's needs no second round.
_PLAIN = 0.8
#: Sizes that are tried besides the configured ones.
_BUCKET_BYTES = (4 * MIB, 10 * MIB, 64 * MIB)
_DIRECT_BYTES = (MIB // 4, 8 * MIB)


class Turns:
    """A round of steps in which candidates take turns.

    Args:
        candidates: how many.
        turns: of each.
        communicator: among all ranks.
        wait: steps before the first turn.

    Attributes:
        candidate: that of the next step; the first one before and after the turns.
    """

    def __init__(self, candidates: int, turns: int, communicator: Communicator[Any], wait: int = 0) -> None:
        self.candidate = 0
        self._turns, self._communicator, self._step = turns, communicator, -wait
        self._seconds: Seconds = [[] for _ in range(candidates)]
        self._last, self._turn = 0.0, list[float]()
        self._agreement: Work[list[Seconds]] | None = None

    def step_ended(self, now: float) -> Seconds | None:
        """Note the end of a step, on all ranks in the same order; `now` is the time in seconds, of any clock.

        Returns:
            The slowest rank's seconds, after the step that follows the last turn.
        """
        if self._agreement is not None:
            by_rank = self._agreement.wait()
            return [[max(turn) for turn in zip(*candidate, strict=True)] for candidate in zip(*by_rank, strict=True)]
        elapsed, self._last = now - self._last, now
        turn, step = divmod(self._step, _STEPS)
        self._step += 1
        if turn < 0:
            return None
        if step > 0:
            self._turn.append(elapsed)
        if step < _STEPS - 1:
            return None
        self._seconds[self.candidate].append(statistics.median(self._turn))
        self._turn = []
        sequence, place = divmod(turn + 1, len(self._seconds))
        self.candidate = place if sequence % 2 == 0 else len(self._seconds) - 1 - place
        if sequence == self._turns:
            self.candidate = 0
            communicator, seconds = self._communicator, self._seconds
            self._agreement = communicator.start(
                "times of steps", lambda: communicator.all_gather_object(seconds, "times of steps")
            )
        return None


def _ratios(new: Sequence[float], old: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(new, old, strict=True)]


def ratio(new: Sequence[float], old: Sequence[float]) -> float:
    """How long steps of `new` take relative to those of `old`, by their seconds in the same turns."""
    return statistics.median(_ratios(new, old))


def is_better(new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether steps of `new` are clearly shorter than those of `old`, by their seconds in the same turns."""
    shorter = sum(ratio < 1 for ratio in _ratios(new, old))
    return ratio(new, old) <= 1 - _GAIN and 4 * shorter >= 3 * len(new)


class Choice(Generic[T]):
    """Tells a reducer how it averages; this one never changes.

    Args:
        now: the way.
        finished: see below.

    Attributes:
        now: in the pass that begins.
        finished: whether `now` stays as it is.
    """

    def __init__(self, now: T, finished: bool = True) -> None:
        self.now, self.finished = now, finished

    def pass_ended(self, now: float) -> None:
        """Note the end of a pass, on all ranks in the same order; `now` is the time in seconds, of any clock."""


#: Reductions overlap backward.
ALWAYS = Choice(True)
#: Gradients travel as they are.
UNCHANGED: Choice[Compression | None] = Choice(None)


class MeasuredOverlap(Choice[bool]):
    """Tries both ways in some of the first steps, in one to three rounds; `now` says whether reductions overlap.

    Args:
        expected: the way that is kept unless the other is clearly faster; equal on all ranks.
        communicator: that of the reductions.
    """

    def __init__(self, expected: bool, communicator: Communicator[Any]) -> None:
        super().__init__(expected, finished=False)
        self._expected, self._communicator = expected, communicator
        self._turns = Turns(2, _TURNS, communicator, _WARM_UP)
        #: In all rounds so far, the expected way first.
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._wins = 0  # rounds that the other way has won

    def pass_ended(self, now: float) -> None:
        """See `Choice`."""
        if self.finished:
            return
        seconds = self._turns.step_ended(now)
        if seconds is None:
            self.now = self._expected != bool(self._turns.candidate)
        else:
            self._decide(*seconds)

    def _decide(self, expected_now: list[float], other_now: list[float]) -> None:
        expected, other = self._seconds
        expected.extend(expected_now)
        other.extend(other_now)
        self._wins += is_better(other_now, expected_now)
        is_first, is_last = len(other) == _TURNS, len(other) == _ROUNDS * _TURNS
        has_won = self._wins == _WINS or (is_last and is_better(other, expected))
        has_lost = is_better(expected, other) if is_first else ratio(other, expected) > 1 - _GAIN
        if not (has_won or has_lost or is_last):
            self._turns = Turns(2, _TURNS, self._communicator)
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


def choose_overlap(wanted: Wanted, has_room: bool, communicator: Communicator[Any]) -> Choice[bool]:
    """Whether reductions of an averager in host memory overlap backward; collective.

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
        return MeasuredOverlap(expected, communicator) if communicator.size > 1 else Choice(expected)
    return Choice(bool(choice))


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


class MeasuredCompression(Choice[Compression | None]):
    """Tries all that `Compression.tried` lists in the first steps; `now` is how gradients travel.

    Args:
        tried: the ways, the most exact first.
        communicator: that of the reductions.
    """

    def __init__(self, tried: Sequence[Compression | None], communicator: Communicator[Any]) -> None:
        super().__init__(tried[0], finished=False)
        self._tried, self._communicator = list(tried), communicator
        self._turns = Turns(len(tried), _TURNS, communicator, _WARM_UP)
        self._seconds: Seconds = [[] for _ in tried]

    def pass_ended(self, now: float) -> None:
        """See `Choice`."""
        if self.finished:
            return
        seconds = self._turns.step_ended(now)
        if seconds is None:
            self.now = self._tried[self._turns.candidate]
            return
        for before, new in zip(self._seconds, seconds, strict=True):
            before.extend(new)
        best = 0
        for other in range(1, len(self._tried)):
            if is_better(self._seconds[other], self._seconds[best]):
                best = other
        is_plain = ratio(self._seconds[best], self._seconds[0]) <= _PLAIN
        if best and len(self._seconds[0]) == _TURNS and not is_plain:
            self._tried, self._seconds = [self._tried[0], self._tried[best]], [self._seconds[0], self._seconds[best]]
            self._turns = Turns(2, _TURNS, self._communicator)
            return
        self.finished, self.now = True, self._tried[best]
        if self._communicator.rank == 0:
            ways = ["without compression" if way is None else f"as {way.name}" for way in self._tried]
            times = [
                f"{statistics.median(turns) * 1e3:.1f} ms a step {way}"
                for turns, way in zip(self._seconds, ways, strict=True)
            ]
            medians = list(map(statistics.median, self._seconds))
            doubt = ", which was not reliably shorter" if medians[best] > min(medians) else ""
            logger.info(
                f"gradients travel {'as they are' if self.now is None else str(self.now).removeprefix('sent ')}: "
                f"{', '.join(times)}{doubt}. To choose yourself, set `compression`."
            )


def choose_compression(
    wanted: Compression | None, node: int, communicator: Communicator[Any]
) -> Choice[Compression | None]:
    """How gradients of an averager in host memory travel between hosts; collective.

    Args:
        wanted: the user's choice, the same on all ranks. If it is not, what compares the buckets says so.
        node: the number of this rank's host.
        communicator: that of the reductions.
    """
    nodes = communicator.all_gather_object(node, "choice of compression")
    if wanted is None or wanted.name != AUTO:
        return Choice(wanted)
    if len(set(nodes)) == 1:
        return UNCHANGED
    return MeasuredCompression(wanted.tried, communicator)


class BucketTuner:
    """Chooses the bucket sizes of the next step.

    Args:
        default: sizes to start from, to compare with, and to fall back to.
        buckets: returns the buckets of given sizes; candidates with equal buckets are tried once.
        communicator: among all ranks, which make the trials in the same steps.

    Attributes:
        sizes: for the next step.
        finished: whether they are final.
        summary: a line for the user, once finished.
    """

    def __init__(
        self,
        default: BucketSizes,
        buckets: Callable[[BucketSizes], Sequence[Bucket]],
        communicator: Communicator[Any],
    ) -> None:
        self.sizes, self.finished, self.summary = default, False, ""
        self._buckets, self._communicator = buckets, communicator
        self._search = self._rounds(default)
        self._next_round(None, _WARM_UP)

    def step_ended(self, now: float) -> None:
        """Note the end of a step, on all ranks in the same order; `now` is the time in seconds, of any clock."""
        if self.finished:
            return
        seconds = self._turns.step_ended(now)
        if seconds is None:
            self.sizes = self._candidates[self._turns.candidate]
        else:
            self._next_round(seconds)

    def _next_round(self, seconds: Seconds | None, wait: int = 0) -> None:
        try:
            self._candidates, turns = self._search.send(seconds)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            self.sizes, self.summary = end.value
            self.finished = True
            return
        self._turns = Turns(len(self._candidates), turns, self._communicator, wait)
        self.sizes = self._candidates[0]

    def _rounds(
        self, default: BucketSizes
    ) -> Generator[tuple[list[BucketSizes], int], Seconds, tuple[BucketSizes, str]]:
        """Yields the candidates of a round and their turns, takes the seconds, and returns the sizes and the line."""
        first = default.first_bucket_bytes
        best = yield from self._fastest(
            default, *(default._replace(bucket_bytes=n, first_bucket_bytes=min(first, n)) for n in _BUCKET_BYTES)
        )
        best = yield from self._fastest(best, *(best._replace(direct_bytes=n) for n in _DIRECT_BYTES))
        if self._layout(best) == self._layout(default):
            return default, f"the default stays ({default}): nothing else was faster"
        old, new = yield [default, best], _FINAL_TURNS
        medians = [statistics.median(turns) * 1e3 for turns in (new, old)]
        compared = f"{medians[0]:.2f} ms per step against {medians[1]:.2f} ms with the default"
        if is_better(new, old):
            wins = sum(one < 1 for one in _ratios(new, old))
            return best, f"{best}; {compared}, shorter in {wins} of {len(new)} trials"
        return default, f"the default stays ({default}): {best}, took {compared}"

    def _fastest(self, *wanted: BucketSizes) -> Generator[tuple[list[BucketSizes], int], Seconds, BucketSizes]:
        distinct: dict[object, BucketSizes] = {}
        for sizes in wanted:
            distinct.setdefault(self._layout(sizes), sizes)
        candidates = list(distinct.values())
        if len(candidates) == 1:
            return candidates[0]
        seconds = yield candidates, _TURNS
        medians = [statistics.median(turns) for turns in seconds]
        return candidates[medians.index(min(medians))]

    def _layout(self, sizes: BucketSizes) -> object:
        return tuple((bucket.entries, bucket.direct) for bucket in self._buckets(sizes))


def tuning_is_wanted(argument: bool | None) -> bool:
    """Whether to tune bucket sizes: `argument`, or RING_AUTOTUNE where it is None.

    Raises:
        ArgumentError: RING_AUTOTUNE is neither 0 nor 1.
    """
    if argument is not None:
        return bool(argument)
    return config.AUTOTUNE.get()
