import random

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.single import SingleCommunicator
from ring_plugins.core.gradients import trials
from ring_plugins.core.gradients.fusion import MIB, BucketSizes, Entry, FusionPlan
from ring_plugins.core.gradients.trials import (
    UNCHANGED,
    BucketTuner,
    Choice,
    MeasuredCompression,
    MeasuredOverlap,
    choose_compression,
    choose_overlap,
    chosen_overlap,
    is_better,
    tuning_is_wanted,
)
from tests.core.collectives.thread_ranks import on_thread_ranks


class Answers(SingleCommunicator):
    """The communicator of one of several ranks, which gets the others' answers from a list."""

    def __init__(self, others=(), size=2):
        super().__init__("answers")
        self.size, self.others, self.asked = size, list(others), []

    def all_gather_object(self, item, purpose=""):
        self.asked.append(purpose)
        return [item, *self.others]


#: Steps of a round, and of its exchange.
ROUND = 2 * trials._TURNS * trials._STEPS + 1


def steps(trial, seconds, count=trials._WARM_UP + trials._ROUNDS * ROUND + 10):
    """Train: a step takes `seconds(overlaps, number)`. Returns which way each step went."""
    clock, ways = 100.0, []
    for number in range(count):
        ways.append(trial.now)
        clock += seconds(trial.now, number)
        trial.pass_ended(clock)
    return ways


@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_way_is_found_under_noise_on_a_machine_that_gets_slower(expected, faster):
    generator = random.Random(0)
    trial = MeasuredOverlap(expected, Answers())
    ways = steps(
        trial,
        lambda overlaps, number: (
            (0.01 + 0.0001 * number) * (0.8 if overlaps is faster else 1) * generator.uniform(0.96, 1.04)
        ),
    )
    assert trial.finished
    assert trial.now is faster
    assert ways[: trials._WARM_UP] == [expected] * trials._WARM_UP
    rounds = 1 if faster is expected else 2
    for number in range(rounds):
        tried = ways[trials._WARM_UP + number * ROUND :][: ROUND - 1]
        assert tried.count(True) == tried.count(False)
    assert set(ways[trials._WARM_UP + rounds * ROUND :]) == {faster}


@pytest.mark.parametrize("expected", [False, True])
def test_a_machine_that_changes_after_the_first_round_keeps_what_was_expected(expected):
    first = trials._WARM_UP + ROUND
    trial = MeasuredOverlap(expected, Answers())
    ways = steps(trial, lambda overlaps, number: 0.9 if overlaps is not expected and number < first else 1.0)
    assert trial.finished
    assert trial.now is expected
    assert set(ways[first + 2 * ROUND :]) == {expected}


@pytest.mark.parametrize("expected", [False, True])
def test_a_gain_that_load_hides_in_one_round_is_found_in_the_next(expected):
    """Two of four turns of the other way are slow in the first round, as by page faults: it proves neither."""
    seen = []

    def seconds(overlaps, number):
        is_other = overlaps is not expected
        seen.append(is_other)
        is_hit = is_other and number < trials._WARM_UP + ROUND and sum(seen) > 2 * trials._STEPS
        return 1.2 if is_hit else 0.9 if is_other else 1.0

    trial = MeasuredOverlap(expected, Answers())
    ways = steps(trial, seconds)
    assert trial.finished
    assert trial.now is not expected
    assert set(ways[trials._WARM_UP + 3 * ROUND :]) == {not expected}


@pytest.mark.parametrize("expected", [False, True])
def test_ways_that_take_equally_long_seldom_leave_what_was_expected(expected):
    """Load comes and goes in bursts. One round alone decides wrongly in 34 of these 200 runs, several in 6."""
    wrong = 0
    for seed in range(200):
        generator = random.Random(seed)
        count = trials._WARM_UP + trials._ROUNDS * ROUND + 10
        bursts = [start for start in range(count) if generator.random() < 0.03]
        load = [1.4 if any(start <= step < start + 12 for start in bursts) else 1.0 for step in range(count)]
        trial = MeasuredOverlap(expected, Answers())
        steps(trial, lambda _, step, load=load, g=generator: load[step] * g.lognormvariate(0, 0.04))
        assert trial.finished
        wrong += trial.now is not expected
    assert wrong <= 16


@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_keeps_what_was_expected(expected, seed):
    generator = random.Random(seed)
    trial = MeasuredOverlap(expected, Answers())
    steps(trial, lambda *_: generator.lognormvariate(0, 0.02))
    assert trial.now is expected


def test_one_slow_step_decides_nothing():
    trial = MeasuredOverlap(True, Answers())
    steps(trial, lambda overlaps, number: 100.0 if number == trials._WARM_UP + 1 else 1.0)
    assert trial.now


