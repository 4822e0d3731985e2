"""Starts a job on several hosts that goes on when ranks, or whole hosts, are lost, and follows it to its end.

mpirun ends all ranks as soon as one of them, a host, or one of its own connections is lost. So such a job does without
mpirun: each host has a supervisor (host_supervisor.py), which starts the ranks of that host. The ranks find each other
by RANK and MASTER_ADDR, like ranks that a user starts one by one.

    ring run ─┬─ supervisor of host1 ── rank 0, rank 1
              └─ ssh ── supervisor of host2 ── rank 2, rank 3

The process that follows the whole job is the *coordinator*: here it is `ring run`. Under mpirun, torchrun and srun, the
first process of each host becomes its supervisor, and on rank 0's host the coordinator, too
(core/rendezvous/launcher_shim.py).

Supervisors connect to the coordinator, with a secret. They exchange JSON:

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
from ring_plugins.core.rendezvous.spawn import is_failure, silent_end
from ring_plugins.launcher.added_hosts import AddedHosts
from ring_plugins.launcher.added_slots import AddedSlots
from ring_plugins.launcher.coordinator_link import HostJob, read_message
from ring_plugins.launcher.growth import GrowthRequests
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.job_hosts import End, Host, read_ranks, verdict, with_ranks
from ring_plugins.launcher.mpirun import JobSpec
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.preflight import LateCheck, login
from ring_plugins.launcher.supervision import GRACE_SECONDS, Supervisor

#: Connections that the coordinator keeps beside those of supervisors, and those that wait in the kernel.
_OTHER_CONNECTIONS, _BACKLOG = 64, 1024
#: Seconds that supervisors have to report after they were told to end: as long as theirs give to the ranks, and more.
_END_SECONDS = 18.0
#: Seconds that supervisors and logins have to end after the job.
_LEAVE_SECONDS = 10.0
#: Seconds between two looks.
_TICK = 0.05
#: What runs the supervisor of a host.
_SUPERVISE = "from ring_plugins.launcher.host_supervisor import main; sys.exit(main())"

Notify = Callable[[str], None]


class Coordinator:
    """Knows the supervisors of all hosts of a job. Leaving the context closes all connections.

    Args:
        hosts: their names, with the ranks of each.
        supervisor: whose signals end the job.
        notify: shows one line to the user.
        port, key: where to listen, and a secret; new ones by default.
        most: up to how many ranks the job may grow; 0 for no more than at the start.

    Attributes:
        port, key: for `HostJob`.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, Sequence[int]]],
        supervisor: Supervisor,
        notify: Notify,
        port: int = 0,
        key: str = "",
        most: int = 0,
    ) -> None:
        self._hosts = [Host(name, ranks) for name, ranks in hosts]
        self._size = sum(len(ranks) for _, ranks in hosts)
        self._added_slots = AddedSlots(
            self._size, most, [ranks for _, ranks in hosts], lambda: self._tell_all("added", self._added_slots.told())
        )
        self._started: dict[str, Any] | None = None  # what all supervisors were told
        self.added_hosts = AddedHosts(self._hosts, self._added_slots, self._tell, notify)
        #: With how many ranks the job goes on.
        self.min_ranks = 1
        #: Called all the time.
        self.meanwhile: Callable[[], object] = lambda: None
        self._supervisor, self._notify = supervisor, notify
        self.key = key or secrets.token_hex(32)
        listener = socket.create_server(("", port), backlog=_BACKLOG)
        self.port: int = listener.getsockname()[1]
        limit = len(self._hosts) + _OTHER_CONNECTIONS
        self._acceptor = Acceptor(self.key.encode(), Purpose.LAUNCHER, self._expects, limit)
        self._acceptor.add(listener)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ)
        self._failed: list[End] = []  # the ends that end the job, in the order in which they were told

    def __enter__(self) -> Coordinator:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()  # first: a supervisor that sees its connection end tries this
        for host in self._hosts:
            if host.frames is not None:
                host.frames.close()
        self._selector.close()

    def wait(self, find_trouble: Callable[[], str | None]) -> tuple[int, str | None]:
        """Follow the job to its end.

        Args:
            find_trouble: returns why a supervisor will not come, None while all may.

        Returns:
            The job's exit status, and a line for the user.
        """
        trouble = self._gather(find_trouble)
        if trouble is None and self._supervisor.signalled is None:
            self._start()
            self._follow()
        if trouble is not None or self._supervisor.signalled is not None:
            self._tell_all("end", int(self._supervisor.signalled or signal.SIGTERM))
            self._poll_until(time.monotonic() + (_END_SECONDS if trouble is None else 0.0))
        if trouble is not None:
            status, why = 1, trouble
        elif self._supervisor.signalled is not None:
            status, why = 128 + self._supervisor.signalled, None
        else:
            status, why = verdict(self._hosts, self._failed, self._size)
        self._tell_all("over", status)
        return status, why

    def _gather(self, find_trouble: Callable[[], str | None]) -> str | None:
        """Wait for all supervisors; returns why one does not come."""
        end = time.monotonic() + config.START_TIMEOUT.get()
        with ProgressLine() as line:
            while missing := [host.name for host in self._hosts if host.here is None]:
                self._poll()
                if self._supervisor.signalled is not None:
                    return None
                if lost := [host.name for host in self._hosts if host.is_lost]:
                    return f"{' and '.join(lost)} ended before the job started; the output above says why."
                if (trouble := find_trouble()) is not None:
                    return trouble
                if time.monotonic() > end:
                    return (
                        f"{' and '.join(missing)} did not come within {config.START_TIMEOUT.get():g} s. Set "
                        f"{config.START_TIMEOUT.name} to wait longer."
                    )
                came = {number: host.name for number, host in enumerate(self._hosts) if host.here is not None}
                line.show(lambda came=came: arrivals(came, len(self._hosts), " to be reached"))  # type: ignore[misc]
        return None

    def _start(self) -> None:
        first = next(host for host in self._hosts if 0 in host.ranks)
        assert first.frames is not None
        assert first.here is not None
        address = str(first.frames.socket.getpeername()[0])
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
            if rejection := self.added_hosts.rejection(new, living.values()):
                return rejection
            chosen = {len(self._hosts): new}
        if rejection := self._added_slots.rejection_of(chosen, number):
            return rejection
        if new is not None:
            self.added_hosts.add(new)
        return self._added_slots.add(number, chosen)

    def _follow(self) -> None:
        """Until the job is over everywhere."""
        failed_at: float | None = None
        while not all(host.is_over for host in self._hosts) and self._supervisor.signalled is None:
            self._poll()
            now = time.monotonic()
            if failed_at is None and (self._failed or any(host.why for host in self._hosts)):
                failed_at = now
            if failed_at is not None and now - failed_at > GRACE_SECONDS:
                self._tell_all("end", int(signal.SIGTERM))
                self._poll_until(now + _END_SECONDS)
                return

    def _poll_until(self, deadline: float) -> None:
        while not all(host.is_over or host.frames is None for host in self._hosts) and time.monotonic() < deadline:
            self._poll()

    def _expects(self, claim: Claim) -> bool:
        return 0 <= claim.rank < len(self._hosts) and self._hosts[claim.rank].frames is None

    def _poll(self) -> None:
        self.meanwhile()
        for key, _ in self._selector.select(_TICK):
            if key.data is not None:
                self._read(key.data)
        for new in self._acceptor.poll():
            self._join(new)
        self.added_hosts.look_after()

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
                self._take(host, *read_message(data))
        except Disconnected:
            self._lose(host)
        except Exception as error:  # what one supervisor sends must not end those of the other hosts
            self._notify(f"{host.name} has sent what no supervisor sends ({type(error).__name__}).")
            self._lose(host)

    def _take(self, host: Host, kind: str, body: Any) -> None:
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
            self.added_hosts.begin(self._started or {}, body)
        elif kind == "given back":
            self._added_slots.take_back(*read_ranks([body]))
        elif kind in ("failed", "ended"):
            ends = [End.told(*told) for told in body["ranks"]]
            replaced = {rank: int(times) for told, times in body.get("replaced", ()) for rank in read_ranks([told])}
            added, why = read_ranks(body.get("added", ())), body["why"]
            if not isinstance(why, str | None):
                raise TypeError(f"{why!r} is no text")
            failed = [end for end in ends if end.how in ("", "followed") and is_failure(end.code)]
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
            if host.here is not None and self._supervisor.signalled is None:
                ranks = self._added_slots.of_host(self._hosts.index(host))
                self._notify(f"{host.name} is lost{with_ranks(ranks)}; the others may go on.")
                self._give_out_anew(host)

    def _give_out_anew(self, host: Host) -> None:
        """Let added ranks that cannot join on a host any more join on others."""
        if self._failed or host.why or self._supervisor.signalled is not None:
            return  # the job is over
        left = [index for index, other in enumerate(self._hosts) if not other.is_over]
        if sum(len(self._added_slots.of_host(index)) for index in left) < self.min_ranks:
            return  # as the ranks will find
        host.ranks = tuple(self._added_slots.of_host(self._hosts.index(host)))
        again = self._added_slots.note_end(self._hosts.index(host), left)
        if again and left:
            where = " and ".join(self._hosts[index].name for index in left)
            self._notify(f"{name_ranks(again)} will join on {where}, since {host.name} has no ranks any more.")
        empty = [rank for rank in host.ranks if rank not in again]
        if empty and left and self.added_hosts.start is not None:
            self._notify(
                f"`ring add-ranks {len(empty)}` lets other processes take the places of {name_ranks(empty)}, and "
                "--host chooses where."
            )

    def _tell_all(self, kind: str, body: Any) -> None:
        for host in self._hosts:
            self._tell(host, kind, body)

    def _tell(self, host: Host, kind: str, body: Any) -> None:
        if host.frames is not None and not host.is_lost:
            with contextlib.suppress(Disconnected, TimeoutError):
                host.frames.send(to_json([kind, body]))
                host.frames.flush(config.NETWORK_TIMEOUT.get())


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


