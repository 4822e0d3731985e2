"""What became of the other ranks, wherever they are, and how they learn what becomes of this one.

Ranks of this host are seen through shared memory (`presence`), within milliseconds and whatever they do. Ranks of other
hosts are heard of over the control channel, where rank 0 passes on what happened.

Whoever started the job is told that a rank failed, because the exit status of an mpirun does not always tell.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from ring_plugins.core.base import config
from ring_plugins.core.base.errors import DeadlockError, PeerFailed, PeerLeft
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.liveness import LocalPeers


def notify_parent(text: str) -> None:
    """Tell what started this process, if it is on this host and wants to know."""
    name = config.PARENT_NOTIFIER.get()
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(text.encode()[:4096], f"\0{name}".encode())


class ParentNotifier:
    """The starter's end: a context in which ranks on this host that have `environment` may tell something.

    Attributes:
        environment: for the ranks.
    """

    def __init__(self) -> None:
        name = f"ring_plugins/{secrets.token_hex(8)}"
        self.environment = {config.PARENT_NOTIFIER.name: name}
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.bind(f"\0{name}".encode())  # in Linux's abstract namespace, which is no file
        self._line.setblocking(False)

    def heard(self) -> str | None:
        """What a rank has told, if there is something that was not asked for before."""
        with contextlib.suppress(BlockingIOError):
            return self._line.recv(4096).decode(errors="replace")
        return None

    def __enter__(self) -> ParentNotifier:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()


#: Seconds for which what a rank sent before it left may still be on its way here.
_IN_FLIGHT = 2.0
#: Seconds that a process takes to end after it left, GPU communicators included.
_EXIT = 15.0


class Peer(NamedTuple):
    """Where a rank is.

    Attributes:
        host: its name.
        pid: process id there.
        domain: equal for ranks that can look at each other's memory.
    """

    host: str
    pid: int
    domain: str


class FailureDetector:
    """This process among the others of the job.

    Args:
        rank: of this process.
        roster: all ranks.
        neighbourhood: those of this host, where they share memory.
        channel: to rank 0, and from there to all.

    Attributes:
        told: the main thread has been told that a peer failed; it is its turn to end the process.
        failed: this process has said that it failed.
        has_lost_the_network: that is what failed.
        verdicts: by name of a communicator, why waiting in it is in vain; a wait that finds one raises it.
    """

    def __init__(self, rank: int, membership: Sequence[Peer], local_peers: LocalPeers | None, channel: Channel) -> None:
        self.rank, self.membership = rank, list(membership)
        self.told = self.failed = self.has_lost_the_network = False
        self.verdicts: dict[str, str] = {}
        self._pid = os.getpid()
        self._local_peers, self._channel = local_peers, channel
        self._distant_failure: PeerFailed | None = None
        self._has_lost_a_process = False
        self._left: dict[int, float] = {}
        self._leavers_to_announce: list[int] = []
        channel.on("failed", lambda sender, body: self._heard(PeerFailed(str(body["text"]), int(body["rank"])), body))
        channel.on("left", lambda sender, body: self._note_left(body["ranks"]))
        channel.on_lost, channel.on_left = self._lost, lambda rank: self._note_left([rank])

    # What became of the others --------------------------------------------------------------------

    def failure(self) -> PeerFailed | None:
        """The failure of any other rank, if there is one."""
        nearby = self._local_peers.failure() if self._local_peers is not None else None
        return nearby or self._distant_failure

    def has_lost_a_process(self) -> bool:
        """Whether a rank's process is gone, without having left."""
        nearby = self._local_peers is not None and self._local_peers.has_lost_a_process()
        return nearby or self._has_lost_a_process

    def check(self, communicator: str, missing: Sequence[int], what: str) -> None:
        """Raise if what this rank waits for cannot happen any more.

        Args:
            communicator: in which it waits.
            missing: world ranks that have not arrived.
            what: the operation that waits, for the error's text.

        Raises:
            PeerFailed: any rank failed or died.
            PeerLeft: one of `missing` ended normally.
            DeadlockError: ranks wait for each other.
        """
        failure = self.failure()
        if failure is not None:
            self.told = True
            raise failure
        for rank in missing:
            if self._has_left(rank):
                self.told = True
                raise PeerLeft(
                    f"rank {rank} has ended its part of the job, and rank {self.rank} waits for it in {what}. "
                    "Usually the ranks took different numbers of steps: give every rank the same number of batches.",
                    rank,
                )
        if communicator in self.verdicts:
            self.told = True
            raise DeadlockError(self.verdicts[communicator])

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended in order: one of another host is believed to some time after it left."""
        if self._local_peers is not None and rank in self._local_peers.others:
            return self._local_peers.has_ended(rank)
        return rank in self._left and time.monotonic() - self._left[rank] > _EXIT

    def _has_left(self, rank: int) -> bool:
        if self._local_peers is not None and self._local_peers.has_left(rank):
            return True
        return rank in self._left and time.monotonic() - self._left[rank] > _IN_FLIGHT

    # What becomes of this one ----------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they stop waiting. The first call counts."""
        if os.getpid() != self._pid or self.failed:
            return
        self.failed = True
        if isinstance(error, PeerFailed):
            root, text = error.rank, str(error)
        else:
            root, text = self.rank, f"rank {self.rank} failed: {summary(error)}"
        if self._local_peers is not None:
            self._local_peers.own.fail(root, text)
        notify_parent(text)
        self._channel.tell(0, "failed", {"rank": root, "text": text, "of": self.rank})
        self._channel.flush(0.5)

    # The channel, on the guard's thread ------------------------------------------------------------

    def announce(self) -> None:
        """On rank 0: tell all who has left since the last call."""
        if self._leavers_to_announce and self.rank == 0:
            self._channel.tell(EVERYONE, "left", {"ranks": self._leavers_to_announce})
            self._leavers_to_announce = []

    def _heard(self, failure: PeerFailed, body: dict[str, Any]) -> None:
        if self._distant_failure is not None:
            return
        if body.get("of") != self.rank:
            self._distant_failure = failure
        self._has_lost_a_process |= bool(body.get("lost"))
        self.has_lost_the_network |= bool(body.get("network"))
        if self.rank == 0:
            self._channel.tell(EVERYONE, "failed", body)

    def _lost(self, rank: int, how: str) -> None:
        peer = self.membership[rank]
        where = f"rank {rank} (process {peer.pid} on {peer.host})"
        if "closed" in how or "reset" in how.lower():
            text = (
                f"{where} died without a word; it was killed by a signal (out of memory? `kill -9`?) or crashed in "
                "native code."
            )
        else:
            self.lose_network(rank, how)
            return
        self._tell_lost(rank, text)

    def lose_network(self, rank: int, how: str) -> None:
        """A rank's host cannot be reached any more; called by the guard's thread.

        Args:
            rank: one on that host.
            how: that was noticed.
        """
        peer, here = self.membership[rank], self.membership[self.rank].host
        self._tell_lost(
            rank,
            f"rank {self.rank} on {here} cannot reach rank {rank} (process {peer.pid} on {peer.host}) any more: the "
            f"network between {here} and {peer.host} is lost, by a cut cable or a firewall, or {peer.host} is down "
            f"({how}).",
            network=True,
        )

    def _tell_lost(self, rank: int, text: str, network: bool = False) -> None:
        # A rank whose data does not arrive may still hear of it over this channel, and learn it in no other way if it
        # only waits for data.
        of = -1 if network else rank
        self._heard(PeerFailed(text, rank), {"rank": rank, "text": text, "of": of, "lost": True, "network": network})

    def _note_left(self, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        for rank in ranks:
            self._left.setdefault(rank, now)
        self._leavers_to_announce += ranks


def summary(error: BaseException) -> str:
    """An error in a line, with the place in the user's code where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{text}{where}"
