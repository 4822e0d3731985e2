"""`ring_plugins.ray.run` on a local cluster: results, failures, and a driver that is killed."""

import importlib.util
import signal

import pytest

from ring_plugins.core.base import progress_line
from ring_plugins.ray.run import _wait_for
from tests.documents import blocks
from tests.launch import start_ranks
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


def test_a_long_wait_for_ray_is_shown_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(progress_line, "FIRST_SECONDS", 0.0)
    answers = iter([False, False, True])
    assert _wait_for(lambda seconds: next(answers), lambda: "Ray has started 1 of 2 ranks", 60)
    assert capsys.readouterr().err == "ring_plugins: Ray has started 1 of 2 ranks, after 0 s.\n"
    assert not _wait_for(lambda seconds: False, lambda: "", 0)
