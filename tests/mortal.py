"""How a rank under test dies at a certain point."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.shm_barrier import SharedMemoryBarrier
from ring_plugins.core.control import mesh_admission
from ring_plugins.core.control.channel import EVERYONE
from ring_plugins.core.control.consensus import Consensus
from ring_plugins.core.joining import join as joining
from ring_plugins.core.net.tcp import TcpTransport
from ring_plugins.core.world import current

#: Called before this process kills itself.
last_words: list[Callable[[], object]] = []


def die(*_: object) -> None:
    for say in last_words:
        say()
    os.kill(os.getpid(), signal.SIGKILL)


def end_at(point: str) -> None:
    """Do what a test's `point` says: "barrier 2 in", "SIGTERM", "stops 5" (for so long), or else to die at once."""
    if point.startswith("barrier"):
        _, number, when = point.split()
        die_in_barrier(int(number), when)
    elif point == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif point.startswith("stops"):
        subprocess.Popen(["sh", "-c", f"sleep {point.split()[1]}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        die()


def die_in_barrier(number: int, when: str) -> None:
    """Die at this barrier or exchange with other hosts from now on, counted from 1.

    Args:
        number: which.
        when: "before" it, or "in" it: after announcing the arrival, or after sending what the kernel takes at once.
    """
    synchronize, exchange, seen = SharedMemoryBarrier.synchronize, TcpTransport.exchange, list[int]()

    def mortally_exchange(self: TcpTransport, *args: object) -> object:
        seen.append(1)
        if len(seen) == number and when == "before":
            die()
        request = exchange(self, *args)  # type: ignore[arg-type]
        if len(seen) == number:
            request.done()
            die()
        return request

    TcpTransport.exchange = mortally_exchange  # type: ignore[method-assign, assignment]

    def mortally(self: SharedMemoryBarrier, *args: object, **options: object) -> None:
        seen.append(1)
        if len(seen) == number and when == "in":
            self._own[0] += 1
        if len(seen) == number:
            die()
        synchronize(self, *args, **options)  # type: ignore[arg-type]

    SharedMemoryBarrier.synchronize = mortally  # type: ignore[method-assign, assignment]
    for communicator in current().in_use():  # which keep the bound method
        if isinstance(communicator, HostCommunicator) and communicator.groups.node is not None:
            communicator.groups.node._synchronize = communicator.groups.node.barriers.synchronize


def pause_once() -> None:
    """Make the file that TEST_PAUSED names, and wait until the test removes it; only one process of a test does so."""
    file = Path(os.environ["TEST_PAUSED"])
    try:
        file.with_name("has paused").touch(exist_ok=False)
    except FileExistsError:
        return
    file.touch()
    while file.exists():
        time.sleep(0.005)


def end_in_round(number: int, when: str) -> None:
    """Die "before" or "in" this round of an admission from now on, counted from 1, or be "stopped" before it.

    `when` may also be "pauses-before" or "pauses-in": the process goes on when the test says so.

    Round 0 is the one in which members call the joiner, round 3 the decision, and round 4 that in which all go on
    together. A member dies "in" the decision when it has told the others that it has arrived, and a joiner when it
    knows of it.
    """
    of_members, of_joiner = mesh_admission.MeshAdmission.gather, mesh_admission.Candidate.gather
    arrive, decided = Consensus.arrive, mesh_admission.Candidate.decision
    seen: list[int] = []
    pauses, is_in = when.startswith("pauses"), when.endswith("in")

    def end() -> None:
        if pauses:
            pause_once()
        elif when == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            die()

    def gather(self: Any, *args: Any) -> Any:
        seen.append(1)
        if len(seen) == number and is_in:
            self._mesh.tell(EVERYONE, {"view": self._view, "round": args[0], "payload": args[1]})
        if len(seen) == number:
            end()
        return of_members(self, *args)

    def gather_as_joiner(self: Any, view: int, round_: int, members: Any, payload: Any = None) -> Any:
        seen.extend([1] * (payload is not None))
        if len(seen) == number and payload is not None:
            if is_in:
                for rank in members:
                    self._tell(rank, {"view": view, "round": round_, "payload": payload})
                self._look()
            end()
        return of_joiner(self, view, round_, members, payload)

    def arrive_with_joiner(self: Any, *args: Any) -> None:
        if number == 3 and args[3] and is_in:
            arrive(self, *args)
        if number == 3 and args[3]:
            end()
        arrive(self, *args)

    def decision(self: Any, *args: Any) -> Any:
        if number == 3 and not is_in:
            end()
        found = decided(self, *args)
        if number == 3 and is_in:
            end()
        return found

    if number == 0:
        end_around(mesh_admission.MeshAdmission, "call", end, is_in)
        end_around(mesh_admission.Candidate, "called", end, is_in)
    if number == 4:
        end_around(joining, "go_on", end, is_in)
    mesh_admission.MeshAdmission.gather = gather  # type: ignore[method-assign]
    mesh_admission.Candidate.gather = gather_as_joiner  # type: ignore[method-assign]
    mesh_admission.Candidate.decision = decision  # type: ignore[method-assign]
    Consensus.arrive = arrive_with_joiner  # type: ignore[method-assign]


def end_around(of: Any, name: str, end: Callable[[], object], is_behind: bool) -> None:
    """Call `end` before a method, or behind it."""
    function = getattr(of, name)

    def with_end(self: Any, *args: Any) -> Any:
        if not is_behind:
            end()
        found = function(self, *args)
        if is_behind:
            end()
        return found

    setattr(of, name, with_end)
