"""All ranks of a Trainer stop at the same place when one is told that the job is to end; SLURM starts it again.

Lightning 2.6.6, pytorch/trainer/connectors/signal_connector.py:108-120, broadcasts inside its handler for SIGTERM,
wherever the main thread happens to be, and its handler for SLURM's signal saves there. If that is inside another
collective, or if not every rank got the signal, ranks wait for each other in different operations. Here the handlers
only take a note. In a ``fit`` the ranks tell each other of it where they compare their loops (`same_loop`), or, in jobs
that go on after losses, with the gradients (`Elastic.change_members`). Then all raise Lightning's ``SIGTERMException``
between two batches, so callbacks save whole states (``OnExceptionCheckpoint``), and SLURM's requeue is asked for.
"""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType
from typing import Any

from ring_plugins.core import world

log = logging.getLogger(__name__)

#: What a rank was told: to end, by SIGTERM; to end and be started again, by SLURM's signal.
STOP, REQUEUE = 1, 2


class Preemption:
    """Follows the signals of one Trainer.

    Args:
        trainer: about to run.
        compares: whether it is a ``fit`` whose ranks tell each other what they were told.

    Attributes:
        told: what this rank was told, and once all ranks stop, what any was.
    """

    def __init__(self, trainer: Any, compares: bool) -> None:
        self._trainer, self._compares, self.told = trainer, compares, 0
        self._elastic = world.current().elastic
        self._notice = self._elastic.preemption_notice if world.current().recovers else None

    def take_signals(self) -> None:
        """Replace the Trainer's handlers, which it has just registered; it restores those of before."""
        connector, is_fitting = self._trainer._signal_connector, self._trainer.state.fn == "fit"
        number = _requeue_signal(self._trainer) if is_fitting else None
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            connector._register_signal(number, self._note_requeue)
        handlers: list[Any] = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
        notifier = connector._sigterm_notifier_fn
        if self._notice is not None and self._notice.is_installed and is_fitting:
            self._notice.is_asked = True
            handlers[:] = [handler for handler in handlers if handler != notifier]
            connector.received_sigterm &= self._elastic.is_ending  # of which the notice was taken, too
            return
        handlers[:] = [self._note_sigterm if handler == notifier else handler for handler in handlers]

    def _note_sigterm(self, number: int, _: FrameType | None) -> None:
        log.info(f"Received SIGTERM: {number}")
        self.told |= STOP
        self._trainer._signal_connector.received_sigterm |= not self._compares

    def _note_requeue(self, number: int, _: FrameType | None) -> None:
        log.info(f"Received {signal.Signals(number).name}: the job saves a checkpoint, and SLURM is to start it again.")
        self.told |= REQUEUE
        if self._notice is not None:
            self._notice.of_job = True  # which the gradients tell all ranks
        elif not self._compares:  # there is one rank
            self.agree(REQUEUE)

    def agree(self, told: int) -> None:
        """Let Lightning stop at the end of this batch or epoch; all ranks call this at the same place.

        Args:
            told: what ranks were told.
        """
        self.told |= told
        self._trainer._signal_connector.received_sigterm = True
        self._elastic.is_ending = True

    def stop(self, told: int) -> None:
        """Stop now, on all ranks at the same place; arguments as of `agree`."""
        self.agree(told)
        raise sys.modules[type(self._trainer.fit_loop.epoch_loop).__module__].SIGTERMException

    def after_pass(self) -> None:
        """In a job that goes on after losses: stop behind this batch if all ranks are to."""
        if self._notice is not None and self._elastic.is_ending:
            self.agree(REQUEUE if self._notice.of_job else STOP)

    def requeue(self) -> None:
        """Save a checkpoint from which a job of SLURM resumes, and have it started again, if a rank was told so.

        All ranks call this when they have stopped. Lightning 2.6.6, signal_connector.py:77: its handler saves once, to
        ``hpc_ckpt_<n>.ckpt``, and rank 0 calls ``scontrol requeue``.
        """
        if self.told & REQUEUE and self._elastic.is_ending:
            self._trainer._signal_connector._slurm_sigusr_handler_fn(_requeue_signal(self._trainer), None)

    def close(self) -> None:
        """A signal that comes from now on has the meaning that it had before."""
        if self._notice is not None:
            self._notice.is_asked = False


def is_agreed(error: BaseException) -> bool:
    """Whether an exception ends the Trainers of all ranks, in step with each other."""
    return is_sigterm(error) and world.is_initialized() and world.current().elastic.is_ending


def is_sigterm(error: BaseException) -> bool:
    """Whether an exception is the one by which Lightning ends on SIGTERM; each of its packages has its own."""
    return type(error).__name__ == "SIGTERMException"


def _requeue_signal(trainer: Any) -> signal.Signals | None:
    """The signal on which a job of SLURM is to be started again; None if there is none.

    As with Lightning: SIGUSR1 in any job of SLURM, unless the user's ``SLURMEnvironment`` says something else.
    """
    connector = trainer._accelerator_connector
    chosen = getattr(connector.cluster_environment, "slurm", None) or connector._cluster_environment_flag
    if hasattr(chosen, "auto_requeue"):
        found: signal.Signals | None = chosen.requeue_signal if chosen.auto_requeue else None
        return found
    is_slurm = sys.modules[type(trainer._signal_connector).__module__].SLURMEnvironment.detect()
    return signal.SIGUSR1 if is_slurm else None
