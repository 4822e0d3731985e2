"""Horovod's `run` on Spark gives `ring_plugins.spark.run` the arguments that mean the same."""

import sys

import pytest

from ring_plugins import ArgumentError
from ring_plugins.horovod import spark

MODULE = sys.modules["ring_plugins.horovod.spark.run"]


@pytest.fixture
def asked(monkeypatch):
    """The calls of `ring_plugins.spark.run`."""
    found = []
    monkeypatch.setattr(MODULE, "spark_run", lambda *args, **options: found.append((args, options)))
    return found


def test_arguments_are_translated(asked):
    spark.run(print, args=(1,), num_proc=2, use_gloo=True, verbose=0, nics={"eth0"}, env={"A": "b"})
    spark.run_elastic(print, num_proc=3, min_np=2, start_timeout=20)
    spark.run_elastic(print, num_proc=3)
    assert asked[0] == (
        (print, (1,), None, 2),
        {
            "env": {"RING_INTERFACE": "eth0", "A": "b"},
            "on_failure": None,
            "min_ranks": None,
            "start_timeout": 600.0,
        },
    )
    assert [options["min_ranks"] for _, options in asked[1:]] == [2, 3]
    assert asked[1][1]["on_failure"] == "continue" and asked[1][1]["start_timeout"] == 20


def test_what_has_no_effect_is_logged_and_what_spark_chooses_is_rejected(asked, caplog):
    spark.run(print, stdout=sys.stdout)
    assert "in the logs of Spark's executors" in caplog.text
    with pytest.raises(ArgumentError, match=r"spark\.pyspark\.python"):
        spark.run(print, executable="python3")
