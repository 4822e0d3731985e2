"""Notices that mpirun goes on although its job is over.

Open MPI 5's mpirun now and then does not end when the last rank has ended, and would wait for ever
(https://github.com/openpmix/prrte/issues/1839). Two signs show that nothing is left to wait for:

- All ranks run on this host, where mpirun is their parent, and nothing below it has been alive for some seconds, though
  something was before.
- A rank has failed, and half a minute later mpirun still runs, on whatever hosts. It ends the others itself, and the
  ranks give each other five seconds.

On several hosts, a job that ends well and whose mpirun lingers is still waited for: the other hosts' ranks are nobody's
children here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ring_plugins.core.linux.process import children, descendants, state

#: Seconds without a living process below mpirun. It ends within one second of its last rank otherwise.
IDLE_SECONDS = 10.0
#: Seconds after the first failure of a rank.
FAILED_SECONDS = 30.0
#: Seconds between two looks, of some milliseconds each.
_LOOK_EVERY = 1.0
_OVER = ("Z", "X", "")


class LingeringMpirun:
    """Tells why an mpirun has to be ended, once it has to.

    Args:
        pid: of mpirun.
        is_local: whether all of its ranks run on this host.
        failure: returns the first failure that a rank of this host has told, None if there is none.
    """

    def __init__(self, pid: int, is_local: bool, failure: Callable[[], str | None]) -> None:
        self._pid, self._is_local, self._failure = pid, is_local, failure
        self._next_look = 0.0
        self._had_processes = False
        self._idle_since = self._failed_since = 0.0

    def __call__(self) -> str | None:
        """A line for the user; None while mpirun may go on."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + _LOOK_EVERY
        if not self._failed_since and self._failure():
            self._failed_since = now
        if self._failed_since and now - self._failed_since > FAILED_SECONDS:
            return f"mpirun still ran {FAILED_SECONDS:g} s after a rank had failed; ended it."
        if any(state(pid) not in _OVER for pid in descendants(self._pid, children())):
            self._had_processes, self._idle_since = True, 0.0
            return None
        self._idle_since = self._idle_since or now
        if self._is_local and self._had_processes and now - self._idle_since > IDLE_SECONDS:
            return (
                f"mpirun still ran {IDLE_SECONDS:g} s after the last of its processes had ended; ended it. "
                "How they ended is unknown."
            )
        return None
