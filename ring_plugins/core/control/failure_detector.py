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

What has been learned of other ranks stands in one table (core/base/facts.py). `FailureDetector` has a method more than
other classes: half are one-line questions that waits and the monitor ask.
"""

from __future__ import annotations

import os
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ring_plugins.core.base.errors import DeadlockError, PeerFailed, PeerLeft
from ring_plugins.core.base.facts import IN_FLIGHT
from ring_plugins.core.base.member import Members
from ring_plugins.core.base.places import place_of
from ring_plugins.core.base.threads import until
from ring_plugins.core.control.channel import EVERYONE, Channel
from ring_plugins.core.control.listen_probe import NETWORK_LOST
from ring_plugins.core.control.liveness import LEFT, MOST_MEMBERS, LocalPeers, death
from ring_plugins.core.control.mesh import Mesh
from ring_plugins.core.control.parent_notifier import notify_parent
from ring_plugins.core.net.auth import Disconnected

#: How the names of communicators begin that the public functions use.
OF_FUNCTIONS = ("ring", "group of ")
#: That of what ranks match by names.
OF_NAMES = "named operations"
#: That of exchanges of weights, before which hosts may take different numbers of steps.
OF_EXCHANGES = "local updates"
#: What a rank has left out that is elsewhere.
LAST_EXCHANGE = (
    "Ranks may take different numbers of steps between exchanges, but all take part in the last one: behind its last "
    "step each calls finish() of LocalUpdates, or strategy.exchange() of Fabric. With Lightning and Keras, fit() does "
    "so where it ends."
)
#: What stands between the name of all of these, and one of them.
IN_ONE = ": "
#: Seconds for which a rank that breaks a communicator waits until the members know. They know within milliseconds, but
#: a member that does not, on a crowded host, may finish an operation with memory that this rank overwrites.
_NOTICE = 10.0
#: Seconds within which the job around a part of it hears what the part has heard.
_OUTER = 1.0
#: Operations of which rejections are remembered.
_REJECTIONS = 100
#: Seconds that a process takes to end after it left, including the teardown of GPU communicators.
_EXIT = 15.0


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
        facts: what is known of the others' ends; of `members`.
        rank: world rank of this process.
        aborted: whether the failure that ends the job has been raised in this process, whose script now ends it.
        has_raised: whether any error about a peer was raised here, even if the script caught it.
        failed: whether this process has reported its own failure.
        deadlocks: name of a communicator -> the deadlock that it is part of, which a wait in it raises.
        mesh: knows who is lost, if the job goes on then. The channel connects all ranks to each other in that case.
        outer: of a job of which this one has only some ranks, and with which it ends; None if there is none.
    """

    def __init__(self, members: Members, local_peers: LocalPeers | None, channel: Channel) -> None:
        self.rank, self.members, self.facts = members.own, members, members.facts
        self.aborted = self.has_raised = self.failed = False
        self.deadlocks: dict[str, str] = {}
        self.mesh: Mesh | None = None
        self.outer: FailureDetector | None = None
        self._pid = os.getpid()
        self._local_peers, self._channel = local_peers, channel
        self._communicators: weakref.WeakValueDictionary[int, Breakable] = weakref.WeakValueDictionary()
        self._knowing: dict[int, set[int]] = {}  # by communicator that this rank has broken
        self._departures: list[int] = []  # which rank 0 has not yet forwarded
        self._has_heard_of_failure = False  # by a message: what this host's memory shows, others have yet to hear
        for kind, note in (
            ("failed", self._note_failed),
            ("exits", self._note_exit),
            ("broken", self._note_broken),
            ("rejected", self._note_rejected),
        ):
            channel.on(kind, partial(self._receive, kind, note), at_once=True)
        channel.on("knows of broken", self._note_knowing)
        channel.on("left", lambda sender, body: self._note_left(body["ranks"]))
        channel.on_end(self._note_end)

    def _receive(self, kind: str, note: Callable[[dict[str, Any]], bool], sender: int, body: dict[str, Any]) -> None:
        """Take a message; rank 0 passes on what is news, where the others are connected to it only."""
        if self.mesh is not None:
            if sender in self.mesh.consensus.members:
                note(body)
        elif note(body) and self.rank == 0:
            self._channel.tell(EVERYONE, kind, body)

    def go_on_with(self, mesh: Mesh) -> None:
        """From now on, losses do not end the job, and all ranks are connected to each other."""
        self.mesh = mesh
        if self._local_peers is not None:
            self._local_peers.may_be_lost = True

    def _tell(self, kind: str, body: dict[str, Any]) -> None:
        """Tell all ranks: directly, or over rank 0, which passes it on."""
        self._channel.tell(0 if self.mesh is None else EVERYONE, kind, body)

    # The other ranks ------------------------------------------------------------------------------

    def failure(self) -> PeerFailed | None:
        """The failure of any other rank, if there is one."""
        if self.outer is not None and (failure := self.outer.failure()) is not None:
            return failure
        if self._local_peers is not None:
            self._local_peers.look(self.facts)
        return self.facts.failure

    def has_lost_a_process(self) -> bool:
        """Whether a rank's process is gone without having left."""
        local = self._local_peers is not None and self._local_peers.has_lost_a_process()
        return local or self.facts.has_lost_a_process

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
            if self.outer is not None:
                failure = until(self.outer.failure, _OUTER) or failure  # which has the numbers that users know
                self.outer.aborted = True
            raise failure
        departed, now = self.facts.departed, time.monotonic()
        for rank in missing:
            if rank in departed and now > departed[rank]:
                self.has_raised = True
                if status := self.facts.exit_statuses.get(rank, 0):
                    self.aborted = True
                    raise PeerFailed(
                        f"rank {rank} ended with exit status {status} (sys.exit), while rank {self.rank} waits for it "
                        f"in {what}.",
                        rank,
                    )
                batches = "the ranks took different numbers of steps: give every rank the same number of batches."
                likely = f"Usually {batches}"
                if communicator.startswith(OF_EXCHANGES):
                    likely = LAST_EXCHANGE
                elif communicator.startswith(OF_NAMES):
                    likely = f"Rank {rank} has called nothing of this name: all ranks must, by equal names."
                elif communicator.startswith(OF_FUNCTIONS):  # a call of the script's own
                    whose = "All ranks" if communicator.startswith(OF_FUNCTIONS[0]) else "All members of the group"
                    likely = (
                        f"Does rank {rank} make this call at all? {whose} must: it must not stand under a condition "
                        f"that is true on some ranks only, such as `if rank() == 0:`. Otherwise {batches}"
                    )
                raise PeerLeft(
                    f"rank {rank} has left the job, but rank {self.rank} waits for it in {what}. {likely}", rank
                )
        if communicator in self.deadlocks:
            self.has_raised = True
            raise DeadlockError(self.deadlocks[communicator])

    def exited(self) -> dict[int, int]:
        """The other ranks that have said that they end with an exit status, and it."""
        self.failure()  # which looks at this host's
        return {rank: status for rank, status in sorted(self.facts.exit_statuses.items()) if rank != self.rank}

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended normally; for another host, whether it has had the time to end."""
        local = self._local_peers.others.get(rank) if self._local_peers is not None else None
        if local is not None:
            return local.state == LEFT and local.has_died()
        return time.monotonic() > self.facts.departed.get(rank, float("inf")) + _EXIT - IN_FLIGHT

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
        if key in self.facts.broken:
            state.fail(self.facts.broken[key])

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
        until(lambda: knowing.issuperset(members) or self.failure() is not None, _NOTICE, 0.001)

    def _note_knowing(self, sender: int, body: dict[str, Any]) -> None:
        key, rank, member = int(body["key"]), self._rank_in(body), int(body["member"])
        if rank == self.rank and key in self._knowing:
            self._knowing[key].add(member)
        elif self.rank == 0 and rank in self.members.known:
            self._channel.tell(rank, "knows of broken", body)

    def _note_broken(self, body: dict[str, Any]) -> bool:
        key, error = int(body["key"]), PeerFailed(str(body["text"]), self._rank_in(body))
        self.facts.broken.setdefault(key, error)
        state = self._communicators.get(key)
        if error.rank != self.rank:
            if state is not None:
                state.fail(error)
            if self.mesh is None:
                self._channel.tell(0, "knows of broken", {"key": key, "rank": error.rank, "member": self.rank})
        return True

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
        by_rank = self.facts.rejected.get((key, number, before), {})
        return next((by_rank[rank] for rank in missing if rank in by_rank), "")

    def _note_rejected(self, body: dict[str, Any]) -> bool:
        rejected, (key, number, before) = self.facts.rejected, body["operation"]
        rejected.setdefault((key, number, before), {})[self._rank_in(body)] = str(body["text"])
        while len(rejected) > _REJECTIONS:
            del rejected[next(iter(rejected))]
        return True

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
        if how is None:
            self._note_left([rank])
            return
        peer = self.members.known[rank]
        if how.code in NETWORK_LOST:
            self.lose_network(rank, str(how))
            return
        if how.is_invalid:
            self._report_lost(
                rank,
                f"rank {self.rank} has closed its control connection to rank {rank} (process {peer.pid} on "
                f"{peer.host}): {how}. Memory or network are faulty, or this is a bug of ring_plugins.",
            )
            return
        where = f" on {peer.host}" if self.members.are_on_several_hosts() else ""  # as ranks that see its lock say it
        self._report_lost(rank, death(rank, peer.pid, where))

    def _report_lost(self, rank: int, text: str, network: bool = False) -> None:
        # The rank "of" ignores the message, since it concerns that rank itself. But a rank behind a lost network may
        # still receive it, and cannot learn of the loss otherwise if it only waits for data.
        of = -1 if network else rank
        body = {"rank": rank, "text": text, "of": of, "lost": True, "network": network}
        self._channel.tell(self.rank, "failed", body)  # one after the other with the failures of which others tell

    def _note_failed(self, body: dict[str, Any]) -> bool:
        facts = self.facts
        if self._has_heard_of_failure:
            return False
        if body.get("of") != self.rank:
            found = PeerFailed(str(body["text"]), self._rank_in(body))
            facts.failure, self._has_heard_of_failure = facts.failure or found, True
        facts.has_lost_a_process |= bool(body.get("lost"))
        facts.has_lost_the_network |= bool(body.get("network"))
        return True

    def _note_exit(self, body: dict[str, Any]) -> bool:
        self.facts.exit_statuses[self._rank_in(body)] = int(body["status"])
        return True

    def _rank_in(self, body: dict[str, Any]) -> int:
        """The rank that a message names. The message may be wrong, or name a process that has just joined."""
        rank = body["rank"]
        if type(rank) is not int or not 0 <= rank < max(len(self.members.known), MOST_MEMBERS):
            raise ValueError(f"{rank!r} is no rank")
        return rank

    def _note_left(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.facts.depart(rank, IN_FLIGHT)
        self._departures += ranks


class ThreadDied(Exception):
    """A helper thread of this rank has ended; the text completes "rank 3 failed: ..."."""


def summary(error: BaseException) -> str:
    """An error in one line, with the place in the user's code where it happened."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    where = place_of(error)
    return f"{text} ({where})" if where else text
