"""The supervisor of one host's ranks, in a job whose ranks `ring run` starts itself.

Each host of a job has one; coordinator.py explains how they work together. It starts the ranks of its host, and other
processes in the places of those that are lost (replacements.py). It tells the coordinator how they ended, and ends all
of them when the coordinator says so, or is gone (coordinator_link.py).

On the host of the coordinator it runs in the same process. On another host it is a process of its own, whose exit
status is the job's. What the ranks print passes through it. So if the login by which it was started is lost, its own
pipe breaks, not theirs.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TextIO, cast

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, name_ranks
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.core.linux.process import STOPPED, state
from ring_plugins.core.members.join_descriptors import joiners_here
from ring_plugins.core.rendezvous.spawn import ending, is_failure, silent_end
from ring_plugins.launcher.added_slots import AddedSlot, world_ranks
from ring_plugins.launcher.coordinator_link import Connection, HostJob, Link
from ring_plugins.launcher.meeting import AtAnAddress, Meeting
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.probe import report
from ring_plugins.launcher.replacements import Replacements, has_vanished
from ring_plugins.launcher.standbys import Standbys
from ring_plugins.launcher.supervision import Supervisor

#: Bytes of one write to a terminal or login that may be slow, and milliseconds between two looks whether it is lost.
_WRITE, _LOOK = 4096, 200
#: Seconds after which a stopped process that waits to join is killed, on a host without members, who would do that.
_PATIENCE = 10.0
#: Seconds between two looks at ranks and messages.
_TICK = 0.02


class _Outlet:
    """Standard output or error; what is written to it is dropped once the login through which it leaves is lost.

    Args:
        descriptor: of the file.
        link: to the coordinator, which is lost when the host of the login is.
    """

    def __init__(self, descriptor: int, link: Link) -> None:
        self._descriptor, self._link, self._closed = descriptor, link, False
        os.set_blocking(descriptor, False)

    def write(self, text: str) -> int:
        data = memoryview(text.encode(errors="replace"))
        while data and not self._closed:
            try:
                data = data[os.write(self._descriptor, data[:_WRITE]) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                if not poll.poll(_LOOK) and self._link.is_lost:
                    self._closed = True
            except OSError:
                self._closed = True
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""


class HostRanks:
    """The ranks of this host.

    Args:
        job: what to run.
        link: to the coordinator.
        supervisor: starts and ends processes.
        meeting: where the ranks find the others.
    """

    def __init__(self, job: HostJob, link: Connection, supervisor: Supervisor, meeting: Meeting) -> None:
        self._job, self._link, self._supervisor, self._meeting = job, link, supervisor, meeting
        self._slots, self._has_told = meeting.slots, False
        self._joined = list[int]()
        self._members, self._joiners = -1, list[dict[str, Any]]()  # as the coordinator knows them
        self._stopped: dict[int, float] = {}  # since when processes are that wait to join
        self._replacements: Replacements | None = None
        supervisor.is_out = self._is_out
        if job.recovers:  # else it is the last line
            supervisor.tell_of_memory = lambda local: _tell_user(
                f"rank {self._names[local]} {supervisor.silent_end(local)}."
            )
        #: The job's exit status, once the coordinator has said it.
        self._status: int | None = None

    def run(self) -> int:
        """Run them to the job's end, and return its exit status."""
        is_first = 0 in self._job.ranks and isinstance(self._meeting, AtAnAddress)
        with reserve_port() if is_first else contextlib.nullcontext() as reserved:
            port = reserved.getsockname()[1] if reserved is not None else 0
            told = {} if self._job.question is None else {"report": report(self._job.question)}
            self._link.send("here", {"host": socket.gethostname(), "port": port, **told})
            start = self._wait_for("start")
            if start is None:
                return 1 if self._status is None else self._status
            with Relay(self._job.tag_output, self._job.output_directory, always=self._job.relays) as relay:
                self._start(start, relay)
                status, why = self._supervisor.wait(self._find_trouble)
                while self._job.is_added and why is None and self._goes_on():
                    status, why = self._supervisor.wait(self._find_trouble)
            if self._supervisor.ending is None and self._status is None:
                why = why or self._early_end()  # of the last rank here, at whose end `wait` returns at once
            self._tell_of_empty_places()
            ended = {"ranks": self._ends(), "why": why, "replaced": self._replaced(), "added": self._added()}
            self._link.send("ended", ended)
            if self._status is None and self._supervisor.ending is None:
                self._status = self._wait_for("over")
        own = status or (0 if self._supervisor.has_succeeded() else 1)
        return own if self._status is None else self._status

    def _start(self, start: Mapping[str, Any], relay: Relay) -> None:
        job, supervisor = self._job, self._supervisor
        inherited = {name: value for name, value in os.environ.items() if name != config.JOINS.name}
        if isinstance(self._meeting, AtAnAddress):
            self._meeting.begin(start)

        def start_rank(local: int | None, world_rank: int) -> subprocess.Popen[bytes]:
            """Start a rank, a process that takes the slot of one, or, without a slot, a standby."""
            rank, is_new = world_rank if local is None else self._names[local], world_rank >= job.size
            was_there = local is None or local < len(supervisor.processes)
            out, err = relay.files(rank, again=is_new and was_there)
            process = supervisor.start(
                job.command,
                {
                    **inherited,
                    **job.environment,
                    **self._meeting.environment(local, rank, len(self._names), is_new),
                    **({config.JOINS.name: str(world_rank)} if is_new else {}),
                },
                pass_fds=[self._meeting.segment.fd],
                stdin=None if job.reads_input and world_rank == 0 else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                index=local if is_new else None,
                is_standby=local is None,
            )
            if is_new:
                relay.start()
            return process

        for local, rank in enumerate(job.ranks):
            start_rank(local, rank)
        relay.start()
        if job.replaces:
            unused = iter(world_ranks(job.index, None if job.is_added else job.hosts, max(job.size, job.most)))
            standbys = Standbys(supervisor, self._slots, job.standbys, unused, partial(start_rank, None), relay.rename)
            self._replacements = Replacements(
                supervisor, self._slots, job.ranks, job.size, unused, start_rank, _tell_user, standbys
            )
        if job.is_added:
            self._take("added", start["added"])
            self._goes_on()

    def _goes_on(self) -> bool:
        """Whether processes of this host, which has been added to the job, are still to join it."""
        if self._status is None and self._supervisor.ending is None and self._replacements is not None:
            for kind, body in self._link.read():
                self._take(kind, body)
            self._slots.others_let_join &= not self._link.is_lost
            self._replacements.tick()
        return any(code is None for code in self._codes())

    def _wait_for(self, kind: str) -> Any:
        """The body of the coordinator's next message of a kind; None if the job, or the coordinator, ends before."""
        while self._supervisor.ending is None and self._status is None:
            for found, body in self._link.read():
                if found == kind:
                    return body
                self._take(found, body)
            if self._link.is_lost:
                return None
            time.sleep(_TICK)
        return None

    def _take(self, kind: str, body: Any) -> None:
        """Do what a message of the coordinator says."""
        if kind == "over":
            self._status = int(body)
        elif kind == "added" and self._replacements is not None:
            slots = [AddedSlot(*one) for one in body["slots"]]
            self._replacements.follow([(one.slot, one.attempt) for one in slots if one.host == self._job.index])
            self._meeting.note_in_use(body["in use"])
        elif kind == "joiners" and isinstance(self._meeting, AtAnAddress):
            self._meeting.remote_joiners.write(body)
            self._slots.num_remote_joiners = len(body)
        elif kind == "alone":
            self._slots.others_let_join = False
        elif kind == "join info?" and isinstance(self._meeting, AtAnAddress):
            self._link.send("join info", self._meeting.join_info.read())
        elif kind == "end":
            self._supervisor.end(signal.Signals(body))

    def _tell_of_empty_places(self) -> None:
        """If all ranks of this host are lost, say that nobody takes their places: no member here lets others join."""
        codes = self._codes()
        lost = all((code or 0) < 0 or self._is_gone(local) for local, code in enumerate(codes))
        is_over = self._status is not None or self._supervisor.ending is not None
        if not self._job.most:  # else it may have grown
            is_over |= self._job.size - len(self._job.ranks) < config.MIN_RANKS.get(self._job.environment)
        ranks = [rank for local, rank in enumerate(self._names) if not self._slots.is_new(local)]
        if self._replacements is not None and lost and ranks and self._job.hosts > 1 and not is_over:
            _tell_user(
                f"nobody takes the place of {name_ranks(ranks)}: all ranks of {socket.gethostname()} are "
                "lost. Those of other hosts go on."
            )

    def _find_trouble(self) -> str | None:
        """Why the ranks of this host cannot go on; also tells the coordinator of the first that fails."""
        for kind, body in self._link.read():
            self._take(kind, body)
        if self._link.is_orphaned:
            self._supervisor.end(signal.SIGTERM)
        if self._replacements is not None:
            self._replacements.tick()
            self._tell_of_added_ranks(self._replacements)
        trouble = self._early_end()
        if not self._has_told:
            failed = [local for local, code in enumerate(self._codes()) if self._ends_job(local, code)]
            if trouble or failed:
                self._has_told = True
                self._link.send("failed", {"ranks": self._ends(), "why": trouble})
        return trouble

    def _tell_of_added_ranks(self, replacements: Replacements) -> None:
        """Tell the coordinator which have joined, and which will not."""
        if joined := [rank for rank in self._added() if rank not in self._joined]:
            self._joined += joined
            self._link.send("joined", joined)
        while replacements.given_back:
            self._link.send("given back", replacements.given_back.pop())
        if self._slots.others_let_join:
            self._slots.others_let_join = not self._link.is_lost
            self._tell_of_joiners()

    def _tell_of_joiners(self) -> None:
        """Tell the coordinator how many members there are here, and who waits if there are none."""
        codes = self._codes()
        joined = [local for local, code in enumerate(codes) if code is None and not self._is_out(local)]
        joiners = []
        for one, address, told in joiners_here(self._slots) if not joined else ():
            if state(one.pid) not in STOPPED:
                self._stopped.pop(one.pid, None)
                joiners.append({"rank": one.rank, "liveness": list(address), **told})
            elif time.monotonic() - self._stopped.setdefault(one.pid, time.monotonic()) > _PATIENCE:
                with contextlib.suppress(OSError):
                    os.kill(one.pid, signal.SIGKILL)
                _tell_user(f"process {one.pid}, which was to join as rank {told['slot']}, was stopped. It was killed.")
        if (len(joined), joiners) != (self._members, self._joiners):
            self._members, self._joiners = len(joined), joiners
            self._link.send("members", {"members": self._members, "joiners": joiners})

    def _added(self) -> list[int]:
        """The ranks by which the job has grown on this host."""
        return [self._names[local] for local in self._replacements.added] if self._replacements is not None else []

    @property
    def _names(self) -> Sequence[int]:
        """What users call the ranks of this host."""
        return self._job.ranks if self._replacements is None else self._replacements.names

    def _early_end(self) -> str | None:
        """A rank that ended before or in init(), where the others wait for it."""
        for local, code in enumerate(self._codes()):
            if code is None or self._is_out(local) or not (where := self._meeting.is_awaited(local, code < 0)):
                continue
            how = silent_end(code) if code < 0 else f"ended ({ending(code)})"
            return (
                f"rank {self._names[local]} {how} before it {where} ring_plugins.init(), where the others wait for "
                f"it{'' if code < 0 else '; its own output says why'}."
            )
        return None

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._supervisor.processes]

    def _ends_job(self, local: int, code: int | None) -> bool:
        return self._supervisor.ends_job(local, code) and not self._is_out(local)

    def _is_out(self, local: int) -> bool:
        """Whether the job goes on whatever a rank's exit status is: it is no member, or the others do without it."""
        has_not_joined = self._replacements is not None and self._replacements.is_out(local)
        return self._slots.is_excluded(local) or self._is_gone(local) or has_not_joined

    def _is_gone(self, local: int) -> bool:
        """Whether a rank has left, or was lost although it ended with status 0."""
        return self._slots.has_left(local) or has_vanished(self._supervisor, self._slots, local)

    def _ends(self) -> list[list[Any]]:
        """Each rank that has ended, in the order of their ends, as fields of `End`."""
        ends: list[list[Any]] = []
        late = self._replacements.late if self._replacements is not None else ()
        for local in self._supervisor.in_order_of_ends():
            code, slots = self._supervisor.processes[local].returncode, self._slots
            if local in late:
                how = "late"
            elif (is_failure(code) and slots.died_silently(local)) or has_vanished(self._supervisor, slots, local):
                how = "lost"
            elif slots.has_left(local) or slots.is_excluded(local):
                how = "left" if slots.has_left(local) else "excluded"
            elif self._supervisor.ends_job(local, code):
                how = "followed" if self._supervisor.has_followed(local) else "failed"
            else:
                how = ""
            ends.append([self._names[local], code, how, self._supervisor.was_killed_for_memory(local)])
        return ends

    def _replaced(self) -> list[list[int]]:
        """Each rank whose place another process has taken, and how often."""
        if self._replacements is None:
            return []
        return [[self._names[local], times] for local, times in self._replacements.filled.items()]


def _tell_user(text: str) -> None:
    print(f"ring run: {text}", file=sys.stderr, flush=True)


def run(job: HostJob, prepare: Callable[[Link], None] = lambda link: None) -> int:
    """Run this host's ranks, and return the job's exit status.

    Args:
        job: what to run.
        prepare: called once the coordinator is reached.
    """
    meeting = AtAnAddress(job)
    with Supervisor(recovers=True, slots=meeting.slots) as supervisor:
        link = Link(job, lambda: supervisor.signalled is not None)
        try:
            prepare(link)
            return HostRanks(job, link, supervisor, meeting).run()
        finally:
            link.close()


def _print_through(link: Link) -> None:
    sys.stdout, sys.stderr = cast("TextIO", _Outlet(1, link)), cast("TextIO", _Outlet(2, link))


def main() -> int:
    """Run the job that standard input describes."""
    # The end of the login by which this process was started: the ranks go on without it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = HostJob.unpack(sys.stdin.buffer.read())
    try:
        return run(job, _print_through)
    except LaunchError as error:
        print(f"ring run: {error}", file=sys.stderr)
        return 1
