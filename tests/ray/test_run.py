"""`ring_plugins.ray.run` on a local cluster: results, failures, and a driver that is killed."""

import importlib.util
import os
import signal

import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.launcher.outcomes import pack_call
from ring_plugins.ray.run import _call_on_own_gpus, _wait_for
from tests.documents import blocks
from tests.launch import run_ranks, start_ranks
from tests.launcher.cluster_jobs import check, script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_results_failures_and_a_killed_driver(monkeypatch):
    # The ranks end at once, but the cluster's own processes take a while.
    monkeypatch.setattr("tests.launch.GRACE_SECONDS", 20.0)
    (example,) = blocks("python", "docs/launching/ray.md")
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    with start_ranks(example.text + script("ring_plugins.ray.run", "num_workers"), 2, env=quiet) as job:
        job.wait_for("pid", timeout=400)
        found = job.reports()[0]
        job.signal_parent(signal.SIGKILL)
        result = job.wait(40)
    assert [where[0] for where in result.values("where")] == [0, 1]  # as many as the cluster has processors
    check(found, "its actor ended", "3 ranks of 1 CPU each", "the cluster has 2 CPU")


HEALING = """
    import os, signal, time
    import ray
    import ring_plugins as ring
    import ring_plugins.ray
    from tests.launcher.healing_calls import sum_up, train
    from tests.worker import report

    def attempt(name, *call, **options):
        try:
            results = ring_plugins.ray.run(*call, num_workers=3, timeout=100, **options)
            report(name, [results, sorted(results.lost.items())], rank=0)
        except ring.RankFailed as error:
            report(name, str(error), rank=0)

    ray.init(num_cpus=3)
    attempt("continue", sum_up, ([0], signal.SIGKILL), on_failure="continue", min_ranks=2)
    attempt("too few", sum_up, ([0, 1], signal.SIGKILL), on_failure="continue", min_ranks=2)
    attempt("nobody", sum_up, ([0, 1, 2], signal.SIGKILL), on_failure="continue")
    attempt("left", train, (signal.SIGTERM, 20), on_failure="continue", min_ranks=2)
    attempt("replace", train, (signal.SIGKILL, 20), on_failure="replace")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_others_go_on_without_a_rank_that_is_killed_and_another_process_takes_its_place(monkeypatch):
    monkeypatch.setattr("tests.launch.GRACE_SECONDS", 20.0)
    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # Ray would let other processes go first
    result = run_ranks(HEALING, 3, env=env, timeout=400)
    found = result.reports[0]
    results, lost = found["continue"]
    assert results == [[1, 0, 2, 12.0], [2, 1, 2, 12.0]]
    assert lost[0][0] == 0 and "its actor ended" in lost[0][1]
    assert "min_ranks=2" in found["too few"] and "rank 2 on" in found["too few"]
    assert found["nobody"].startswith("no rank is left that could have a result (rank 0: its actor ended")
    results, lost = found["left"]
    assert [one[:3] for one in results] == [[0, 0, 2], [2, 1, 2]] and lost == [[1, "left on SIGTERM"]]
    results, lost = found["replace"]
    assert [one[:4] for one in results] == [[0, 0, 3, False], [1, 1, 3, True], [2, 2, 3, False]] and lost == []
    assert results[0][4] == results[1][4] == results[2][4]
    assert "starting another process in the place of rank 1." in result.output


def test_a_rank_that_is_a_process_of_an_actor_sees_its_own_gpus(monkeypatch):
    asked = pack_call(os.getenv, ("CUDA_VISIBLE_DEVICES",), None)
    for local, gpus, seen in ((0, 1.0, "4"), (2, 1.0, "6"), (1, 2.0, "6,7"), (1, 0.5, "4"), (2, 0.5, "5")):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        assert _call_on_own_gpus(asked, gpus) == seen


def test_a_long_wait_for_ray_is_shown_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.0)
    answers = iter([False, False, True])
    assert _wait_for(lambda seconds: next(answers), lambda: "Ray has started 1 of 2 actors", 60)
    assert capsys.readouterr().err == "ring_plugins: Ray has started 1 of 2 actors, after 0 s.\n"
    assert not _wait_for(lambda seconds: False, lambda: "", 0)
