"""Starts a job on several hosts that goes on when ranks, or whole hosts, are lost, and follows it to its end.

mpirun ends all ranks as soon as one of them, a host, or a connection of its own is lost. So this kind of job does
without: each host has a supervisor of its own (host_supervisor.py), which starts that host's ranks, and the ranks find
each other by RANK and MASTER_ADDR, as those that a user starts one by one.

    ring run ─┬─ supervisor of host1 ── rank 0, rank 1
              └─ ssh ── supervisor of host2 ── rank 2, rank 3

Under mpirun, torchrun and srun, the holders of their slots start the supervisors (core/rendezvous/slots.py), and the
one on rank 0's host is the coordinator's child.

Supervisors log in to the coordinator, which is in `ring run`. In JSON, over authenticated connections:

    supervisor -> coordinator   ["here", {host, port}]     it runs; the port is one that rank 0 can listen at
                                ["failed", {ranks, why}]   a rank has ended in a way that ends the job
                                ["ended", {ranks, why}]    all of its ranks have ended
                                ["joined", ranks]          further ranks have, and
                                ["given back", rank]       one will not (further_seats.py)
                                ["members", {members, newcomers}]  of a host that was added
                                ["join info", info]        what such a host needs (core/rendezvous/seats.py)
    coordinator -> supervisor   ["start", {address, port, secret}]   all are here: where rank 0 will listen
                                ["further", {in use, seats}]  which hosts have further ranks
                                ["join info?", null]       asks for it
                                ["newcomers", processes]   that wait on hosts without members
                                ["alone", null]            nobody is left who lets others join
                                ["end", signal]            end all ranks
                                ["over", status]           the job has ended

**Who may be lost.** A rank: its supervisor goes on with the others. All ranks of a host, its supervisor, or the host:
the connection to it ends, and the coordinator goes on with the other hosts. A login: what that host prints is lost. The
coordinator's host: the other supervisors go on without a coordinator, and nobody sees their exit status. Which ranks go
on is for the ranks to agree (control/consensus.py); nobody here decides that.

**Hosts that come later.** `ring add-ranks` may name a host that has no ranks, or none any more. The coordinator starts
a supervisor there, gives it the join info of another host, and tells all others who waits there to join.

**Who may not.** If the coordinator is killed while its host lives, all supervisors end their ranks, so that nothing of
a job is left behind. A rank that ends with an exit status, rather than by a signal, ends the job as on one host: its
supervisor says so, and after some seconds the coordinator ends all.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.linux.interfaces import address_towards, own_addresses
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket, from_json, to_json
from ring_plugins.core.rendezvous.spawn import ending, silent_end
from ring_plugins.launcher.further_seats import FurtherSeats
from ring_plugins.launcher.growth import GrowthRequests
from ring_plugins.launcher.host_supervisor import MOST_ADDED, HostJob, watch
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.mpirun import JobSpec
from ring_plugins.launcher.output import Relay
from ring_plugins.launcher.preflight import login
from ring_plugins.launcher.replacements import how_often
from ring_plugins.launcher.supervision import GRACE_SECONDS, Supervisor

#: Connections that the coordinator keeps beside those of supervisors, and those that wait in the kernel.
_OTHER_CONNECTIONS, _BACKLOG = 64, 1024
#: Seconds that supervisors have to report after they were told to end: as long as theirs give to the ranks, and more.
_END_SECONDS = 18.0
#: Seconds that supervisors and logins have to end after the job.
_LEAVE_SECONDS = 10.0
#: Seconds between two looks.
_TICK = 0.05

Notify = Callable[[str], None]
#: Rank, `returncode`, and "left", "cut off" or "late" if that is why it ended.
End = tuple[int, int, str]


class _Host:
    """What the coordinator knows of a host.

    Attributes:
        name: of it.
        ranks: that it runs.
        frames: the connection to its supervisor, None before it has come.
        here: what that said first.
        report: what it said of the ends of its ranks, None before.
        why: why they could not go on.
        replaced: ranks of it whose places other processes have taken, with how often.
        added: ranks of it by which the job has grown.
        is_lost: whether the connection has ended before all was said.
        is_added: whether the job has begun without it.
        members, newcomers: how many ranks a host that was added has now, and who waits there if it has none.
        has_begun: whether it knows how to take part.
        login: the process that runs its supervisor, of one that was added, and when that was started.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.frames: FrameSocket | None = None
        self.here: Mapping[str, Any] | None = None
        self.report: list[End] | None = None
        self.why: str | None = None
        self.replaced: dict[int, int] = {}
        self.added: list[int] = []
        self.is_added = self.has_begun = False
        self.members, self.newcomers = 0, list[Any]()
        self.login: tuple[subprocess.Popen[bytes], float] | None = None
        self.is_lost = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected from it."""
        return self.is_lost or self.report is not None


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
        self._hosts = [_Host(name, ranks) for name, ranks in hosts]
        self._size = sum(len(ranks) for _, ranks in hosts)
        self._further = FurtherSeats(
            self._size, most, [ranks for _, ranks in hosts], lambda: self._tell_all("further", self._further.told())
        )
        self._started: dict[str, Any] | None = None  # what all supervisors were told
        self._asked: _Host | None = None  # for its join info
        self._is_alone = False  # whether nobody is left who lets others join
        self._newcomers: list[Any] = []
        #: Called all the time.
        self.meanwhile: Callable[[], object] = lambda: None
        #: Starts the supervisor of a host that is to be the job's host of this number; None if that is not possible.
        self.start_host: Callable[[str, int], subprocess.Popen[bytes]] | None = None
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
        status, why = (1, trouble) if trouble is not None else self._verdict()
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
        """Let so many further ranks join; returns an answer for the user.

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
        if refusal := self._further.refusal(number):
            return refusal
        if not chosen and wanted is not None:
            if self.start_host is None:
                return f"no: --host {wanted} is none of the job's hosts: {', '.join(living.values())}"
            if sum(host.is_added for host in self._hosts) == MOST_ADDED:
                return f"no: --host {wanted} would be more than {MOST_ADDED} hosts that were added to the job"
            host, index = _Host(wanted, []), len(self._hosts)
            host.is_added = True
            self._hosts.append(host)
            chosen = {index: wanted}
            host.login = self.start_host(wanted, index), time.monotonic()
        return self._further.add(number, chosen)

    def _look_after_added_hosts(self) -> None:
        """Let hosts take part that were added, and end those by which nobody can join any more."""
        waiting = [host for host in self._hosts if host.is_added and not host.is_over and not host.has_begun]
        for host in waiting:
            assert host.login is not None
            process, since = host.login
            if process.poll() is not None or (
                host.here is None and time.monotonic() - since > config.START_TIMEOUT.get()
            ):
                how = "did not come" if process.poll() is None else "could not be reached, as the output above says"
                self._drop_added(host, how)
        members = [one for one in self._hosts if not one.is_over and (not one.is_added or one.members)]
        if members and any(host.here is not None for host in waiting) and self._asked not in members:
            self._asked = members[0]
            self._tell(members[0], "join info?", None)
        if not members and self._started is not None:
            for host in waiting:
                if not host.is_over:
                    self._tell(host, "end", int(signal.SIGTERM))
                    self._drop_added(host, "comes too late, since the other ranks have ended")
            if not self._is_alone:
                self._is_alone = True
                self._tell_all("alone", None)
        newcomers = [one for host in self._hosts if not host.is_over for one in host.newcomers]
        if newcomers != self._newcomers:
            self._newcomers = newcomers
            self._tell_all("newcomers", newcomers)

    def _drop_added(self, host: _Host, how: str) -> None:
        """Go on without a host that was added and has not begun."""
        assert host.login is not None
        host.is_lost = True
        if host.login[0].poll() is None:
            host.login[0].terminate()
        seats = self._further.note_end(self._hosts.index(host), [])
        self._notify(f"{host.name} {how}{f'; {name_ranks(seats)} will not join' if seats else ''}.")

    def _begin_on_added_hosts(self, join_info: Any) -> None:
        """Tell hosts that were added how to take part; by the join info of a host that does."""
        self._asked = None
        for host in self._hosts:
            if join_info and host.is_added and host.here is not None and not host.has_begun and not host.is_over:
                host.has_begun = True
                self._tell(
                    host, "start", {**(self._started or {}), "join info": join_info, "further": self._further.told()}
                )

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
        if any(host.is_added for host in self._hosts):
            self._look_after_added_hosts()

    def _join(self, new: Authenticated) -> None:
        if not self._expects(new.claim):
            new.socket.close()
            return
        host = self._hosts[new.claim.rank]
        watch(new.socket)
        host.frames = FrameSocket(new.socket, Purpose.LAUNCHER)
        self._selector.register(host.frames, selectors.EVENT_READ, host)

    def _read(self, host: _Host) -> None:
        assert host.frames is not None
        try:
            for data in host.frames.read():
                kind, body = from_json(data)
                if kind == "here":
                    host.here = body
                elif kind == "joined":
                    self._further.note_joined([int(rank) for rank in body])
                elif kind == "members":
                    host.members, host.newcomers = int(body["members"]), list(body["newcomers"])
                elif kind == "join info":
                    self._begin_on_added_hosts(body)
                elif kind == "given back":
                    self._further.take_back(int(body))
                elif kind in ("failed", "ended"):
                    ends = [(int(rank), int(code), str(how)) for rank, code, how in body["ranks"]]
                    self._failed += [end for end in ends if self._ends_job(end) and end not in self._failed]
                    host.why = body["why"]
                    host.report = ends if kind == "ended" else None
                    host.replaced = {int(rank): int(times) for rank, times in body.get("replaced", ())}
                    host.added = [int(rank) for rank in body.get("added", ())]
                    if kind == "ended" and not any(not code and not how for _, code, how in ends):
                        self._give_out_anew(host)
        except (Disconnected, ValueError, KeyError, TypeError):
            self._lose(host)

    def _lose(self, host: _Host) -> None:
        assert host.frames is not None
        self._selector.unregister(host.frames)
        host.frames.close()
        if not host.is_over:
            host.is_lost = True
            if host.here is not None and self._supervisor.signalled is None:
                ranks = self._further.of_host(self._hosts.index(host))
                self._notify(f"{host.name} is lost{_with(ranks)}; the others may go on.")
                self._give_out_anew(host)

    def _give_out_anew(self, host: _Host) -> None:
        """Let further ranks that cannot join on a host any more join on others."""
        left = [index for index, other in enumerate(self._hosts) if not other.is_over]
        host.ranks = tuple(self._further.of_host(self._hosts.index(host)))
        again = self._further.note_end(self._hosts.index(host), left)
        if again and left:
            where = " and ".join(self._hosts[index].name for index in left)
            self._notify(f"{name_ranks(again)} will join on {where}, since {host.name} has no ranks any more.")
        empty = [rank for rank in host.ranks if rank not in again]
        if empty and left and self.start_host is not None:
            self._notify(
                f"`ring add-ranks {len(empty)}` lets other processes take the places of {name_ranks(empty)}, and "
                "--host chooses where."
            )

    def _tell_all(self, kind: str, body: Any) -> None:
        for host in self._hosts:
            self._tell(host, kind, body)

    def _tell(self, host: _Host, kind: str, body: Any) -> None:
        if host.frames is not None and not host.is_lost:
            with contextlib.suppress(Disconnected, TimeoutError):
                host.frames.send(to_json([kind, body]))
                host.frames.flush(config.NETWORK_TIMEOUT.get())

    def _ends_job(self, end: End) -> bool:
        return not end[2] and self._supervisor.ends_job(end[1])

    def _verdict(self) -> tuple[int, str | None]:
        """The exit status of a job whose hosts have reported or are lost, and what the user should know of it."""
        if self._supervisor.signalled is not None:
            return 128 + self._supervisor.signalled, None
        ends = [end for host in self._hosts for end in host.report or ()]
        lost = [host for host in self._hosts if host.report is None and (host.has_begun or not host.is_added)]
        if why := next((host.why for host in self._hosts if host.why), None):
            return 1, why
        if self._failed:
            rank, code, _ = min(self._failed, key=lambda end: end[1] == 1)  # those that end because of another have 1
            return code, f"rank {rank} ended with {ending(code)}."
        died = [end for end in ends if (end[1] < 0 and not end[2]) or end[2] == "lost"]
        cut = [rank for rank, _, how in ends if how == "cut off"]
        left = [rank for rank, _, how in ends if how == "left"]
        late = [rank for rank, _, how in ends if how == "late"]
        well = [end for end in ends if not end[1] and end[2] not in ("cut off", "late", "lost")]
        replaced = {rank: times for host in self._hosts for rank, times in host.replaced.items()}
        added = sorted(rank for host in self._hosts for rank in host.added)
        further, late = [rank for rank in late if rank >= self._size], [rank for rank in late if rank < self._size]
        told = [f"{name_ranks(added)} joined"] if added else []
        told += [f"other processes took the place of {how_often(replaced)}"] if replaced else []
        told += [f"{name_ranks(left)} left"] if left else []
        told += [f"{name_ranks([rank for rank, *_ in died])} died"] if died else []
        told += [f"{name_ranks(cut)} ended as the others could not be reached"] if cut else []
        told += [f"{host.name} was lost{_with(host.ranks)}" for host in lost]
        if well:
            told += [f"nobody had joined yet in the place of {name_ranks(late)}"] if late else []
            told += [f"{name_ranks(further)} had not joined yet"] if further else []
            others = "all" if told and not (left or died or cut or lost or late or further) else "the other"
            normally = len(well) - len([end for end in well if end[2]])
            return 0, f"{', '.join(told)}, and {others} {normally} ended normally." if told else None
        if lost and (cut or not died):
            where = " and ".join(host.name for host in lost)
            return 1, f"{', '.join(told)}. The ranks on {where} may have gone on; nobody here can tell."
        killed = [end for end in died if end[1]]  # rather than ended with status 0, before the others
        status = 128 - killed[0][1] if killed else 1
        if len(died) == 1 and killed:
            return status, f"rank {died[0][0]} {silent_end(died[0][1])}."
        return status, f"{', '.join(told)}, and no rank is left."


