"""`ring_plugins.spark.run` on two executors: results, failures, and a driver that is killed."""

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from ring_plugins.core.base.errors import ArgumentError, LaunchError
from ring_plugins.core.members.policy import FailurePolicy
from ring_plugins.launcher.outcomes import pack_call, results
from tests.documents import blocks
from tests.java import java_environment, spark_home
from tests.launch import start_ranks
from tests.launcher.cluster_jobs import check, script
from tests.launcher.healing_calls import sum_up

QUIET = """
spark.sparkContext.setLogLevel("FATAL")
"""


def test_the_number_of_ranks_that_spark_chooses_is_said(monkeypatch, caplog):
    spark_run = importlib.import_module("ring_plugins.spark.run")
    slots = [0, 0, 3]
    profiles = SimpleNamespace(defaultResourceProfile=lambda: None)
    scala = SimpleNamespace(
        resourceProfileManager=lambda: profiles,
        maxNumConcurrentTasks=lambda profile: slots.pop(0) if len(slots) > 1 else slots[0],
    )
    context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala))
    monkeypatch.setattr(spark_run.logger, "propagate", True)
    with caplog.at_level("INFO", logger="ring_plugins"):
        assert spark_run._wait_for_slots(context, None, 30.0) == 3
    assert "starting 3 ranks; num_proc= chooses" in caplog.text
    slots[:] = [0]
    with pytest.raises(LaunchError, match="^no number of ranks was asked for, but after 0 s Spark can run 0 tasks"):
        spark_run._wait_for_slots(context, None, 0.0)
    with pytest.raises(LaunchError, match="^num_proc=4, but after 0 s"):
        spark_run._wait_for_slots(context, 4, 0.0)


@contextlib.contextmanager
def tasks(monkeypatch, size, variables):
    """Threads that stand in for Spark's tasks; the ranks are real processes. Yields the driver."""
    spark_run = importlib.import_module("ring_plugins.spark.run")
    own, everyone, messages = threading.local(), threading.Barrier(size, timeout=30), {}

    def all_gather(message):
        messages[own.partition] = message
        everyone.wait()
        return [messages[partition] for partition in range(size)]

    context = SimpleNamespace(allGather=all_gather, partitionId=lambda: own.partition)
    pyspark = SimpleNamespace(BarrierTaskContext=SimpleNamespace(get=lambda: context))
    monkeypatch.setitem(sys.modules, "pyspark", pyspark)

    def run_task(task, partition):
        own.partition = partition
        list(task(()))

    with spark_run.Driver() as driver:
        task = spark_run._RankTask("127.0.0.1", driver.port, driver.key, variables)
        threads = [threading.Thread(target=run_task, args=(task, partition)) for partition in range(size)]
        for thread in threads:
            thread.start()
        yield driver
    for thread in threads:
        thread.join()


def test_tasks_become_ranks_and_report_to_the_driver(monkeypatch):
    with tasks(monkeypatch, 2, {"MINE": "yes"}) as driver:
        asked = "[os.environ['RANK'], os.environ['RING_SECRET'], open('/proc/self/cmdline').read()]"
        outcomes = driver.outcomes(pack_call(eval, (asked, {"os": os}), None), 2, lambda: None, 30)
    (rank_0, secret, said_0), (rank_1, same, said_1) = results(outcomes)
    assert (rank_0, rank_1, secret) == ("0", "1", same)
    assert len(secret) == 64 and secret != driver.key.hex()
    assert secret not in said_0 + said_1


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[0], [1, 2]])
def test_the_others_go_on_without_a_rank_whose_process_is_killed(monkeypatch, victims):
    policy = FailurePolicy.chosen("continue", 1)
    with tasks(monkeypatch, 3, policy.environment) as driver:
        packed = pack_call(sum_up, (victims, signal.SIGKILL), None)
        found = results(driver.outcomes(packed, 3, lambda: None, 60, recovers=True), 3)
    left = [rank for rank in range(3) if rank not in victims]
    total = 2 * 3.0 + 3 * len(left)
    assert found == [(rank, place, len(left), total) for place, rank in enumerate(left)]
    assert found.lost == dict.fromkeys(victims, "its process ended with signal SIGKILL")


def test_replacing_lost_ranks_is_rejected_with_the_reason(monkeypatch):
    spark_run = importlib.import_module("ring_plugins.spark.run")
    monkeypatch.setattr(spark_run, "_context", lambda: None)
    with pytest.raises(
        ArgumentError, match="does not work on Spark, which starts the tasks of a barrier stage together"
    ):
        spark_run.run(sum_up, on_failure="replace")


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="pyspark is not installed")
@pytest.mark.slow  # a minute, most of which Spark's own processes take to start and end
@pytest.mark.timeout(600)
def test_results_failures_and_a_killed_driver(tmp_path, monkeypatch):
    # The ranks end at once, but the cluster's own processes take a while.
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
