"""`ring run --on-failure replace` over several hosts: other processes take the places of ranks that are killed."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.keras import test_replacement as of_keras
from tests.launch import slowness
from tests.lightning import test_replacement as of_lightning
from tests.torch.test_replacement import CHECKS, check

RING = str(Path(sys.executable).parent / "ring")
EVERYONE = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def cluster():
    with hosts(2) as cluster:
        yield cluster


def start(cluster, deaths, env=None, pending=True, ranks_per_host=2, script=CHECKS, options=("--no-check",), on=None):
    """`ring run` on host1 over all hosts, or the first `on` ones, as docs/fault_tolerance.md starts train.py."""
    names = cluster.hosts[:on]
    size = ranks_per_host * len(names)
    env = {
        "TEST_DEATHS": json.dumps(deaths),
        "TEST_RANKS": str(size),
        "TEST_HOSTS": str(len(names)),
        **({"TEST_PENDING": str(60 * slowness())} if pending else {}),
        **(env or {}),
    }
    where = ["-H", ",".join(f"{host}:{ranks_per_host}" for host in names)]
    exported = [word for name in env for word in ("-x", name)]
    command = [RING, "run", *where, "--on-failure", "replace", *exported, *options, sys.executable]
    return cluster.start(command, script, size, env=env)


def train(cluster, deaths, **options):
    return start(cluster, deaths, **options).run(120)


@pytest.mark.slow  # the default suite tries it in tests/campaigns, without real hosts
def test_another_process_takes_the_place_of_rank_0(cluster):
    result = train(cluster, [[0, 2, "now"]])
    found, own = check(result, EVERYONE)
    left = [1, 2, 3]
    assert found["history"] == [EVERYONE] * 2 + [left] * 2 + [EVERYONE] * 8
    assert found["numbers"] == [4, 1, 2, 3]
    assert [one["joined at"] for one in own] == [4, None, None, None]
    assert [one["changes"] for one in own] == [[[[], [], [4], 3]], *[[[[0], [], [], 4], [[], [], [4], 3]]] * 3]
    assert "ring run: starting another process in the place of rank 0.\n" in result.output
    assert "in the place of rank 0 joined; the job goes on with 4 ranks since" in result.output
    assert "ring run: other processes took the place of rank 0, and all 4 ended normally." in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        [[2, 2, "barrier 2 in"], [3, 5, "now"]],
        [[1, 2, "now"], [0, 6, "now"], [1, 0, "joiner now"]],
        [[3, 2, "SIGTERM"], [0, 5, "now"]],
        [[3, 2, "now"], [0, 6, "now"]],  # the second joiner has the lower number
    ],
    ids=str,
)
def test_several_may_be_replaced_at_once_or_in_a_row_and_those_that_left(cluster, deaths):
    found, _ = check(train(cluster, deaths), EVERYONE)
    assert sum(len(slots) < 4 for slots in found["history"]) <= 2 * len(deaths)


@pytest.mark.slow
def test_two_that_join_at_one_commit_hear_of_each_other_as_the_others_do(cluster):
    """So their functions for changes may use collectives: all are called equally often."""
    found, own = check(train(cluster, [[0, 1, "now"], [2, 1, "now"]]), EVERYONE)
    assert found["numbers"] == [4, 1, 5, 3] and own[0]["joined at"] == own[2]["joined at"]
    assert [[joined for _, _, joined, _ in one["changes"] if joined] for one in own] == [[[4], [5]]] * 4


ROUNDS = [f"round {number} {when}" for number in (1, 2, 3) for when in ("before", "in")]


@pytest.mark.slow
@pytest.mark.parametrize("point", ROUNDS)
def test_a_joiner_may_die_while_it_joins_and_the_next_one_joins(cluster, point):
    found, _ = check(train(cluster, [[1, 2, "now"], [1, 0, f"joiner {point}"]]), EVERYONE)
    assert found["numbers"] == [0, 6, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_nobody_waits_long_for_a_joiner_that_is_stopped_while_it_joins(cluster, number):
    result = train(cluster, [[1, 2, "now"], [1, 0, f"joiner round {number} stopped"]])
    found, _ = check(result, EVERYONE)
    assert found["numbers"] == [0, 6, 2, 3]
    text = "which was to join as rank 4, has not answered for 2 s (stopped?). It was killed, and the"
    if number == 3:  # behind which it is a member, as soon as the others have decided
        text = "which has joined as rank 4, did not go on for 2 s (stopped?). It was killed."
    assert text in result.output


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "victim"), [(1, 3), (3, 0)])  # of different hosts, so that both are replaced
@pytest.mark.parametrize("point", ROUNDS)
def test_so_may_a_member_while_another_process_joins(cluster, lost, victim, point):
    found, _ = check(train(cluster, [[lost, 2, "now"], [victim, 3, point]]), EVERYONE)
    assert found["numbers"][victim] > 3 and found["numbers"][lost] > 3


@pytest.mark.slow
def test_a_process_joins_in_a_fit_of_lightning(cluster, tmp_path):
    result = train(cluster, [[0, 1, "now"]], script=of_lightning.CHECKS, env={"TEST_ROOT": str(tmp_path)})
    found, own = of_lightning.check(result, EVERYONE, 4)
    assert own[0]["number"] == 4 and found["history"][-1] == EVERYONE


@pytest.mark.slow
@pytest.mark.parametrize("backend", of_keras.BACKENDS)
def test_a_process_joins_in_a_fit_of_keras(cluster, backend):
    result = train(cluster, [[3, 1, "now"]], script=of_keras.CHECKS, env={"KERAS_BACKEND": backend})
    found, numbers = of_keras.check(result, EVERYONE)
    assert numbers == [0, 1, 2, 5] and found["history"][-1] == EVERYONE


@pytest.mark.slow
@pytest.mark.parametrize("slot", [0, 3])
@pytest.mark.parametrize("plugin", ["plain", "lightning", *of_keras.BACKENDS])
def test_a_rank_that_is_stopped_for_longer_than_the_network_may_be_silent_is_waited_for(
    cluster, tmp_path, plugin, slot
):
    """While another one is replaced."""
    env = {"RING_NETWORK_TIMEOUT": "2", "TEST_ROOT": str(tmp_path), "KERAS_BACKEND": plugin}
    script = {"plain": CHECKS, "lightning": of_lightning.CHECKS}.get(plugin, of_keras.CHECKS)
    result = train(cluster, [[1, 1, "now"], [slot, 2, "stops 5"]], script=script, env=env)
    if plugin == "plain":
        found, _ = check(result, EVERYONE)
    elif plugin == "lightning":
        found, _ = of_lightning.check(result, EVERYONE, 4)
    else:
        found, _ = of_keras.check(result, EVERYONE)
    assert found["history"][-1] == EVERYONE and all(len(slots) >= 3 for slots in found["history"])
    assert "cannot be reached" not in result.output and "(stopped?)" not in result.output


@pytest.mark.slow
def test_nobody_takes_the_places_of_all_ranks_of_a_host(cluster):
    result = start(cluster, [[2, 2, "now"], [3, 2, "now"]], pending=False).run(120)
    check(result, [0, 1])
    assert "ring run: nobody takes the place of ranks 2, 3: all ranks of host2 are lost" in result.output
    # A process may have started in the place of one of them before the other died.
    late = "|".join(
        f"rank {one} died, nobody had joined yet in the place of rank {other}" for one, other in ((2, 3), (3, 2))
    )
    assert re.search(rf"ring run: (ranks 2, 3 died|{late}), and the other 2 ended normally\.", result.output)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["round 2 before", "round 3 in"])
def test_nor_if_the_last_of_them_dies_while_another_process_joins(cluster, point):
    result = train(cluster, [[3, 2, "now"], [2, 3, point]])
    assert "ring run: nobody takes the place of ranks 2, 3: all ranks of host2 are lost" in result.output


def grow(cluster, deaths, ranks_per_host=2, added=((0, 1, 2),), where=None, most=6, **options):
    """A job that grows: by two ranks, one on each host, if nothing else is said."""
    env = {
        "TEST_ADDED": json.dumps(added),
        "TEST_WHERE": json.dumps(where or {"4": "host1", "5": "host2"}),
        "TEST_MOST": str(most),
        "TEST_EPOCHS": "4",
        **options.pop("env", {}),
    }
    growing = ("--no-check", "--max-ranks", str(most))
    return train(cluster, deaths, ranks_per_host=ranks_per_host, env=env, options=growing, **options)


def check_grown(result, slots=6):
    found, own = check(result, range(slots), epochs=4, steps=result.reports[0]["found"]["ends"][-1])
    assert found["history"][-1] == list(range(slots))
    return found, own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "numbers"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([[4, 8, "joiner now"], [2, 8, "now"]], None),
        ([[5, 8, "joiner now"], [4, 12, "joiner now"]], None),
        ([[1, 0, "now"]], None),
        *(([[4, 0, f"joiner round {n} {when}"]], [0, 1, 2, 3, 6, 5]) for n in (1, 2, 3) for when in ("before", "in")),
        ([[5, 0, "joiner round 2 stopped"]], [0, 1, 2, 3, 4, 7]),
        *(([[victim, 5, f"round {n} in"]], None) for victim, n in ((0, 2), (3, 3), (2, 1))),
    ],
    ids=str,
)
def test_a_job_grows_on_several_hosts_whoever_dies_meanwhile(cluster, deaths, numbers):
    result = grow(cluster, deaths)
    found, own = check_grown(result)
    assert result.reports[0]["answer"] == "rank 4 on host1 and rank 5 on host2 will join where an epoch begins."
    assert numbers in (None, found["numbers"])
    if not deaths:
        assert [one["changes"] for one in own] == [[[[], [], [4], 4], [[], [], [5], 5]]] * 6
        assert found["ends"] == [6, 10, 14, 18] and found["history"][:6] == [EVERYONE] * 6
        assert "ring run: ranks 4, 5 joined, and all 6 ended normally." in result.output


@pytest.mark.slow
def test_a_host_may_get_all_added_ranks_and_then_have_more_than_the_other(cluster):
    """As docs/fault_tolerance.md says: `ring run --max-ranks`, and `ring add-ranks 2 --host host2`, here twice."""
    where = {str(slot): "host2" for slot in range(4, 8)}
    added = [[0, 1, 2, "host2"], [0, 7, 2, "host2"]]
    result = grow(cluster, [[6, 11, "joiner now"]], added=added, where=where, most=8)
    found, own = check_grown(result, 8)
    assert found["ends"][:2] == [6, 10] and result.reports[0]["answer"].startswith("ranks 6, 7 on host2 will join")
    assert own[6]["number"] == 9, "the first one of host2 that has taken a place"


@pytest.mark.slow
def test_added_ranks_of_a_host_that_is_lost_join_on_another_one(cluster):
    deaths, added = [[2, 2, "now"], [3, 2, "now"]], [[0, 1, 2, "host2"]]
    result = grow(cluster, deaths, added=added, where={"4": "host1", "5": "host1"}, pending=False)
    assert "ranks 4, 5 will join on host1, since host2 has no ranks any more." in result.output
    slots = [0, 1, *(slot for slot in (4, 5) if slot in result.reports and "found" in result.reports[slot])]
    check(result, slots, epochs=4, steps=result.reports[0]["found"]["ends"][-1])


@pytest.mark.slow
def test_a_fit_of_lightning_grows(cluster):
    result = grow(cluster, [], 1, [[0, 2, 2]], {"2": "host1", "3": "host2"}, 4, script=of_lightning.GROWS)
    of_lightning.check_grown(result)


@pytest.mark.slow
def test_a_job_of_keras_grows_between_two_fits(cluster):
    env = {"KERAS_BACKEND": "jax"}
    result = grow(cluster, [], 1, [[0, 2, 2]], {"2": "host1", "3": "host2"}, 4, script=of_keras.GROWS, env=env)
    assert result.values("found") == of_keras.grown()
