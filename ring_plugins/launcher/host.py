"""The supervisor of one host's ranks, in a job whose ranks `ring run` starts itself.

Each host of a job has one; coordinator.py explains how they work together. It starts the ranks of its host, and other
processes in the places of those that are lost (restart.py). It tells the coordinator how they ended, and ends all
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
from collections.abc import Callable
from typing import Any, TextIO, cast

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import LaunchError, name_ranks
from ring_plugins.core.base.member import Member
from ring_plugins.core.linux.interfaces import reserve_port
from ring_plugins.core.linux.process import STOPPED, state
from ring_plugins.core.members.join_descriptors import joiners_here
from ring_plugins.launcher.added_slots import AddedSlot, world_ranks
from ring_plugins.launcher.coordinator_link import HostJob, Link
from ring_plugins.launcher.job_hosts import FAILED, OUT, Host, OwnHost, verdict
from ring_plugins.launcher.meeting import Meeting
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.probe import report
from ring_plugins.launcher.processes import Popen, Processes
from ring_plugins.launcher.restart import SlotProcesses

#: Bytes of one write to a terminal or login that may be slow, and milliseconds between two looks whether it is lost.
_WRITE, _LOOK = 4096, 200
#: Seconds after which a stopped process that waits to join is killed, on a host without members, who would do that.
_PATIENCE = 10.0
#: Seconds between two looks at ranks and messages.
_TICK = 0.02


class _Outlet:
    """Standard output or error. Drops what is written once the login that carries it is lost.

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


