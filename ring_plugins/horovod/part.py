"""`hvd.init(comm=ranks)`: some of the launcher's ranks become a job of their own.

Everything of Horovod is then within them, ranks and sizes included, so it is not one group among others. All ranks
that the launcher has started meet once, and tell each other how to reach them. Each part begins anew, by the variables
that a launcher would have set for it. Their common job goes on beside it, so that all hear of a rank that fails, by
the number that the launcher gave it.
"""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Iterable
from typing import Any

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError, MismatchError
from ring_plugins.core.base.log import logger
from ring_plugins.core.base.member import find_topology
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.job import World
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.core.world import current, init_part
from ring_plugins.horovod.common.process_sets import ranks_of_comm
from ring_plugins.launcher.meeting import rank_environment

#: What the script gave for each such job.
_given: weakref.WeakKeyDictionary[World, Any] = weakref.WeakKeyDictionary()


def become_part(comm: Any, is_new: bool) -> None:
    """Make a job of some of the launcher's ranks, numbered in this order; collective among all, with their own parts.

    Args:
        comm: the ranks of this process's part, or a communicator of mpi4py. All ranks in order change nothing.
        is_new: whether nothing has used the launcher's job yet.

    Raises:
        ArgumentError: this rank is not one of them, they are not distinct ranks, or the job is in use, or goes on
            after losses.
        MismatchError: the ranks of a part give different ones.
    """
    if current() in _given and (comm is _given[current()] or comm == _given[current()]):
        return
    ranks = list(comm) if isinstance(comm, Iterable) else ranks_of_comm(comm)
    if current() not in _given and ranks == list(range(current().topology.size)):
        return
    if not is_new:
        raise ArgumentError(
            f"comm has the ranks {ranks}, but this process has joined a job of {current().topology.size} already: call "
            "hvd.init(comm=) first, or shutdown() before, on all ranks."
        )
    environment, reserved = _meet(ranks)
    before = dict(os.environ)
    try:
        os.environ.update(environment)
        init_part()
    finally:
        os.environ.clear()  # processes that a rank starts, and a later init, are the launcher's again
        os.environ.update(before)
        reserved.close()
    _given[current()] = comm
    if ring.rank() == 0:
        logger.info(f"ranks {ranks} of the launcher's are a job of their own (hvd.init(comm=)).")


def _meet(ranks: list[int]) -> tuple[dict[str, str], socket.socket]:
    """The variables by which this process finds the others of its part, and a socket that keeps their port free."""
    world = current()
    own, size, here = world.topology.rank, world.topology.size, world.members.here
    with rejections_told(world.communicator, "hvd.init"):
        world.refuse_to_recover("hvd.init(comm=) with some of the ranks")
        if own not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
            raise ArgumentError(
                f"comm has the ranks {ranks} of a job of {size}, and rank {own} called with it. All ranks call "
                "hvd.init, each with the list of its own part; or hvd.init() on all, and hvd.add_process_set(ranks)."
            )
    reserved = reserve_port()
    meeting = (*here.addresses, "127.0.0.1")[0], reserved.getsockname()[1], secrets.token_hex(32)
    told = world.communicator.all_gather_object((ranks, here.node, here.host, meeting), "hvd.init")
    by_rank = [one[0] for one in told]
    if any(by_rank[other] != theirs for theirs in by_rank for other in theirs):
        raise MismatchError(
            f"the ranks call hvd.init with comm={by_rank}, in their order: those of a part pass equal lists, and no "
            "rank is in two."
        )
    nodes, hosts = ([told[rank][i] for rank in ranks] for i in (1, 2))
    place = find_topology(ranks.index(own), nodes, hosts)
    # torchrun's agent holds the port that the launcher's ranks met at.
    return {**rank_environment(place, *told[ranks[0]][3]), "TORCHELASTIC_USE_AGENT_STORE": "False"}, reserved
