"""Follows an mpirun that starts a job: one that hangs is ended, and one that has lost a host does not end with 0.

**A hung mpirun.** Open MPI 5's mpirun now and then does not end when the last rank has ended, and would wait for ever
(https://github.com/openpmix/prrte/issues/1839). Two signs show that nothing is left to wait for:

- All ranks run on this host, where mpirun is their parent, and nothing below it has been alive for some seconds, though
  something was before.
- A rank has failed, and half a minute later mpirun still runs, on whatever hosts. It ends the others itself, and the
  ranks give each other five seconds.

Considered and rejected: asking other hosts by ssh whether ranks still run there. It took a hundred lines, which had to
tell ranks from other processes, and from hosts that show none.

**A lost host.** Open MPI kills the other hosts' ranks then, and ends with status 0. Its banner on standard error is the
only sign, if mpirun is faster than the ranks, whose own connections notice a lost host too. So what it prints there
passes through this process, unchanged.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.control.parent_notifier import ParentNotifier
from ring_plugins.core.linux.process import as_status, children, descendants, state
from ring_plugins.launcher import mpirun
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.processes import Processes

_DEAF = "ended every rank because the thread that reads mpirun's errors died; its traceback is above."
#: Seconds without a living process below mpirun. It ends within one second of its last rank otherwise.
IDLE_SECONDS = 10.0
#: Seconds after the first failure of a rank.
FAILED_SECONDS = 30.0
#: Seconds between two looks, of some milliseconds each.
_LOOK_EVERY = 1.0
_OVER = ("Z", "X", "")
#: In the help texts of PRRTE (Open MPI 5) and ORTE (Open MPI 4).
_LOST = b"has lost communication with a remote daemon"
_READ = 1 << 16
#: Seconds to wait for the end of the pipe, which a process that a rank left behind may keep open.
_END = 5.0


def run_mpirun(plan: LaunchPlan, processes: Processes) -> tuple[int, str | None]:
    """Run a job by mpirun to its end; returns its exit status, and what the user should know of it.

    Args:
        plan: of the job.
        processes: of this host.
    """
    assert plan.mpirun is not None
    with ParentNotifier() as notifier, contextlib.ExitStack() as stack:
        environment = {**os.environ, **notifier.environment}
        lost = stack.enter_context(LostHost()) if plan.mpirun.flavor == "Open MPI" and not plan.is_local else None
        # On SIGTERM mpirun ends its ranks on all hosts; whatever remains on this one is killed.
        process = processes.start(
            mpirun.command_line(plan.mpirun, plan.job),
            environment,
            end_signal=signal.SIGTERM,
            stderr=None if lost is None else lost.stderr,
        )
        if lost is not None:
            lost.start()
        hangs = HungMpirun(process.pid, plan.is_local, notifier.first_message)

        def find_trouble() -> str | None:
            return _DEAF if lost is not None and lost.has_died else hangs()

        why = processes.wait(lambda: [process] if process.poll() is None else [], find_trouble)
        stack.close()
        if processes.ending is not None:
            status = 128 + processes.ending
        else:
            status = as_status(process.returncode) or (1 if why else 0)
        if lost is not None and lost.has_died:
            return status or 1, _DEAF
        cause = notifier.first_message() if processes.signalled is None else None
        if cause is None and lost is not None and lost.found:
            cause = "mpirun lost a host and ended the ranks of the others"
        # Open MPI 5 exits with 0 after it has lost a host. The cause is repeated as the last line: what the ranks
        # printed stands above mpirun's own banners.
        return status or (1 if cause else 0), why or (cause and f"{cause.rstrip('.')}.")


class HungMpirun:
    """Tells why an mpirun has to be ended, once it has to.

    Args:
        pid: of mpirun.
        is_local: whether all of its ranks run on this host.
        failure: returns the first failure that a rank of this host has told, None if there is none.
    """

    def __init__(self, pid: int, is_local: bool, failure: Callable[[], str | None]) -> None:
        self._pid, self._is_local, self._failure = pid, is_local, failure
        self._next_look = self._idle_since = self._failed_since = 0.0
        self._had_processes = False

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

    def __exit__(self, *_: object) -> None:
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
