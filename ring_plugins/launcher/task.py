"""One rank's part of `ring_plugins.run` and its relatives: call the function, and report how it ended."""

from __future__ import annotations

import contextlib
import pickle
import socket
import traceback

import ring_plugins
from ring_plugins.core import world
from ring_plugins.core.exit_hooks import consequence
from ring_plugins.launcher.outcomes import Failure, Outcome, pack


def perform(packed: bytes, rank: int) -> Outcome:
    """Call a packed `(function, args, kwargs)` as a rank, and leave the job.

    A failure is told to the other ranks at once, so that they stop waiting.
    """
    try:
        function, args, kwargs = pickle.loads(packed)
        outcome = Outcome(rank, pack(f"the result of rank {rank}", function(*args, **kwargs)))
        ring_plugins.shutdown()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return Outcome(rank, pack("nothing", None))
        return Outcome(rank, failure=_failure(error))
    return outcome


def _failure(error: BaseException) -> Failure:
    caused_by = None
    if world.is_initialized() and (current := world.current()).topology.size > 1:
        peer = consequence(current, error)
        current.fail(peer or error)
        caused_by = peer.rank if peer is not None else None
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    # The first frame is `perform`'s, which is nobody's business.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next))
    packed = None
    with contextlib.suppress(Exception):
        packed = pack("the error", error.with_traceback(None))
    return Failure(socket.gethostname(), summary, text, packed, caused_by)
