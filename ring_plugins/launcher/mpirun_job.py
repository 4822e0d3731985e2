"""Follows an mpirun that starts a job: one that hangs is ended, and one that has lost a host does not end with 0.

**A hung mpirun.** Open MPI 5's mpirun now and then does not end when the last rank has ended, and would wait for ever
(https://github.com/openpmix/prrte/issues/1839). Three signs show that nothing is left to wait for:

- All ranks run on this host, where mpirun is their parent, and nothing below it has been alive for some seconds, though
  something was before.
- A rank has failed, and half a minute later mpirun still runs, on whatever hosts. It ends the others itself, and the
  ranks give each other five seconds.
- On several hosts, no rank has been alive here for some seconds, and the other hosts, asked twice, have none either.
  Ranks there are nobody's children here, and how long they go on is theirs to choose. So they are asked less and less
  often while some run.

Hosts are asked only where their names are known, and only for Open MPI 5: ranks of others are not told apart from
other processes, and their launchers are not known to hang.

**A lost host.** Open MPI kills the other hosts' ranks then, and ends with status 0. Its banner on standard error is the
only sign, if mpirun is faster than the ranks, whose own connections notice a lost host too. So what it prints there
passes through this process, unchanged.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import TracebackType

from ring_plugins.core.base.errors import LaunchError
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.control.parent_notifier import ParentNotifier
from ring_plugins.core.linux.process import as_status, children, descendants, state
from ring_plugins.launcher import mpirun, preflight
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.launch_plan import LaunchPlan
from ring_plugins.launcher.processes import Popen, Processes

_DEAF = "ended every rank because the thread that reads mpirun's errors died; its traceback is above."
#: Seconds without a living process below mpirun. It ends within one second of its last rank otherwise.
IDLE_SECONDS = 10.0
#: Seconds after the first failure of a rank.
FAILED_SECONDS = 30.0
#: Seconds between two looks, of some milliseconds each.
_LOOK_EVERY = 1.0
#: Seconds between two questions to the other hosts: at first, and at most.
ASK_EVERY, _ASK_AT_MOST = 30.0, 600.0
#: Seconds for a host to answer.
_ANSWER_SECONDS = 20.0
_OVER = ("Z", "X", "")

_ANSWER = re.compile(r"^ring ranks: (\d+) (\d+)$", re.MULTILINE)
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
        others = _other_hosts(plan, process.pid, processes)
        hangs = HungMpirun(process.pid, plan.is_local, notifier.first_message, others)

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


def _other_hosts(plan: LaunchPlan, pid: int, processes: Processes) -> OtherHosts | None:
    """The hosts to ask whether ranks still run there, None if that is not possible."""
    hosts = [part.host for part in plan.job.shares if part.ranks and not is_this_host(part.host)]
    is_known = plan.mpirun is not None and plan.mpirun.uses_prrte and not plan.is_local and plan.job.shares
    return OtherHosts(preflight.login(plan.job), hosts, pid, processes) if is_known else None


def _question(pid: int) -> str:
    """A command that prints how many daemons of a PRRTE job, and how many of its ranks, a host runs.

    A job is named after its mpirun's process id. Daemons have its name on their command lines, with 0 behind the @, and
    ranks and what they have started have it in their environments, with another number.
    """
    count = 'cat /proc/[0-9]*/{} 2>/dev/null | tr "\\0" "\\n" | grep -c "{}"'
    daemons = count.format("cmdline", f"[-]{pid}@0$")  # the brackets keep this command from finding itself
    ranks = count.format("environ", f"^PMIX_NAMESPACE=.*-{pid}@[1-9]")
    return "sh -c " + shlex.quote(f'echo "ring ranks: $({daemons}) $({ranks})"')


class OtherHosts:
    """Asks hosts whether ranks of a job run there, without waiting for their answers.

    Args:
        login: ssh or what replaces it, with its options; gets a host and a command.
        hosts: their names.
        pid: of the job's mpirun.
        processes: of this host.
    """

    def __init__(self, login: Sequence[str], hosts: Sequence[str], pid: int, processes: Processes) -> None:
        self._login, self._hosts, self._question = tuple(login), tuple(hosts), _question(pid)
        self._processes = processes
        self._asked: list[Popen] = []
        self._deadline = 0.0

    def ask(self) -> None:
        """Ask all hosts."""
        self._deadline = time.monotonic() + _ANSWER_SECONDS
        for host in self._hosts:
            command = [*self._login, host, self._question]
            with contextlib.suppress(LaunchError):  # then the host's answer is missing
                self._asked.append(
                    self._processes.start(
                        command, os.environ, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, is_helper=True
                    )
                )

    @property
    def is_asking(self) -> bool:
        """Whether answers are still to be taken."""
        return bool(self._asked)

    def answers(self) -> list[tuple[int, int]] | None:
        """Daemons and ranks of each host that has answered, None while some may still."""
        if any(process.poll() is None for process in self._asked) and time.monotonic() < self._deadline:
            return None
        found = []
        for process in self._asked:
            process.kill()
            printed, _ = process.communicate()
            if answer := _ANSWER.search(printed.decode(errors="replace")):
                found.append((int(answer[1]), int(answer[2])))
        self._asked.clear()
        return found

    def has_no_rank(self, answers: list[tuple[int, int]], daemons_are_gone: bool) -> bool:
        """Whether these answers show that the hosts run no rank any more.

        Args:
            answers: of `answers`.
            daemons_are_gone: whether the logins that started the daemons are over. Otherwise an answer counts only if
                the daemon could be seen, and so its ranks could be.
        """
        return len(answers) == len(self._hosts) and all(
            not ranks and (daemons or daemons_are_gone) for daemons, ranks in answers
        )


class HungMpirun:
    """Tells why an mpirun has to be ended, once it has to.

    Args:
        pid: of mpirun.
        is_local: whether all of its ranks run on this host.
        failure: returns the first failure that a rank of this host has told, None if there is none.
        others: the other hosts of the job, None if they cannot be asked.
    """

    def __init__(
        self, pid: int, is_local: bool, failure: Callable[[], str | None], others: OtherHosts | None = None
    ) -> None:
        self._pid, self._is_local, self._failure, self._others = pid, is_local, failure, others
        self._next_look = 0.0
        self._had_processes = False
        self._idle_since = self._failed_since = 0.0
        self._ask_at, self._pause, self._had_no_rank = 0.0, ASK_EVERY, False

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
        alive = [pid for pid in descendants(self._pid, children()) if state(pid) not in _OVER]
        if any(self._is_local or _is_rank(pid) for pid in alive):
            self._had_processes, self._idle_since = True, 0.0
            return None
        self._idle_since = self._idle_since or now
        if now - self._idle_since <= IDLE_SECONDS:
            return None
        if self._is_local and self._had_processes:
            return (
                f"mpirun still ran {IDLE_SECONDS:g} s after the last of its processes had ended; ended it. "
                "How they ended is unknown."
            )
        if self._others is not None and self._is_over_elsewhere(self._others, now, daemons_are_gone=not alive):
            return "mpirun still ran after the last rank had ended on all hosts; ended it. How they ended is unknown."
        return None

    def _is_over_elsewhere(self, others: OtherHosts, now: float, daemons_are_gone: bool) -> bool:
        """Whether the other hosts have twice in a row said that they run no rank, though some host did before."""
        if not others.is_asking:
            if now >= self._ask_at:
                self._ask_at = now + self._pause
                others.ask()
            return False
        answers = others.answers()
        if answers is None:
            return False
        self._had_processes |= any(ranks for _, ranks in answers)
        had_no_rank = self._had_no_rank
        self._had_no_rank = self._had_processes and others.has_no_rank(answers, daemons_are_gone)
        self._pause = ASK_EVERY if self._had_no_rank else min(2 * self._pause, _ASK_AT_MOST)
        self._ask_at = now + self._pause
        return had_no_rank and self._had_no_rank


def _is_rank(pid: int) -> bool:
    """Whether a process below mpirun is a rank or started by one, rather than a login on another host."""
    try:
        return b"PMIX_NAMESPACE=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True  # it has just ended, or may not be read


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
