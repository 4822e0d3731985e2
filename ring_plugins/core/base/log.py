"""Messages to the user: records of the logger "ring_plugins", by default on standard error.

Every record has the `rank` of its process as an attribute, None before `init()`. To silence or redirect:

    logging.getLogger("ring_plugins").setLevel(logging.ERROR)
    logging.getLogger("ring_plugins").handlers[:] = [my_handler]
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, TextIO


class _Logger(logging.Logger):
    """Stays enabled: `logging.config` disables every existing logger by default, and ranks would end silently."""

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass


logger = logging.getLogger("ring_plugins")
logger.__class__ = _Logger

_rank: int | None = None


def set_rank(rank: int | None) -> None:
    """Attach this rank to every record from now on, None to stop."""
    global _rank
    _rank = rank


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = _rank
    return True


def flush_output() -> None:
    """Flush standard output and error before this process ends; a closed one is None, or raises."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]  # Python 3.10 cannot evaluate it
else:
    _TextHandler = logging.StreamHandler


class _StandardError(_TextHandler):
    """Writes to the current `sys.stderr`, and ignores errors after the launcher has closed its end of the pipe."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # a property in place of an attribute, as in logging itself
        return sys.stderr

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exc_info()[1], OSError | ValueError | AttributeError):
            super().handleError(record)


def writes_to_standard_error() -> bool:
    """Whether messages go where `ring_plugins` sends them by default, rather than where the user redirected them."""
    return logger.isEnabledFor(logging.INFO) and any(isinstance(one, _StandardError) for one in logger.handlers)


def _install() -> None:
    if logger.handlers:  # the user's own, set before the first import
        return
    handler = _StandardError()
    handler.setFormatter(logging.Formatter("ring_plugins: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


logger.addFilter(_add_rank)
_install()
