"""The torch.distributed process group that everything in Lightning which is not a gradient talks through.

torchmetrics, Lightning's SIGTERM check and `prepare_data` barrier, object collectives and users' own code call
torch.distributed without asking the strategy. With its default group on our communicators they need no special case,
and a rank that waits in any of them hears of a failed peer.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.world import World
from ring_plugins.torch.backend import register
from ring_plugins.torch.rendezvous import store_from_world

BACKEND = "ring"

# The world over which we initialised torch.distributed: after `ring_plugins.shutdown()` the group is of no more use.
_over: list[World] = []


def ensure_process_group(world: World, timeout: timedelta | None = None) -> None:
    """Initialise torch.distributed over `world` unless that was done before, by us or by the user.

    Raises:
        LaunchError: If a process group exists that numbers the processes differently.
    """
    place = world.topology
    if _over and _over[0] is not world:
        leave_process_group()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
            raise LaunchError(
                f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, ring_plugins"
                f" rank {place.rank} of {place.size}. Let RingStrategy initialise torch.distributed, or start the job"
                " with one launcher that both follow."
            )
        return
    register()
    timeout = default_pg_timeout if timeout is None else timeout
    # Our own store, not the launcher's: under torchrun MASTER_PORT belongs to the agent's
    # (TORCHELASTIC_USE_AGENT_STORE). Our backend could do without one, but ``new_group(backend="gloo")``, which
    # Lightning calls around `prepare_data`, cannot.
    store, rank, size = store_from_world(timeout)
    _over[:] = [world]
    with _own_words_for_errors():
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)


@contextmanager
def _own_words_for_errors() -> Iterator[None]:
    """Keep ``sys.excepthook`` as it is.

    torch 2.13, distributed/distributed_c10d.py, `init_process_group`: puts a hook in front that holds back whatever the
    others print, in order to begin each line with the rank. Ours says the rank already, and may end the job before
    torch prints what it held back.
    """
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def leave_process_group() -> None:
    """Destroy the process group if it is ours."""
    _over.clear()
    if dist.is_initialized() and dist.get_backend() == BACKEND:
        dist.destroy_process_group()
