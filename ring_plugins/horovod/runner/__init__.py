"""`import ring_plugins.horovod.runner`: Horovod's `run`."""

from ring_plugins.horovod.runner.run import run

__all__ = ["run"]
