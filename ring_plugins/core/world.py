"""The job that this process belongs to: `init` joins it, `shutdown` leaves it, and `current` is it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ring_plugins.core import exit_hooks
from ring_plugins.core.arrays.codec import AUTO, Compression
from ring_plugins.core.arrays.result_memory import kept_results
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, NotInitialized
from ring_plugins.core.base.log import logger, set_rank
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import on_all_or_none
from ring_plugins.core.job import World
from ring_plugins.core.linux import thread_count
from ring_plugins.core.linux.process import keep_freed_memory
from ring_plugins.core.members.policy import FailurePolicy, prepare_to_continue
from ring_plugins.core.observe.observers import Observers
from ring_plugins.core.observe.timeline import check_directory
from ring_plugins.core.rendezvous import connect, launcher_of, launchers, tcp
from ring_plugins.core.rendezvous.claim import check_ancestors

_world: World | None = None
_outer: World | None = None  # the launcher's, if `_world` is a part of that
_generation = 0  # how often this process has connected
_announced = 0  # the last of these jobs whose training has been announced


def init(
    ranks: int | None = None,
    *,
    on_failure: str | None = None,
    min_ranks: int | None = None,
    max_ranks: int | None = None,
) -> World:
    """Join the other processes of the job; another call of it must want the same, and changes nothing.

    Under mpirun, torchrun, srun or another launcher the job consists of the ranks that it started. A script that was
    started on its own stays a job of one, or spawns `ranks - 1` further processes that run it too.

    Args:
        ranks: how many processes a script that was started on its own becomes.
        on_failure: what happens when a rank is killed or crashes: "end" ends the job; "continue" lets the other ranks
            finish the step and go on (see docs/fault_tolerance.md; the script may start again in this call); "replace"
            also starts another process in its place. The default is RING_ON_FAILURE, or "end".
        min_ranks: the fewest ranks with which a job goes on. The default is RING_MIN_RANKS, or 1.
        max_ranks: up to how many ranks the job may grow by `ring add-ranks` while it runs, with "replace". The default
            is RING_MAX_RANKS, or no more than at the start.

    Returns:
        The connected job. Scripts need not keep it.

    Raises:
        ArgumentError: `ranks` is not a positive integer, or `on_failure`, `min_ranks` or `max_ranks` is invalid or not
            supported here; or this process has joined a job with other arguments already.
        LaunchError: the processes cannot find each other, or this one is a child of a rank.
        MissingDependency: the launcher needs a package that is not installed.
    """
    global _world, _generation
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ArgumentError(f"ranks={ranks!r} is not a positive number of processes.")
    before = _world
    if before is not None and before.is_mine():
        before.first_call.check("init", ranks, on_failure, min_ranks, max_ranks)
        return before
    if before is not None and before.topology.size > 1:
        raise LaunchError(
            f"this process was forked from rank {before.topology.rank} (a data loader's worker?); call "
            "ring_plugins.init() in the ranks themselves."
        )
    policy = FailurePolicy.chosen(on_failure, min_ranks, max_ranks)
    if ranks is not None and max_ranks is not None:
        policy.check_size(ranks)
    check_ancestors((config.LAUNCHER.name, *launchers.identity()))
    if policy.recovers:
        prepare_to_continue(ranks, policy, _generation)
    check_directory(ranks)
    exit_hooks.install(lambda: _outer or _world, shutdown)
    rendezvous = connect(ranks, _generation)
    _generation += 1
    world = _world = World(rendezvous, launcher_of(rendezvous.size), policy, ranks, is_part=_outer is not None)
    set_rank(rendezvous.rank)
    world.export_place()
    if rendezvous.rank == 0 and _generation == 1:
        for name, meant in config.unknown(likeness=0.8).items():
            if meant:  # others may belong to another program
                logger.warning(f"{name} is set, but ring_plugins does not read it. Did you mean {meant}?")
        for text in policy.idle_variables():
            logger.warning(text)
    thread_count.share_among(*world.members.cores)
    if rendezvous.size > 1 and config.KEEP_MEMORY.get():
        keep_freed_memory()
    for function in _on_joined:
        function()
    return world


_on_joined: list[Callable[[], object]] = []


def on_joined(function: Callable[[], object]) -> None:
    """Have `init` call a function whenever this process has joined a job, for checks that name frameworks."""
    _on_joined.append(function)


def init_part() -> World:
    """Join a job of some of this job's ranks, as the environment says now; collective among those.

    Until `shutdown` this job goes on beside it, and ends it when any of its ranks fails: ranks of other parts, too.
    """
    global _outer, _world
    outer = _outer = current()
    _world = None
    try:
        part = init()
    except BaseException:
        _world, _outer = outer, None  # by which the others hear of it
        raise
    outer.part = part
    if part.failure_detector is not None:
        part.failure_detector.outer = outer.failure_detector
    return part


def shutdown() -> None:
    """Leave the job. `init` may be called again afterwards, by all ranks."""
    global _outer, _world
    world, _outer, _world = _outer or _world, None, None
    if world is not None and world.is_mine():
        world.close()
        kept_results.clear()
        set_rank(None)
        tcp.withdraw_exported()


def is_initialized() -> bool:
    """Whether `init` has been called in this process and `shutdown` has not been called since."""
    return _world is not None


def current() -> World:
    """The world that `init` made.

    Raises:
        NotInitialized: it has not been called.
    """
    if _world is None:
        raise NotInitialized("call ring_plugins.init(), or hvd.init(), before this.")
    return _world


def current_observers() -> Observers | None:
    """The observing services of this process, None if there is no job of several ranks."""
    return None if _world is None else _world.observers


def announce_training() -> None:
    """Say on rank 0, once per job, how many ranks train together, as Lightning does; nothing for one rank."""
    global _announced
    if _world is None or _world.topology.size == 1 or _world.is_joining or _announced == _generation:
        return
    _announced = _generation
    if _world.topology.rank == 0:
        logger.info(f"training on {_world.summary}")


def replaces() -> bool:
    """As `World.replaces`; False outside of a job, as in `is_joining`."""
    return _world is not None and _world.replaces


def is_joining() -> bool:
    """As `World.is_joining`; False outside of a job, where communicators are of threads of one process."""
    return _world is not None and _world.is_joining


def has_not_joined() -> bool:
    """Whether this process was to take the place of a lost rank, and has not: how it ends is of no importance."""
    return config.JOINS.is_set() and (not is_initialized() or is_joining())


def has_room_to_overlap(threads: int) -> bool:
    """Whether communication has something to overlap with: a network, or a core beside those that compute.

    Args:
        threads: how many threads this rank computes with.

    Returns:
        False outside of a job, where communicators are of threads of one process.
    """
    if _world is None:
        return False
    return _world.topology.num_nodes > 1 or thread_count.share(*_world.members.cores) > threads


def check_tried(compression: Compression | None) -> None:
    """Reject what is tried in the first steps where processes may join that have not seen them.

    Raises:
        ArgumentError: `compression` is "auto", and on_failure "replace".
    """
    if compression is not None and compression.name == AUTO and replaces():
        current().refuse_to_recover(f'compression="{AUTO}" ("bf16" and "int8" work)')


def node_rank() -> int:
    """The number of this process's host; 0 outside of a job."""
    return 0 if _world is None else _world.topology.node_rank


@contextlib.contextmanager
def constructed_by_all(what: str, members: Communicator[Any] | None = None) -> Iterator[None]:
    """Let all ranks know if an exception ends a construction that all take part in, or all members of a group."""
    members = _world.communicator if members is None and _world is not None else members
    with contextlib.nullcontext() if members is None else on_all_or_none(members, what):
        yield
