"""The algorithms for chunks between hosts, on simulated hosts: right sums, and the same bits on all ranks."""

import numpy as np
import pytest

from ring_plugins.core.arrays.codec import HalfCodec, IdentityCodec, Int8Codec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.collectives.algorithms import (
    Reduction,
    butterfly,
    choose_algorithm,
    pair_exchange,
    radices,
    reduce_small,
    ring,
    rounds,
)
from ring_plugins.core.collectives.fingerprint import fingerprint
from tests.core.collectives.simulated_hosts import simulated_hosts

CASES = [
    (2, pair_exchange, 1),
    (2, butterfly, 2),
    (3, butterfly, 2),
    (12, butterfly, 4),
    (18, butterfly, 6),
    (2, ring, 2),
    (3, ring, 4),
    (4, ring, 6),
]


def test_the_algorithm_depends_on_the_number_of_hosts_and_on_the_size():
    assert choose_algorithm(2, 1 << 20) == (pair_exchange, 1)
    assert choose_algorithm(2, 25 << 20) == (butterfly, 2)
    assert choose_algorithm(7, 1 << 20) == (butterfly, 2)
    assert choose_algorithm(8, 1 << 20) == (butterfly, 4)  # groups of 4 and 2
    assert choose_algorithm(1024, 1 << 20) == (butterfly, 10)  # five times in groups of 4
    assert choose_algorithm(37, 1 << 20) == (ring, 72)


def run(on_all, rows, op, algorithm, rounds, make_codec=IdentityCodec, length=30_001):
    """Reduce every rank's row in chunks of `length`, the last one shorter; the results of all ranks."""
    divisor = len(rows) if op is Op.AVERAGE else 1

    def reduce(rank, member):
        array, codec = rows[rank].copy(), make_codec()
        if isinstance(codec, HalfCodec):
            codec.begin(array)
        operation = fingerprint("all_reduce", "float32", array.size, op.name)
        reduction = Reduction(member.group, op, "float32", divisor, codec, array.nbytes, operation)
        chunks, under_way = [array[start : start + length] for start in range(0, array.size, length)], []
        for chunk in [*chunks, *[None] * rounds]:
            if chunk is not None:
                under_way.append(algorithm(reduction, chunk))
            under_way = [one for one in under_way if next(one, "over") != "over"]
        assert not under_way  # each took as many rounds as it says
        reduction.finish_sending()
        return array

    results = on_all(reduce)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    return results[0]


@pytest.mark.parametrize(("members", "algorithm", "rounds"), CASES)
def test_every_algorithm_gives_the_right_sums(members, algorithm, rounds):
    random = np.random.default_rng(0)
    with simulated_hosts((1,) * members) as on_all:
        for count in (1, 17, 100_003):  # with empty parts too
            rows = random.standard_normal((members, count)).astype(np.float32)
            for op, expected in ((Op.SUM, rows.sum(0)), (Op.AVERAGE, rows.mean(0)), (Op.MAX, rows.max(0))):
                np.testing.assert_allclose(run(on_all, rows, op, algorithm, rounds), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("members", "algorithm", "rounds"), CASES)
def test_every_algorithm_sends_rounded_numbers(members, algorithm, rounds):
    rows = np.random.default_rng(0).standard_normal((members, 100_003)).astype(np.float32)
    with simulated_hosts((1,) * members) as on_all:
        got = run(on_all, rows, Op.AVERAGE, algorithm, rounds, lambda: HalfCodec("float16"))
    np.testing.assert_allclose(got, rows.mean(0), atol=1e-2)


@pytest.mark.parametrize("members", [1, 2, 3, 7, 8, 12, 18, 37, 64])
def test_after_all_rounds_of_a_butterfly_everyone_has_heard_of_everyone(members):
    assert np.prod(radices(members)) == members
    known = [{position} for position in range(members)]
    for number in range(len(radices(members))):
        groups = [rounds(members, position)[number] for position in range(members)]
        assert all(groups[other] == group for group in groups for other in group)
        known = [set.union(*(known[other] for other in group)) for group in groups]
    assert all(len(heard) == members for heard in known)


@pytest.mark.parametrize("members", [3, 8])
def test_a_small_all_reduce_gives_all_the_same(members):
    with simulated_hosts((1,) * members) as on_all:

        def reduce(rank, member):
            array, operation = np.arange(5, dtype=np.float32) + rank, fingerprint("all_reduce")
            reduce_small(member.group, array, Op.AVERAGE, "float32", members, IdentityCodec(), operation)
            return array.tolist()

        assert on_all(reduce) == [(np.arange(5) + (members - 1) / 2).tolist()] * members


@pytest.mark.parametrize("members", [3, 8])
def test_error_feedback_loses_nothing_in_any_round_of_a_small_all_reduce(members):
    """What rounds a sum of several members, in a later round, comes back too: the error of a mean falls with steps."""
    rows = np.random.default_rng(0).standard_normal((members, 100)).astype(np.float32)
    with simulated_hosts((1,) * members) as on_all:

        def reduce(rank, member):
            codec, total = Int8Codec(error_feedback=True, can_undo=True), np.zeros(100)
            for step in range(65):
                array = rows[rank].copy()
                codec.begin(array)
                reduce_small(member.group, array, Op.AVERAGE, "float32", members, codec, fingerprint("all_reduce"))
                if step:
                    total += array
                else:
                    codec.undo()  # this one is given up
            return total / 64

        results = on_all(reduce)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    np.testing.assert_allclose(results[0], rows.mean(0), atol=5e-4)
