"""`ring_plugins.spark.run` on two executors of their own: results, failures, and a driver that is killed."""

import importlib.util
import signal
from pathlib import Path

import pytest

from tests.documents import blocks
from tests.java import java_environment
from tests.launch import start_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="pyspark is not installed")

CHECKS = """
from tests.worker import report
import os, signal
import ring_plugins as ring

spark.sparkContext.setLogLevel("FATAL")
report("weights", weights, rank=0)

def fails():
    ring.init()
    if ring.rank() == 1:
        raise ValueError("on purpose")
    ring.barrier()

def is_killed():
    ring.init()
    if ring.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring.barrier()

for function in (fails, is_killed):
    try:
        ring_plugins.spark.run(function, num_proc=2)
    except ring.RankFailed as error:
        report(function.__name__, [error.rank, error.host, str(error), repr(error.__cause__)], rank=0)

try:
    ring_plugins.spark.run(fails, num_proc=3, start_timeout=0.5)
except ring.LaunchError as error:
    report("too many", str(error), rank=0)

def endless(text):
    ring.init()
    report("where", [ring.rank(), ring.local_rank(), os.environ["MINE"] + text])
    report("pid", os.getpid())
    while True:
        ring.barrier()

ring_plugins.spark.run(endless, (" here",), num_proc=2, env={"MINE": "found"})
"""


def spark_home(directory: Path) -> Path:
    """Spark as it is installed, but with a place of its own for what executors leave: it is beside the program."""
    import pyspark

    home = directory / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


@pytest.mark.timeout(600)
def test_results_failures_and_a_killed_driver(tmp_path, monkeypatch):
    # Our processes end at once, the cluster's own take their time.
    monkeypatch.setattr("tests.launch.GRACE_SECONDS", 20.0)
    (example,) = blocks("python", "docs/launching/spark.md")
    env = {
        **java_environment(tmp_path),
        "SPARK_HOME": str(spark_home(tmp_path)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": "--conf spark.ui.enabled=false pyspark-shell",
    }
    with start_ranks(example.text + CHECKS, 2, env=env) as job:
        job.wait_for("pid", timeout=400)
        found = job.reports()[0]
        job.signal_parent(signal.SIGKILL)
        result = job.wait(30)
    assert all(abs(weight - 0.5) < 1e-6 for weight in found["weights"]), result
    assert result.values("where") == [[0, 0, "found here"], [1, 1, "found here"]]
    rank, host, text, cause = found["fails"]
    assert (rank, cause) == (1, "ValueError('on purpose')")
    assert text.startswith(f"rank 1 on {host} failed: ValueError: on purpose\n\nOn rank 1:\nTraceback")
    assert found["is_killed"][0] == 1
    assert "signal SIGKILL" in found["is_killed"][2]
    assert "num_proc=3" in found["too many"] and "2 tasks" in found["too many"]
