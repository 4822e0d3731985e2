"""`ring_plugins.ray.run` on a local cluster: results, failures, and a driver that is killed."""

import importlib.util
import signal

import pytest

from tests.documents import blocks
from tests.launch import start_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

CHECKS = """
from tests.worker import report
import os, signal
import ring_plugins as ring

report("weights", weights, rank=0)

def fails():
    ring.init()
    if ring.rank() == 1:
        raise ValueError(os.environ["MINE"])
    ring.barrier()

def is_killed():
    ring.init()
    if ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring.barrier()

for function in (fails, is_killed):
    try:
        ring_plugins.ray.run(function, num_workers=2, env={"MINE": "on purpose"} if function is fails else None)
    except ring.RankFailed as error:
        report(function.__name__, [error.rank, error.host, str(error), repr(error.__cause__)], rank=0)

try:
    ring_plugins.ray.run(fails, num_workers=3, start_timeout=0.5)
except ring.LaunchError as error:
    report("too many", str(error), rank=0)

def endless():
    ring.init()
    report("pid", os.getpid())
    while True:
        ring.barrier()

ring_plugins.ray.run(endless)
"""


@pytest.mark.timeout(600)
def test_results_failures_and_a_killed_driver(monkeypatch):
    # Our processes end at once, the cluster's own take their time.
    monkeypatch.setattr("tests.launch.GRACE_SECONDS", 20.0)
    (example,) = blocks("python", "docs/launching/ray.md")
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    with start_ranks(example.text + CHECKS, 2, env=quiet) as job:
        job.wait_for("pid", timeout=400)
        found = job.reports()[0]
        job.signal_parent(signal.SIGKILL)
        result = job.wait(40)
    assert all(abs(weight - 0.5) < 1e-6 for weight in found["weights"]), result
    rank, host, text, cause = found["fails"]
    assert (rank, cause) == (1, "ValueError('on purpose')")
    assert text.startswith(f"rank 1 on {host} failed: ValueError: on purpose\n\nOn rank 1:\nTraceback")
    assert found["is_killed"][0] == 1
    assert "its actor ended" in found["is_killed"][2]
    assert "3 ranks of 1 CPU each" in found["too many"] and "the cluster has 2 CPU" in found["too many"]
