"""Follows a job to its end: starts it on its hosts, and goes on when ranks, or whole hosts, are lost.

mpirun ends all ranks as soon as one of them, a host, or one of its own connections is lost. So a job that is to go on
does without mpirun: each host has a supervisor (host.py), which starts the ranks of that host.

    ring run ─┬─ rank 0, rank 1
              └─ ssh ── supervisor of host2 ── rank 2, rank 3

The *coordinator* follows the whole job. It is in `ring run`, as is the supervisor of that host. Under mpirun, torchrun
and srun, the first process of each host becomes its supervisor, and on rank 0's host the coordinator, too
(core/rendezvous/launcher_shim.py). A job of one host has a coordinator and one supervisor in one process.

Supervisors of other hosts connect to the coordinator, with a secret, and exchange JSON with it. The one in the same
process hands the same messages over (`OwnHost`):

    supervisor -> coordinator   ["here", {host, port}]     it runs; rank 0 can listen at the port
                                ["failed", {ranks, why}]   a rank has ended in a way that ends the job
                                ["ended", {ranks, why}]    all of its ranks have ended
                                ["joined", ranks]          added ranks have joined
                                ["given back", rank]       an added rank will not join (added_slots.py)
    coordinator -> supervisor   ["start", {address, port, secret}]   all are here: where rank 0 will listen
                                ["added", {in use, slots}]         which hosts have added ranks
                                ["end", signal]            end all ranks
                                ["over", status]           the job has ended

and a few more if `ring add-ranks` names a host that has no ranks (added_hosts.py).

**What may be lost.**

- A rank: its supervisor goes on with the others.
- All ranks of a host, its supervisor, or the host: the coordinator goes on with the other hosts.
- A login: what that host prints is lost.
- The coordinator's host: the other supervisors go on without a coordinator, and nobody sees their exit status.

Which ranks go on is for the ranks to agree (control/consensus.py). Nobody here decides that.

**What ends the job.** If the coordinator is killed while its host lives, all supervisors end their ranks, so that
nothing of a job is left behind. A rank that ends with an exit status, rather than by a signal, ends the job as it does
on one host: its supervisor says so, and some seconds later the coordinator ends all.

Considered and rejected: Open MPI's --enable-recovery and MPICH's -disable-auto-cleanup, which keep ranks alive but not
the daemons of a lost host. One `ring run` for each host that knows nothing of the others: a job in which all ranks were
killed would end with status 0 somewhere, and Ctrl-C would end one host's ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.own_python import own_python, own_python_elsewhere
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.linux.interfaces import address_towards, own_addresses
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket, to_json
from ring_plugins.core.net.tcp_options import end_when_silent
from ring_plugins.core.rendezvous.spawn import silent_end
from ring_plugins.launcher.added_hosts import AddedHosts
from ring_plugins.launcher.added_slots import AddedSlots
from ring_plugins.launcher.coordinator_link import HostJob, read_message
from ring_plugins.launcher.growth import GrowthRequests
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.job_hosts import End, Host, read_ranks, verdict, with_ranks
from ring_plugins.launcher.mpirun import JobSpec
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.preflight import LateCheck, login
from ring_plugins.launcher.processes import GRACE_SECONDS, Processes

#: Connections that the coordinator keeps beside those of supervisors, and those that wait in the kernel.
_OTHER_CONNECTIONS, _BACKLOG = 64, 1024
#: Seconds that supervisors have to report after they were told to end: as long as theirs give to the ranks, and more.
_END_SECONDS = 18.0
#: Seconds that supervisors and logins have to end after the job.
_LEAVE_SECONDS = 10.0
#: Seconds between two looks.
_TICK = 0.05
#: What runs the supervisor of a host.
_SUPERVISE = "from ring_plugins.launcher.host import main; sys.exit(main())"

Notify = Callable[[str], None]


class Coordinator:
    """Knows the supervisors of all hosts of a job. A context manager: leaving it closes all connections.

    Args:
        hosts: their names, with the ranks of each.
        processes: of this host; a signal that ends them ends the job.
        notify: shows one line to the user.
        port: where to listen, 0 for a new one; None if all supervisors are in this process.
        key: a secret; a new one by default.
        most: up to how many ranks the job may grow; 0 for no more than at the start.
        min_ranks: with how many ranks the job goes on.
        takes_requests: whether `ring add-ranks` may ask it for more.
        logins: start the supervisors of other hosts; None if those come by themselves.

    Attributes:
        port, key: for `HostJob`.
        result: the job's exit status, and a line for the user, once it is over.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, Sequence[int]]],
        processes: Processes,
        notify: Notify,
        port: int | None,
        key: str = "",
        most: int = 0,
        min_ranks: int = 1,
        takes_requests: bool = False,
        logins: Logins | None = None,
    ) -> None:
        self._hosts = [Host(name, ranks) for name, ranks in hosts]
        self._size, self._min_ranks = sum(len(ranks) for _, ranks in hosts), min_ranks
        self._processes, self._notify, self._logins = processes, notify, logins
        self._added_slots = AddedSlots(
            self._size, most, [ranks for _, ranks in hosts], lambda: self._tell_all("added", self._added_slots.told())
        )
        self._started: dict[str, Any] | None = None  # what all supervisors were told
        self._began, self._failed_at = time.monotonic(), 0.0
        #: When to wait no longer for hosts that were told to end, and why they were if the job never began.
        self._end_at, self._trouble = 0.0, ""
        self.result: tuple[int, str | None] | None = None
        self.key = key or secrets.token_hex(32)
        limit = len(self._hosts) + _OTHER_CONNECTIONS
        self._acceptor = Acceptor(self.key.encode(), Purpose.LAUNCHER, self._expects, limit)
        self._selector, self.port = selectors.DefaultSelector(), 0
        if port is not None:
            listener = socket.create_server(("", port), backlog=_BACKLOG)
            self.port = listener.getsockname()[1]
            self._acceptor.add(listener)
            self._selector.register(self._acceptor, selectors.EVENT_READ)
        self._failed: list[End] = []  # the ends that end the job, in the order in which they were told
        self._open, self._line = contextlib.ExitStack(), ProgressLine()
        self._requests = self._open.enter_context(GrowthRequests(self.add_ranks)) if takes_requests else None
        start = partial(logins.start, self) if takes_requests and logins is not None else None
        problems_of = logins.check.problems if logins is not None else lambda host, report: []
        self._added_hosts = AddedHosts(self._hosts, self._added_slots, self._tell, notify, start, problems_of)

    def __enter__(self) -> Coordinator:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._open.enter_context(self._line)
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()  # first: a supervisor that sees its connection end tries this
        for host in self._hosts:
            if host.frames is not None:
                host.frames.close()
        self._selector.close()
        self._open.close()

    def connect(self, index: int) -> OwnHost:
        """The connection of a supervisor in this process, of the host of an index."""
        self._hosts[index].inbox = []
        return OwnHost(self, self._hosts[index])

    def finish(self) -> tuple[int, str | None]:
        """Follow the job to its end; returns `result`."""
        while self.result is None:
            self.tick(_TICK)
        return self.result

    def tick(self, seconds: float = 0.0) -> None:
        """Do what is due, after waiting at most so many seconds for messages."""
        self._poll(seconds)
        if self.result is not None:
            return
        now, signalled = time.monotonic(), self._processes.signalled
        if not self._end_at and signalled is not None:
            self._end(signalled)
        elif not self._end_at and self._started is None:
            self._gather(now)
        elif not self._end_at and self._failed_at and now - self._failed_at > GRACE_SECONDS:
            self._end(signal.SIGTERM)
        if not self._failed_at and (self._failed or any(host.why for host in self._hosts)):
            self._failed_at = now
        is_over = all(host.is_over or (self._end_at and not host.is_connected) for host in self._hosts)
        if is_over or (self._end_at and now > self._end_at):
            self._finish()

    def _end(self, number: signal.Signals, patience: float = _END_SECONDS) -> None:
        self._end_at = time.monotonic() + patience
        self._tell_all("end", int(number))

    def _finish(self) -> None:
        if self._trouble:
            self.result = 1, self._trouble
        elif (signalled := self._processes.signalled) is not None:
            self.result = 128 + signalled, None
        else:
            self.result = verdict(self._hosts, self._failed, self._size)
        self._tell_all("over", self.result[0])

    def _gather(self, now: float) -> None:
        """Start the job if all supervisors have come, or end it if one does not come."""
        missing = [host.name for host in self._hosts if host.here is None]
        if not missing:
            self._start()
            return
        trouble = self._logins.trouble() if self._logins is not None else None
        if lost := [host.name for host in self._hosts if host.is_lost]:
            trouble = f"{' and '.join(lost)} ended before the job started; the output above says why."
        elif trouble is None and now - self._began > config.START_TIMEOUT.get():
            trouble = (
                f"{' and '.join(missing)} did not come within {config.START_TIMEOUT.get():g} s. Set "
                f"{config.START_TIMEOUT.name} to wait longer."
            )
        if trouble:
            self._trouble = trouble
            self._end(signal.SIGTERM, 0.0)
        came = {number: host.name for number, host in enumerate(self._hosts) if host.here is not None}
        self._line.show(lambda: arrivals(came, len(self._hosts), " to be reached"))

    def _start(self) -> None:
        self._line.remove()
        first = next(host for host in self._hosts if 0 in host.ranks)
        assert first.here is not None
        address = str(first.frames.socket.getpeername()[0]) if first.frames is not None else "127.0.0.1"
        if address.startswith("127."):  # this host, which others have reached at another address
            reached = [str(host.frames.socket.getsockname()[0]) for host in self._hosts if host.frames is not None]
            address = next((one for one in reached if not one.startswith("127.")), address)
        secret = config.SECRET.get() or secrets.token_hex(32)
        self._started = {"address": address, "port": int(first.here["port"]), "secret": secret}
        self._tell_all("start", self._started)

    def add_ranks(self, number: int, wanted: str | None) -> str:
        """Let so many added ranks join; returns an answer for the user.

        Args:
            number: how many.
            wanted: name of the host on which they are to run, None for any.
        """
        living = {index: host.name for index, host in enumerate(self._hosts) if not host.is_over}
        chosen = {index: name for index, name in living.items() if wanted is None or _is_same_host(name, wanted)}
        if self._started is None:
            return "no: the job has not begun yet"
        if not living:
            return "no: the job ends"
        if rejection := self._added_slots.rejection(number):
            return rejection
        new = wanted if not chosen else None
        if new is not None:
            if rejection := self._added_hosts.rejection(new, living.values()):
                return rejection
            chosen = {len(self._hosts): new}
        if rejection := self._added_slots.rejection_of(chosen, number):
            return rejection
        if new is not None:
            self._added_hosts.add(new)
        return self._added_slots.add(number, chosen)

    def _expects(self, claim: Claim) -> bool:
        host = self._hosts[claim.rank] if 0 <= claim.rank < len(self._hosts) else None
        return host is not None and host.frames is None and host.inbox is None

    def _poll(self, seconds: float) -> None:
        if self._requests is not None:
            self._requests.poll()
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._read(key.data)
        for new in self._acceptor.poll():
            self._join(new)
        self._added_hosts.look_after()

    def _join(self, new: Authenticated) -> None:
        if not self._expects(new.claim):
            new.socket.close()
            return
        host = self._hosts[new.claim.rank]
        end_when_silent(new.socket)
        host.frames = FrameSocket(new.socket, Purpose.LAUNCHER)
        self._selector.register(host.frames, selectors.EVENT_READ, host)

    def _read(self, host: Host) -> None:
        assert host.frames is not None
        try:
            for data in host.frames.read():
                self.take(host, *read_message(data))
        except Disconnected:
            self._lose(host)
        except Exception as error:  # what one supervisor sends must not end those of the other hosts
            self._notify(f"{host.name} has sent what no supervisor sends ({type(error).__name__}).")
            self._lose(host)

    def take(self, host: Host, kind: str, body: Any) -> None:
        """Do what a message of a supervisor asks for; one that is wrong raises any error, and changes nothing."""
        if kind == "here":
            port = int(body["port"])
            if not 0 <= port < 1 << 16:  # 0 without rank 0
                raise ValueError(f"{port} is no port")
            host.here = {**body, "port": port}
        elif kind == "joined":
            self._added_slots.note_joined(read_ranks(body))
        elif kind == "members":
            host.members, host.joiners = int(body["members"]), list(body["joiners"])
        elif kind == "join info":
            self._added_hosts.begin(self._started or {}, body)
        elif kind == "given back":
            self._added_slots.take_back(*read_ranks([body]))
        elif kind in ("failed", "ended"):
            ends = [End.told(*told) for told in body["ranks"]]
            replaced = {rank: int(times) for told, times in body.get("replaced", ()) for rank in read_ranks([told])}
            added, why = read_ranks(body.get("added", ())), body["why"]
            if not isinstance(why, str | None):
                raise TypeError(f"{why!r} is no text")
            failed = [end for end in ends if end.how in ("failed", "followed")]
            if why and not self._failed:  # others end because of those that have ended now
                failed = failed or [end for end in ends if end.code and not end.how]
            self._failed += [end for end in failed if end not in self._failed]
            host.why, host.replaced, host.added = why, replaced, added
            host.report = ends if kind == "ended" else None
            if kind == "ended" and not any(not end.code and not end.how for end in ends):
                self._give_out_anew(host)

    def _lose(self, host: Host) -> None:
        assert host.frames is not None
        self._selector.unregister(host.frames)
        host.frames.close()
        if not host.is_over:
            host.is_lost = True
            if host.here is not None and self._processes.signalled is None:
                ranks = self._added_slots.of_host(self._hosts.index(host))
                self._notify(f"{host.name} is lost{with_ranks(ranks)}; the others may go on.")
                self._give_out_anew(host)

    def _give_out_anew(self, host: Host) -> None:
        """Let added ranks that cannot join on a host any more join on others."""
        if self._failed or host.why or self._processes.signalled is not None:
            return  # the job is over
        left = [index for index, other in enumerate(self._hosts) if not other.is_over]
        if sum(len(self._added_slots.of_host(index)) for index in left) < self._min_ranks:
            return  # as the ranks will find
        host.ranks = tuple(self._added_slots.of_host(self._hosts.index(host)))
        again = self._added_slots.note_end(self._hosts.index(host), left)
        if again and left:
            where = " and ".join(self._hosts[index].name for index in left)
            self._notify(f"{name_ranks(again)} will join on {where}, since {host.name} has no ranks any more.")
        empty = [rank for rank in host.ranks if rank not in again]
        if empty and left and self._added_hosts.can_add:
            self._notify(
                f"`ring add-ranks {len(empty)}` lets other processes take the places of {name_ranks(empty)}, and "
                "--host chooses where."
            )

    def _tell_all(self, kind: str, body: Any) -> None:
        for host in self._hosts:
            self._tell(host, kind, body)

    def _tell(self, host: Host, kind: str, body: Any) -> None:
        if host.inbox is not None:
            host.inbox.append((kind, body))
        elif host.frames is not None and not host.is_lost:
            with contextlib.suppress(Disconnected, TimeoutError):
                host.frames.send(to_json([kind, body]))
                host.frames.flush(config.NETWORK_TIMEOUT.get())


