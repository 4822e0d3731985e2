"""Local updates: hosts train by themselves, and exchange what they have learned every so many steps.

**Problem.** Where a step's gradients take longer to send than to compute, a job waits for its network most of the time.

**Idea** (local SGD, Stich 2018; DiLoCo, Douillard et al. 2023). All begin with equal weights, the *anchor*. Each host
takes some steps of its own. Then all average the difference of their weights to the anchor, and an *outer optimizer*
moves the anchor by that: by the average itself, or by SGD with Nesterov's momentum, to which the average is a
gradient. Everybody goes on from the new anchor. Weights are equal after an exchange, not in between.

**Fragments** (Streaming DiLoCo, Douillard et al. 2025). The weights may be cut into parts that take turns, so that
fewer bytes go at once. They are cut between cache lines, as codecs need it.

**While training goes on** (also Streaming DiLoCo's). An exchange may end `delay` steps after it has begun, and travel
meanwhile. What a rank has learned in these steps is added to the new anchor, so no step is lost, and the next exchange
tells of it. Each rank takes the result at a fixed step, not when it arrives: two runs give the same weights.

**Who is there.** Before numbers are reduced, the ranks tell each other a few words: which fragment is due, how many
steps each has taken since its last exchange, and a checksum of the anchor. So averages are weighted by steps, a rank
that has no more data takes part with the weight 0 until nobody has, hosts of different speeds may exchange by time,
and anchors that differ are noticed at every exchange. Local steps are never compared, they differ by design.

**When a rank is lost** and the others go on (core/collectives/recovery.py), they find that in their next exchange:
nothing else connects them, so local steps are neither interrupted nor lost. An exchange that it interrupts is repeated
from the weights, which it has not touched, without that rank's share. A rank that is to leave says so, too. Then all
fragments are exchanged, so that all it has learned counts.

Numbers that are averaged and not trained, such as statistics of batch normalization, lie behind the others. The outer
optimizer leaves them alone, and they are not rounded: a variance must not become negative.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import CACHE_LINE, HostMemory
from ring_plugins.core.base.errors import (
    ArgumentError,
    DriftError,
    MembersLost,
    MismatchError,
    RingError,
    name_ranks,
)
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator, Work
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.gradients.local_settings import ALL, NOW, Settings, Told, Weights, wanted_by

#: Share of the time that the line about the exchanges' time speaks of.
_SHARE = 0.05
#: The exchange after which rank 0 says how long they take; the first ones make connections and buffers.
_TOLD_AFTER = 3


class _Late(NamedTuple):
    """An exchange that is under way while this rank takes steps.

    Attributes:
        fragment: of which.
        due: the step after which it ends here.
        work: waits for what all have told; the average is in the work memory then.
        own: this rank's weights as it began.
    """

    fragment: int
    due: int
    work: Work[list[Told]]
    own: Array


class OuterSteps:
    """Counts the steps of this rank, and exchanges its weights when they are due. All ranks of a communicator make it.

    Args:
        settings: how.
        communicator: of all ranks that train the model; nothing else uses it.
        team: ranks with the same number average every step by other means, and so have equal weights.
        described: of the model, such as names and shapes; equal on all ranks.
        planned: how many exchanges of each fragment there will be, if that is known.

    Attributes:
        steps, exchanges: how many there have been; fragments count by their share.
        are_together: whether all ranks were at the same place in the last exchange, or some have waited for others.
        is_over: whether all ranks know, since an exchange of all fragments, that the job ends.
        teams: how many there are.
        mates: places in the communicator of the ranks in this one's team.
        weights: of the model, once it has begun.

    Raises:
        MismatchError: settings or models differ.
    """

    def __init__(
        self,
        settings: Settings,
        communicator: Communicator[Any],
        team: int,
        described: Sequence[object] = (),
        planned: float = math.inf,
    ) -> None:
        self._settings, self._communicator, self._team = settings, communicator, team
        told = communicator.all_gather_object((settings, tuple(described), team), "local updates")
        (first, weights, _), *others = told
        for rank, (other, theirs, _) in zip(communicator.ranks[1:], others, strict=True):
            for name, mine in first.shown().items():
                self._check_equal(name, mine, other.shown()[name], rank)
            for i, (mine, its) in enumerate(itertools.zip_longest(weights, theirs)):
                self._check_equal(f"weight {i} of the model", mine, its, rank)
        self.teams = len({one for *_, one in told})
        self.mates = [place for place, (*_, one) in enumerate(told) if one == team]
        self.steps, self.exchanges = 0, 0.0
        self.weights: Weights | None = None
        self._gap = self._left = max(settings.every // settings.fragments, 1)
        self._turn, self._checksum, self._is_timed, self.is_over = 0, 0, False, False
        self.are_together, self._ranks = True, communicator.ranks
        self._ended, self._steps_then = time.monotonic(), 0
        self._late: _Late | None = None
        found = settings.misfit(planned)
        if communicator.rank == 0 and found:
            logger.warning(f"local updates: {found}")

    def _check_equal(self, name: str, first: object, second: object, rank: int) -> None:
        if first != second:
            raise MismatchError(
                f"local updates: {name} is {first} on rank {self._communicator.ranks[0]} and {second} on rank {rank}. "
                "Give all ranks the same."
            )

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to exchange: all ranks are in one team, and the outer optimizer averages."""
        return self.teams == 1 and self._settings.outer == (1.0, 0.0)

    @property
    def has_begun(self) -> bool:
        """Whether there is an anchor."""
        return self.weights is not None

    def begin(self, weights: Weights) -> None:
        """Take the weights as they are for the anchor: they must be equal on all ranks.

        Raises:
            ArgumentError: there are more fragments than cache lines.
        """
        fragments, line = self._settings.fragments, CACHE_LINE // np.dtype(weights.dtype).itemsize
        lines = -(-weights.trained // line)
        if fragments > max(lines, 1):
            raise ArgumentError(
                f"fragments={fragments} are more than the {lines} cache lines of the model, which are never cut; use "
                f"fragments={max(lines, 1)} or less."
            )
        self.weights = weights
        cuts = [lines * i // fragments * line for i in range(fragments)] + [weights.trained]
        #: By fragment: where it begins, where its trained numbers end, and where it ends.
        self._cuts = [(*pair, pair[1]) for pair in itertools.pairwise(cuts)]
        self._cuts[-1] = (*self._cuts[-1][:2], weights.trained + weights.averaged)
        self._at = [self.steps] * fragments
        self.anchor = np.empty(self._cuts[-1][2], weights.dtype)
        weights.read(0, self.anchor)
        self._velocity = np.zeros(weights.trained if self._settings.outer[1] else 0, weights.dtype)
        self._work = np.empty(max(end - start for start, _, end in self._cuts), weights.dtype)
        compression = self._settings.compression
        recovers = self._communicator.recovers
        self._codecs = [None if compression is None else compression.codec(recovers) for _ in range(fragments)]
        self._ended, self._steps_then = time.monotonic(), self.steps

    # Steps --------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Count a step of this rank, and exchange what is due."""
        self.steps += 1
        self._left -= 1
        if self._late is not None and self.steps >= self._late.due:
            self._end_late()
        if self._left <= 0 and not self.is_idle:
            self._end_late()
            if self._left <= 0:  # else all have exchanged all, since a rank wants a change
                self._meet(self._turn)

    def exchange(self) -> None:
        """Exchange all fragments, once all ranks have called this; meanwhile take part in what is due on the others.

        Weights are equal then, and a checkpoint loses no step. So they are where the job is to end: no rank waits then.
        """
        while not self.is_idle and not (self.is_over and self.steps == self._steps_then) and not self._meet(ALL):
            pass

    def finish(self) -> None:
        """As `exchange`, when this rank has no more steps."""
        self.exchange()
        rounds = self.exchanges / self._settings.fragments
        if self._communicator.rank == 0 and (found := self._settings.misfit(rounds)):
            logger.warning(f"this training had local updates with {found}")

    def wants_change(self) -> int:
        """Bits of what this rank wants, as to leave, or that the job ends: all hear of it in their next exchange."""
        return 0

    def follow_changes(self, wanted: int) -> bool:
        """Called on all ranks after an exchange, with what any of them `wanted`: let ranks leave.

        Returns:
            Whether the job ends. All have the same weights then.
        """
        return False

    def _meet(self, turn: int) -> bool:
        """Exchange with the other ranks.

        Args:
            turn: which fragment, ALL or NOW.

        Returns:
            Whether all ranks want all fragments exchanged.
        """
        self._end_late()
        began, steps, ranks = time.monotonic(), self.steps - self._steps_then, self._communicator.ranks
        if not {*ranks} <= {*self._ranks}:  # one that has joined has got the whole anchor
            self._checksum = zlib.crc32(self.anchor.view(np.uint8))
        own = Told(
            *(turn, tuple([self.steps - at for at in self._at]), self._checksum, self._team),
            pace=(began - self._ended) / steps if steps else 0.0,
            wants_change=self.wants_change(),
        )
        if self._settings.delay and turn >= 0:
            self._begin_late(turn, own)
            return False
        told: list[Told] = self._communicator.all_gather_object(own, "local updates")
        self._check_anchors([one.checksum for one in told])
        by_rank, wanted = dict(zip(self._communicator.ranks, told, strict=True)), wanted_by(told)
        # Those that are due agree: all ranks have been in the same exchanges.
        most, met = max(one.turn for one in told), time.monotonic()
        is_late = self._settings.delay > 0 and most >= 0  # on others, which take steps meanwhile
        due = most if most >= 0 and (is_late or not wanted) else ALL
        for fragment in range(self._settings.fragments) if due == ALL else [due]:
            repeated(partial(self._exchange, fragment, by_rank))
            self._at[fragment] = self.steps
        start, end = (0, self.anchor.size) if due == ALL else self._cuts[due][::2]
        self._checksum = zlib.crc32(self.anchor[start:end].view(np.uint8))
        if self._communicator.ranks != ranks:  # there may be no further exchange, in which all compare them
            self._check_anchors(self._communicator.all_gather_object(self._checksum, "local updates"))
        self._turn = (due + 1) % self._settings.fragments
        self._take_pace(told)
        self._left = self._gap
        self._ended, self._steps_then = time.monotonic(), self.steps
        if due != ALL or self._settings.fragments == 1:
            self._tell_times(steps, own.pace, self._ended - met)
        if is_late and wanted:
            return self._meet(ALL)  # the others call it once they have ended this one
        self.are_together, self._ranks = len({one.turn == ALL for one in told}) == 1, self._communicator.ranks
        self.is_over = self.follow_changes(wanted) and due == ALL
        return all(one.turn == ALL for one in told) or self.is_over

    def _take_pace(self, told: Sequence[Told]) -> None:
        pace = next(one.pace for one in told if one.team == self._team)
        if self._settings.seconds and pace:
            self._gap = max(1, round(self._settings.seconds / pace))

    def _begin_late(self, fragment: int, own: Told) -> None:
        """Let an exchange go on while this rank takes steps."""
        assert self.weights is not None
        start, _, end = self._cuts[fragment]
        self.weights.read(start, self._work[: end - start])
        average = partial(self._average_late, fragment, own)
        weights, due = self._work[: end - start].copy(), self.steps + self._settings.delay
        self._late = _Late(fragment, due, self._communicator.start("local updates", average), weights)
        self._at[fragment] = self._steps_then = self.steps
        self._turn, self._left = (fragment + 1) % self._settings.fragments, self._gap
        self._ended = time.monotonic()

    def _average_late(self, fragment: int, own: Told) -> list[Told]:
        """On the communicator's thread; what it touches, the script's leaves alone until `_end_late`."""
        told: list[Told] = self._communicator.all_gather_object(own, "local updates")
        self._check_anchors([one.checksum for one in told])
        self._average(fragment, [one.since[fragment] for one in told], lambda _, reduce: reduce())
        return told

    def _end_late(self) -> None:
        """Take the result of the exchange that is under way, if there is one."""
        late, self._late = self._late, None
        if late is None:
            return
        began = time.monotonic()
        told = late.work.wait()
        self._apply(late.fragment, late.own)
        start, _, end = self._cuts[late.fragment]
        self._checksum = zlib.crc32(self.anchor[start:end].view(np.uint8))
        self._take_pace(told)
        own = told[self._communicator.rank]
        self._tell_times(own.since[late.fragment] // self._settings.fragments, own.pace, time.monotonic() - began)
        if wanted_by(told):
            self._meet(NOW)

    def _exchange(self, fragment: int, told: Mapping[int, Told]) -> None:
        """Average a fragment over all ranks, and move its anchor and weights, or neither if ranks are lost meanwhile.

        Args:
            fragment: which.
            told: by world rank.

        Raises:
            MembersLost: the others are to repeat it.
        """
        assert self.weights is not None
        counts = [told[rank].since[fragment] for rank in self._communicator.ranks]
        if not any(counts):
            return
        start, _, end = self._cuts[fragment]
        self.weights.read(start, self._work[: end - start])
        # synchronously: else the collective repeats itself, with the weights of the ranks that were there
        self._average(fragment, counts, self._communicator.run_synchronously)
        self._apply(fragment)

    def _average(self, fragment: int, counts: Sequence[int], run: Callable[[str, Callable[[], None]], object]) -> None:
        """Turn weights in the work memory into the average change.

        Args:
            fragment: whose.
            counts: steps of each rank.
            run: calls what communicates.
        """
        assert self.weights is not None
        start, trained, end = self._cuts[fragment]
        anchor, work, codec = self.anchor[start:end], self._work[: end - start], self._codecs[fragment]
        work[: trained - start] -= anchor[: trained - start]
        weight = counts[self._communicator.rank] * len(counts) / sum(counts)
        if weight != 1:
            work *= weight
        if codec is not None:
            codec.begin(work, trained - start)
        memory = HostMemory(work, self.weights.dtype)
        try:
            run("local updates", partial(self._communicator.all_reduce, memory, Op.AVERAGE, codec))
        except MembersLost:
            if codec is not None:
                codec.undo()
            raise

    def _apply(self, fragment: int, own: Array | None = None) -> None:
        """Move a fragment's anchor by the average change, and the weights there.

        Args:
            fragment: which.
            own: the weights of which the change was taken, if this rank has taken steps since: these are kept.
        """
        assert self.weights is not None
        start, trained, end = self._cuts[fragment]
        anchor, work = self.anchor[start:end], self._work[: end - start]
        change = work[: trained - start]
        lr, momentum = self._settings.outer
        if momentum:  # as torch.optim.SGD(nesterov=True), where -change is the gradient
            velocity = self._velocity[start:trained]
            velocity *= momentum
            velocity += change
            change += momentum * velocity
        if lr != 1:
            change *= lr
        change += anchor[: change.size]
        np.copyto(anchor, work)
        if own is not None:
            self.weights.read(start, work)
            change -= own[: change.size]
            change += anchor[: change.size]
            np.copyto(work[change.size :], anchor[change.size :])
        self.weights.write(start, work)
        self.exchanges += 1

    def _check_anchors(self, checksums: Sequence[int]) -> None:
        if len(set(checksums)) > 1:
            most = max(checksums, key=checksums.count)
            odd = [rank for rank, one in zip(self._communicator.ranks, checksums, strict=True) if one != most]
            raise DriftError(
                f"local updates: after {self.exchanges:g} exchanges the anchors of {name_ranks(odd)} differ from the "
                "others'. They have loaded another checkpoint, or have a memory error. Continue from a checkpoint on "
                "all ranks."
            )

    def _tell_times(self, steps: int, pace: float, seconds: float) -> None:
        """Say how long an exchange of a fragment makes a rank wait, once."""
        if not steps or self._is_timed or self.exchanges < _TOLD_AFTER * self._settings.fragments:
            return
        self._is_timed = True
        if self._communicator.rank == 0 and pace:
            every = max(1, math.ceil(seconds * (1 / _SHARE - 1) / pace)) * self._settings.fragments
            logger.info(
                f"local updates: {steps} steps took {steps * pace:.2f} s and their exchange {seconds:.2f} s; with "
                f"{every} steps between exchanges they would take {_SHARE:.0%} of the time."
            )

    # The anchor ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside the context the model has the anchor's weights, which are equal on all ranks; no rank waits."""
        if self.weights is None:
            yield
            return
        own = np.empty_like(self.anchor)
        self.weights.read(0, own)
        self.weights.write(0, self.anchor)
        try:
            yield
        finally:
            self.weights.write(0, own)

    def state(self) -> dict[str, Any]:
        """The anchor, the outer optimizer's velocity and the number of exchanges; {} before the first step."""
        if self.weights is None:
            return {}
        return {"anchor": self.anchor.copy(), "velocity": self._velocity.copy(), "exchanges": self.exchanges}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from such a state, the same on all ranks: the anchor becomes the weights, and a round begins.

        Raises:
            ArgumentError: it is of another model, or of an outer optimizer without momentum while this one has some.
        """
        if self.weights is None:
            raise RingError("local updates: begin() before load().")
        self._end_late()
        for name, own in (("anchor", self.anchor), ("velocity", self._velocity)):
            if state[name].size != own.size:
                raise ArgumentError(
                    f"the state of local updates has {state[name].size} numbers in its {name}, and here are "
                    f"{own.size}: it is of another model, or of another kind of outer=."
                )
            np.copyto(own, state[name])
        self.exchanges = float(state["exchanges"])
        self._at = [self.steps] * len(self._at)
        self._turn, self._left, self._checksum = 0, self._gap, zlib.crc32(self.anchor.view(np.uint8))
        self.weights.write(0, self.anchor)
        if self.is_idle:
            self.weights = None  # no exchange moves this anchor: later checkpoints would bring it back