def test_a_gain_must_be_clear():
    assert is_better([0.9] * 4, [1.0] * 4)
    assert is_better([0.9, 0.9, 0.9, 1.1], [1.0] * 4)
    assert not is_better([0.9, 0.9, 1.1, 1.1], [1.0] * 4)
    assert not is_better([0.99] * 4, [1.0] * 4)


def test_all_ranks_decide_alike_by_the_slowest():
    """Rank 1 is slower when overlapped, the others are faster."""

    def train(rank, communicator):
        trial = MeasuredOverlap(True, communicator)
        slow = rank == 1
        ways = steps(trial, lambda overlaps, _: (1.5 if slow else 0.5) if overlaps else 1.0)
        assert trial.finished
        return ways

    first, *others = on_thread_ranks(3, train)
    assert all(ways == first for ways in others)
    assert not first[-1]
    assert first[0]


def test_one_line_tells_what_was_decided(monkeypatch):
    said = []
    monkeypatch.setattr(trials.logger, "info", said.append)
    steps(MeasuredOverlap(True, Answers()), lambda overlaps, _: 0.002 if overlaps else 0.001)
    assert said[0] == (
        "gradients are averaged after backward: 1.0 ms a step, against 2.0 ms while backward runs. To choose yourself, "
        "set `overlap` or RING_OVERLAP."
    )
    steps(MeasuredOverlap(False, Answers()), lambda overlaps, _: 0.001 if overlaps else 0.002)
    assert said[1].startswith("gradients are averaged while backward runs: 1.0 ms a step, against 2.0 ms")
    # Other programs made half of the turns of the expected way long: its median is longer, and it is kept all the same.
    half = trials._TURNS * trials._STEPS
    slow = [i for i in range(1000) if (i - trials._WARM_UP) % ROUND >= half]
    steps(MeasuredOverlap(True, Answers()), lambda overlaps, i: 0.003 if overlaps and i in slow else 0.001)
    assert said[2].startswith(
        "gradients are averaged while backward runs: 2.0 ms a step, against 1.0 ms after backward, which was not "
    )


def test_what_is_known_decides_first_and_rank_0_chooses():
    room, none = ("auto", True), ("auto", False)
    assert choose_overlap("auto", True, Answers([room])).now
    assert not choose_overlap("auto", True, Answers([none])).now
    assert isinstance(choose_overlap("auto", True, Answers([room])), MeasuredOverlap)
    chosen = choose_overlap(False, True, Answers([(True, True)]))
    assert type(chosen) is Choice
    assert not chosen.now
    assert choose_overlap(True, False, Answers([("auto", False)])).now
    assert type(choose_overlap("auto", True, SingleCommunicator("alone"))) is Choice


def test_the_variable_chooses_where_the_argument_does_not(monkeypatch):
    assert chosen_overlap("auto") == "auto"
    monkeypatch.setenv("RING_OVERLAP", "1")
    assert chosen_overlap("auto") is True
    assert chosen_overlap(False) is False
    monkeypatch.setenv("RING_OVERLAP", "0")
    assert chosen_overlap("auto") is False
    monkeypatch.setenv("RING_OVERLAP", "yes")
    with pytest.raises(ArgumentError, match="RING_OVERLAP='yes' is not one of auto, 0, 1"):
        chosen_overlap("auto")
    with pytest.raises(ArgumentError, match="overlap='never' must be"):
        chosen_overlap("never")


def test_times_that_are_exchanged_are_in_the_order_of_the_turns():
    trial = MeasuredOverlap(True, Answers())
    steps(trial, lambda overlaps, number: 1.0 if overlaps else 2.0, trials._WARM_UP + 2 * trials._TURNS * trials._STEPS)
    (seconds,) = trial._turns._agreement.wait()
    assert np.allclose(seconds, [[1.0] * trials._TURNS, [2.0] * trials._TURNS])


MODEL = FusionPlan([Entry(f"p{i}", "float32", count) for i, count in enumerate([10, 900_000, 70_000, 4_000_000] * 8)])


def tune(seconds, ranks=3):
    """Train `ranks` ranks whose steps take `seconds(sizes, rank, step)`; return the tuners and the number of steps."""

    def train(rank, communicator):
        tuner, clock, sizes = BucketTuner(BucketSizes(), MODEL.buckets_with, communicator), 100.0 * rank, []
        while not tuner.finished:
            sizes.append(tuner.sizes)
            clock += seconds(tuner.sizes, rank, len(sizes))
            tuner.step_ended(clock)
            assert len(sizes) < 500
        return tuner, sizes

    (first, sizes), *others = on_thread_ranks(ranks, train)
    assert all(other == sizes for _, other in others)
    return [first, *(tuner for tuner, _ in others)], len(sizes)