def run(job: JobSpec, replaces: bool, most: int, supervisor: Supervisor, notify: Notify) -> tuple[int, str | None]:
    """Run a job on the hosts of its shares, and return its exit status and a line for the user.

    Args:
        job: the job.
        replaces: whether other processes take the places of ranks that are lost.
        most: up to how many ranks the job may grow; 0 for no more than at the start.
        supervisor: for the processes that this one starts.
        notify: shows one line to the user.
    """
    ranks = iter(range(job.ranks))
    hosts = [(part.host, [next(ranks) for _ in range(part.ranks)]) for part in job.shares]
    environment = {
        name: os.environ[name] if value is None else value
        for name, value in job.environment.items()
        if value is not None or name in os.environ
    }
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(Relay(False, always=True))
        coordinator = stack.enter_context(Coordinator(hosts, supervisor, notify, most=most))
        coordinator.min_ranks = config.MIN_RANKS.get(environment)
        if replaces:
            coordinator.meanwhile = stack.enter_context(GrowthRequests(coordinator.add_ranks)).poll
        started: list[tuple[str, subprocess.Popen[bytes]]] = []

        check = LateCheck(job)
        coordinator.added_hosts.problems_of = check.problems

        def start_host(host: str, index: int, own: Sequence[int] = ()) -> subprocess.Popen[bytes]:
            """Start a host's supervisor; one without ranks is added to the job."""
            towards = "" if is_this_host(host) else address_towards(host.rpartition("@")[2])
            addresses = ["127.0.0.1"] if is_this_host(host) else [*filter(None, [towards]), *own_addresses()]
            told = HostJob(
                list(dict.fromkeys(addresses)), coordinator.port, coordinator.key, index, max(len(hosts), index + 1),
                own, job.ranks, job.command, environment, job.tag_output, job.output_directory, replaces=replaces,
                most=most, is_added=not own, question=None if own else check.question,
            )  # fmt: skip
            started.append((host, _start(supervisor, command_for(job, host), told, relay, index)))
            if not own:
                check.ask(host)
                relay.start()
            return started[-1][1]

        for index, (host, own) in enumerate(hosts):
            start_host(host, index, own)
        relay.start()
        coordinator.added_hosts.start = start_host if replaces else None
        return _follow(coordinator, started)


