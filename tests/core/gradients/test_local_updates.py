"""The schedule and the arithmetic of local updates, on ranks that are threads of this process."""

import contextlib
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import DriftError, MembersLost
from ring_plugins.core.gradients.local_settings import Settings
from ring_plugins.core.gradients.local_updates import OuterSteps

LINE = 16


class Meeting:
    """Where ranks that are threads exchange objects."""

    def __init__(self, size):
        self.barrier, self.items = threading.Barrier(size, timeout=20), [None] * size
        self.lock, self.next = threading.Lock(), None  # among those that are left after a loss

    def gather(self, rank, item):
        self.items[rank] = item
        self.barrier.wait()
        found = list(self.items)
        self.barrier.wait()
        return found


class Threads:
    """A communicator of one of these ranks."""

    recovers = False

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.items)
        self.ranks, self.sent = (*range(self.size),), []

    def all_gather_object(self, item, purpose=""):
        return self.meeting.gather(self.rank, item)

    def all_reduce(self, memory, op, codec=None):
        self.sent.append(memory.array.size)
        memory.array[:] = np.mean(self.meeting.gather(self.rank, memory.array.copy()), axis=0, dtype=np.float64)

    def run_synchronously(self, description, function):
        return function()

    def start(self, description, function, repeats=False):
        """Not before all wait for it."""
        return SimpleNamespace(wait=function)


class Dead(Exception):
    """Ends a rank, of which the others see nothing more."""


class Mortals(Threads):
    """The same where ranks die in their all-reduces, counted from 0: {number: rank}."""

    recovers, deaths = True, dict[int, int]()

    def all_reduce(self, memory, op, codec=None):
        victim = self.deaths.get(len(self.sent))
        if codec is not None:
            codec.pack(memory.array)
        if victim is None or victim not in self.ranks:
            super().all_reduce(memory, op)
            return
        self.sent.append(memory.array.size)
        memory.array[:] = np.nan  # what it holds then is anybody's
        own, ranks = self.ranks[self.rank], tuple(rank for rank in self.ranks if rank != victim)
        if own == victim:
            raise Dead
        with self.meeting.lock:
            self.meeting.next = self.meeting.next or Meeting(len(ranks))
        self.meeting, self.ranks, self.size, self.rank = self.meeting.next, ranks, len(ranks), ranks.index(own)
        raise MembersLost("a rank has died", victim)


class Numbers:
    """Weights that are one array."""

    dtype = "float32"

    def __init__(self, trained, averaged=0):
        self.trained, self.averaged = trained, averaged
        self.array = np.zeros(trained + averaged, np.float32)

    def read(self, start, out):
        out[:] = self.array[start : start + out.size]

    def write(self, start, values):
        self.array[start : start + values.size] = values


