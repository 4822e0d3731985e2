"""Predicted steps whose arithmetic can be done by hand."""

import math

import pytest

from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.planning import Gradient, Network, Profile, TransportModel, needed_gigabits, predict
from ring_plugins.planning.simulation import slowest_of


def flat(gigabits=8.0, alpha=0.0):
    """1 GB/s between hosts."""
    return Network("flat", gigabits, TransportModel(1.0, alpha, 0.0, 1e6, True))


def profile(*ready, count=250_000, backward=0.010):
    """Parameters of 1 MB each; seconds at which their gradients are complete."""
    gradients = tuple(Gradient(f"p{i}", "float32", count, at) for i, at in enumerate(ready))
    return Profile("made up", 8, 0.005, backward, 0.001, gradients, "a test")


ALONE = BucketSizes(1, 1, None)  # every gradient is a bucket


def test_one_rank_does_not_communicate():
    assert predict(profile(0.01), flat(), 1).efficiency == 1.0


def test_communication_hides_behind_backward_except_for_the_last_bucket():
    # Two hosts: 1 MB takes 1 ms. The last layer's gradient is reduced at 2 ms, before the first layer's is ready at 10.
    found = predict(profile(0.010, 0.002), flat(), 2, 1, ALONE, jitter=0.0)
    assert found.exposed == pytest.approx(0.001, rel=1e-3)
    assert found.communication == pytest.approx(0.002, rel=1e-3)
    assert found.step == pytest.approx(0.017, rel=1e-3)


def test_without_a_spare_core_nothing_hides():
    found = predict(profile(0.010, 0.002), flat(), 2, 1, ALONE, jitter=0.0, overlap=False)
    assert found.exposed == pytest.approx(0.002, rel=1e-3)


def test_buckets_are_reduced_one_at_a_time_in_order():
    found = predict(profile(0.001, 0.001, 0.009), flat(), 2, 1, ALONE, jitter=0.0)
    assert found.exposed == pytest.approx(0.002, rel=1e-3)  # 9 to 10, then two more
    slow = predict(profile(0.010, 0.002), flat(gigabits=0.8), 2, 1, ALONE, jitter=0.0)
    assert slow.exposed == pytest.approx(0.012, rel=1e-2)  # 2 + 10 + 10 - 10 ms


def test_the_slowest_of_many():
    assert slowest_of(1) == 0
    assert slowest_of(2, 0.01) == pytest.approx(0.0056, rel=0.06)  # 1 / sqrt(pi)
    assert slowest_of(1000, 0.01) == pytest.approx(0.0324, rel=0.02)


def test_the_network_that_is_needed():
    needed = needed_gigabits(profile(0.010), flat(), 2, 1, 0.9)
    reached = predict(profile(0.010), flat(needed), 2).efficiency
    assert 0.9 <= reached < 0.905
    assert math.isinf(needed_gigabits(profile(0.010), flat(alpha=1.0), 2))