def coordinate(
    job: HostJob, hosts: Sequence[tuple[str, Sequence[int]]], supervisor: Supervisor, notify: Notify
) -> tuple[int, str | None]:
    """The same for a job whose other hosts' supervisors come by themselves.

    Args:
        job: of this host.
        hosts: all of them, this one first.
        supervisor, notify: as for `run`.
    """
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(Relay(False, always=True))
        coordinator = stack.enter_context(Coordinator(hosts, supervisor, notify, job.port, job.key))
        started = [(hosts[0][0], _start(supervisor, own_python(_SUPERVISE), job, relay, 0))]
        relay.start()
        return _follow(coordinator, started)


def _follow(coordinator: Coordinator, started: Sequence[tuple[str, subprocess.Popen[bytes]]]) -> tuple[int, str | None]:
    """Follow a job to its end.

    Args:
        coordinator: of all supervisors.
        started: the hosts whose supervisors, or logins, this process has started.
    """

    def find_trouble() -> str | None:
        for host, process in started:
            if (code := process.poll()) is not None:
                how = silent_end(code) if code < 0 else f"ended with status {code}"
                what = "the supervisor" if is_this_host(host) else "the login"
                return f"{host}: {what} {how} before the job started; its output above says why."
        return None

    status, why = coordinator.wait(find_trouble)
    deadline = time.monotonic() + _LEAVE_SECONDS
    while any(process.poll() is None for _, process in started) and time.monotonic() < deadline:
        time.sleep(_TICK)
    for _, process in started:
        if process.poll() is None:
            process.kill()
    return status, why


def _start(
    supervisor: Supervisor, command: Sequence[str], job: HostJob, relay: Relay, index: int
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a host, which reads what it has to know, secrets among it, from standard input."""
    out, err = relay.files(index)
    description = os.memfd_create("ring_plugins/job")
    try:
        os.write(description, job.pack())
        os.lseek(description, 0, os.SEEK_SET)
        return supervisor.start(
            command,
            os.environ,
            end_signal=signal.SIGTERM,
            stdin=description,
            stdout=out,
            stderr=err,
            own_session=command[0] != sys.executable,  # Ctrl-C is for the ranks, not for their logins
        )
    finally:
        os.close(description)
