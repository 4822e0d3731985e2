"""A group of processes that ends together: when one fails, on a signal, and when the process that started it dies.

`ring run` promises that nothing of a job outlives it. Three mechanisms of Linux keep that promise:

- A process that is started here asks the kernel for a signal at the death of its parent (PR_SET_PDEATHSIG). It holds
  even if this process is killed with SIGKILL.
- This process adopts orphans (PR_SET_CHILD_SUBREAPER). What a rank leaves behind, such as a data loader's worker in a
  session of its own, becomes a child of this process instead of init's, and is found and killed.
- Signals to this process are noted, and the wait loop acts on them: the ranks get some seconds to print their own
  errors before they are killed. SIGUSR1 and SIGUSR2 are passed on.

Process groups alone would not do: mpirun, shells and data loaders make sessions of their own.

A script that has spawned its ranks waits for them itself, by the same rule (core/rendezvous/spawn.py). It is the user's
process, whose other children and handlers of signals must stay as they are, so it adopts and searches nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.linux.process import adopt_orphans, children, descendants, end_with_parent, wait_until_over

#: Seconds that the other processes get to end with their own errors, once the job is over.
GRACE_SECONDS = 8.0
#: Seconds before SIGTERM follows a Ctrl-C, which the terminal has sent to all processes already.
_INTERRUPT_SECONDS = 3.0
#: Seconds between two searches for orphans.
_ORPHAN_SECONDS = 1.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Those to which scripts give a meaning of their own.
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

Popen = subprocess.Popen[bytes]


class Processes:
    """Starts processes, and ends them together with everything that they have started.

    Use it as a context manager in the main thread.

    Attributes:
        started: processes that end with the job, in the order of their start.
        helpers: processes that outlive the job; they end with this context.
        signalled: the last signal that this process received, None if none.
        ending: that, or why `end` was called; None while the job goes on.
    """

    def __init__(self) -> None:
        self.started, self.helpers = list[Popen](), list[Popen]()
        self.signalled: signal.Signals | None = None
        self._told_to_end: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._ignored: list[signal.Signals] = []  # of the user's signals, by whatever has started this process

    def __enter__(self) -> Processes:  # noqa: PYI034 - typing.Self needs Python 3.11
        adopt_orphans(True)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as set by nohup, which must keep its effect
                self._previous[number] = signal.signal(number, self._note_signal)
        self._ignored = [number for number in _USER_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        self._previous |= {number: signal.signal(number, self._pass_on) for number in _USER_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        _kill_all([*self.started, *self.helpers])
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        adopt_orphans(False)

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        self.signalled = signal.Signals(number)

    @property
    def ending(self) -> signal.Signals | None:
        return self.signalled or self._told_to_end

    def end(self, number: signal.Signals) -> None:
        """End all processes as after a signal to this one, unless they end already."""
        if self.ending is not None:
            return
        self._told_to_end = number
        if number == signal.SIGINT:  # as a terminal sends it to all processes of its host
            self._pass_on(number, None)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        for process in self.started:
            process.send_signal(number)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        end_signal: signal.Signals = signal.SIGKILL,
        pass_fds: Sequence[int] = (),
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        own_session: bool = False,
        is_helper: bool = False,
    ) -> Popen:
        """Start a process, which gets `end_signal` if this process ends before it.

        Args:
            command, environment, pass_fds, stdin, stdout, stderr: as for Popen.
            end_signal: see above.
            own_session: whether it must not get what a terminal sends to all processes, such as Ctrl-C, and ignores the
                user's signals.
            is_helper: whether it becomes one of `helpers`.

        Raises:
            LaunchError: the program cannot be run.
        """
        parent = os.getpid()

        def before_exec() -> None:
            for number in _USER_SIGNALS if own_session else self._ignored:
                signal.signal(number, signal.SIG_IGN)
            end_with_parent(end_signal)
            if os.getppid() != parent:
                os._exit(1)

        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                pass_fds=tuple(pass_fds),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=own_session,
                preexec_fn=before_exec,  # noqa: PLW1509 - this is the main thread, before any other is started
            )
        except OSError as error:
            raise LaunchError(
                f"{command[0]} cannot be run: {error.strerror}; does a script lack its #! line?"
            ) from error
        (self.helpers if is_helper else self.started).append(process)
        return process

    def wait(
        self,
        running: Callable[[], Sequence[Popen]],
        find_trouble: Callable[[], str | None],
        before_end: Callable[[], object] = lambda: None,
    ) -> str | None:
        """Wait until processes have ended, and kill all others that end with the job.

        Once the job is over, they get `GRACE_SECONDS`, unless they are stopped (Ctrl-Z, SIGSTOP).

        Args:
            running: returns those to wait for that have not ended.
            find_trouble: called regularly until the job is over. Returns why they have to be ended, "" if the job is
                over and they end by themselves, None while it goes on.
            before_end: called before they get SIGTERM.

        Returns:
            What `find_trouble` found.
        """
        over: float | None = None
        next_search = time.monotonic() + _ORPHAN_SECONDS
        had_orphans = is_terminated = False
        trouble = None

        def look(left: Sequence[Popen]) -> bool:
            nonlocal over, next_search, had_orphans, is_terminated, trouble
            now = time.monotonic()
            if over is None and (self.ending is not None or (trouble := find_trouble()) is not None):
                over = now
            delay = _INTERRUPT_SECONDS if self.ending == signal.SIGINT else 0.0
            # After a failure the ranks notify each other. After a signal, or if a rank never came, nobody does.
            if over is not None and (self.ending or trouble) and not is_terminated and now - over >= delay:
                is_terminated = True
                before_end()
                for process in left:
                    process.terminate()
            if now > next_search:
                next_search = now + _ORPHAN_SECONDS
                had_orphans = self._kill_orphans_of_idle_processes(had_orphans)
            return over is not None

        wait_until_over(running, look, GRACE_SECONDS, 0.02)
        _kill_all(self.started, self.helpers)
        return trouble

    def _kill_orphans_of_idle_processes(self, had_orphans: bool) -> bool:
        """Kill orphans once no rank runs any more: mpirun waits for every process that could still print.

        Args:
            had_orphans: what this returned last time. Ranks that are just being started look the same for a moment.
        """
        family = children()
        known = {process.pid for process in (*self.started, *self.helpers)}
        orphans = [pid for pid in family.get(os.getpid(), []) if pid not in known]
        is_busy = any(family.get(process.pid) for process in self.started)
        if had_orphans and not is_busy:
            for pid in [*orphans, *(below for orphan in orphans for below in descendants(orphan, family))]:
                _kill(pid)
        return bool(orphans) and not is_busy


def _kill_all(processes: Sequence[Popen], spared: Sequence[Popen] = ()) -> None:
    """Kill these processes, and then all descendants of this process but the spared ones."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
    deadline = time.monotonic() + 5.0
    while (left := _family(spared)) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid)
        time.sleep(0.01)


def _family(spared: Sequence[Popen]) -> set[int]:
    """The descendants of this process, without the spared ones and their descendants."""
    found = children()
    kept = [pid for one in spared for pid in (one.pid, *descendants(one.pid, found))]
    return set(descendants(os.getpid(), found)).difference(kept)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)  # an orphan that this process has adopted
