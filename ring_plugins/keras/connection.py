"""The world as the Keras face meets it."""

from __future__ import annotations

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.world import World, current, init, is_initialized
from ring_plugins.keras.failure import install_hook


def connect() -> World:
    """The job's world; joins the ranks that a launcher started if the script has not called `ring_plugins.init()`."""
    if not is_initialized():
        init()
    install_hook()
    return current()


def check_root(root_rank: int, world: World) -> None:
    """Refuse what is no rank of this job.

    Raises:
        ArgumentError: naming the value and the number of ranks.
    """
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < world.topology.size:
        raise ArgumentError(
            f"root_rank={root_rank!r} is not a rank of this job of {world.topology.size}; pass a number from 0 to "
            f"{world.topology.size - 1}."
        )
