"""Notices that mpirun has lost a host: Open MPI kills the other hosts' ranks then, and ends with status 0.

Its banner on standard error is the only sign, if mpirun is faster than the ranks, whose own connections notice a lost
host too. So what it prints there passes through this process, unchanged.
"""

from __future__ import annotations

import os
from types import TracebackType

from ring_plugins.core.base.threads import HelperThread

#: In the help texts of PRRTE (Open MPI 5) and ORTE (Open MPI 4).
_LOST = b"has lost communication with a remote daemon"
_READ = 1 << 16
#: Seconds to wait for the end of the pipe, which a process that a rank left behind may keep open.
_END = 5.0


class LostHost:
    """Passes on what mpirun prints to standard error, and reads it.

    Leaving the context waits until everything has been passed on.

    Attributes:
        stderr: for mpirun, as Popen takes it.
        found: whether mpirun has lost a host; final once the context is left.
        has_died: whether its thread has died, so that nobody reads what mpirun prints.
    """

    def __init__(self) -> None:
        self.found = self.has_died = False
        self._reading, self.stderr = os.pipe()
        self._thread = HelperThread(self._copy, "ring:mpirun's errors", outside_a_job=self._note_death)

    def __enter__(self) -> LostHost:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def start(self) -> None:
        """Begin to read, once mpirun has its end."""
        os.close(self.stderr)
        self.stderr = -1
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stderr >= 0:  # mpirun could not be started
            self.start()
        self._thread.join(_END)

    def _copy(self) -> None:
        before, shown = b"", True
        with os.fdopen(self._reading, "rb", buffering=0) as pipe:
            while data := pipe.read(_READ):
                self.found = self.found or _LOST in before + data
                before = (before + data)[-len(_LOST) :]
                try:
                    while shown and data:
                        data = data[os.write(2, data) :]
                except OSError:
                    shown = False  # standard error is closed; mpirun must not wait for it

    def _note_death(self) -> None:
        self.has_died = True
