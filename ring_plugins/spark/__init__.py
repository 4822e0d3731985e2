"""Runs ranks on the executors of a Spark cluster."""

from ring_plugins.spark.run import run

__all__ = ["run"]
