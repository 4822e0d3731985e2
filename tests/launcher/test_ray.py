"""`ring_plugins.ray.run` on a local cluster: results, failures, and a driver that is killed."""

import importlib.util
import signal

import pytest

from tests.documents import blocks
from tests.launch import start_ranks
from tests.launcher.cluster_jobs import check, script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


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
