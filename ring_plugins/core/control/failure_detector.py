"""Detects the failure of other ranks, on any host, and reports this rank's own failure to them.

The promise: when a rank fails, in whatever way, every other rank that waits for it, directly or indirectly, raises
an error that names the rank that failed first and the reason. No rank hangs, and none blames a victim.

Ranks end in different ways, and each is noticed by the quickest means that never mistakes a busy process for a dead
one:

- An exception: the rank itself reports it before it ends, in shared memory on its host and over the control channel
  elsewhere. A rank that fails because of a peer passes on the peer's reason as the root cause.
- Death by a signal: ranks of the same host see a lock that the kernel has dropped (liveness.py); rank 0 sees the
  control connection close without a goodbye, and tells the others.
- A host or network that is gone: the kernel's acknowledgments stop (tcp_liveness.py), or the control connection times
  out. Both ends report it, since neither can reach the other.
- A normal end: `left`. It is an error only for ranks that still wait for the rank that left: `PeerLeft`, or
  `PeerFailed` if that rank called `sys.exit` with a status.
- Alive, but interrupted in an operation by an exception that its script caught: only that communicator is broken, on
  all its members (`break_communicator`); the job goes on.
- Alive but waiting in a different operation: stall detection on rank 0 finds the cycle (observe/stall.py) and puts it
  into `deadlocks`.

The first failure that reaches a rank counts, and rank 0 passes on only the first, so ranks report the same one unless
two fail at the same moment.

Considered and rejected: heartbeats, and detectors that learn their intervals (phi accrual), declare a rank dead that
holds the GIL in a long computation. A time-out on every operation, as torch has for NCCL and gloo, cannot tell a slow
rank from a dead one; it is only the last resort here (RING_TIMEOUT). Agreement on the set of failed ranks (MPI's ULFM)
is needed to go on without them (mesh.py); to end, or to restart all ranks, the first failure is enough.

`FailureDetector` has 30 methods: half are one-line questions that waits and the monitor ask.
"""

from __future__ import annotations

import errno
import os
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ring_plugins.core.base.errors import DeadlockError, PeerFailed, PeerLeft
from ring_plugins.core.base.member import Members
from ring_plugins.core.base.places import place_of
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.liveness import MOST_MEMBERS, SILENT_ENDS, LocalPeers
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.parent_notifier import notify_parent
from ring_plugins.core.net.auth import Disconnected

#: How the names of communicators begin that the public functions use.
OF_FUNCTIONS = "ring"
#: Seconds for which data that a rank sent before it left may still be on its way.
_IN_FLIGHT = 2.0
#: Seconds after which what a rank of the same host has told before it left has arrived.
_TOLD = 0.3
#: Seconds for which a rank that breaks a communicator waits until the members know. They know within milliseconds, but
#: a member that does not, on a crowded host, may finish an operation with memory that this rank overwrites.
_NOTICE = 10.0
#: Operations of which rejections are remembered.
_REJECTIONS = 100
#: Seconds that a process takes to end after it left, including the teardown of GPU communicators.
_EXIT = 15.0
#: Errors by which the kernel reports that another host does not react, rather than that a process has closed its end.
_NETWORK_LOST = frozenset(
    (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENONET)
)


class Breakable(Protocol):
    """What a communicator remembers of its failure; see `core.collectives.api.FailureState`."""

    def fail(self, error: BaseException) -> None:
        """Make every further call raise `error`, unless an earlier error is already recorded."""


