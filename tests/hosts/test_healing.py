"""Ranks, whole hosts and networks are lost in the middle of a training on several hosts: the others go on, whole."""

import json
import signal
import time

import pytest

from tests.hosts import hosts
from tests.keras import test_recovery as of_keras
from tests.lightning import test_recovery as of_lightning
from tests.torch.test_local_updates import RECOVERY, lose
from tests.torch.test_recovery import CHECKS, check_survivors, replayed


@pytest.fixture(scope="module")
def cluster():
    with hosts(3) as cluster:
        yield cluster


def train(cluster, deaths, ranks_per_host=2, checks=CHECKS, seconds=60, **env):
    """Start ranks as docs/fault_tolerance.md starts train.py, with MASTER_ADDR=host1 and MASTER_PORT=29500."""
    size = ranks_per_host * len(cluster.hosts)
    env = {"TEST_DEATHS": json.dumps(deaths), "TEST_MIN": "1", "TEST_RANKS": str(size), **env}
    return cluster.environment(checks, ranks_per_host, env=env).run(seconds, check=False)


def fit(cluster, deaths, directory, ranks_per_host=1):
    """The same with Lightning's Trainer."""
    return train(cluster, deaths, ranks_per_host, of_lightning.CHECKS, TEST_ROOT=str(directory))


@pytest.mark.slow  # the default suite tries it without Lightning, and Lightning in tests/campaigns
def test_the_others_go_on_without_rank_0_and_its_host(cluster, tmp_path):
    deaths = {0: [2, "barrier 3 in"]}
    result = fit(cluster, deaths, tmp_path)
    of_lightning.check_survivors(result, deaths)
    assert " on host1) died; the job goes on with 2 of its 3 ranks" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_per_host", "deaths"),
    [
        (1, {2: [2, "in step"]}),
        (2, {0: [1, "in validation"], 1: [1, "in validation"]}),
        (1, {0: [1, "in checkpoint"]}),
        (1, {1: [3, "barrier 20 in"], 0: [6, "barrier 5 before"]}),
    ],
    ids=str,
)
def test_so_they_do_wherever_in_a_fit_of_lightning_ranks_die(cluster, tmp_path, ranks_per_host, deaths):
    found = of_lightning.check_survivors(fit(cluster, deaths, tmp_path, ranks_per_host), deaths, 3 * ranks_per_host)
    assert all(mean == sum(rank + 1 for rank in ranks) / len(ranks) for ranks, mean in found["validated"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", of_keras.BACKENDS)
@pytest.mark.parametrize(
    ("ranks_per_host", "deaths"),
    [
        (1, {2: [2, "before the step"]}),
        (1, {0: [2, "barrier 3 in"]}),
        (1, {1: [3, "barrier 9 in"], 0: [5, "barrier 4 before"]}),  # after the last step of an epoch
        (2, {0: [5, "before the step"], 1: [5, "before the step"]}),
    ],
    ids=str,
)
def test_so_they_do_wherever_in_a_fit_of_keras(cluster, backend, ranks_per_host, deaths):
    result = train(cluster, deaths, ranks_per_host, of_keras.CHECKS, 120, KERAS_BACKEND=backend)
    of_keras.check_survivors(result, deaths, 3 * ranks_per_host)


@pytest.mark.slow
@pytest.mark.parametrize("backend", of_keras.BACKENDS)
def test_the_next_rank_writes_again_what_rank_0_of_another_host_was_writing(cluster, backend, tmp_path):
    deaths = {0: [4, "while saving"]}
    result = train(cluster, deaths, 1, of_keras.CHECKS, 120, KERAS_BACKEND=backend, TEST_FILES=str(tmp_path))
    of_keras.check_survivors(result, deaths)
    files = ["1.keras", "2.keras", "backup", "best.keras", "log.csv"]
    assert result.reports[1]["saved"] == [True, *files]


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: [2, "barrier 3 in"]},
        {5: [3, "in forward"]},
        {0: [2, "barrier 3 in"], 4: [5, "in step"]},
        {2: [3, "barrier 2 in"], 3: [3, "barrier 2 in"]},
        {0: [3, "in forward"], 1: [3, "in forward"]},
        {0: [1, "in backward"], 2: [1, "in backward"], 4: [1, "in backward"]},
    ],
    ids=str,
)
def test_ranks_and_whole_hosts_may_be_killed_anywhere(cluster, deaths):
    result = train(cluster, deaths)
    check_survivors(result, deaths, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        {0: [2, "SIGTERM"], 1: [2, "SIGTERM"]},
        {4: [2, "SIGTERM"], 0: [2, "barrier 12 in"], 3: [4, "SIGTERM"]},
    ],
    ids=str,
)
def test_ranks_leave_after_the_step_in_which_they_get_sigterm(cluster, deaths):
    result = train(cluster, deaths)
    check_survivors(result, deaths, 6)
    assert "left on SIGTERM" in result.output and "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ["lightning", *of_keras.BACKENDS])
def test_so_does_rank_0_from_a_fit(cluster, tmp_path, plugin):
    deaths = {0: [2, "SIGTERM"]}
    if plugin == "lightning":
        result = fit(cluster, deaths, tmp_path)
        assert of_lightning.check_survivors(result, deaths)["history"][:2] == [[0, 1, 2]] * 2
    else:
        result = train(cluster, deaths, 1, of_keras.CHECKS, 120, KERAS_BACKEND=plugin)
        of_keras.check_survivors(result, deaths)
    assert "left on SIGTERM" in result.output and "Traceback" not in result.output