class OwnHost:
    """The connection between the coordinator and a supervisor in the same process, which also keeps the former going.

    Args:
        coordinator: of the job.
        host: of the supervisor.
    """

    is_lost = is_orphaned = False

    def __init__(self, coordinator: Coordinator, host: Host) -> None:
        self._coordinator, self._host = coordinator, host

    def send(self, kind: str, body: Any) -> None:
        """Hand over a message of the supervisor."""
        self._coordinator.take(self._host, kind, body)

    def read(self) -> list[tuple[str, Any]]:
        """Let the coordinator do what is due; returns its messages."""
        self._coordinator.tick()
        found, self._host.inbox = self._host.inbox or [], []
        return found


def _is_same_host(name: str, wanted: str) -> bool:
    """Whether a user's name for a host is that of the one which the job calls so."""
    return wanted in (name, name.rpartition("@")[2]) or (is_this_host(name) and is_this_host(wanted))


def command_for(job: JobSpec, host: str) -> list[str]:
    """The command that starts the supervisor of a host."""
    program = job.command[0]
    python = program if Path(program).name.startswith("python") else sys.executable
    if is_this_host(host):
        return own_python(_SUPERVISE)
    paths = [name for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in job.environment and name in os.environ]
    remote = shlex.join(
        ["env", *(f"{name}={os.environ[name]}" for name in paths), *own_python_elsewhere(python, _SUPERVISE)]
    )
    alive = [] if job.agent else ["-o", "ServerAliveInterval=15"]  # a firewall may drop a login that is idle
    return [*login(job), *alive, host, f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {remote}"]


class Logins:
    """Starts the supervisors of a job's other hosts.

    Args:
        job: the job.
        described: what all supervisors have to know; each gets its own host's part.
        processes: end with the job, these among them.
        relay: passes on what they print.

    Attributes:
        check: of hosts that are added.
    """

    def __init__(self, job: JobSpec, described: HostJob, processes: Processes, relay: Relay) -> None:
        self._job, self._described, self._processes, self._relay = job, described, processes, relay
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.check = LateCheck(job)

    def start(
        self, coordinator: Coordinator, host: str, index: int, ranks: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a host's supervisor; one without ranks is added to the job. Returns its process, or that of its login.

        Args:
            coordinator: of the job.
            host, index: its name and number.
            ranks: that it is to run.
        """
        towards = "" if is_this_host(host) else address_towards(host.rpartition("@")[2])
        addresses = ["127.0.0.1"] if is_this_host(host) else [*filter(None, [towards]), *own_addresses()]
        told = replace(
            self._described,
            addresses=list(dict.fromkeys(addresses)),
            port=coordinator.port,
            key=coordinator.key,
            index=index,
            hosts=max(self._described.hosts, index + 1),
            ranks=ranks,
            is_added=not ranks,
            question=None if ranks else self.check.question,
        )
        command = command_for(self._job, host)
        out, err = self._relay.files(index)
        description = os.memfd_create("ring_plugins/job")  # secrets are among it, so it is the standard input
        try:
            os.write(description, told.pack())
            os.lseek(description, 0, os.SEEK_SET)
            process = self._processes.start(
                command,
                os.environ,
                end_signal=signal.SIGTERM,
                stdin=description,
                stdout=out,
                stderr=err,
                own_session=command[0] != sys.executable,  # Ctrl-C is for the ranks, not for their logins
                is_helper=True,
            )
        finally:
            os.close(description)
        self._relay.start()
        self._started.append((host, process))
        if not ranks:
            self.check.ask(host)
        return process

    def trouble(self) -> str | None:
        """Why a supervisor will not come, None while all may."""
        for host, process in self._started:
            if (code := process.poll()) is not None:
                how = silent_end(code) if code < 0 else f"ended with status {code}"
                what = "the supervisor" if is_this_host(host) else "the login"
                return f"{host}: {what} {how} before the job started; its output above says why."
        return None

    def leave(self) -> None:
        """Wait for their ends, after that of the job."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while any(process.poll() is None for _, process in self._started) and time.monotonic() < deadline:
            time.sleep(_TICK)
