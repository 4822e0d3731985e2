"""`horovod.tensorflow.mpi_ops`: this process's place in the job, as operations of TensorFlow, and all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ring_plugins.horovod import basics
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.common.process_sets import set_of
from ring_plugins.horovod.common.util import num_rank_is_power_2
from ring_plugins.horovod.tensorflow import collectives, host
from ring_plugins.horovod.tensorflow.collectives import *  # noqa: F403 - all its public functions are Horovod's
from ring_plugins.horovod.tensorflow.functions import broadcast_
from ring_plugins.horovod.tensorflow.joined import join

__all__ = [
    "broadcast_",
    "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility",
    "init",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
__all__ += basics.__all__ + collectives.__all__


check_num_rank_power_of_2 = num_rank_is_power_2


def init(comm: Any = None, process_sets: Any = None) -> None:  # type: ignore[no-redef]
    """Join the job; see `ring_plugins.horovod.basics.init`."""
    basics.init(comm, process_sets)
    if (operations := host.follow_names()) is not None:
        operations.prepare()


def handle_average_backwards_compatibility(op: Any, average: bool | None) -> Any:
    """The reduction that Horovod's two arguments for it mean."""
    return basics.op_of(average, op)


def rank_op(name: str | None = None) -> Any:
    """This process's rank, in a tensor of type int32: inside a `tf.function` the one when it runs."""
    return _asked_when_it_runs(basics.rank)


def local_rank_op(name: str | None = None) -> Any:
    """The rank among the processes of this host, as `rank_op`."""
    return _asked_when_it_runs(basics.local_rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of processes in the job, or in the process set of this number, as `rank_op`."""
    return _asked_when_it_runs(lambda: basics.size(set_of(process_set_id)))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this process is in the process set of this number, else 0, as `rank_op`."""
    return _asked_when_it_runs(lambda: int(bool(set_of(process_set_id).included())))


def local_size_op(name: str | None = None) -> Any:
    """The number of processes on this host, as `rank_op`."""
    return _asked_when_it_runs(basics.local_size)


def _asked_when_it_runs(number: Callable[[], int]) -> Any:
    return tf.ensure_shape(tf.numpy_function(lambda: np.int32(number()), [], tf.int32), ())
