"""Hosts that are added to a running job: `ring add-ranks --host` names one that has no ranks, or none any more.

The coordinator (coordinator.py) starts a supervisor there as on any other host. What differs is how its processes
find the members of the job, and how these find them:

    coordinator                 starts the new host's supervisor, and waits for its "here", which has its versions
    coordinator -> a member's   "join info?"               its supervisor has what its ranks wrote (rendezvous/slots.py)
    a member's  -> coordinator  "join info"
    coordinator -> new host's   "start", with that         it starts the processes, which wait to join
    new host's  -> coordinator  "members"                  how many of them are members, and which wait if none is
    coordinator -> all          "joiners"                all such processes; members connect to them

Once the host has a member, that one sees which others wait there. When no host has members any more, nobody can let a
process join. Then the coordinator says "alone", and the processes that wait end.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import name_ranks
from ring_plugins.launcher.added_slots import MOST_ADDED, AddedSlots
from ring_plugins.launcher.job_hosts import Host


class AddedHosts:
    """Adds hosts to a job.

    Args:
        hosts: of the job; those that are added come behind the others.
        added_slots: which of them have which slots.
        tell: sends a message, of a kind and with a body, to the supervisor of a host.
        notify: shows one line to the user.
        start: starts the supervisor of a host, which gets this number in the job; None if that is not possible.
        problems_of: why a host cannot run ranks, given its name and the "report" in its "here"; None if that is not
            known yet.
    """

    def __init__(
        self,
        hosts: list[Host],
        added_slots: AddedSlots,
        tell: Callable[[Host, str, Any], None],
        notify: Callable[[str], None],
        start: Callable[[str, int], subprocess.Popen[bytes]] | None,
        problems_of: Callable[[str, Any], list[str] | None],
    ) -> None:
        self._hosts, self._added_slots, self._tell, self._notify = hosts, added_slots, tell, notify
        self._start, self._problems_of = start, problems_of
        self._asked: Host | None = None  # for its join info
        self._joiners: list[Any] = []  # as all supervisors know them
        self._is_alone = False  # whether they know that nobody is left who lets others join

    @property
    def can_add(self) -> bool:
        """Whether hosts can be added."""
        return self._start is not None

    def rejection(self, name: str, living: Iterable[str]) -> str:
        """Why a host cannot be added, "" if it can.

        Args:
            name: of the host.
            living: names of those that the job has.
        """
        if self._start is None:
            return f"no: --host {name} is none of the job's hosts: {', '.join(living)}"
        if sum(host.is_added for host in self._hosts) == MOST_ADDED:
            return f"no: --host {name} would be more than {MOST_ADDED} hosts that were added to the job"
        return ""

    def add(self, name: str) -> int:
        """Add a host for which there is no `rejection`; returns its number."""
        assert self._start is not None
        host, number = Host(name, []), len(self._hosts)
        host.is_added = True
        self._hosts.append(host)
        host.login = self._start(name, number), time.monotonic()
        return number

    def look_after(self) -> None:
        """Let hosts take part that were added, and end those by which nobody can join any more."""
        if not any(host.is_added for host in self._hosts):
            return
        waiting = [host for host in self._hosts if host.is_added and not host.is_over and not host.has_begun]
        for host in waiting:
            self._drop_if_it_cannot_begin(host)
        with_members = [host for host in self._hosts if not host.is_over and (not host.is_added or host.members)]
        if with_members and any(map(self._may_begin, waiting)) and self._asked not in with_members:
            self._asked = with_members[0]
            self._tell(self._asked, "join info?", None)
        if not with_members:
            for host in waiting:
                if not host.is_over:
                    self._tell(host, "end", int(signal.SIGTERM))
                    self._drop(host, "comes too late, since the other ranks have ended")
            if not self._is_alone:
                self._is_alone = True
                self._tell_all("alone", None)
        joiners = [one for host in self._hosts if not host.is_over for one in host.joiners]
        if joiners != self._joiners:
            self._joiners = joiners
            self._tell_all("joiners", joiners)

    def begin(self, started: Mapping[str, Any], join_info: Any) -> None:
        """Let all hosts begin whose supervisors have come.

        Args:
            started: what the supervisors of the first hosts were told.
            join_info: that of a host with members; None if there is none.
        """
        self._asked = None
        for host in self._hosts:
            if join_info and host.is_added and not host.has_begun and self._may_begin(host):
                host.has_begun = True
                self._tell(host, "start", {**started, "join info": join_info, "added": self._added_slots.told()})

    def _may_begin(self, host: Host) -> bool:
        """Whether a host has come, and can run ranks."""
        return not host.is_over and self._problems(host) == []

    def _problems(self, host: Host) -> list[str] | None:
        """Why a host cannot run ranks; None if that is not known yet."""
        return None if host.here is None else self._problems_of(host.name, host.here.get("report"))

    def _drop_if_it_cannot_begin(self, host: Host) -> None:
        assert host.login is not None
        process, since = host.login
        if process.poll() is not None:
            self._drop(host, "could not be reached, as the output above says")
        elif host.here is None and time.monotonic() - since > config.START_TIMEOUT.get():
            self._drop(host, "did not come")
        elif problems := self._problems(host):
            self._tell(host, "end", int(signal.SIGTERM))
            self._drop(host, f"cannot run ranks as it is: {' '.join(problems).rstrip('.')}")

    def _drop(self, host: Host, how: str) -> None:
        """Go on without a host that was added and has not begun."""
        assert host.login is not None
        host.is_lost = True
        if host.login[0].poll() is None:
            host.login[0].terminate()
        slots = self._added_slots.note_end(self._hosts.index(host), [])
        self._notify(f"{host.name} {how}{f'; {name_ranks(slots)} will not join' if slots else ''}.")

    def _tell_all(self, kind: str, body: Any) -> None:
        for host in self._hosts:
            self._tell(host, kind, body)