def noisy(function, spread=0.05):
    generator = random.Random(0)
    return lambda *args: function(*args) * generator.uniform(1 - spread, 1 + spread)


def test_better_sizes_are_found_under_noise_on_a_machine_that_gets_slower():
    def seconds(sizes, rank, step):
        base = 0.01 + 0.002 * rank + 0.00005 * step
        return base * (0.7 if sizes.bucket_bytes == 4 * MIB else 1) * (0.8 if sizes.direct_bytes == 8 * MIB else 1)

    tuners, steps = tune(noisy(seconds))
    assert {tuner.sizes for tuner in tuners} == {BucketSizes(4 * MIB, MIB, 8 * MIB)}
    assert "buckets of 4 MiB" in tuners[0].summary
    assert steps < 200


def test_the_slowest_rank_decides():
    def seconds(sizes, rank, step):
        return (0.5 if rank == 0 else 2.0) if sizes.bucket_bytes == 64 * MIB else 1.0

    tuners, _ = tune(seconds)
    assert tuners[0].sizes.bucket_bytes != 64 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_leaves_the_default(seed):
    generator = random.Random(seed)
    tuners, _ = tune(lambda *_: generator.lognormvariate(0, 0.02))
    assert tuners[0].sizes == BucketSizes()
    assert tuners[0].summary.startswith("the default stays")


def test_a_candidate_that_was_faster_once_is_measured_again():
    tuners, _ = tune(lambda sizes, _, step: 0.5 if sizes.bucket_bytes == 4 * MIB and step < 60 else 1.0)
    assert tuners[0].sizes == BucketSizes()


def test_a_model_whose_buckets_are_the_same_anyway_is_not_tuned():
    small = FusionPlan([Entry("weight", "float32", 100), Entry("bias", "float32", 10)])
    tuner = BucketTuner(BucketSizes(), small.buckets_with, Answers())
    assert tuner.finished
    assert tuner.sizes == BucketSizes()


def test_the_environment_switches_it_on(monkeypatch):
    assert not tuning_is_wanted(None)
    monkeypatch.setenv("RING_AUTOTUNE", "1")
    assert tuning_is_wanted(None)
    assert not tuning_is_wanted(False)
    monkeypatch.setenv("RING_AUTOTUNE", "yes")
    with pytest.raises(ArgumentError, match="RING_AUTOTUNE='yes'"):
        tuning_is_wanted(None)


WAYS = Compression.named("auto").tried


@pytest.mark.parametrize(
    ("seconds", "fastest", "rounds"),
    [
        ({None: 1.0, "bf16": 0.5, "int8": 0.3}, "int8", 1),
        ({None: 1.0, "bf16": 0.9, "int8": 1.4}, "bf16", 2),
        ({None: 1.0, "bf16": 0.9, "int8": 0.9}, "bf16", 2),
        ({None: 1.0, "bf16": 1.0, "int8": 1.5}, None, 1),
    ],
)
def test_gradients_travel_as_is_fastest_and_the_more_exact_way_wins_where_both_take_equally_long(
    seconds, fastest, rounds
):
    generator = random.Random(0)
    trial = MeasuredCompression(WAYS, Answers())
    name = lambda way: way and way.name  # noqa: E731
    ways = steps(trial, lambda way, _: seconds[name(way)] * generator.uniform(0.99, 1.01), 200)
    assert trial.finished
    assert name(trial.now) == fastest
    tried = ways[trials._WARM_UP :][: 3 * trials._TURNS * trials._STEPS]
    assert [list(map(name, tried)).count(one) for one in seconds] == [trials._TURNS * trials._STEPS] * 3
    assert {*map(name, ways[trials._WARM_UP + 3 * ROUND :])} == {fastest}
    assert len(trial._seconds[0]) == rounds * trials._TURNS


def test_eight_bits_without_error_feedback_are_not_tried():
    assert Compression.named("auto", False).tried == [None, ("bf16", False)]
    assert Compression.named("auto", True).tried == [None, ("bf16", True), ("int8", True)]
    assert WAYS == [None, ("bf16", False), ("int8", True)]


def test_what_the_user_chose_and_what_does_not_leave_the_host_is_not_tried():
    chosen = Compression.named("int8")
    answers = Answers()
    assert choose_compression(chosen, 0, answers).now is chosen
    assert answers.asked == ["choice of compression"]  # as on a rank with "auto", which it does not leave waiting
    assert choose_compression(Compression.named("auto"), 1, Answers([1])) is UNCHANGED
    tried = choose_compression(Compression.named("auto"), 0, Answers([1]))
    assert isinstance(tried, MeasuredCompression)
    assert tried.now is None