class FailureDetector:
    """Records which other ranks have failed or left, and reports this rank's failure.

    Args:
        members: of the job.
        local_peers: the ranks of this host, where they share memory.
        channel: to rank 0, and from there to all; or to all.

    Attributes:
        members: as given.
        rank: world rank of this process.
        aborted: whether the failure that ends the job has been raised in this process, whose script now ends it.
        has_raised: whether any error about a peer was raised here, even if the script caught it.
        failed: whether this process has reported its own failure.
        has_lost_the_network: whether the failure is a lost network.
        deadlocks: name of a communicator -> the deadlock that it is part of, which a wait in it raises.
        mesh: knows who is lost, if the job goes on then. The channel connects all ranks to each other in that case.
    """

    def __init__(self, members: Members, local_peers: LocalPeers | None, channel: Channel) -> None:
        self.rank, self.members = members.own, members
        self.aborted = self.has_raised = self.failed = self.has_lost_the_network = False
        self.deadlocks: dict[str, str] = {}
        self.mesh: Mesh | None = None
        self._pid = os.getpid()
        self._local_peers, self._channel = local_peers, channel
        self._remote_failure: PeerFailed | None = None
        self._has_lost_a_process = False
        self._communicators: weakref.WeakValueDictionary[int, Breakable] = weakref.WeakValueDictionary()
        self._broken: dict[int, PeerFailed] = {}
        self._knowing: dict[int, set[int]] = {}  # by communicator that this rank has broken
        #: By communicator, operations finished and calls rejected since: who rejected the next call, and why.
        self._rejections: dict[tuple[int, int, int], dict[int, str]] = {}
        self._left: dict[int, float] = {}
        self._left_here: dict[int, float] = {}
        self._departures: list[int] = []  # which rank 0 has not yet forwarded
        self._exit_status: dict[int, int] = {}  # of ranks that leave with another one than 0
        for kind, note in (
            ("failed", self._note_failed),
            ("exits", self._note_exit),
            ("broken", self._note_broken),
            ("rejected", self._note_rejected),
        ):
            channel.on(kind, partial(self._receive, note), at_once=True)
        channel.on("knows of broken", self._note_knowing)
        channel.on("left", lambda sender, body: self._note_left(body["ranks"]))
        channel.on_end(self._note_end)

    def _receive(self, note: Callable[[dict[str, Any]], None], sender: int, body: dict[str, Any]) -> None:
        if self.mesh is None or self.mesh.is_member(sender):
            note(body)

    def go_on_with(self, mesh: Mesh) -> None:
        """From now on, losses do not end the job, and all ranks are connected to each other."""
        self.mesh = mesh
        if self._local_peers is not None:
            self._local_peers.may_be_lost = True

    def _tell(self, kind: str, body: dict[str, Any]) -> None:
        """Tell all ranks: directly, or over rank 0, which passes it on."""
        self._channel.tell(0 if self.mesh is None else EVERYONE, kind, body)

    def _pass_on(self, kind: str, body: dict[str, Any]) -> None:
        if self.rank == 0 and self.mesh is None:
            self._channel.tell(EVERYONE, kind, body)

    # The other ranks ------------------------------------------------------------------------------

    def failure(self) -> PeerFailed | None:
        """The failure of any other rank, if there is one."""
        local = self._local_peers.failure() if self._local_peers is not None else None
        return local or self._remote_failure

    def has_lost_a_process(self) -> bool:
        """Whether a rank's process is gone without having left."""
        local = self._local_peers is not None and self._local_peers.has_lost_a_process()
        return local or self._has_lost_a_process

    def dead(self) -> frozenset[int]:
        """Members that are dead, if the job goes on without them."""
        return self.mesh.dead() if self.mesh is not None else frozenset()

    def check(self, communicator: str, missing: Sequence[int], what: str) -> None:
        """Raise if the operation that this rank waits in cannot complete any more.

        Args:
            communicator: in which it waits.
            missing: world ranks that have not arrived.
            what: the operation that waits, for the error's text.

        Raises:
            PeerFailed: any rank failed or died, or one of `missing` ended with an exit status other than 0.
            PeerLeft: one of `missing` ended normally.
            DeadlockError: ranks wait for each other.
        """
        failure = self.failure()
        if failure is not None:
            self.aborted = True
            raise failure
        for rank in missing:
            if self.has_left(rank):
                self.has_raised = True
                if status := self.exit_status(rank):
                    self.aborted = True
                    raise PeerFailed(
                        f"rank {rank} ended with exit status {status} (sys.exit), while rank {self.rank} waits for it "
                        f"in {what}.",
                        rank,
                    )
                batches = "the ranks took different numbers of steps: give every rank the same number of batches."
                likely = f"Usually {batches}"
                if communicator.startswith(OF_FUNCTIONS):  # a call of the script's own
                    likely = (
                        f"Does rank {rank} make this call at all? All ranks must: it must not stand under a condition "
                        f"that is true on some ranks only, such as `if rank() == 0:`. Otherwise {batches}"
                    )
                raise PeerLeft(
                    f"rank {rank} has left the job, but rank {self.rank} waits for it in {what}. {likely}", rank
                )
        if communicator in self.deadlocks:
            self.has_raised = True
            raise DeadlockError(self.deadlocks[communicator])

    def exit_status(self, rank: int) -> int:
        """With which another rank has said that it ends, 0 if it has not."""
        local = self._local_peers.exit_status(rank) if self._local_peers is not None else 0
        return self._exit_status.get(rank) or local

    def exited(self) -> dict[int, int]:
        """The other ranks that have said that they end with an exit status, and it."""
        statuses = {rank: self.exit_status(rank) for rank in self.members.known if rank != self.rank}
        return {rank: status for rank, status in statuses.items() if status}

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended normally; on another host, whether it should have by now."""
        if self._local_peers is not None and rank in self._local_peers.others:
            return self._local_peers.has_ended(rank)
        return rank in self._left and time.monotonic() - self._left[rank] > _EXIT

    def has_left(self, rank: int) -> bool:
        """Whether a rank has ended normally and what it sent before must have arrived."""
        if self._local_peers is not None and self._local_peers.has_left(rank):
            # Seen in shared memory, before what it has told over the channel: that it rejected an operation, and why.
            return time.monotonic() - self._left_here.setdefault(rank, time.monotonic()) > _TOLD
        if self.mesh is not None and self.mesh.has_left(rank):
            self._left.setdefault(rank, time.monotonic())
        return rank in self._left and time.monotonic() - self._left[rank] > _IN_FLIGHT

    # This rank ------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that they stop waiting. Only the first call counts."""
        if os.getpid() != self._pid or self.failed:
            return
        self.failed = True
        if self.mesh is not None and self.mesh.is_excluded:
            return  # the others go on without this rank
        if isinstance(error, PeerFailed):
            root, text = error.rank, str(error)
        else:
            reason = str(error) if isinstance(error, ThreadDied) else summary(error)
            root, text = self.rank, f"rank {self.rank} failed: {reason}"
        if self._local_peers is not None:
            self._local_peers.own.fail(root, text)
        notify_parent(text)
        self._tell("failed", {"rank": root, "text": text, "of": self.rank})
        self._channel.flush(0.5)

    def leave(self, status: int) -> None:
        """Tell the other ranks that this one ends with an exit status; those that wait for it raise an error."""
        if os.getpid() == self._pid and status:
            if self._local_peers is not None:
                self._local_peers.own.note_exit(status)
            self._tell("exits", {"rank": self.rank, "status": status})

    # Communicators --------------------------------------------------------------------------------

    def watch(self, key: int, state: Breakable) -> None:
        """Let `state` fail when a member breaks the communicator.

        Args:
            key: of the communicator, the same on all its members and different from all others'.
            state: of this member; not kept alive.
        """
        self._communicators[key] = state
        if key in self._broken:
            state.fail(self._broken[key])

    def break_communicator(self, key: int, text: str, members: Sequence[int]) -> None:
        """Make all other members of a communicator raise `PeerFailed`, now and in every further call.

        Returns once all of them know, so that none can finish an operation with memory that this rank overwrites
        afterwards without noticing; after some seconds at the latest, for one of them may be stopped or dead.

        Args:
            key: as in `watch`.
            text: says what happened on this rank and what to do.
            members: world ranks to wait for.
        """
        if os.getpid() != self._pid:
            return
        self._knowing[key] = knowing = {self.rank}
        self._tell("broken", {"key": key, "rank": self.rank, "text": text})
        if self.mesh is not None:
            return  # nobody finishes an operation without this rank's confirmation, or sees it in shared memory
        end = time.monotonic() + _NOTICE
        while not knowing.issuperset(members) and self.failure() is None and time.monotonic() < end:
            time.sleep(0.001)

    def _note_knowing(self, sender: int, body: dict[str, Any]) -> None:
        key, rank, member = int(body["key"]), self._rank_in(body), int(body["member"])
        if rank == self.rank and key in self._knowing:
            self._knowing[key].add(member)
        elif self.rank == 0 and rank in self.members.known:
            self._channel.tell(rank, "knows of broken", body)

    def _note_broken(self, body: dict[str, Any]) -> None:
        key, error = int(body["key"]), PeerFailed(str(body["text"]), self._rank_in(body))
        self._broken.setdefault(key, error)
        state = self._communicators.get(key)
        if error.rank != self.rank:
            if state is not None:
                state.fail(error)
            if self.mesh is None:
                self._channel.tell(0, "knows of broken", {"key": key, "rank": error.rank, "member": self.rank})
        self._pass_on("broken", body)

    def reject(self, key: int, number: int, before: int, text: str) -> None:
        """Tell all ranks that this one rejected the arguments of an operation.

        Args:
            key: of the communicator, as in `watch`.
            number, before: which operation it is: operations finished, and calls rejected since.
            text: says what was rejected and why.
        """
        if os.getpid() == self._pid:
            self._tell("rejected", {"operation": [key, number, before], "rank": self.rank, "text": text})

    def rejection(self, key: int, number: int, before: int, missing: Sequence[int]) -> str:
        """Why one of `missing` rejected an operation, "" if none did."""
        rejections = self._rejections.get((key, number, before)) if key >= 0 else None
        return next((rejections[rank] for rank in missing if rank in rejections), "") if rejections else ""

    def _note_rejected(self, body: dict[str, Any]) -> None:
        key, number, before = body["operation"]
        self._rejections.setdefault((key, number, before), {})[self._rank_in(body)] = str(body["text"])
        while len(self._rejections) > _REJECTIONS:
            del self._rejections[next(iter(self._rejections))]
        self._pass_on("rejected", body)

    # On the monitor thread, which moves the channel -----------------------------------------------

    def forward_departures(self) -> None:
        """On rank 0: tell all ranks which ranks have left since the last call."""
        if self._departures and self.rank == 0:
            self._channel.tell(EVERYONE, "left", {"ranks": self._departures})
            self._departures = []

    def lose_network(self, rank: int, how: str) -> None:
        """Report that a host cannot be reached any more.

        Args:
            rank: a rank on that host.
            how: how that was detected.
        """
        if self.mesh is not None:
            self.mesh.note_unreachable(rank)
            return
        peer, here = self.members.known[rank], self.members.here.host
        self._report_lost(
            rank,
            f"rank {self.rank} on {here} cannot reach rank {rank} (process {peer.pid} on {peer.host}) any more: the "
            f"network between {here} and {peer.host} is lost, by a cut cable or a firewall, or {peer.host} is down "
            f"({how}).",
            network=True,
        )

    def _note_end(self, rank: int, how: Disconnected | None) -> None:
        """The connection to a rank has ended, by a goodbye if `how` is None."""
        if self.mesh is not None:
            return  # it has seen that
        if how is None:
            self._note_left([rank])
            return
        peer = self.members.known[rank]
        if how.code in _NETWORK_LOST:
            self.lose_network(rank, str(how))
            return
        if how.is_invalid:
            self._report_lost(
                rank,
                f"rank {self.rank} has closed its control connection to rank {rank} (process {peer.pid} on "
                f"{peer.host}): {how}. Memory or network are faulty, or this is a bug of ring_plugins.",
            )
            return
        self._report_lost(
            rank,
            f"rank {rank} (process {peer.pid} on {peer.host}) died without reporting an error; {SILENT_ENDS}.",
        )

    def _report_lost(self, rank: int, text: str, network: bool = False) -> None:
        # The rank "of" ignores the message, since it concerns that rank itself. But a rank behind a lost network may
        # still receive it, and cannot learn of the loss otherwise if it only waits for data.
        of = -1 if network else rank
        body = {"rank": rank, "text": text, "of": of, "lost": True, "network": network}
        self._channel.tell(self.rank, "failed", body)  # one after the other with the failures of which others tell

    def _note_failed(self, body: dict[str, Any]) -> None:
        if self._remote_failure is not None:
            return
        if body.get("of") != self.rank:
            self._remote_failure = PeerFailed(str(body["text"]), self._rank_in(body))
        self._has_lost_a_process |= bool(body.get("lost"))
        self.has_lost_the_network |= bool(body.get("network"))
        self._pass_on("failed", body)

    def _note_exit(self, body: dict[str, Any]) -> None:
        self._exit_status[self._rank_in(body)] = int(body["status"])
        self._pass_on("exits", body)

    def _rank_in(self, body: dict[str, Any]) -> int:
        """The rank in a message of another one, which may be wrong, or know of a process that has just joined."""
        rank = body["rank"]
        if type(rank) is not int or not 0 <= rank < max(len(self.members.known), MOST_MEMBERS):
            raise ValueError(f"{rank!r} is no rank")
        return rank

    def _note_left(self, ranks: Sequence[int]) -> None:
        now = time.monotonic()
        for rank in ranks:
            self._left.setdefault(rank, now)
        self._departures += ranks


class ThreadDied(Exception):
    """A helper thread of this rank has ended; the text completes "rank 3 failed: ..."."""


def summary(error: BaseException) -> str:
    """An error in one line, with the place in the user's code where it happened."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    where = place_of(error)
    return f"{text} ({where})" if where else text