class Supervisor:
    """Starts this host's ranks, replaces them, and reports how they end.

    Args:
        job: what to run.
        link: to the coordinator.
        processes: of this host.
        meeting: where the ranks find the others.
    """

    def __init__(self, job: HostJob, link: Link | OwnHost, processes: Processes, meeting: Meeting) -> None:
        self._job, self._link, self._processes, self._meeting = job, link, processes, meeting
        self._rows = meeting.slots
        self._relay = Relay(job.tag_output, job.output_directory, always=not meeting.in_memory)
        self._inherited = {name: value for name, value in os.environ.items() if name != config.JOINS.name}
        unused = world_ranks(job.index, None if job.is_added else job.hosts, max(job.size, job.most))
        self._slots = SlotProcesses(
            self._rows,
            job.ranks,
            job.size,
            self._start,
            tell_user,
            job.recovers,
            iter(unused) if job.replaces else None,
            job.standbys,
            self._relay.rename,
        )
        self._has_told_failure = False
        self._published: dict[str, Any] = {"joined": []}
        self._stopped: dict[int, float] = {}  # since when processes are that wait to join
        #: The job's exit status, once the coordinator has said it.
        self._status: int | None = None

    def run(self) -> int:
        """Run them to the job's end, and return its exit status."""
        needs_port = 0 in self._job.ranks and not self._meeting.in_memory
        with reserve_port() if needs_port else contextlib.nullcontext() as reserved:
            port = reserved.getsockname()[1] if reserved is not None else 0
            told = {} if self._job.question is None else {"report": report(self._job.question)}
            self._link.send("here", {"host": socket.gethostname(), "port": port, **told})
            start = self._wait_for("start")
            if start is None:
                return 1 if self._status is None else self._status
            self._meeting.begin(start)
            with self._relay:
                self._slots.start_first()
                self._relay.start()
                if self._job.is_added:
                    self._take("added", start["added"])
                why = self._processes.wait(self._running, self._find_trouble, self._rows.end_all)
                self._slots.are_killed = True
            if not self._is_over:
                why = why or self._early_end()  # of the last rank here, at whose end `wait` returns at once
                self._tell_of_empty_places()
            ends = self._slots.ends()
            replaced = [list(one) for one in self._slots.replaced.items()]
            self._link.send("ended", {"ranks": ends, "why": why, "replaced": replaced, "added": self._slots.added})
            if not self._is_over:
                self._status = self._wait_for("over")
        if self._status is not None:
            return self._status
        # What the ranks of this host alone make of it.
        if self._processes.ending is not None:
            return 128 + self._processes.ending
        own = Host("", self._job.ranks)
        own.report, own.why = ends, why
        return verdict([own], [end for end in ends if end.how in FAILED], self._job.size)[0]

    @property
    def _is_over(self) -> bool:
        """Whether the job has ended, or is to end."""
        return self._status is not None or self._processes.ending is not None

    def _start(self, local: int | None, world_rank: int) -> Popen:
        """Start a rank or its successor in a slot, or, without a slot, a standby."""
        job, names = self._job, self._slots.names
        rank, is_new = world_rank if local is None else names[local], world_rank >= job.size
        is_again = is_new and (local is None or rank != world_rank)
        out, err = self._relay.files(rank, again=is_again)
        process = self._processes.start(
            job.command,
            {
                **self._inherited,
                **job.environment,
                **self._meeting.environment(local, rank, len(names), is_new),
                **({config.JOINS.name: str(world_rank)} if is_new else {}),
            },
            pass_fds=[self._meeting.segment.fd],
            stdin=None if world_rank == 0 and self._meeting.in_memory else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        if is_new:
            self._relay.start()
        return process

    def _running(self) -> list[Popen]:
        if not (running := self._slots.running()) and self._job.is_added and not self._is_over:
            self._receive()  # processes of this host may still have to join
            if not self._has_told_failure:
                self._slots.tick()
            running = self._slots.running()
        return running

    def _receive(self) -> None:
        """Do what the coordinator says."""
        for kind, body in self._link.read():
            self._take(kind, body)
        self._rows.others_let_join &= not self._link.is_lost
        if self._link.is_orphaned:
            self._processes.end(signal.SIGTERM)

    def _wait_for(self, kind: str) -> Any:
        """The body of the coordinator's next message of a kind; None if the job, or the coordinator, ends before."""
        while not self._is_over:
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
        elif kind == "added" and self._job.replaces:
            slots = [AddedSlot(*one) for one in body["slots"]]
            self._slots.follow([(one.slot, one.attempt) for one in slots if one.host == self._job.index])
            self._meeting.note_in_use(body["in use"])
        elif kind == "leaving":
            self._slots.let_leave(body)
        elif kind == "joiners":
            self._rows.tell_of_remote_joiners(body)
        elif kind == "alone":
            self._rows.others_let_join = False
        elif kind == "join info?":
            self._link.send("join info", self._rows.join_info.read())
        elif kind == "end":
            self._processes.end(signal.Signals(body))

    def _find_trouble(self) -> str | None:
        """Why the ranks of this host cannot go on, "" if one has failed; tells the coordinator so."""
        self._receive()
        self._slots.tick()
        self._tell_of_added_ranks()
        trouble = self._early_end()
        if trouble is None and not set(FAILED).isdisjoint(self._slots.hows()):
            trouble = ""
        if trouble is not None:
            self._has_told_failure = True
            self._link.send("failed", {"ranks": self._slots.ends(), "why": trouble or None})
        return trouble

    def _early_end(self) -> str | None:
        """A rank that ended before or in init(), where the others wait for it."""
        for local, (code, how) in enumerate(zip(self._slots.codes(), self._slots.hows(), strict=True)):
            if code is None or how in OUT or not (where := self._meeting.is_awaited(local, code < 0)):
                continue
            return (
                f"rank {self._slots.names[local]} {self._slots.silent_end(local)} before it {where} "
                f"ring_plugins.init(), where the others wait for it{'' if code < 0 else '; its own output says why'}."
            )
        return None

    def _tell_of_empty_places(self) -> None:
        """If all ranks of this host are lost, say that nobody takes their places: no member here lets others join."""
        slots, job = self._slots, self._job
        ends = zip(slots.codes(), slots.hows(), strict=True)
        lost = all((code or 0) < 0 or how in ("left", "lost") for code, how in ends)
        # With `most` the job may have grown.
        goes_on = job.most or job.size - len(job.ranks) >= config.MIN_RANKS.get(job.environment)
        ranks = [rank for local, rank in enumerate(slots.names) if not self._rows.is_new(local)]
        if job.replaces and lost and ranks and job.hosts > 1 and goes_on and not slots.were_let_go:
            tell_user(
                f"nobody takes the place of {name_ranks(ranks)}: all ranks of {socket.gethostname()} are "
                "lost. Those of other hosts go on."
            )

    def _tell_of_added_ranks(self) -> None:
        """Tell the coordinator which have joined, and which will not, and on an added host, who is there."""
        self._publish("joined", self._slots.added)
        while self._slots.given_back:
            self._link.send("given back", self._slots.given_back.pop())
        if self._rows.others_let_join:
            ends = zip(self._slots.codes(), self._slots.hows(), strict=True)
            members = sum(code is None and how not in OUT for code, how in ends)
            self._publish("members", {"members": members, "joiners": [] if members else self._joiners()})

    def _publish(self, kind: str, body: Any) -> None:
        """Send a value to the coordinator in full, if it has changed."""
        if self._published.get(kind) != body:
            self._published[kind] = body
            self._link.send(kind, body)

    def _joiners(self) -> list[Member]:
        """Who waits to join. On a host without members, nobody else ends one that is stopped."""
        joiners = []
        for one in joiners_here(self._rows):
            if state(one.pid) not in STOPPED:
                self._stopped.pop(one.pid, None)
                joiners.append(one)
            elif time.monotonic() - self._stopped.setdefault(one.pid, time.monotonic()) > _PATIENCE:
                with contextlib.suppress(OSError):
                    os.kill(one.pid, signal.SIGKILL)
                tell_user(f"process {one.pid}, which was to join as rank {one.slot}, was stopped. It was killed.")
        return joiners


def tell_user(text: str) -> None:
    """Print a line for the user beside what ranks print."""
    print(f"ring run: {text}", file=sys.stderr, flush=True)


def run(job: HostJob, prepare: Callable[[Link], None] = lambda link: None) -> int:
    """Run this host's ranks, and return the job's exit status.

    Args:
        job: what to run.
        prepare: called once the coordinator is reached.
    """
    with Processes() as processes:
        link = Link(job, lambda: processes.signalled is not None)
        try:
            prepare(link)
            return Supervisor(job, link, processes, Meeting(job)).run()
        finally:
            link.close()


def main() -> int:
    """Run the job that standard input describes."""
    # The end of the login by which this process was started: the ranks go on without it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job = HostJob.unpack(sys.stdin.buffer.read())

    def print_through(link: Link) -> None:
        sys.stdout, sys.stderr = cast("TextIO", _Outlet(1, link)), cast("TextIO", _Outlet(2, link))

    try:
        return run(job, print_through)
    except LaunchError as error:
        print(f"ring run: {error}", file=sys.stderr)
        return 1
