"""Ends processes together: when one of them fails, on a signal, and when the process that started them is killed.

`ring run` promises that nothing of a job outlives it. Three mechanisms of Linux keep that promise:

- A process that is started here asks the kernel for a signal at the death of its parent (PR_SET_PDEATHSIG). It holds
  even if this process is killed with SIGKILL.
- This process adopts orphans (PR_SET_CHILD_SUBREAPER). What a rank leaves behind, such as a data loader's worker in a
  session of its own, becomes a child of this process instead of init's, and is found and killed.
- Signals to this process are noted, and the wait loop acts on them: the ranks get some seconds to print their own
  errors before they are killed. SIGUSR1 and SIGUSR2 are passed on.

Process groups alone would not do: mpirun, shells and data loaders make sessions of their own.
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
from ring_plugins.core.linux.process import (
    STOPPED,
    adopt_orphans,
    children,
    descendants,
    end_with_parent,
    memory_kills,
    state,
)
from ring_plugins.core.rendezvous.slots import Slots
from ring_plugins.core.rendezvous.spawn import as_status, first_cause, is_failure, silent_end

#: Seconds that the other processes get to end with their own errors, once the job is over.
GRACE_SECONDS = 8.0
#: Seconds before SIGTERM follows a Ctrl-C, which the terminal has sent to all processes already.
_INTERRUPT_SECONDS = 3.0
#: Seconds between two searches for orphans.
_ORPHAN_SECONDS = 1.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Those to which scripts give a meaning of their own.
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """Starts processes, and ends them together with everything that they have started.

    Use it as a context manager in the main thread.

    Args:
        recovers: whether the others go on when a process is killed by a signal, or ends without telling them.
            One that fails by an exit status otherwise ends all.
        slots: in which the processes, by their indices, say how they end; None if they have no such memory.

    Attributes:
        processes: in the order of their start.
        standbys: further processes, for which nobody waits and whose ends do not matter; they end with the others.
        helpers: further processes that outlive the ranks; they end with this context.
        signalled: the last signal that this process received, None if none.
        ending: that, or why `end` was called; None while the job goes on.
        own_helpers: returns the process ids of children that are no orphans of the job.
        is_out: whether the exit status of the process of an index does not matter, as it has left the job before its
            end or has not joined it.
        tell_of_memory: called if the process of an index was killed since memory had run out.
    """

    def __init__(self, recovers: bool = False, slots: Slots | None = None) -> None:
        self._recovers, self._slots = recovers, slots
        self.processes: list[subprocess.Popen[bytes]] = []
        self.standbys: list[subprocess.Popen[bytes]] = []
        self.helpers: list[subprocess.Popen[bytes]] = []
        self.signalled: signal.Signals | None = None
        self._told_to_end: signal.Signals | None = None
        self.own_helpers: Callable[[], set[int]] = set
        self.is_out: Callable[[int], bool] = lambda index: False
        self._previous: dict[signal.Signals, Any] = {}
        self._ignored: list[signal.Signals] = []  # of the user's signals, by whatever has started this process
        self.tell_of_memory: Callable[[int], None] = lambda index: None
        self._ended: list[subprocess.Popen[bytes]] = []  # in the order in which that was seen
        self._kills = False  # those that have not ended by themselves
        self._memory_kills, self._of_memory = memory_kills(), list[subprocess.Popen[bytes]]()

    def __enter__(self) -> Supervisor:  # noqa: PYI034 - typing.Self needs Python 3.11
        adopt_orphans(True)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as set by nohup, which must keep its effect
                self._previous[number] = signal.signal(number, self._note_signal)
        self._ignored = [number for number in _USER_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        self._previous |= {number: signal.signal(number, self._pass_on) for number in _USER_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        _kill_all([*self.processes, *self.standbys, *self.helpers])
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
            for process in self.processes:
                process.send_signal(number)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        for process in [*self.processes, *self.standbys]:
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
        index: int | None = None,
        own_session: bool = False,
        is_standby: bool = False,
        is_helper: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process, which gets `end_signal` if this process ends before it.

        Args:
            command, environment, pass_fds, stdin, stdout, stderr: as for Popen.
            end_signal: see above.
            index: that it gets in `processes`, of one that has ended or behind the last; None for the latter.
            own_session: whether it must not get what a terminal sends to all processes, such as Ctrl-C, and ignores the
                user's signals.
            is_standby, is_helper: whether it becomes one of `standbys` or `helpers` instead.

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
        if is_standby or is_helper:
            (self.standbys if is_standby else self.helpers).append(process)
        else:
            self._put(process, len(self.processes) if index is None else index)
        return process

    def _put(self, process: subprocess.Popen[bytes], index: int) -> None:
        self._note_ends()  # of the one in whose place it comes
        self.processes[index : index + 1] = [process]

    def slot_standby(self, standby: subprocess.Popen[bytes], index: int) -> None:
        """Put one of `standbys` into the place of the process of an index that has ended, or behind the last."""
        self.standbys.remove(standby)
        self._put(standby, index)

    def wait(self, find_trouble: Callable[[], str | None] = lambda: None) -> tuple[int, str | None]:
        """Wait until all processes have ended.

        Once one has failed, the others get `GRACE_SECONDS`, unless they are stopped (Ctrl-Z, SIGSTOP).

        Args:
            find_trouble: called regularly; returns why the job cannot succeed any more, None while it can.

        Returns:
            The exit status of the job, and what `find_trouble` found.
        """
        over: float | None = None
        next_search = time.monotonic() + _ORPHAN_SECONDS
        had_orphans = False
        terminated = False
        trouble = None
        while running := [process for process in self.processes if process.poll() is None]:
            now = time.monotonic()
            self._note_ends()
            if over is None and self.ending is not None:
                over = now
            if over is None and (trouble := find_trouble()) is not None:
                over = now
            if over is None and self._has_failed():
                over = now
            delay = _INTERRUPT_SECONDS if self.ending == signal.SIGINT else 0.0
            # After a failure the ranks notify each other. After a signal, or if a rank never came, nobody does.
            if over is not None and (self.ending or trouble) and not terminated and now - over >= delay:
                terminated = True
                if self._slots is not None:
                    self._slots.end_all()
                for process in running:
                    process.terminate()
            if over is not None and (
                now - over > GRACE_SECONDS or all(state(process.pid) in STOPPED for process in running)
            ):
                self._note_ends()
                self._kills = True
                break
            if now > next_search:
                next_search = now + _ORPHAN_SECONDS
                had_orphans = self._kill_orphans_of_idle_processes(had_orphans)
            time.sleep(0.02)
        self._note_ends()
        _kill_all([*self.processes, *self.standbys], self.helpers)
        if self.ending is not None:
            return 128 + self.ending, trouble
        if self.has_succeeded():
            return (1 if trouble else 0), trouble
        failed = self.first_failure()
        return (1 if failed is None else as_status(failed[1])), trouble

    def _note_ends(self) -> None:
        for index, process in enumerate(self.processes):
            if self._kills or process.returncode is None or process in self._ended:
                continue
            self._ended.append(process)
            if process.returncode == -signal.SIGKILL and (kills := memory_kills()) > self._memory_kills:
                self._memory_kills = kills
                self._of_memory.append(process)
                self.tell_of_memory(index)

    def silent_end(self, index: int) -> str:
        """How the process of an index ended, in words."""
        process = self.processes[index]
        return silent_end(process.returncode, process in self._of_memory)

    def was_killed_for_memory(self, index: int) -> bool:
        """Whether the process of an index may have been killed since memory had run out."""
        return self.processes[index] in self._of_memory

    def in_order_of_ends(self) -> list[int]:
        """The indices of the processes that have ended, in the order in which that was seen; those killed come last."""
        self._note_ends()
        order = {id(process): number for number, process in enumerate(self._ended)}
        ended = [index for index, process in enumerate(self.processes) if process.returncode is not None]
        return sorted(ended, key=lambda index: order.get(id(self.processes[index]), len(order)))

    def has_followed(self, index: int) -> bool:
        """Whether the process of an index ended because of another: it said so, or was killed when others had ended."""
        said_so = self._slots is not None and self._slots.has_followed(index)
        return said_so or self.processes[index] not in self._ended

    def first_failure(self) -> tuple[int, int] | None:
        """Index and `returncode` of the process because of which the job ended, None if none failed."""
        codes = {index: code for index, code in enumerate(self._codes()) if code}
        # Python ends a process by SIGINT that has reported a KeyboardInterrupt.
        ending = [one for one, code in codes.items() if code == -signal.SIGINT or self.ends_job(one, code)]
        ended = [self.processes.index(process) for process in self._ended if process in self.processes]
        has_followed = self._slots.has_followed if self._slots is not None else lambda index: False
        if not codes:
            return None
        first = first_cause({one: codes[one] for one in ending or codes}, ended, has_followed)
        return first, codes[first]

    def has_succeeded(self) -> bool:
        """Whether the job has: a process ended normally, and none in a way that ends the others."""
        return 0 in self._codes() and not self._has_failed()

    def _has_failed(self) -> bool:
        """Whether the end of a process ends the job."""
        return any(code and self.ends_job(index, code) for index, code in enumerate(self._codes()))

    def _codes(self) -> list[int | None]:
        """The `returncode` of each process, None if it runs or is out."""
        return [
            None if process.returncode is None or self.is_out(index) else process.returncode
            for index, process in enumerate(self.processes)
        ]

    def ends_job(self, index: int, code: int | None) -> bool:
        """Whether the others are to end after the process of an index; `code` is its `returncode`, None if it runs."""
        if not code or not self._recovers:
            return bool(code)
        return is_failure(code) and not (self._slots is not None and self._slots.died_silently(index))

    def _kill_orphans_of_idle_processes(self, had_orphans: bool) -> bool:
        """Kill orphans once no rank runs any more: mpirun waits for every process that could still print.

        Args:
            had_orphans: what this returned last time. Ranks that are just being started look the same for a moment.
        """
        family = children()
        own = [process.pid for process in self.processes]
        known = self.own_helpers().union(own, [one.pid for one in (*self.standbys, *self.helpers)])
        orphans = [pid for pid in family.get(os.getpid(), []) if pid not in known]
        is_busy = any(family.get(pid) for pid in own)
        if had_orphans and not is_busy:
            for pid in [*orphans, *(below for orphan in orphans for below in descendants(orphan, family))]:
                _kill(pid)
        return bool(orphans) and not is_busy


def _kill_all(processes: Sequence[subprocess.Popen[bytes]], spared: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """Kill processes that still run, and then the descendants of this process, until none is left but those spared."""
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


def _family(spared: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """The descendants of this process, without those that are spared and theirs."""
    found = children()
    kept = [pid for one in spared for pid in (one.pid, *descendants(one.pid, found))]
    return set(descendants(os.getpid(), found)).difference(kept)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)  # an orphan that this process has adopted
