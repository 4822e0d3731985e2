"""Forked jobs in which processes take the places of lost ranks.

This process does what `ring run` does: it fills the slots of ranks that died, with the launcher's own `SlotProcesses`.
So several processes in a row may have a slot.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ring_plugins.core.base import config
from ring_plugins.core.control.liveness import MOST_MEMBERS
from ring_plugins.core.linux.shared_memory import Segment
from ring_plugins.core.rendezvous.slots import Slots
from ring_plugins.core.rendezvous.spawn import SharedMemoryRendezvous, child_environment
from ring_plugins.launcher.added_slots import AddedSlots
from ring_plugins.launcher.growth import GrowthRequests
from ring_plugins.launcher.restart import SlotProcesses
from tests.forked_ranks import Ended, be_rank, collect, free_port


class Forked:
    """A forked process, as `subprocess.Popen` has one."""

    def __init__(
        self, process: int, function: Callable[[int], Any], variables: dict[str, str], directory: Path
    ) -> None:
        self.process, self.returncode = process, None
        self.pid = os.fork()
        if not self.pid:
            be_rank(process, function, variables, directory)

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.001)


def run_replaced(
    ranks: int,
    standbys: int,
    function: Callable[[int], Any],
    seconds: float,
    most: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> Ended:
    """Run `function(process)` on forked ranks, and on those that take their places, until all slots' processes end.

    Args:
        ranks: of the job.
        standbys: that wait until a rank is lost.
        function: gets the number of its process: its rank for the first ones.
        seconds: after which a job hangs, and is ended.
        most: up to how many ranks it grows, which a rank asks this process for.
        meanwhile: called all the time, in this process.
    """
    most = max(most, ranks)
    segment = Segment.create(SharedMemoryRendezvous.nbytes(ranks, most))
    places = SharedMemoryRendezvous(segment, 0, ranks, [], most).slots
    started, began = list[Forked](), time.monotonic()
    with TemporaryDirectory() as name:
        directory = Path(name)

        def start(slot: int | None, process: int) -> Any:
            size = max(ranks, places.size_until_joined(slot) if process >= ranks and slot is not None else 0)
            variables = child_environment(segment, slot, size, os.getpid(), most)
            variables |= {config.LOSSES_TOLERATED.name: "1", config.ON_FAILURE.name: "replace"}
            variables |= {config.JOINS.name: str(process)} if process >= ranks else {}
            started.append(one := Forked(process, function, variables, directory))
            return one

        first, unused = range(ranks), iter(range(most, MOST_MEMBERS))
        slots = SlotProcesses(places, first, ranks, start, lambda _: None, world_ranks=unused, standbys=standbys)
        slots.start_first()

        added = AddedSlots(ranks, most, [first])
        published = added.told()
        with GrowthRequests(lambda number, host: added.add(number, {0: "here"})) as requests:

            def each_time() -> None:
                nonlocal published
                requests.poll()
                added.note_joined(slots.added)
                while slots.given_back:
                    added.take_back(slots.given_back.pop())
                if (told := added.told()) != published:
                    published = told
                    slots.follow([(one.slot, one.attempt) for one in told["slots"]])
                    places.in_use = told["in use"]
                meanwhile()

            result = _follow([slots], started, directory, began, seconds, each_time)
    segment.close_file()
    return result


def run_replaced_between_hosts(sizes: Sequence[int], function: Callable[[int], Any], seconds: float) -> Ended:
    """As `run_replaced`, of ranks that act as several hosts, each with a supervisor of its own, and without standbys.

    Args:
        sizes: how many ranks each host has.
        function, seconds: as there.
    """
    ranks, port, began = sum(sizes), free_port(), time.monotonic()
    started, hosts, segments = list[Forked](), list[SlotProcesses](), list[Segment]()
    with TemporaryDirectory() as name:
        directory = Path(name)

        def add(index: int, first: int, size: int) -> None:
            segment = Segment.create(Slots.nbytes(size))
            segments.append(segment)

            def start(local: int | None, process: int) -> Any:
                assert local is not None
                variables = {"RANK": str(first + local), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
                variables |= {"MASTER_PORT": port, config.VIRTUAL_NODES.name: ",".join(map(str, sizes))}
                variables |= {config.LOSSES_TOLERATED.name: "1", config.ON_FAILURE.name: "replace"}
                variables |= {config.LAUNCHER.name: "rendezvous", **Slots.environment(segment, size, local)}
                variables |= {config.JOINS.name: str(process)} if process >= ranks else {}
                started.append(one := Forked(process, function, variables, directory))
                return one

            rows = Slots(segment.array)
            unused = iter(range(ranks + index, MOST_MEMBERS, len(sizes)))
            own = range(first, first + size)
            hosts.append(SlotProcesses(rows, own, ranks, start, lambda _: None, world_ranks=unused))
            hosts[-1].start_first()

        for index, size in enumerate(sizes):
            add(index, sum(sizes[:index]), size)
        result = _follow(hosts, started, directory, began, seconds)
    for segment in segments:
        segment.close_file()
    return result


def _follow(
    hosts: Sequence[SlotProcesses],
    started: Sequence[Forked],
    directory: Path,
    began: float,
    seconds: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> Ended:
    """Replace lost ranks until the processes of all slots have ended."""

    def running() -> list[Any]:
        return [process for slots in hosts for process in slots.running()]

    while (hung := running()) and time.monotonic() < began + seconds:
        for slots in hosts:
            slots.tick()
        meanwhile()
        time.sleep(0.002)
    for process in hung:
        os.kill(process.pid, signal.SIGUSR1)
    if hung:
        time.sleep(1.0)
        hung = running()
    for one in started:
        if one.poll() is None:
            one.kill()
            os.waitpid(one.pid, 0)
    ended = {one.process: one.returncode for one in started if one.returncode is not None or one in hung}
    return collect(directory, ended, began)
