"""Processes that end together: with the first that fails, on a signal, and when their starter is killed itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from ring_plugins.core.linux.process import adopt_orphans, children, descendants, end_with_parent

#: Seconds in which others of the job may end by themselves, with a word of their own, once it is over.
_GRACE = 8.0
#: Seconds that a terminal's Ctrl-C, which reaches all processes by itself, is left to do its work.
_INTERRUPTED = 3.0
#: How often to look for processes that a rank has left behind.
_LOOK = 1.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Starts processes and sees all of them, and what they start, to their end.

    Used as a context in the main thread. Orphans of the processes become children of this one, so that none is lost
    sight of, whatever it does.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.signalled: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Supervisor:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        adopt_orphans(True)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                self._previous[number] = signal.signal(number, self._take_note)
        return self

    def __exit__(self, *_: object) -> None:
        end(self.processes)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        adopt_orphans(False)

    def _take_note(self, number: int, _: FrameType | None) -> None:
        self.signalled = signal.Signals(number)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        dying_word: signal.Signals = signal.SIGKILL,
        pass_fds: Sequence[int] = (),
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process that gets the signal `dying_word` when this process ends before it."""
        starter = os.getpid()

        def before_running() -> None:
            end_with_parent(dying_word)
            if os.getppid() != starter:
                os._exit(1)

        process = subprocess.Popen(
            command,
            env=dict(environment),
            pass_fds=tuple(pass_fds),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=before_running,  # noqa: PLW1509 - in the main thread of a process without others
        )
        self.processes.append(process)
        return process

    def wait(self, look: Callable[[], str | None] = lambda: None) -> tuple[int, str | None]:
        """Wait until all have ended; once one has failed the others get some seconds to do so.

        Args:
            look: looked at regularly; a text says that the job cannot succeed any more, and why.

        Returns:
            The exit status that the job deserves, and the text of `look`, if there was one.
        """
        over: float | None = None
        next_look = time.monotonic() + _LOOK
        idle = False
        told_to_end = False
        why = None
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            if over is None and self.signalled is not None:
                over = now
            if over is None and (why := look()) is not None:
                over = now
            if over is None and any(process.returncode for process in self.processes):
                over = now
            patience = _INTERRUPTED if self.signalled == signal.SIGINT else 0.0
            # Ranks that wait for one that will never come cannot end by themselves.
            if over is not None and (self.signalled or why) and not told_to_end and now - over >= patience:
                told_to_end = True
                for process in self.processes:
                    if process.poll() is None:
                        process.terminate()
            if over is not None and now - over > _GRACE:
                break
            if now > next_look:
                next_look = now + _LOOK
                idle = self._end_orphans_of_the_idle(idle)
            time.sleep(0.02)
        end(self.processes)
        if self.signalled is not None:
            return 128 + self.signalled, why
        codes = [process.returncode for process in self.processes]
        bad = next((code for code in codes if code), 0)
        return (bad if bad >= 0 else 128 - bad) or (1 if why else 0), why

    def _end_orphans_of_the_idle(self, idle: bool) -> bool:
        """End what ranks left behind if nothing runs any more: mpirun waits for everyone who could still print.

        Args:
            idle: what this returned last time; twice in a row is no moment between two things.
        """
        family = children()
        own = [process.pid for process in self.processes]
        orphans = [pid for pid in family.get(os.getpid(), []) if pid not in own]
        busy = any(family.get(pid) for pid in own)
        if idle and not busy:
            for pid in [*orphans, *(below for orphan in orphans for below in descendants(orphan, family))]:
                _kill(pid)
        return bool(orphans) and not busy


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what still lives of `processes` and of what they started, until nothing does."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
    deadline = time.monotonic() + 5.0
    while (left := descendants(os.getpid(), children())) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid)
        time.sleep(0.01)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)  # an orphan that became our child
