"""`ring_plugins.spark.run` on two executors of their own: results, failures, and a driver that is killed."""

import importlib.util
import signal
from pathlib import Path

import pytest

from tests.documents import blocks
from tests.java import java_environment
from tests.launch import start_ranks
from tests.launcher.cluster_jobs import check, script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="pyspark is not installed")

QUIET = """
spark.sparkContext.setLogLevel("FATAL")
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
    with start_ranks(example.text + QUIET + script("ring_plugins.spark.run", "num_proc"), 2, env=env) as job:
        job.wait_for("pid", timeout=400)
        found = job.reports()[0]
        job.signal_parent(signal.SIGKILL)
        result = job.wait(30)
    assert result.values("where") == [[0, 0, " here"], [1, 1, " here"]]
    check(found, "signal SIGKILL", "num_proc=3", "2 tasks")
