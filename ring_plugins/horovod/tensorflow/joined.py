"""`hvd.join` for TensorFlow: what a rank does that has run out of data before others."""

from __future__ import annotations

import functools
import gc
from concurrent.futures import Future
from typing import Any

from ring_plugins.core.base.threads import HelperThread
from ring_plugins.horovod import basics
from ring_plugins.horovod.tensorflow import host
from ring_plugins.horovod.tensorflow.tape import exchanges_of_all
from ring_plugins.keras.averaging import installed
from ring_plugins.keras.buckets import HostBuckets
from ring_plugins.keras.state import broadcast_all


def join(device: Any = -1) -> int:
    """Wait until all ranks have called it, as one that runs out of data before others.

    Meanwhile this rank counts as zeros in sums and averages of `allreduce`, and in those of each `DistributedOptimizer`
    and `DistributedGradientTape` that has averaged before, unless gradients are sparse or averaged on GPUs. At the end,
    their variables are those of a rank that came last, and so are the optimizers of Keras that are distributed. A loop
    with a tape passes on the state of its optimizer itself:
    `hvd.broadcast_variables(optimizer.variables, root_rank=hvd.join())`.

    Args:
        device: has no effect.

    Returns:
        The rank that came last.

    Raises:
        MismatchError: between hosts, another rank is in an operation without a name.
    """
    gc.collect()  # what the script has dropped is gone on all ranks then
    host.follow_names()  # which a script that calls ring_plugins.init() has not begun
    followed = []
    for exchange, variables in _in_use():
        waited: Future[int] = Future()
        HelperThread(functools.partial(_follow, exchange.host_buckets, waited), "ring:hvd.join").start()
        followed.append((exchange.communicator, variables, waited))
    last = basics.join(device)
    for communicator, variables, waited in followed:
        by_rank = communicator.all_gather_object(waited.result(), "hvd.join")
        if max(by_rank) > 0:
            broadcast_all(variables, communicator.ranks[by_rank.index(min(by_rank))])
    return last


def _in_use() -> list[tuple[Any, list[Any]]]:
    """What averages the gradients of all ranks, with the variables that it changes, in the same order on all."""
    by_name = {one.settings.name: one for one in installed if one.settings.group is None and one.exchange is not None}
    found = [(exchange, exchange.variables) for exchange in exchanges_of_all()]
    for name in sorted(by_name, key=lambda name: (len(name), name)):  # they are numbered
        averaging = by_name[name]
        if averaging.exchange is not None:
            found.append((averaging.exchange, [*averaging.variables, *averaging.optimizer.variables]))
    return [pair for pair in found if getattr(pair[0], "host_buckets", None) is not None]  # of TensorFlow


def _follow(buckets: HostBuckets, waited: Future[int]) -> None:
    """Take part until all ranks do; the result is how many steps of others there were."""
    try:
        steps = 0
        while not buckets.take_part():
            steps += 1
        waited.set_result(steps)
    except BaseException as error:
        waited.set_exception(error)