def _with(ranks: Sequence[int]) -> str:
    """The ranks of a host that is lost; one that was added may have none."""
    return f", with {name_ranks(ranks)}" if ranks else ""


def _is_same_host(name: str, wanted: str) -> bool:
    """Whether a user's name for a host is that of the one which the job calls so."""
    return wanted in (name, name.rpartition("@")[2]) or (is_this_host(name) and is_this_host(wanted))


def command_for(job: JobSpec, host: str) -> list[str]:
    """The command that starts the supervisor of a host."""
    program = job.command[0]
    python = program if Path(program).name.startswith("python") else sys.executable
    module = [python, "-m", "ring_plugins.launcher.host_supervisor"]
    if is_this_host(host):
        return [sys.executable, *module[1:]]
    paths = [name for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in job.environment and name in os.environ]
    remote = shlex.join(["env", *(f"{name}={os.environ[name]}" for name in paths), *module])
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
        if replaces:
            coordinator.meanwhile = stack.enter_context(GrowthRequests(coordinator.add_ranks)).poll
        started: list[tuple[str, subprocess.Popen[bytes]]] = []

        def start_host(host: str, index: int, own: Sequence[int] = ()) -> subprocess.Popen[bytes]:
            """Start a host's supervisor; one without ranks is added to the job."""
            towards = "" if is_this_host(host) else address_towards(host.rpartition("@")[2])
            addresses = ["127.0.0.1"] if is_this_host(host) else [*filter(None, [towards]), *own_addresses()]
            told = HostJob(
                list(dict.fromkeys(addresses)), coordinator.port, coordinator.key, index, max(len(hosts), index + 1),
                own, job.ranks, job.command, environment, job.tag_output, job.output_directory, replaces=replaces,
                most=most, is_added=not own,
            )  # fmt: skip
            started.append((host, _start(supervisor, command_for(job, host), told, relay, index)))
            if not own:
                relay.start()
            return started[-1][1]

        for index, (host, own) in enumerate(hosts):
            start_host(host, index, own)
        relay.start()
        coordinator.start_host = start_host if replaces else None
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
        command = [sys.executable, "-m", "ring_plugins.launcher.host_supervisor"]
        started = [(hosts[0][0], _start(supervisor, command, job, relay, 0))]
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
