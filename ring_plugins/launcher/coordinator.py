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
                                ["given back", rank]       an added rank will not join, or one has left as it was told
    coordinator -> supervisor   ["start", {address, port, secret}]   all are here: where rank 0 will listen
                                ["added", {in use, slots}]         which hosts have added ranks
                                ["leaving", ranks]                 which are to leave (discovery.py)
                                ["end", signal]            end all ranks
                                ["over", status]           the job has ended

**Added hosts.** `ring add-ranks --host` may name a host that has no ranks, or none any more. The coordinator starts a
supervisor there as on any other host. What differs is how its processes find the members of the job, and how these find
them:

    new host's  -> coordinator  "here", with its versions
    coordinator -> a member's   "join info?"     its supervisor has what its ranks wrote (core/rendezvous/slots.py)
    a member's  -> coordinator  "join info"
    coordinator -> new host's   "start", with that         it starts the processes, which wait to join
    new host's  -> coordinator  "members"                  how many of them are members, and which wait if none is
    coordinator -> all          "joiners"                  all such processes; members connect to them
    coordinator -> all          "alone"                    no host has members any more: nobody can join

Once the host has a member, that one sees which others wait there.

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
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.core.base.progress_line import ProgressLine, arrivals
from ring_plugins.core.linux.interfaces import own_addresses
from ring_plugins.core.linux.process import silent_end
from ring_plugins.core.net.acceptor import Acceptor, Authenticated
from ring_plugins.core.net.auth import Claim, Disconnected, Purpose
from ring_plugins.core.net.frames import FrameSocket, to_json
from ring_plugins.core.net.peers import Event, Peers
from ring_plugins.core.net.sockets import end_when_silent
from ring_plugins.launcher.added_slots import MOST_ADDED, AddedSlots
from ring_plugins.launcher.coordinator_link import read_message
from ring_plugins.launcher.discovery import Follower, HostDiscovery
from ring_plugins.launcher.growth import GrowthRequests
from ring_plugins.launcher.hosts import is_this_host
from ring_plugins.launcher.job_hosts import FAILED, End, Host, OwnHost, read_ranks, verdict, with_ranks
from ring_plugins.launcher.logins import Logins
from ring_plugins.launcher.processes import GRACE_SECONDS, Processes