def on_ranks(size, function, kind=Threads):
    """Call `function(communicator)` on threads; return results or exceptions by rank."""
    meeting, found = Meeting(size), [None] * size

    def work(rank):
        try:
            found[rank] = function(kind(meeting, rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def trained(settings, steps, numbers=2 * LINE, averaged=0, team=None):
    """A function that adds the rank plus 1 in each of `steps(rank)` steps, and then ends."""

    def work(communicator):
        rank, weights = communicator.rank, Numbers(numbers, averaged)
        outer = OuterSteps(settings, communicator, rank if team is None else team)
        outer.begin(weights)
        history = []
        for _ in range(steps(rank)):
            weights.array += rank + 1
            outer.after_step()
            history.append(weights.array.copy())
        outer.finish()
        return outer, weights.array, history, communicator.sent

    return work


def test_weights_are_averaged_every_so_many_steps():
    found = on_ranks(2, trained(Settings.checked(2), lambda rank: 5))
    for rank, (outer, weights, history, sent) in enumerate(found):
        assert [one[0] for one in history] == [rank + 1, 3, 3 + rank + 1, 6, 6 + rank + 1]
        assert (weights == 7.5).all()
        assert (outer.exchanges, outer.steps, sent) == (3, 5, [2 * LINE] * 3)


def test_fragments_take_turns_and_are_cut_between_cache_lines():
    found = on_ranks(2, trained(Settings.checked(2, fragments=2), lambda rank: 2, 3 * LINE, 5))
    for rank, (_, weights, history, sent) in enumerate(found):
        assert [history[0][i] for i in (0, LINE - 1, LINE)] == [1.5, 1.5, rank + 1]
        assert [history[1][i] for i in (0, LINE, -1)] == [1.5 + rank + 1, 3, 3]
        assert (weights == 3).all()
        assert sent == [LINE, 2 * LINE + 5, LINE]  # the last fragment has nothing new at the end


def test_averages_are_weighted_by_steps_and_ranks_that_have_ended_follow():
    """Rank 0 ends after a step. Its weight is 1 to rank 1's 2 in the first exchange, and 0 later."""
    found = on_ranks(2, trained(Settings.checked(2), lambda rank: 1 + 3 * rank))
    for _, weights, _, _ in found:
        assert weights[0] == pytest.approx((1 * 1 + 2 * 4) / 3 + 4)
    assert found[0][0].exchanges == found[1][0].exchanges == 2


def test_nesterov_moves_the_anchor_and_statistics_are_only_averaged():
    found = on_ranks(2, trained(Settings.checked(1, (0.5, 0.8)), lambda rank: 2, LINE, 1))
    first = 0.5 * (1.5 + 0.8 * 1.5)
    second = first + 0.5 * (1.5 + 0.8 * (0.8 * 1.5 + 1.5))
    for _, weights, history, _ in found:
        assert history[0][0] == pytest.approx(first)
        assert history[1][0] == weights[0] == pytest.approx(second)
        assert history[0][-1] == 1.5
        assert weights[-1] == 3


def test_one_team_that_averages_is_idle_and_a_momentum_is_not():
    for outer, exchanges in (("average", 0), ("nesterov", 3)):
        (found, _, _, sent), _ = on_ranks(2, trained(Settings.checked(1, outer), lambda rank: 3, team=0))
        assert (found.is_idle, found.exchanges, len(sent)) == (not exchanges, exchanges, exchanges)


def test_the_model_has_the_anchor_inside_a_context():
    def work(communicator):
        outer, weights = OuterSteps(Settings.checked(2), communicator, communicator.rank), Numbers(LINE)
        with outer.at_anchor():  # nothing has begun
            pass
        outer.begin(weights)
        weights.array += 5
        inside = []
        with contextlib.suppress(ZeroDivisionError), outer.at_anchor():
            inside.append(weights.array.any())
            _ = 1 / 0
        assert inside == [False]
        assert (weights.array == 5).all()

    assert on_ranks(2, work) == [None, None]


def test_a_state_restores_anchor_and_velocity():
    def work(communicator):
        settings = Settings.checked(2, (0.9, 0.6))
        outer, weights = OuterSteps(settings, communicator, communicator.rank), Numbers(LINE)
        assert outer.state() == {}
        outer.begin(weights)
        results: list[tuple[object, float]] = []
        kept: dict[str, object] = {}
        for again in range(2):
            if again:
                outer.load(kept)
            for step in range(4):
                weights.array += communicator.rank + step
                outer.after_step()
                if step == 1 and not again:
                    kept = outer.state()
            results.append((weights.array.copy(), kept["anchor"][0]))
        return results

    for (first, anchor), (second, _) in on_ranks(2, work):
        assert 0 < anchor < first[0]
        assert second[0] > first[0]  # two rounds more


def test_all_ranks_hear_of_different_settings_models_and_anchors():
    every = on_ranks(3, lambda one: OuterSteps(Settings.checked(4 + 4 * (one.rank == 2)), one, one.rank))
    assert {str(error) for error in every} == {
        "local updates: every is 4 on rank 0 and 8 on rank 2. Give all ranks the same."
    }
    models = on_ranks(2, lambda one: OuterSteps(Settings.checked(4), one, one.rank, ["a", "b"][: 2 - one.rank]))
    assert all("weight 1 of the model is b on rank 0 and None on rank 1" in str(error) for error in models)

    def drift(communicator):
        outer, weights = OuterSteps(Settings.checked(1), communicator, communicator.rank), Numbers(LINE)
        outer.begin(weights)
        outer.after_step()
        outer.load(outer.state() | {"anchor": np.full(LINE, communicator.rank // 2, np.float32)})
        outer.after_step()

    for error in on_ranks(3, drift):
        assert isinstance(error, DriftError)
        assert "after 1 exchanges the anchors of rank 2 differ" in str(error)


def test_an_exchange_of_all_waits_for_those_that_still_take_steps():
    """Rank 0 asks for it after a step, rank 1 after four; rank 0 is in the others' two exchanges meanwhile."""

    def work(communicator):
        outer, weights = OuterSteps(Settings.checked(2), communicator, communicator.rank), Numbers(LINE)
        outer.begin(weights)
        for _ in range(1 + 3 * communicator.rank):
            weights.array += 1
            outer.after_step()
        outer.exchange()
        after = weights.array.copy()
        weights.array += 1
        outer.after_step()
        outer.exchange()
        return outer.exchanges, after[0], weights.array[0]

    first = (1 * 1 + 2 * 2) / 3 + 2
    assert on_ranks(2, work) == [(3, pytest.approx(first), pytest.approx(first + 1))] * 2


def test_hosts_take_steps_by_their_speed_where_exchanges_go_by_time():
    """Two ranks of a team, whose first one's pace counts for both, and a slower one."""

    def work(communicator):
        outer = OuterSteps(Settings.checked("1 s"), communicator, communicator.rank // 2)
        outer.begin(Numbers(LINE))
        outer._ended -= (0.01, 0.5, 0.1)[communicator.rank]  # what the first step took
        outer.after_step()
        return outer._gap

    fast, same, slow = on_ranks(3, work)
    assert fast == same
    assert 9 < fast <= 100
    assert slow <= 10


def test_an_exchange_in_which_a_rank_dies_is_repeated_without_it(monkeypatch):
    """Rank 1 dies in the first exchange, and rank 0 in the last."""
    monkeypatch.setattr(Mortals, "deaths", {0: 1, 4: 0})
    found = on_ranks(3, trained(Settings.checked(2, fragments=2), lambda rank: 3, 2 * LINE), Mortals)
    assert isinstance(found[0], Dead) and isinstance(found[1], Dead)
    outer, weights, history, sent = found[2]
    assert history[0][[0, LINE]].tolist() == [(1 + 3) / 2, 3]  # of ranks 0 and 2
    assert history[1][[0, LINE]].tolist() == [2 + 3, (2 + 6) / 2]
    assert history[2][[0, LINE]].tolist() == [(2 + 2 + 2 + 6) / 2, 4 + 3]
    assert weights[[0, LINE]].tolist() == [6, 4 + 3]  # of rank 2 alone
    assert len(sent) == 6
    assert (outer.anchor == weights).all()


def test_a_lost_rank_has_no_weight_in_the_average(monkeypatch):
    monkeypatch.setattr(Mortals, "deaths", {0: 1})
    _, _, (outer, weights, _, _) = on_ranks(3, trained(Settings.checked(100), lambda rank: rank + 1), Mortals)
    assert (weights == (1 * 1 + 3 * 9) / 4).all()
    assert outer.exchanges == 1


def test_rounding_errors_of_an_exchange_that_is_repeated_are_forgotten(monkeypatch):
    def work(communicator):
        outer, weights = OuterSteps(settings, communicator, communicator.rank), Numbers(LINE)
        outer.begin(weights)
        weights.array += np.linspace(0, 1, LINE, dtype=np.float32) ** 2
        outer.after_step()
        return outer._codecs[0]._errors

    settings, errors = Settings.checked(1, compression=Compression("int8", True)), []
    for deaths in ({}, {0: 1}):
        monkeypatch.setattr(Mortals, "deaths", deaths)
        errors.append(on_ranks(2, work, Mortals)[0])
    assert errors[0].any()
    assert (errors[0] == errors[1]).all()


def test_all_fragments_are_exchanged_before_a_rank_leaves():
    class Leaving(OuterSteps):
        followed: list[int]

        def wants_change(self):
            return self._communicator.rank == 1 and self.steps == 2

        def follow_changes(self, wanted):
            self.followed.append(wanted)
            return False

    def work(communicator):
        outer, weights = Leaving(Settings.checked(4, fragments=4), communicator, communicator.rank), Numbers(4 * LINE)
        outer.followed = []
        outer.begin(weights)
        for _ in range(3):
            weights.array += communicator.rank + 1
            outer.after_step()
        return outer.followed, outer._turn, weights.array[::LINE].tolist()

    for rank, (followed, turn, weights) in enumerate(on_ranks(2, work)):
        own = rank + 1.0
        assert (followed, turn) == ([False, True, False], 1)
        assert weights == [3 + 1.5, 3 + own, 3 + own, 3 + own]


def test_all_ranks_end_an_exchange_at_the_same_place_where_the_job_ends():
    """Rank 0 waits for rank 1 since its first step, and does not any more."""

    class Ending(OuterSteps):
        def wants_change(self):
            return 2 * (self._communicator.rank == 1 and self.steps == 4)

        def follow_changes(self, wanted):
            return wanted == 2

    def work(communicator):
        outer, weights = Ending(Settings.checked(2), communicator, communicator.rank), Numbers(LINE)
        outer.begin(weights)
        for _ in range(1 + 5 * communicator.rank):
            weights.array += 1
            outer.after_step()
            if outer.is_over:
                break
        outer.exchange()
        outer.finish()
        return outer.exchanges, outer.steps, weights.array[0]

    value = pytest.approx((1 + 2 * 2) / 3 + 2)
    assert on_ranks(2, work) == [(2, 1, value), (2, 4, value)]


def test_training_goes_on_while_an_exchange_travels():
    """Two steps more than in the exchange are added to its result, and are in the next one."""
    found = on_ranks(2, trained(Settings.checked(3, delay=2), lambda rank: 8, LINE, 1))
    for rank, (outer, weights, history, sent) in enumerate(found):
        own, first = rank + 1, 4.5
        assert [one[0] for one in history] == [
            *(own, 2 * own, 3 * own, 4 * own),
            *(first + 2 * own, first + 3 * own, first + 4 * own, 2 * first + 2 * own),
        ]
        assert history[4][-1] == first  # statistics are not added to
        assert (weights[:LINE] == 12).all()
        assert (outer.exchanges, len(sent)) == (3, 3)


def test_who_waits_for_others_takes_part_in_their_delayed_exchanges():
    """Rank 0 has one step. Rank 1 wants a change in its third: all exchange all once the result is there."""

    class Leaving(OuterSteps):
        def wants_change(self):
            return int(self._communicator.rank == 1 and self.steps in (3, 4))

        def follow_changes(self, wanted):
            followed[self._communicator.rank].append((self.steps, wanted))
            return False

    def work(communicator):
        settings = Settings.checked(6, fragments=2, delay=1)
        outer, weights = Leaving(settings, communicator, communicator.rank), Numbers(2 * LINE)
        outer.begin(weights)
        for _ in range(1 + 6 * communicator.rank):
            weights.array += 1
            outer.after_step()
        outer.finish()
        return weights.array.tolist(), outer.anchor.tolist(), outer.exchanges

    followed: list[list[tuple[int, int]]] = [[], []]
    first, second = on_ranks(2, work)
    assert first == second
    assert first[0] == first[1]
    assert [one for one in followed[1] if one[1]] == [(4, 1)]
    assert [one for one in followed[0] if one[1]] == [(1, 1)]


def test_a_momentum_with_too_few_exchanges_is_told(caplog):
    settings = Settings.checked(32, (0.7, 0.9), steps=999)
    with caplog.at_level(logging.WARNING, "ring_plugins"):
        on_ranks(1, lambda one: OuterSteps(settings, one, 0, planned=31))
    assert [one.message[:49] for one in caplog.records] == ["local updates: outer=(0.7, 0.9) with 31 exchanges"]


@pytest.mark.parametrize(("fragments", "every"), [(1, 76), (2, 152)])
def test_a_line_says_which_number_of_steps_would_lose_5_percent_of_the_time(caplog, fragments, every):
    """Once, behind the third exchange: 38 s of steps of 0.5 s to 2 s for a fragment."""
    outer = on_ranks(1, lambda one: OuterSteps(Settings.checked(10, "nesterov", fragments), one, 0))[0]
    with caplog.at_level(logging.INFO, "ring_plugins"):
        for outer.exchanges in range(2 * fragments, 5 * fragments):
            outer._tell_times(10, 0.5, 2.0)
    (told,) = [one.message for one in caplog.records if one.levelno == logging.INFO]
    assert "10 steps took 5.00 s and their exchange 2.00 s" in told
    assert f"with {every} steps between exchanges they would take 5% of the time" in told
