"""`ring run --host-discovery-script`: a script of the user prints which hosts there are, and the job follows.

The script prints a line for each host, as in a hostfile: `host1:2`. It runs again and again, each time for some seconds
at most. `ring run` looks at it between two looks at its ranks, and never waits for it. What it prints is a wish:

- Hosts and slots that the job has not yet are given to it as `ring add-ranks --host` would, up to `--max-ranks`.
- Ranks on hosts that are not listed any more, or with fewer slots, are to leave: their supervisor sends them SIGTERM,
  upon which a rank leaves after its step (core/members). None is told so if fewer than `--min-ranks` would be left. It
  stays until others have joined, or its host is gone.
- A host that is lost, or that cannot be reached, is used again only after the script has left it out once.

A script that fails, takes too long or prints something else says nothing about hosts, so nothing changes.

Horovod stops all ranks whenever the list changes, and numbers them anew.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, LaunchError, name_ranks, quoted
from ring_plugins.core.linux.process import ending, silent_end
from ring_plugins.launcher.added_slots import AddedSlots
from ring_plugins.launcher.hosts import Host, is_this_host, parse_hostfile
from ring_plugins.launcher.hosts import slots as slots_of
from ring_plugins.launcher.job_hosts import Host as JobHost
from ring_plugins.launcher.processes import Popen, Processes

#: Seconds between the end of the script and its next start, for which it may run, and between two looks at it.
_EVERY, _LIMIT, _TICK = 1.0, 30.0, 0.05
#: Bytes that it may print, and characters of an error's line that are shown.
_MOST, _LONGEST = 1 << 20, 300
#: Exit statuses of the shell if there is no such command, or it cannot be run.
_NO_COMMAND = (126, 127)


class HostDiscovery:
    """Runs the script again and again.

    Args:
        script: a command of the shell.
        processes: of this process; the script is one of their helpers while it runs.
        notify: shows one line to the user.

    Attributes:
        name: of the script, for messages.
    """

    def __init__(self, script: str, processes: Processes, notify: Callable[[str], None]) -> None:
        self.name = f"--host-discovery-script {quoted(script)}"
        self._script, self._processes, self._notify = script, processes, notify
        self._running: Popen | None = None
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._due, self.code = 0.0, 0
        self._trouble, self._kind_of_trouble = "", ""

    def poll(self) -> list[Host] | None:
        """The hosts that the script has just printed; None if it has not since the last call, or has failed."""
        now = time.monotonic()
        if self._running is None:
            if now >= self._due:
                self._start()
            return None
        is_too_much = max(os.fstat(file.fileno()).st_size for file in (self._out, self._err)) > _MOST
        if self._running.poll() is None and now < self._due and not is_too_much:
            return None
        is_late = self._running.poll() is None
        self._end()
        self._due = now + _EVERY
        return self._read(is_late, is_too_much)

    def _start(self) -> None:
        for file in (self._out, self._err):
            file.seek(0)
            file.truncate()
        self._running = self._processes.start(
            ["/bin/sh", "-c", self._script],
            os.environ,
            stdin=None,
            stdout=self._out.fileno(),
            stderr=self._err.fileno(),
            own_session=True,
            is_helper=True,
        )
        self._due = time.monotonic() + _LIMIT

    def _end(self) -> None:
        """End the script, with what it has started."""
        if (process := self._running) is None:
            return
        self._running = None
        self._processes.helpers.remove(process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.code = process.wait()

    def _read(self, is_late: bool, is_too_much: bool) -> list[Host] | None:
        trouble, kind, found = "", "", list[Host]()
        if is_too_much:
            trouble = kind = f"printed more than {_MOST >> 20} MiB, and was killed"
        elif is_late:
            trouble = kind = f"did not end within {_LIMIT:g} s, and was killed"
        elif self.code:
            lines = self._text(self._err).strip().splitlines()
            kind = silent_end(self.code) if self.code < 0 else f"ended with {ending(self.code)}"
            trouble = f"{kind}{f': {quoted(lines[-1][:_LONGEST])}' if lines else ''}"
        else:
            try:
                found = parse_hostfile(self._text(self._out), "its output", "its output")
            except ArgumentError as error:
                kind, trouble = "ended well, but", f"ended well, but {quoted(error, 400)}"
        if trouble and kind != self._kind_of_trouble:  # the rest may hold the time, and be another every second
            self._notify(f"{self.name} {trouble.rstrip('.')}. It is tried again; the hosts stay as they are.")
        self._trouble, self._kind_of_trouble = trouble, kind
        return None if trouble else found

    @staticmethod
    def _text(file: IO[bytes]) -> str:
        file.seek(0)
        return file.read(_MOST).decode(errors="replace")

    def wait_for(self, least: int) -> list[Host]:
        """Wait until the script prints hosts with so many slots, and return them.

        Raises:
            LaunchError: it does not within RING_START_TIMEOUT, or there is no such program, or this process is to end.
        """
        limit = config.START_TIMEOUT
        end, told = time.monotonic() + limit.get(), -1
        while True:
            found = self.poll()
            if found is not None and slots_of(found) >= least:
                return found
            if found is not None and slots_of(found) != told:
                told = slots_of(found)
                self._notify(f"waiting for {_slots(least)}; {self.name} lists {told}.")
            if self.code in _NO_COMMAND:
                raise LaunchError(f"{self.name} cannot be run ({self._trouble}): give the path of a program.")
            if self._processes.signalled is not None:
                raise LaunchError(f"ended because of {self._processes.signalled.name}, before any rank was started.")
            if time.monotonic() > end:
                still = ", and still runs" if self._running is not None and told < 0 and not self._trouble else ""
                raise LaunchError(
                    f"{self.name} listed {_slots(max(told, 0))} within {limit.get():g} s{still}, of {least} that "
                    f"are needed: set {limit.name} to wait longer, or ask for fewer with --min-ranks."
                )
            time.sleep(_TICK)

    def close(self) -> None:
        """End the script if it runs."""
        self._end()
        self._out.close()
        self._err.close()


def first_hosts(script: str, least: int, notify: Callable[[str], None]) -> list[Host]:
    """The hosts that a script prints as soon as they have so many slots; `HostDiscovery.wait_for` says more."""
    with Processes() as processes:
        discovery = HostDiscovery(script, processes, notify)
        try:
            return discovery.wait_for(least)
        finally:
            discovery.close()


class Follower:
    """Lets ranks of a job join and leave as the script says.

    Args:
        discovery: runs the script.
        hosts: of the job, by their numbers; may grow.
        slots: says which slots each has.
        add: lets ranks join, given their number and a host; its answer begins with "ok: " or "no: ".
        min_ranks: how many have to be left.
        notify: shows one line to the user.
    """

    def __init__(
        self,
        discovery: HostDiscovery,
        hosts: Sequence[JobHost],
        slots: AddedSlots,
        add: Callable[[int, str | None], str],
        min_ranks: int,
        notify: Callable[[str], None],
    ) -> None:
        self._discovery, self._hosts, self._slots = discovery, hosts, slots
        self._add, self._min_ranks, self._notify = add, max(1, min_ranks), notify
        self._let_go = set[int]()  # numbers of hosts that are to have no ranks
        self._seen_over = set[int]()
        self._excluded = set[str]()
        self._told = set[str]()

    def poll(self) -> None:
        """Do what the script has printed, if it just has."""
        if (found := self._discovery.poll()) is not None:
            self.follow(found)

    def follow(self, listed: Sequence[Host]) -> None:
        """Let ranks join and leave, so that the job gets these hosts and no others."""
        if any(not end.code and not end.how for host in self._hosts for end in host.report or ()):
            return  # the job ends
        wanted = dict[str, int]()
        for host in listed:
            wanted[_key(host.name)] = wanted.get(_key(host.name), 0) + (host.slots or 1)
        self._exclude(wanted)
        living = [(index, host.name) for index, host in enumerate(self._hosts) if not host.is_over]
        self._let_leave(living, wanted)
        for host in listed:
            name = _key(host.name)
            here = sum(len(self._slots.of_host(index)) for index, other in living if _key(other) == name)
            number = min(wanted[name] - here, len(self._slots.free()))
            if number > 0 and name not in self._excluded:
                wanted[name] = 0  # several names of this host may be listed
                kind, _, text = self._add(number, host.name).partition(": ")
                self._tell(f"{host.name} is listed with {_slots(host.slots or 1)}: {text}.", once=kind != "ok")

    def _exclude(self, wanted: Mapping[str, int]) -> None:
        """Note which hosts are lost though they are listed, and which are not listed any more."""
        self._excluded &= set(wanted)
        for index, host in enumerate(self._hosts):
            if host.is_over and index not in self._seen_over:
                self._seen_over.add(index)
                if index not in self._let_go and _key(host.name) in wanted:
                    self._excluded.add(_key(host.name))
                    self._notify(f"{host.name} gets no more ranks until {self._discovery.name} has left it out once.")

    def _let_leave(self, living: Sequence[tuple[int, str]], wanted: Mapping[str, int]) -> None:
        slots = self._slots
        spare = sum(len(slots.joined(index)) for index, _ in living) - len(slots.leaving) - self._min_ranks
        for index, name in living:
            here = [slot for slot in slots.of_host(index) if slot not in slots.leaving]
            surplus = max(0, len(here) - wanted.get(_key(name), 0))
            self._let_go.discard(index)
            if surplus == len(here):
                self._let_go.add(index)
            joined = slots.joined(index)
            chosen = sorted(here, key=lambda slot: (slot in joined, -slot))[:surplus]
            kept = [slot for slot in chosen if slot in joined][max(0, spare) :]
            leave = sorted(set(chosen).difference(kept))
            spare -= len(set(leave).intersection(joined))
            slots.let_leave(leave)
            if leave:
                self._notify(f"{name_ranks(leave)} on {name} will leave: the slots are not listed any more.")
            if kept:
                self._tell(
                    f"{name_ranks(sorted(kept))} on {name}: kept for now, though the slots are not listed any more, "
                    f"since fewer than {self._min_ranks} ranks would be left.",
                    once=True,
                )

    def _tell(self, text: str, once: bool) -> None:
        if not once or text not in self._told:
            self._notify(text)
        if once:
            self._told.add(text)


def _slots(number: int) -> str:
    return f"{number} slot{'s' * (number != 1)}"


@functools.lru_cache(1024)  # it may ask a name server
def _key(name: str) -> str:
    """The same for all names of a host that a user may mix."""
    return "this host" if is_this_host(name) else name.rpartition("@")[2]
