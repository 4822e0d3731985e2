"""`ring add-ranks --host`: ranks of hosts that were not in the job at its start, or that have lost all of theirs."""

import json
import re

import pytest

from tests.hosts import hosts
from tests.hosts.test_replacement import train
from tests.keras import test_replacement as of_keras
from tests.lightning import test_replacement as of_lightning
from tests.torch.test_replacement import check, replayed


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as cluster:
        cluster.hosts = cluster.hosts[:2]  # those of the job at its start
        yield cluster


def grow(cluster, deaths, added, where, most=6, pending=True, remote=(), compares="--no-check"):
    env = {"TEST_ADDED": json.dumps(added), "TEST_WHERE": json.dumps(where), "TEST_MOST": str(most), "TEST_EPOCHS": "4"}
    options = (compares, "--max-ranks", str(most)) if most else (compares,)
    env = {**env, "TEST_REMOTE_JOINERS": json.dumps(remote), **({} if most else {"TEST_MOST": "4"})}
    result = train(cluster, deaths, env=env, options=options, pending=pending)
    slots = [slot for slot in range(8) if "found" in result.reports.get(slot, {})]
    found, own = check(result, slots, epochs=4, steps=result.reports[0]["found"]["ends"][-1])
    return result, found, own, slots


ON_HOST3 = {"4": "host3", "5": "host3"}


DEATHS = [
    [[4, 8, "joiner now"]],
    [[1, 0, "now"]],
    *([[4, 0, f"joiner round {n} {when}"]] for n in (1, 2, 3) for when in ("before", "in")),
    *([[4, 0, f"joiner round {n} stopped"]] for n in (1, 2)),
    *([[victim, 5, f"round {n} in"]] for victim, n in ((0, 2), (3, 3), (2, 1))),
]


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [[], *(pytest.param(each, marks=pytest.mark.slow) for each in DEATHS)], ids=str)
def test_a_host_that_was_not_in_the_job_joins_it_whoever_dies_meanwhile(cluster, deaths):
    compares = "--no-check" if deaths else "--check"  # of the versions on host3, too
    result, found, own, slots = grow(cluster, deaths, [[0, 1, 2, "host3"]], ON_HOST3, compares=compares)
    assert result.reports[0]["answer"] == "ranks 4, 5 on host3 will join where an epoch begins."
    assert slots == list(range(6)) and found["history"][-1] == slots
    if not deaths:
        assert found["numbers"] == slots and found["ends"] == [6, 10, 14, 18]
        assert [one["changes"] for one in own] == [[[[], [], [4], 4], [[], [], [5], 5]]] * 6
        assert "ring run: ranks 4, 5 joined, and all 6 ended normally." in result.output


@pytest.mark.slow
@pytest.mark.parametrize("host", ["host2", "host3"])
def test_others_take_the_places_of_all_ranks_of_a_host_there_or_elsewhere(cluster, host):
    """Without --max-ranks."""
    deaths, added = [[2, 1, "now"], [3, 1, "now"]], [[0, 4, 2, host]]
    result, found, _, slots = grow(cluster, deaths, added, {"4": host, "5": host}, most=0, remote=[2, 3])
    assert result.reports[0]["answer"] == f"ranks 2, 3 on {host} will join."
    assert slots == [0, 1, 2, 3] and found["history"][-1] == slots
    assert "`ring add-ranks 2` lets other processes take the places of ranks 2, 3, and --host chooses" in result.output


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_disturbs_nobody(cluster):
    result, _, _, slots = grow(cluster, [], [[0, 1, 1, "nowhere"]], {"4": "nowhere"}, pending=False)
    assert slots == [0, 1, 2, 3] and result.reports[0]["answer"].startswith("rank 4 on nowhere will join")
    assert "ring run: nowhere: the login ended with status 255 before its ranks started; its" in result.output
    assert "; rank 4 will not join." in result.output


@pytest.mark.slow
def test_a_host_that_comes_at_the_very_end_does_not_keep_the_job(cluster):
    result, _, _, slots = grow(cluster, [], [[0, 3, 1, "host3"]], {"4": "host3"}, pending=False)
    assert slots == [0, 1, 2, 3] and result.reports[0]["answer"].startswith("rank 4 on host3 will join")
    assert re.search("host3 comes too late, .*; rank 4 will not join|rank 4 had not joined yet", result.output)
    assert not re.search("ranks? [:;,.]", result.output)


def fit(cluster, script, deaths=(), backend=""):
    """Two ranks become four in the second epoch, of which the further ones are on host3."""
    env = {
        "TEST_ADDED": json.dumps([[0, 2, 2, "host3"]]), "TEST_WHERE": json.dumps({"2": "host3", "3": "host3"}),
        "TEST_MOST": "4", **({"KERAS_BACKEND": backend} if backend else {}),
    }  # fmt: skip
    options = ("--no-check", "--max-ranks", "4")
    result = train(cluster, deaths, ranks_per_host=1, script=script, env=env, options=options)
    assert result.reports[0]["answer"] == "ranks 2, 3 on host3 will join where an epoch begins."
    assert "ring run: ranks 2, 3 joined" in result.output
    return result


@pytest.mark.slow
def test_a_fit_of_lightning_grows_on_a_new_host(cluster):
    history = [[0, 1]] * 12 + [[0, 1, 2, 3]] * 12
    found = [replayed(history, ends=[12, 18, 24]), history, [2, 4, 4], 4, 4, 24, 3, 3.5]
    assert fit(cluster, of_lightning.GROWS).values("found") == [found] * 4


@pytest.mark.slow
def test_a_rank_of_that_host_is_replaced_in_a_fit_of_lightning(cluster):
    """In the middle of the second epoch: the schedule, the epoch and what the module keeps are taken over."""
    result = fit(cluster, of_lightning.GROWS, [[3, 14, "every joiner now"]])
    found = result.values("found")
    assert found == [found[0]] * 4, str(result)
    weights, history, validated, *sizes = found[0]
    assert [0, 1, 2] in history and history[-1] == [0, 1, 2, 3] and len(history) == 24
    # The rank has taken part in the step in which it was lost, or not.
    lost = history.index([0, 1, 2])
    possible = [history, [*history[:lost], [0, 1, 2, 3], *history[lost + 1 :]]]
    assert weights in [replayed(one, ends=[12, 18, 24]) for one in possible]
    assert validated == [2, 4, 4] and sizes == [4, 4, 24, 3, 3.5]


@pytest.mark.slow
@pytest.mark.parametrize("backend", of_keras.BACKENDS)
def test_a_job_of_keras_grows_on_a_new_host(cluster, backend):
    assert fit(cluster, of_keras.GROWS, backend=backend).values("found") == of_keras.grown()


@pytest.mark.slow
@pytest.mark.parametrize("backend", of_keras.BACKENDS)
def test_a_rank_of_that_host_is_replaced_in_a_job_of_keras(cluster, backend):
    result = fit(cluster, of_keras.GROWS, [[3, 14, "every joiner now"]], backend)
    found = result.values("found")
    assert found == [found[0]] * 4, str(result)
    assert found[0][1][-1] == [0, 1, 2, 3] and [0, 1, 2] in found[0][1] and found[0][2] == 2.0