#: Connections that the coordinator keeps beside those of supervisors, and those that wait in the kernel.
_OTHER_CONNECTIONS, _BACKLOG = 64, 1024
#: Seconds that supervisors have to report after they were told to end, more than theirs give to the ranks, and to read
#: the last message.
_END_SECONDS, _READ_SECONDS = 18.0, 2.0
#: Seconds between two looks.
_TICK = 0.05


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
        discovery: lists the hosts that the job may use, and it follows; None if nobody does.
        logins: start the supervisors of other hosts; None if those come by themselves.

    Attributes:
        port, key: for `HostJob`.
        result: the job's exit status, and a line for the user, once it is over.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, Sequence[int]]],
        processes: Processes,
        notify: Callable[[str], None],
        port: int | None,
        key: str = "",
        most: int = 0,
        min_ranks: int = 1,
        takes_requests: bool = False,
        logins: Logins | None = None,
        discovery: HostDiscovery | None = None,
    ) -> None:
        self._hosts = [Host(name, ranks) for name, ranks in hosts]
        self._size, self._min_ranks = sum(len(ranks) for _, ranks in hosts), min_ranks
        self._may_add_hosts = takes_requests and logins is not None
        self._processes, self._notify, self._logins = processes, notify, logins
        self._added_slots = AddedSlots(self._size, most, [ranks for _, ranks in hosts])
        self._published: dict[str, Any] = {"added": self._added_slots.told(), "joiners": [], "leaving": []}
        self._asked: Host | None = None  # for its join info
        self._started: dict[str, Any] | None = None  # what all supervisors were told
        self._failed_at = 0.0
        #: When to wait no longer for hosts that were told to end, and why they were if the job never began.
        self._end_at, self._trouble = 0.0, ""
        self.result: tuple[int, str | None] | None = None
        self.key = key or secrets.token_hex(32)
        acceptor = Acceptor(self.key.encode(), Purpose.LAUNCHER, self._expects, len(hosts) + _OTHER_CONNECTIONS)
        self.port = 0
        if port is not None:
            listener = socket.create_server(("", port), backlog=_BACKLOG)
            self.port = listener.getsockname()[1]
            acceptor.add(listener)
        self._peers = Peers(acceptor)  # by the numbers of their hosts
        self._failed: list[End] = []  # the ends that end the job, in the order in which they were told
        self._open, self._line = contextlib.ExitStack(), ProgressLine()
        self._follower: Follower | None = None
        if discovery is not None:
            self._follower = Follower(discovery, self._hosts, self._added_slots, self.add_ranks, min_ranks, notify)
        self._requests = self._open.enter_context(GrowthRequests(self.add_ranks)) if takes_requests else None

    def __enter__(self) -> Coordinator:  # noqa: PYI034 - typing.Self needs Python 3.11
        self._open.enter_context(self._line)
        return self

    def __exit__(self, *_: object) -> None:
        self._peers.stop_accepting()  # first: a supervisor that sees its connection end tries this
        self._peers.close(_READ_SECONDS)
        self._open.close()

    def connect(self, index: int) -> OwnHost:
        """The connection of a supervisor in this process, of the host of an index."""
        self._hosts[index].inbox = []
        return OwnHost(self._hosts[index], self.take, self.tick)

    def log_in(self) -> None:
        """Start the supervisors of all hosts that have none yet."""
        for index, host in enumerate(self._hosts):
            if self._logins is not None and host.inbox is None and host.login is None:
                host.login = self._logins.start(self.port, self.key, host.name, index, host.ranks, host.is_added)

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
            self._gather()
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

    def _gather(self) -> None:
        """Start the job if all supervisors have come, or end it if one does not come."""
        if trouble := " ".join(filter(None, map(self._why_missing, self._hosts))):
            self._trouble = trouble
            self._end(signal.SIGTERM, 0.0)
        elif all(host.here is not None for host in self._hosts):
            self._start()
        else:
            came = {number: host.name for number, host in enumerate(self._hosts) if host.here is not None}
            self._line.show(lambda: arrivals(came, len(self._hosts), " to be reached"))

    def _why_missing(self, host: Host) -> str:
        """Why a supervisor will not connect or begin; "" while it still may."""
        if host.is_lost:
            return f"{host.name}: the supervisor ended before its ranks started; its output above says why."
        if host.here is not None:
            return ""
        if host.login is not None and (code := host.login.poll()) is not None:
            how = silent_end(code) if code < 0 else f"ended with status {code}"
            what = "the supervisor" if is_this_host(host.name) else "the login"
            return f"{host.name}: {what} {how} before its ranks started; its output above says why."
        if time.monotonic() - host.since > config.START_TIMEOUT.get():
            limit = config.START_TIMEOUT
            return f"{host.name} did not come within {limit.get():g} s. Set {limit.name} to wait longer."
        return ""

    def _start(self) -> None:
        self._line.remove()
        first = next(host for host in self._hosts if 0 in host.ranks)
        assert first.here is not None
        address = first.addresses[0] if first.addresses is not None else "127.0.0.1"
        if address.startswith("127."):  # this host, which others have reached at another address
            reached = [host.addresses[1] for host in self._hosts if host.addresses is not None]
            reached += own_addresses() if self._follower is not None else []  # others may come later
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
        chosen = {
            index: name
            for index, name in living.items()
            if wanted in (None, name, name.rpartition("@")[2])
            or (wanted and is_this_host(name) and is_this_host(wanted))
        }
        if self._started is None:
            return "no: the job has not begun yet"
        if not living:
            return "no: the job ends"
        if rejection := self._added_slots.rejection(number):
            return rejection
        if wanted is None or chosen:
            return self._added_slots.add(number, chosen)
        if self._logins is None or not self._may_add_hosts:
            return f"no: --host {wanted} is none of the job's hosts: {', '.join(living.values())}"
        if sum(host.is_added for host in self._hosts) == MOST_ADDED:
            return f"no: --host {wanted} would be more than {MOST_ADDED} hosts that were added to the job"
        answer = self._added_slots.add(number, {len(self._hosts): wanted})
        if answer.startswith("ok"):
            self._hosts.append(Host(wanted, [], is_added=True))
            self.log_in()
        return answer

    def _expects(self, claim: Claim) -> bool:
        host = self._hosts[claim.rank] if 0 <= claim.rank < len(self._hosts) else None
        return not self._end_at and host is not None and host.addresses is None and host.inbox is None

    def _poll(self, seconds: float) -> None:
        if self._requests is not None:
            self._requests.poll()
        if self._follower is not None and self._started is not None and not (self._end_at or self._failed_at):
            self._follower.poll()
        ready = self._peers.wait(seconds)
        for new in self._peers.accepted():
            self._join(new)
        for index, event in self._peers.events(ready):
            self._read(self._hosts[index], event)
        self._look_after_added_hosts()
        self._publish("added", self._added_slots.told())
        self._publish("leaving", sorted(self._added_slots.leaving))

    def _join(self, new: Authenticated) -> None:
        if not self._expects(new.claim):
            new.socket.close()
            return
        end_when_silent(new.socket)
        # The kernel has forgotten the other end of a connection that was reset meanwhile.
        self._hosts[new.claim.rank].addresses = new.address, str(new.socket.getsockname()[0])
        self._peers.add(new.claim.rank, FrameSocket(new.socket, Purpose.LAUNCHER))

    def _read(self, host: Host, event: Event) -> None:
        try:
            if isinstance(event, Disconnected):
                raise event
            self.take(host, *read_message(event))
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
            if host.is_added and self._logins and (why := self._logins.problems(host.name, body.get("report"))):
                self._drop(host, f"{host.name} cannot run ranks as it is: {' '.join(why)}")
        elif kind == "joined":
            self._added_slots.note_joined(read_ranks(body))
        elif kind == "members":
            host.members, host.joiners = int(body["members"]), list(body["joiners"])
        elif kind == "join info":
            # All added hosts begin whose supervisors have connected, if this host has members.
            self._asked, told = None, {"join info": body, "added": self._added_slots.told()}
            waiting = [other for other in self._hosts if other.is_added and not (other.is_over or other.has_begun)]
            for other in (one for one in waiting if body and one.here is not None):
                other.has_begun = True
                self._tell(other, "start", {**(self._started or {}), **told})
        elif kind == "given back":
            self._added_slots.take_back(read_ranks([body])[0], self._hosts.index(host))
        elif kind in ("failed", "ended"):
            ends = [End.told(*told) for told in body["ranks"]]
            replaced = {rank: int(times) for told, times in body.get("replaced", ()) for rank in read_ranks([told])}
            added, why = read_ranks(body.get("added", ())), body["why"]
            if not isinstance(why, str | None):
                raise TypeError(f"{why!r} is no text")
            failed = [end for end in ends if end.how in FAILED]
            if why and not self._failed:  # others end because of those that have ended now
                failed = failed or [end for end in ends if end.code and not end.how]
            self._failed += [end for end in failed if end not in self._failed]
            host.why, host.replaced, host.added = why, replaced, added
            host.report = ends if kind == "ended" else None
            if kind == "ended" and not any(not end.code and not end.how for end in ends):
                self._give_out_anew(host)

    def _lose(self, host: Host) -> None:
        index = self._hosts.index(host)
        self._peers.hang_up(index)
        if not host.is_over:
            host.is_lost = True
            if host.here is not None and self._processes.signalled is None:
                ranks = self._added_slots.of_host(index)
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
        if empty and left and self._may_add_hosts and self._follower is None:
            self._notify(
                f"`ring add-ranks {len(empty)}` lets other processes take the places of {name_ranks(empty)}, and "
                "--host chooses where."
            )

    def _publish(self, kind: str, body: Any) -> None:
        """Send all supervisors a whole table, which has changed."""
        if self._published.get(kind) != body:
            self._published[kind] = body
            self._tell_all(kind, body)

    def _tell_all(self, kind: str, body: Any) -> None:
        for host in self._hosts:
            self._tell(host, kind, body)

    def _tell(self, host: Host, kind: str, body: Any) -> None:
        if host.inbox is not None:
            host.inbox.append((kind, body))
        else:
            self._peers.send(self._hosts.index(host), to_json([kind, body]))

    # Hosts that were added to the job ----------------------------------------------------------------

    def _look_after_added_hosts(self) -> None:
        """Let added hosts take part, and end those from which nobody can join any more."""
        if not any(host.is_added for host in self._hosts):
            return
        with_members = [host for host in self._hosts if not host.is_over and (not host.is_added or host.members)]
        waiting = [host for host in self._hosts if host.is_added and not host.is_over and not host.has_begun]
        for host in waiting:
            why = self._why_missing(host)
            if why or not with_members:
                self._drop(host, why or f"{host.name} comes too late, since the other ranks have ended.")
        has_come = any(host.here is not None and not host.is_over for host in waiting)
        if with_members and has_come and self._asked not in with_members:
            self._asked = with_members[0]
            self._tell(self._asked, "join info?", None)
        if not with_members:
            self._publish("alone", True)
        self._publish("joiners", [one for host in self._hosts if not host.is_over for one in host.joiners])

    def _drop(self, host: Host, why: str) -> None:
        """Go on without an added host that has not begun."""
        self._tell(host, "end", int(signal.SIGTERM))
        host.is_lost = True
        if host.login is not None and host.login.poll() is None:
            host.login.terminate()
        slots = self._added_slots.note_end(self._hosts.index(host), [])
        self._notify(f"{why.rstrip('.')}{f'; {name_ranks(slots)} will not join' if slots else ''}.")
