"""The world of this process: joining it, leaving it, and finding it again."""

from __future__ import annotations

from ring_plugins.core import endings
from ring_plugins.core.errors import ArgumentError, LaunchError, NotInitialised
from ring_plugins.core.job import World
from ring_plugins.core.launch import connect, detect

_world: World | None = None
_generation = 0


def init(ranks: int | None = None) -> World:
    """Join the other processes of the job; calling it again changes nothing.

    Started by mpirun, torchrun, srun or another launcher it finds the ranks that were started. Started
    alone, the process stays alone, or starts itself `ranks - 1` times more.

    Args:
        ranks: how many processes a script that was started alone becomes.

    Returns:
        The world, which most users need not keep.

    Raises:
        ArgumentError: `ranks` is not a positive integer.
        LaunchError: the processes cannot find each other, or this one is a rank's forked child.
        MissingDependency: the launcher needs a package that is missing.
    """
    global _world, _generation
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    if _world is not None and _world.is_mine():
        return _world
    if _world is not None and _world.place.size > 1:
        raise LaunchError(
            f"this process was forked from rank {_world.place.rank} (a data loader's worker?); ring_plugins.init() "
            "belongs into the ranks themselves."
        )
    endings.install(lambda: _world, shutdown)
    connection = connect(ranks, _generation)
    _generation += 1
    kind = detect().kind
    launcher = "alone" if connection.size == 1 else "grown" if kind == "alone" else kind
    _world = World(connection, launcher)
    return _world


def shutdown() -> None:
    """Leave the job. `init` may be called again afterwards, by all ranks."""
    global _world
    world, _world = _world, None
    if world is not None and world.is_mine():
        world.close()
        world._connection.close()


def is_initialised() -> bool:
    """Whether `init` has been called in this process, and `shutdown` not since."""
    return _world is not None


def current() -> World:
    """The world that `init` made.

    Raises:
        NotInitialised: it has not been called.
    """
    if _world is None:
        raise NotInitialised("call ring_plugins.init() before this.")
    return _world
