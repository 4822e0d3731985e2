"""`import ring_plugins.horovod.spark`: Horovod's `run` on Spark; its estimators do not exist here."""

from ring_plugins.horovod.spark.run import run, run_elastic

__all__ = ["run", "run_elastic"]
