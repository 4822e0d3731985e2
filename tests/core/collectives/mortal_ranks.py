"""Ranks that can die, as threads of one process: every point of an operation can be tried in milliseconds.

A thread that dies stops where it is and does nothing more, nor does the one in which its communicator works. Its memory
stays, and its `Mortal` says that it is gone, as the kernel's lock would.
"""

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ring_plugins.core.base.member import Member, Members
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.recovery import JobRecovery
from ring_plugins.core.collectives.shm_barrier import _EPOCH, SharedMemoryBarrier
from ring_plugins.core.control.channel import Channel
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.liveness import FAILED, LEFT, RUNNING, LocalPeers
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.wait import Wait

_synchronize = SharedMemoryBarrier.synchronize


class Mortal:
    """A `Liveness` in ordinary memory."""

    exit_status = 0

    def __init__(self, rank):
        self.rank, self.pid, self.state, self.is_dead = rank, 1000 + rank, RUNNING, False
        self.root_cause = (-1, "")

    def has_died(self):
        return self.is_dead

    def is_lost(self):
        return self.state == RUNNING and self.is_dead

    def fail(self, rank, text):
        self.root_cause, self.state = (rank, text), FAILED

    def leave(self):
        self.state = LEFT


class Silent:
    """A control channel that nobody reads."""

    def on(self, kind, handler, at_once=False):
        pass

    def on_end(self, handler):
        pass

    def tell(self, rank, kind, body):
        pass

    def flush(self, seconds):
        return True


class Wires:
    """Connects each two of some ranks, in the place of a `Listener`."""

    def __init__(self, size):
        self._ends = {}
        for low, high in itertools.combinations(range(size), 2):
            self._ends[low, high], self._ends[high, low] = socket.socketpair()

    def of(self, rank):
        """As the `Listener` of a rank."""
        return Wire(lambda peer: self._ends.pop((rank, peer)))


class Wire(NamedTuple):
    connect: Any

    def connection(self, peer, tag):
        return self.connect(peer)


class Rank:
    """A rank as its own thread sees it.

    Args:
        rank: its number.
        everyone: by rank, the `Mortal` of each.
        gather: exchanges items among all.
        over: set when the survivors are done.
        wires: connects them.
        min_ranks: as for `Mesh`.

    Attributes:
        view: ranks that are left.
        barriers: how many this rank has come to.
        dies: called at each barrier with its number; returns "before" or "in" to die there, None to live.
    """

    def __init__(self, rank, everyone, gather, over, wires, min_ranks):
        self.rank, self._everyone, self._gather, self._over = rank, everyone, gather, over
        self.peers = LocalPeers(everyone[rank], [one for one in everyone if one.rank != rank])
        self._members = Members(rank, [Member(one.rank, one.rank, "host", one.pid, "domain") for one in everyone])
        self.channel = Channel(rank, len(everyone))
        self.detector = FailureDetector(self._members, self.peers, self.channel)
        self.mesh = Mesh(self._members, self.channel, self.peers, min_ranks, confirms=False)
        self.mesh.connect(wires.of(rank), Wait("ring", self.detector))
        self.detector.go_on_with(self.mesh)
        self._communicators, self._recovery = [], JobRecovery(self._go_on_without)
        self.barriers, self.dies = 0, lambda number: None

    @property
    def view(self):
        return self._members.ranks

    def communicator(self, name):
        """A new communicator of all ranks."""
        tag = 2 * len(self._communicators)
        made = HostCommunicator(
            name, self.rank, "host", tag, self._gather, self.detector, None, recovery=self._recovery
        )
        self._communicators.append(made)
        return made

    def _go_on_without(self, wait):
        self.mesh.agree(wait)
        for communicator in self._communicators:
            communicator.keep(self.view, self._members.view)

    def die(self):
        """Do nothing more."""
        self._everyone[self.rank].is_dead = True
        self._over.wait(60)
        raise Died

    def close(self):
        for communicator in self._communicators:
            communicator.close()


class Died(BaseException):
    """Ends the thread of a rank that died, when nobody looks any more."""


def on_mortal_ranks(monkeypatch, size, function, min_ranks=1):
    """Call `function(rank)` on all `Rank`s at once; returns results by rank, None for those that died.

    Raises:
        Exception: the first error of a rank.
    """
    together, items, over = threading.Barrier(size), [None] * size, threading.Event()
    everyone, ranks, wires = [Mortal(rank) for rank in range(size)], {}, Wires(size)

    def mortally(barrier, *args, **options):
        rank = ranks.get(barrier._ranks[barrier._position])
        if rank is not None:
            if everyone[rank.rank].is_dead:  # in another of its threads
                rank.die()
            rank.barriers += 1
            how = rank.dies(rank.barriers)
            if how == "in":
                barrier._own[_EPOCH] += 1
            if how:
                rank.die()
        _synchronize(barrier, *args, **options)

    monkeypatch.setattr(SharedMemoryBarrier, "synchronize", mortally)

    def call(number):
        def gather(item):
            items[number] = item
            together.wait(60)
            gathered = list(items)
            together.wait(60)
            return gathered

        rank = ranks[number] = Rank(number, everyone, gather, over, wires, min_ranks)
        try:
            return function(rank)
        except Died:
            return None
        except BaseException as error:
            if everyone[number].is_dead:
                return None
            everyone[number].fail(number, f"rank {number} failed: {error!r}")
            raise
        finally:
            living.discard(number)
            if not living & {one.rank for one in everyone if not one.is_dead}:
                over.set()
            if not everyone[number].is_dead:
                rank.close()

    living = set(range(size))
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(call, number) for number in range(size)]
    for rank in ranks.values():
        rank.mesh.close()
    for rank in ranks.values():
        rank.channel.close()
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
