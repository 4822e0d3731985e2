"""The launcher starts the missing ranks, or joins those that run already; and how a rank that fails or is stopped ends.

Such a rank notifies the other ranks first, and exits with a nonzero status.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

import ring_plugins as ring
from ring_plugins.core import world
from ring_plugins.core.job import World
from ring_plugins.lightning.environment import RingEnvironment, set_rank_zero
from ring_plugins.lightning.preemption import is_agreed, is_sigterm
from ring_plugins.lightning.process_group import destroy_process_group


class RingLauncher:
    """Brings up the `World` and calls Lightning's function in it.

    A process that was started alone starts the others: each runs the script again from its first line and joins when
    it arrives here. Where a launcher has started every rank, this one joins them.
    """

    def __init__(self, environment: RingEnvironment) -> None:
        self._environment = environment

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook, which has no script to run again but may be a rank of an external job."""
        return self._environment.creates_processes_externally

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` on every rank; `trainer` is not handed on."""
        join_world(self._environment)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            # Before Lightning's own handling: callbacks may wait for ranks that are already on their way out.
            report_failure(error)
            raise

    def kill(self, signum: int) -> None:
        """Do nothing; Lightning calls this when the process gets a signal.

        The ranks started from here need no copy of the signal: they end when this process does, and learn of an
        orderly stop through the job itself.
        """


class RingFabricLauncher(RingLauncher):
    """The same for Fabric, whose functions take any keyword."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` on every rank."""
        return super().launch(partial(function, *args, **kwargs))


def join_world(environment: RingEnvironment) -> World:
    """The `World`, brought up on the first call of a process.

    It is brought up again after a failure that the script survived (on all ranks: an error that only some of them catch
    ends the job within seconds), and if it had one rank and now needs more.
    """
    has_other_size = world.is_initialized() and environment.world_size() != world.current().topology.size
    if has_failed() or (has_other_size and environment.group is None):
        destroy_process_group()
        ring.shutdown()
    if not world.is_initialized():
        ranks = None if environment.creates_processes_externally else environment.world_size()
        ring.init(ranks=ranks, **environment.failure_policy)
    if world.current() not in _announced:  # the script may have called init() itself
        _announced.add(world.current())
        set_rank_zero()
        is_alone = world.current().topology.size == 1 and not environment.creates_processes_externally
        more = "; pass devices= to start more" if is_alone else ""
        rank_zero_info(f"ring_plugins: {world.current().summary}{more}")
    if (found := world.current()).topology.size > 1:
        found.first_call.check("RingStrategy", **environment.failure_policy)
    return found


#: Worlds of which rank 0 has said how many ranks train.
_announced: weakref.WeakSet[World] = weakref.WeakSet()


# How a rank ends ----------------------------------------------------------------------------------

# The status that a shell reports for a process that SIGTERM ended.
_TERMINATED = 128 + 15

_failed: list[World] = []


def report_failure(error: BaseException) -> None:
    """Tell every rank that this one failed and why, so that they raise instead of waiting.

    Only the first failure is reported, and orderly exits are not: Lightning's tuner ends with an exception, as do all
    ranks that stop together on SIGTERM, and a script may call ``sys.exit(0)`` on every rank.
    """
    if not world.is_initialized() or world.current().topology.size == 1 or has_failed():
        return
    # Lightning 2.6.6, pytorch/utilities/exceptions.py:33; each of the two packages has a class of this name.
    is_plain_exit = isinstance(error, SystemExit) and not error.code and not is_sigterm(error)
    if is_plain_exit or is_agreed(error) or type(error).__name__ == "_TunerExitException":
        return
    _failed[:] = [world.current()]
    world.current().fail(error)


def has_failed() -> bool:
    """Whether this rank reported a failure, so that it must wait for no other rank on its way out."""
    return bool(_failed) and world.is_initialized() and world.current() is _failed[0]


def set_exit_status(error: BaseException) -> None:
    """Make a SIGTERM end the process with a status other than zero.

    Lightning 2.6.6, pytorch/utilities/exceptions.py:19: ``SIGTERMException`` is a ``SystemExit`` without a code, so a
    job that was told to stop reports success.
    """
    if is_sigterm(error) and isinstance(error, SystemExit) and not error.code:
        error.code = _TERMINATED
