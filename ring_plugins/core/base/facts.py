"""What a rank knows of the ends of the others: one table for the job, and the only place where this is kept.

Facts arrive in many ways: words in the memory of this host's ranks (liveness.py), messages (failure_detector.py), ends
of connections (mesh.py), the kernel's counters (tcp_liveness.py) and leaders of agreements (consensus.py), all in
core/control. Whoever learns one notes it here, and whoever asks looks here. Nothing is taken back.
"""

from __future__ import annotations

import time

from ring_plugins.core.base.errors import PeerFailed

#: Seconds for which data that a rank sent before it left may still be on its way.
IN_FLIGHT = 2.0


class Facts:
    """Which other ranks have ended or cannot be reached, and what they have said about it. All numbers are world ranks.

    Attributes:
        dead: ranks whose processes have ended without a word, which is proven.
        silent: ranks that cannot be reached any more.
        left: ranks that left normally in a job that agrees on its members, with how many operations each had confirmed.
        departed: by rank that left normally, the `time.monotonic` from which all that it had sent has arrived.
        exit_statuses: with which ranks have said that they end, other than 0.
        failure: the first failure of another rank that ends the job.
        has_lost_a_process: whether the failure is the end of a process on another host.
        has_lost_the_network: whether the failure is a lost network.
        broken: by key of a communicator, why it can be used no more on any member.
        rejected: by communicator, operations finished and calls rejected since: who rejected the next call, and why.
    """

    def __init__(self) -> None:
        self.dead: set[int] = set()
        self.silent: set[int] = set()
        self.left: dict[int, int] = {}
        self.departed: dict[int, float] = {}
        self.exit_statuses: dict[int, int] = {}
        self.failure: PeerFailed | None = None
        self.has_lost_a_process = self.has_lost_the_network = False
        self.broken: dict[int, PeerFailed] = {}
        self.rejected: dict[tuple[int, int, int], dict[int, str]] = {}

    def depart(self, rank: int, in_flight: float) -> None:
        """A rank has left normally; what it sent before may arrive for so many seconds more."""
        self.departed[rank] = min(self.departed.get(rank, float("inf")), time.monotonic() + in_flight)