@pytest.mark.slow
def test_a_stopped_rank_is_waited_for_and_an_exception_ends_the_job(cluster):
    with cluster.environment(UNTIL_LOST, 1, env={"RING_NETWORK_TIMEOUT": "2"}) as job:
        job.wait_for("steps")
        job.send_signal(2, signal.SIGSTOP)
        before = job.wait_for("steps")[0]
        time.sleep(5)
        assert job.wait_for("steps")[0] <= before + 1
        job.send_signal(2, signal.SIGCONT)
        end = time.monotonic() + 20
        while job.wait_for("steps")[0] < before + 10 and time.monotonic() < end:
            time.sleep(0.1)
        assert job.wait_for("steps")[0] >= before + 10 and job.process.poll() is None
        job.send_signal(1, signal.SIGINT)  # KeyboardInterrupt
        result = job.wait(30)
    assert result.returncode and not any("found" in report for report in result.reports.values())
    assert "KeyboardInterrupt" in result.output
    assert "died" not in result.output


#: Trains until ranks were lost and 20 steps are taken since, and reports its weights, and the ranks of each step.
UNTIL_LOST = """
import time
import torch
import ring_plugins as ring
from ring_plugins.core.world import current
from ring_plugins.torch import DistributedOptimizer, broadcast_parameters
from tests.passes import members_of_passes
from tests.torch.checks_recovery import gradient
from tests.worker import report, report_pid

ring.init(on_failure="continue")
me = ring.rank()
report_pid()
model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(count)) for count in (10, 200_000)])
broadcast_parameters(model)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), model.named_parameters())
averaged_over, since, passes = [], 0, members_of_passes()
try:
    while since < 20:
        optimizer.zero_grad()
        (gradient(len(averaged_over), me) * sum(parameter.sum() for parameter in model)).backward()
        averaged_over.append(passes[-1])
        optimizer.step()
        since += current().elastic.view > 0
        report("steps", len(averaged_over), me)
        time.sleep(0.05)
except ring.PeerFailed as error:
    report("ended", str(error), me)
    raise
report("found", [[sorted(set(parameter.tolist())) for parameter in model], averaged_over], me)
"""


@pytest.fixture
def two_networks():
    """Commands travel over eth0, which stays, and data over eth1, which can be cut."""
    with hosts(3, networks={"eth0": None, "eth1": None}) as cluster:
        yield cluster


def check_that_one_side_went_on(result, going_on, ending):
    found = [result.reports[rank]["found"] for rank in going_on]
    weights, averaged_over = found[0]
    assert all(one == found[0] for one in found), str(result)
    assert weights == [replayed(averaged_over)] * 2
    assert averaged_over[0] == sorted([*going_on, *ending]) and averaged_over[-1] == going_on
    for rank in ending:
        assert "found" not in result.reports[rank]
        assert "this side ends" in result.reports[rank]["ended"] or "goes on without" in result.reports[rank]["ended"]
    for rank in ending:
        assert f"rank {rank} (process" in result.output or f"and rank {rank} (process" in result.output
    assert "cannot be reached any more; the job goes on with" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "is_mended"), [("host3", False), ("host1", True)])
def test_the_larger_side_of_a_cut_network_goes_on_and_the_other_ends(two_networks, cut, is_mended):
    """Even if the network comes back, by when both sides have decided."""
    env = {"RING_INTERFACE": "eth1", "RING_NETWORK_TIMEOUT": "2"}
    with two_networks.environment(UNTIL_LOST, 2, env=env) as job:
        job.wait_for("steps")
        two_networks.cut(cut, "eth1")
        if is_mended:
            time.sleep(2.5)
            two_networks.mend(cut, "eth1")
        result = job.wait(40)
    own = two_networks.hosts.index(cut)
    ending = [2 * own, 2 * own + 1]
    check_that_one_side_went_on(result, [rank for rank in range(6) if rank not in ending], ending)


@pytest.fixture
def one_rank_a_host(cluster):
    return lambda env: cluster.environment(RECOVERY, 1, env={**env, "TEST_RANKS": "3"}).run(60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("point", [[5, "dies"], [14, "dies"], *([7, f"barrier {n} in"] for n in range(1, 9))], ids=str)
def test_a_rank_may_be_killed_anywhere_in_a_round_of_local_updates(one_rank_a_host, victim, point):
    lose({victim: point}, one_rank_a_host, outer="nesterov")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "options"),
    [
        ({1: [5, "dies"], 2: [7, "barrier 2 in"]}, {"fragments": 2}),
        ({0: [3, "barrier 3 in"], 2: [9, "dies"]}, {"compression": "int8", "fragments": 4, "outer": "nesterov"}),
        ({0: [7, "barrier 7 in"]}, {"compression": "int8"}),
        ({1: [14, "barrier 3 in"]}, {"fragments": 2, "outer": "nesterov"}),
        ({1: [13, "barrier 10 before"]}, {"fragments": 4}),
        ({1: [0, "dies"]}, {"every": 2}),
    ],
    ids=str,
)
def test_so_may_several_with_all_options_of_local_updates(one_rank_a_host, deaths, options):
    lose(deaths, one_rank_a_host, **options)


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 4])
def test_a_rank_leaves_local_updates_at_an_exchange_of_all_it_has_learned(one_rank_a_host, fragments):
    deaths = {1: [5, "SIGTERM"]}
    result, history, changes = lose(deaths, one_rank_a_host, fragments=fragments, outer="nesterov")
    at = 7 if fragments == 1 else 5
    assert len([one for one in history if one[0] == at]) == fragments
    assert all(("1" in since) == (step <= at) for step, _, since in history)
    assert changes == [[at, [], [1], 3, 2, []]]
    assert " left on SIGTERM; the job goes on with 2 of its 3 ranks" in result.output
