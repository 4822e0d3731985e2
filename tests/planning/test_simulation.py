"""Predicted steps whose arithmetic can be done by hand."""

import json
import math

import pytest

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.planning import (
    TRANSPORTS,
    Gradient,
    Network,
    Profile,
    TransportModel,
    needed_gigabits,
    parse,
    predict,
    remedies,
)
from ring_plugins.planning.simulation import fitted, slowest_of


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


def test_fewer_bits_and_fewer_exchanges_help_on_slow_networks():
    mine = profile(0.010, 0.002)
    fast = remedies(mine, flat(), 2, overlap=False)['compression="auto"']
    assert fast.exposed == pytest.approx(2 * 0.85e-3, rel=1e-3)  # half the bytes take 0.5 ms, rounding them 0.85
    slow = remedies(mine, flat(gigabits=0.8), 2, overlap=False, every=10)
    assert slow['compression="auto"'].exposed == pytest.approx(2 * 0.010 * 17 / 64, rel=1e-3)
    assert slow["sync_every=10"].exposed == pytest.approx(2 * 0.010 / 10, rel=1e-3)
    assert remedies(mine, flat(), 2, per_host=2) == {}
    assert remedies(mine, Network("MPI", 8.0, TRANSPORTS["cpu"]), 2) == {}
    gpus = remedies(mine, Network("tcp", 0.8, TRANSPORTS["tcp"]), 2, overlap=False, every=10)
    assert gpus['compression="int8"'].exposed == pytest.approx(2 * 0.010 / 0.9 * 17 / 64, rel=5e-2)
    assert gpus["sync_every=10"].exposed == pytest.approx(2 * 0.010 / 0.9 / 10, rel=2e-2)
    fast = remedies(mine, Network("tcp", 80.0, TRANSPORTS["tcp"]), 2, overlap=False)['compression="bf16"']
    assert fast.exposed == pytest.approx(1e-4 / 0.52 + 2 * 30e-6, rel=1e-2)


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


def test_the_cost_of_an_all_reduce_follows_its_algorithm():
    megabyte = 1_000_000
    assert flat().all_reduce(megabyte, 4, 1) == pytest.approx(1.5e-3)
    assert flat(alpha=1e-3).all_reduce(0, 2, 1) == pytest.approx(2e-3)
    assert flat(alpha=1e-3).all_reduce(0, 4, 1) == pytest.approx(
        2e-3 * (2 + 3) / (2 + 1)
    )  # two rounds with three hosts
    assert flat(alpha=1e-3).all_reduce(0, 64, 1) == pytest.approx(3 * 2e-3 * (2 + 3) / (2 + 1))  # in groups of four
    two_level = Network("", 8.0, TransportModel(1.0, 0.0, 0.0, 2.0, True))
    assert two_level.all_reduce(megabyte, 4, 2) == pytest.approx(0.5e-3 + 1e-3)  # inside, then between two hosts
    ring = Network("", 8.0, TransportModel(1.0, 0.0, 0.0, 2.0, False))
    assert ring.all_reduce(megabyte, 4, 2) == pytest.approx(1.5e-3)
    assert ring.all_reduce(megabyte, 2, 2) == pytest.approx(0.5e-3)  # one host


def test_a_fitted_network_predicts_what_it_was_fitted_to():
    for hosts in (2, 4, 64):
        network = fitted("measured", [(1000, 1e-3), (100_000_000, 0.1)], hosts, hosts)
        assert network.all_reduce(1000, hosts, 1) == pytest.approx(1e-3, rel=1e-2)
        assert network.all_reduce(100_000_000, hosts, 1) == pytest.approx(0.1, rel=1e-2)


def test_transports_are_those_of_the_page():
    assert set(TRANSPORTS) == {"rdma", "tcp", "cpu", "ring"}


def test_networks_by_rate_name_and_measurement(tmp_path):
    assert parse("25gbit", "rdma").gigabits == 25
    assert parse("800 mbit").gigabits == pytest.approx(0.8)
    assert parse("ib-hdr").gigabits == 200
    assert parse("25gbit").inside(100).transport.local_gbytes == 100
    points = [(size, 2 * 50e-6 + size / 1e9) for size in (64, 4096, 1 << 20, 1 << 24)]
    found = fitted("", points, ranks=2, hosts=2)
    assert found.gigabits == pytest.approx(8.0, rel=1e-3)
    assert found.transport.alpha == pytest.approx(50e-6, rel=1e-3)
    rows = [{"bytes": size, "median": seconds, "backend": "ring"} for size, seconds in points]
    (tmp_path / "bench.json").write_text(json.dumps({"ranks": 2, "nodes": 2, "curve": rows}))
    (tmp_path / "doctor.json").write_text(json.dumps({"all_reduce": {"ranks": 2, "nodes": 2, "curve": rows}}))
    for name in ("bench", "doctor"):
        assert parse(str(tmp_path / f"{name}.json")) == parse(str(tmp_path / "bench.json"))
    former = [{"contestant" if key == "backend" else key: value for key, value in row.items()} for row in rows]
    (tmp_path / "former.json").write_text(json.dumps({"ranks": 2, "nodes": 2, "curve": former}))
    assert parse(str(tmp_path / "former.json")) == parse(str(tmp_path / "bench.json"))
    (tmp_path / "one.json").write_text(json.dumps({"ranks": 2, "nodes": 1, "curve": rows}))
    for wrong, said in (
        ("fast", "is neither a rate"),
        (str(tmp_path / "one.json"), "on one host"),
        ("0gbit", "is neither a rate"),
        ("1.2.3gbit", "is neither a rate"),
    ):
        with pytest.raises(ArgumentError, match=said):
            parse(wrong)
    with pytest.raises(ArgumentError, match="pigeons"):
        parse("25gbit", "pigeons")
