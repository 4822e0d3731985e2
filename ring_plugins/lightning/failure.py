"""When a rank fails inside Lightning: the others are told why before anything else is tried."""

from ring_plugins.core import world
from ring_plugins.core import world as job

# What a shell reports for a process that SIGTERM ended.
_TERMINATED = 128 + 15

_told: list[job.World] = []


def tell_peers(error: BaseException) -> None:
    """Tell every rank that this one failed and why; theirs then raise instead of waiting.

    Nothing is told a second time, nor of an end that is not a failure: Lightning's tuner leaves by an exception, and a
    script may call ``sys.exit(0)`` on every rank.
    """
    if not world.is_initialized() or world.current().topology.size == 1 or _is_orderly(error) or peers_were_told():
        return
    _told[:] = [world.current()]
    world.current().fail(error)


def peers_were_told() -> bool:
    """Whether this rank gave up its job, so that it must wait for nobody on its way out."""
    return bool(_told) and world.is_initialized() and world.current() is _told[0]


def give_status(error: BaseException) -> None:
    """Make a SIGTERM end the process with a status other than zero.

    Lightning 2.6.6, pytorch/utilities/exceptions.py:19: ``SIGTERMException`` is a ``SystemExit`` without a code, so a
    job that was told to stop reports success.
    """
    if _is_sigterm(error) and isinstance(error, SystemExit) and not error.code:
        error.code = _TERMINATED


def _is_orderly(error: BaseException) -> bool:
    # Lightning 2.6.6, pytorch/utilities/exceptions.py:33; the class exists once in each spelling of Lightning.
    is_tuner_exit = type(error).__name__ == "_TunerExitException"
    is_plain_exit = isinstance(error, SystemExit) and not error.code and not _is_sigterm(error)
    return is_tuner_exit or is_plain_exit


def _is_sigterm(error: BaseException) -> bool:
    return type(error).__name__ == "SIGTERMException"
