"""The network of a host is cut while a process joins: one side goes on, whole, and the other ends and says why."""

import json
import socket
import time
from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.hosts.test_replacement import EVERYONE, start
from tests.launch import slowness
from tests.torch.checks_replacement import gradient

CHECKS = Path(__file__).with_name("checks_cuts.py")
FIRST, SECOND = [0, 1], [2, 3]


@pytest.fixture(scope="module")
def cluster():
    with hosts(2) as cluster:
        yield cluster


def train(cluster, tmp_path, deaths, seconds=0.0, cut="host2", options=("--no-check",), **env):
    """Cut a host off when a process pauses, for so many seconds, or for good."""
    file = tmp_path / "paused"
    env = {"TEST_PAUSED": str(file), "RING_NETWORK_TIMEOUT": "3", **env}
    try:
        with start(cluster, deaths, env=env, script=CHECKS, options=options, on=2) as job:
            end = time.monotonic() + 60 * slowness()
            while not file.exists() and job.process.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            assert file.exists(), str(job._result())
            cluster.cut(cut)
            file.unlink()
            if seconds:
                time.sleep(seconds)
                cluster.mend(cut)
            return job.wait(60, grace=20)
    finally:
        if not seconds:
            cluster.mend(cut)


def check(result, going_on):
    """That these have, all alike, what a replay of the steps gives, and the others end without that, and say why."""
    found = {slot: told["found"] for slot, told in result.reports.items() if "found" in told}
    assert sorted(found) == going_on, str(result)
    weight, large, history, numbers = next(iter(found.values()))
    assert all(one == found[going_on[0]] for one in found.values()), str(result)
    assert weight == sum(sum(gradient(step, slot) for slot in slots) / len(slots) for step, slots in enumerate(history))
    assert large == [weight] and history[-1] == going_on
    assert result.returncode == (0 if 0 in going_on else 1), str(result)
    for slot in EVERYONE:
        if slot not in going_on and "ended" in result.reports[slot]:
            ended = result.reports[slot]["ended"]
            assert "this side ends" in ended or "goes on without" in ended
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "paused", "going_on"),
    [
        *((3, [3, 0, f"joiner round {point}"], FIRST) for point in ("0 pauses-in", "2 pauses-in", "4 pauses-in")),
        *((3, [0, 3, f"round {point}"], FIRST) for point in ("2 pauses-in", "3 pauses-in")),
        *((3, [2, 3, f"round {point}"], FIRST) for point in ("1 pauses-before", "3 pauses-in")),
        # Until it has joined, host2 has more ranks, and then host1 has as many and the lowest.
        *((1, [1, 0, f"joiner round {point}"], SECOND) for point in ("0 pauses-in", "2 pauses-before")),
        (1, [1, 0, "joiner round 4 pauses-in"], FIRST),
        (1, [0, 3, "round 2 pauses-before"], SECOND),
        (1, [2, 3, "round 2 pauses-in"], SECOND),
    ],
    ids=str,
)
def test_one_side_goes_on_after_a_cut(cluster, tmp_path, lost, paused, going_on):
    result = train(cluster, tmp_path, [[lost, 2, "now"], paused])
    check(result, going_on)
    if going_on == SECOND:
        assert "The ranks on host2 may have gone on" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 3])
@pytest.mark.parametrize("point", ["0 pauses-in", "2 pauses-in", "3 pauses-before", "4 pauses-before"])
def test_the_process_joins_behind_a_short_cut(cluster, tmp_path, lost, point):
    paused = [lost, 0, f"joiner round {point}"]
    numbers = check(train(cluster, tmp_path, [[lost, 2, "now"], paused], 0.7), EVERYONE)
    assert numbers[lost] == {1: 4, 3: 5}[lost], "the first one that was started"


@pytest.mark.slow
@pytest.mark.parametrize("paused", [[3, 0, "joiner round 2 pauses-before"], [0, 3, "round 2 pauses-before"]], ids=str)
def test_so_it_does_behind_one_that_is_little_shorter_than_the_network_may_be_silent(cluster, tmp_path, paused):
    """TCP by itself repeats what was lost after 3 s, and then only after 6."""
    with socket.socket() as one:
        try:
            one.getsockopt(socket.IPPROTO_TCP, 44)
        except OSError:
            pytest.skip("Linux knows TCP_RTO_MAX_MS since 6.15")
    deaths = [[3, 2, "now"], paused]
    check(train(cluster, tmp_path, deaths, 4.2, RING_NETWORK_TIMEOUT="6"), EVERYONE)


@pytest.fixture
def three():
    with hosts(3) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("paused", [[4, 0, "joiner round 2 pauses-before"], [0, 4, "round 0 pauses-before"]], ids=str)
def test_added_ranks_join_on_other_hosts_if_theirs_is_cut_off_while_they_join(three, tmp_path, paused):
    env, options = {"TEST_ADDED": json.dumps([3, 2, "host3"]), "TEST_MOST": "6"}, ("--no-check", "--max-ranks", "6")
    result = train(three, tmp_path, [paused], cut="host3", options=options, **env)
    check(result, list(range(6)))
    assert "ranks 4, 5 will join on host1 and host2, since host3 has no ranks any more." in result.output
