"""`horovod.tensorflow.mpi_ops`: this process's place in the job, as operations of TensorFlow, and all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ring_plugins.horovod import basics
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.tensorflow import collectives
from ring_plugins.horovod.tensorflow.collectives import *  # noqa: F403 - all its public functions are Horovod's

__all__ = ["local_rank_op", "local_size_op", "rank_op", "size_op"]
__all__ += basics.__all__ + collectives.__all__


def rank_op(name: str | None = None) -> Any:
    """This process's rank, in a tensor of type int32: inside a `tf.function` the one when it runs."""
    return _asked_when_it_runs(basics.rank)


def local_rank_op(name: str | None = None) -> Any:
    """The rank among the processes of this host, as `rank_op`."""
    return _asked_when_it_runs(basics.local_rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of processes, as `rank_op`."""
    return _asked_when_it_runs(basics.size)


def local_size_op(name: str | None = None) -> Any:
    """The number of processes on this host, as `rank_op`."""
    return _asked_when_it_runs(basics.local_size)


def _asked_when_it_runs(number: Callable[[], int]) -> Any:
    return tf.ensure_shape(tf.numpy_function(lambda: np.int32(number()), [], tf.int32), ())
