"""How a rank under test dies at a certain point."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.shm_barrier import SharedMemoryBarrier
from ring_plugins.core.control import admission
from ring_plugins.core.net.tcp import TcpTransport
from ring_plugins.core.world import current

#: Called before this process kills itself.
last_words: list[Callable[[], object]] = []


def die(*_: object) -> None:
    for say in last_words:
        say()
    os.kill(os.getpid(), signal.SIGKILL)


def end_at(point: str) -> None:
    """Do what a test's `point` says: "barrier 2 in", "SIGTERM", or anything else to die at once."""
    if point.startswith("barrier"):
        _, number, when = point.split()
        die_in_barrier(int(number), when)
    elif point == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
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
    for communicator in current()._in_use():  # which keep the bound method
        if isinstance(communicator, HostCommunicator) and communicator._node is not None:
            communicator._node._synchronize = communicator._node.barriers.synchronize


def end_in_round(number: int, when: str) -> None:
    """Die "before" or "in" this round of an admission from now on, counted from 1, or be "stopped" before it."""
    gather, seen = admission.Admission.gather, []

    def mortally(self: Any, payload: Any) -> Any:
        seen.append(1)
        if len(seen) == number and when == "in":
            self._own.tell(self._round + 1, json.dumps(payload).encode())
        if len(seen) == number and when == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif len(seen) == number:
            die()
        return gather(self, payload)

    admission.Admission.gather = mortally  # type: ignore[method-assign]
