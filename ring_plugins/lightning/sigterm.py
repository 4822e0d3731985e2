"""SIGTERM during ``fit``: keep Lightning's orderly stop, without the broadcast it makes inside the signal handler."""

import logging
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


def note_sigterm_without_broadcast(trainer: Any) -> None:
    """Replace Lightning's SIGTERM notifier by one that only takes note.

    Lightning 2.6.6, pytorch/trainer/connectors/signal_connector.py:108-120: the handler broadcasts from rank 0,
    wherever the main thread happens to be. If that is inside another collective, or if not every rank was signalled,
    ranks then wait for each other in different operations. The handler's other half is enough: every training batch
    begins with an agreed look at rank 0's note (pytorch/loops/training_epoch_loop.py:259-272), and a rank that was
    signalled alone stops by itself and its peers hear of that.

    Called once the Trainer has registered its handlers; the Trainer puts the previous ones back.
    """
    connector = trainer._signal_connector
    entries: list[Any] = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    entries[:] = [_take_note(connector) if entry == connector._sigterm_notifier_fn else entry for entry in entries]


def _take_note(connector: Any) -> Callable[[int, FrameType | None], None]:
    def take_note(signum: int, _: FrameType | None) -> None:
        log.info(f"Received SIGTERM: {signum}")
        connector.received_sigterm = True

    return take_note
