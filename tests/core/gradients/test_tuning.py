import itertools
import random

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import MIB, BucketSizes, Entry, FusionPlan
from ring_plugins.core.gradients.tuning import BucketTuner, is_wanted

MODEL = FusionPlan([Entry(f"p{i}", "float32", count) for i, count in enumerate([10, 900_000, 70_000, 4_000_000] * 8)])


def tune(seconds, ranks=3, plan=MODEL):
    """Train `ranks` ranks whose steps take `seconds(sizes, rank, step)`; return the tuners and the number of steps."""
    tuners = [BucketTuner(BucketSizes(), plan.buckets_with) for _ in range(ranks)]
    clocks = [100.0 * rank for rank in range(ranks)]  # clocks of different hosts
    for step in itertools.count():
        if tuners[0].finished:
            return tuners, step
        assert step < 500
        assert len({tuner.sizes for tuner in tuners}) == 1
        due = []
        for rank, tuner in enumerate(tuners):
            clocks[rank] += seconds(tuner.sizes, rank, step)
            due.append(tuner.step_ended(clocks[rank]))
        assert len(set(due)) == 1
        if due[0]:
            decision = tuners[0].decide([tuner.times for tuner in tuners])
            for tuner in tuners:
                tuner.adopt(decision)
    raise AssertionError


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
    tuner = BucketTuner(BucketSizes(), small.buckets_with)
    assert tuner.finished
    assert tuner.sizes == BucketSizes()


def test_the_environment_switches_it_on(monkeypatch):
    assert not is_wanted(None)
    monkeypatch.setenv("RING_AUTOTUNE", "1")
    assert is_wanted(None)
    assert not is_wanted(False)
    monkeypatch.setenv("RING_AUTOTUNE", "yes")
    with pytest.raises(ArgumentError, match="RING_AUTOTUNE='yes'"):
        is_wanted(None)
