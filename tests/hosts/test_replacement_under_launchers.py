"""mpirun, torchrun and srun over several hosts: other processes take the places of ranks that are killed."""

import json
import re

import pytest

from tests.hosts import hosts
from tests.hosts.test_healing_under_launchers import LAUNCHERS, start
from tests.keras import test_replacement as of_keras
from tests.launch import slowness
from tests.lightning import test_replacement as of_lightning
from tests.torch.test_replacement import CHECKS, check

pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.parametrize("launcher", LAUNCHERS)]
EVERYONE = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def cluster():
    with hosts(2) as cluster:
        yield cluster


def train(cluster, launcher, deaths, script=CHECKS, env=None, awaited=True):
    """Two ranks on each host, as docs/healing.md starts train.py."""
    env = {
        "TEST_DEATHS": json.dumps(deaths),
        "TEST_RANKS": "4",
        "TEST_HOSTS": "2",
        "RING_ON_FAILURE": "replace",
        **({"TEST_AWAITED": str(60 * slowness())} if awaited else {}),
        **(env or {}),
    }
    return start(cluster, launcher, script, env).run(150)


@pytest.mark.parametrize(
    "deaths",
    [
        [[1, 2, "now"]],
        [[0, 2, "now"], [3, 6, "now"]],
        [[0, 2, "barrier 2 in"], [2, 2, "barrier 2 in"]],
        [[1, 2, "now"], [0, 6, "now"], [3, 9, "SIGTERM"]],
    ],
    ids=str,
)
def test_other_processes_take_the_places_of_lost_ranks(cluster, launcher, deaths):
    result = train(cluster, launcher, deaths)
    found, _ = check(result, EVERYONE)
    replaced = {seat for seat, *_ in deaths}
    assert {seat for seat, number in enumerate(found["numbers"]) if number > 3} == replaced
    assert result.output.count("ring run: starting another process in the place of rank") == len(deaths)
    assert re.search(r"ring run: other processes took the place of rank .*, and all 4 ended normally\.", result.output)


@pytest.mark.parametrize("point", ["round 2 before", "round 3 in"])
def test_a_newcomer_may_die_while_it_joins_and_the_next_one_joins(cluster, launcher, point):
    found, _ = check(train(cluster, launcher, [[1, 2, "now"], [1, 0, f"newcomer {point}"]]), EVERYONE)
    assert found["numbers"] == [0, 6, 2, 3]


def test_nobody_waits_long_for_a_newcomer_that_is_stopped_while_it_joins(cluster, launcher):
    result = train(cluster, launcher, [[1, 2, "now"], [1, 0, "newcomer round 2 stopped"]])
    found, _ = check(result, EVERYONE)
    assert found["numbers"] == [0, 6, 2, 3]
    assert "which was to join as rank 4, has not answered for 2 s (stopped?). It was killed, and the" in result.output


def test_a_member_may_die_while_another_process_joins(cluster, launcher):
    """Of different hosts, so that both are replaced."""
    found, _ = check(train(cluster, launcher, [[1, 2, "now"], [3, 3, "round 2 in"]]), EVERYONE)
    assert found["numbers"][1] > 3 and found["numbers"][3] > 3


def test_nobody_takes_the_places_of_all_ranks_of_a_host(cluster, launcher):
    result = train(cluster, launcher, [[2, 2, "now"], [3, 2, "now"]], awaited=False)
    check(result, [0, 1])
    assert "ring run: nobody takes the place of ranks 2, 3: all ranks of host2 are lost" in result.output


def test_a_process_joins_in_a_fit_of_lightning(cluster, launcher, tmp_path):
    env = {"TEST_ROOT": str(tmp_path)}
    result = train(cluster, launcher, [[0, 1, "now"]], of_lightning.CHECKS, env)
    found, own = of_lightning.check(result, EVERYONE, 4)
    assert own[0]["number"] == 4 and found["history"][-1] == EVERYONE


@pytest.mark.parametrize("backend", of_keras.BACKENDS)
def test_a_process_joins_in_a_fit_of_keras(cluster, launcher, backend):
    result = train(cluster, launcher, [[3, 1, "now"]], of_keras.CHECKS, {"KERAS_BACKEND": backend})
    found, numbers = of_keras.check(result, EVERYONE)
    assert numbers == [0, 1, 2, 5] and found["history"][-1] == EVERYONE
