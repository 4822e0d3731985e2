"""How a rank that fails or is stopped ends: it notifies the other ranks first, and exits with a nonzero status."""

import logging
import signal
from types import FrameType
from typing import Any

from ring_plugins.core import world
from ring_plugins.core.job import World

log = logging.getLogger(__name__)

# The status that a shell reports for a process that SIGTERM ended.
_TERMINATED = 128 + 15

_failed: list[World] = []


def report_failure(error: BaseException) -> None:
    """Tell every rank that this one failed and why, so that they raise instead of waiting.

    Only the first failure is reported, and orderly exits are not: Lightning's tuner ends with an exception, and a
    script may call ``sys.exit(0)`` on every rank.
    """
    if not world.is_initialized() or world.current().topology.size == 1 or _is_orderly(error) or has_failed():
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
    if _is_sigterm(error) and isinstance(error, SystemExit) and not error.code:
        error.code = _TERMINATED


def _is_orderly(error: BaseException) -> bool:
    # Lightning 2.6.6, pytorch/utilities/exceptions.py:33; each of the two packages has a class of this name.
    is_tuner_exit = type(error).__name__ == "_TunerExitException"
    is_plain_exit = isinstance(error, SystemExit) and not error.code and not _is_sigterm(error)
    return is_tuner_exit or is_plain_exit


def _is_sigterm(error: BaseException) -> bool:
    return type(error).__name__ == "SIGTERMException"


def keep_sigterm_handler_from_broadcasting(trainer: Any) -> None:
    """Keep Lightning's orderly stop on SIGTERM, without the broadcast that it makes inside the signal handler.

    Lightning 2.6.6, pytorch/trainer/connectors/signal_connector.py:108-120: the handler broadcasts from rank 0,
    wherever the main thread happens to be. If that is inside another collective, or if not every rank got the signal,
    ranks wait for each other in different operations. The handler's other half is enough: at the start of every
    training batch all ranks read rank 0's flag (pytorch/loops/training_epoch_loop.py:259-272), and a rank that is the
    only one to get the signal stops and reports that.

    In a ``fit`` that goes on without ranks that are lost, nothing stops: the rank leaves after its step.

    Called once the Trainer has registered its handlers; the Trainer restores the previous ones.
    """
    connector = trainer._signal_connector
    handlers: list[Any] = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    notifier = connector._sigterm_notifier_fn
    preemption_notice = world.current().elastic.preemption_notice if world.is_initialized() else None
    if preemption_notice is not None and preemption_notice.is_installed and trainer.state.fn == "fit":
        handlers[:] = [handler for handler in handlers if handler != notifier]
        connector.received_sigterm = False  # of which the notice was taken, too
        return

    def set_flag(signum: int, _: FrameType | None) -> None:
        log.info(f"Received SIGTERM: {signum}")
        connector.received_sigterm = True

    handlers[:] = [set_flag if handler == notifier else handler for handler in handlers]
