"""Which ranks a job still has, and how the survivors agree on that when one is lost.

With `on_failure="continue"` a job goes on without a rank whose process is gone: killed by a signal, or crashed. (A rank
that reports an exception still ends the job.) Nobody knows beforehand when that happens, so two questions arise.

**Where does everyone stand?** All operations on one host are sequences of barriers (collectives/shm_barrier.py). A rank
that died has arrived at some barriers and never arrives at the next. Its memory outlives it, so whatever it announced
counts: the survivors pass every barrier that it reached, and all of them are stuck at the first that it did not reach.
None of them has seen the operation end, and none has begun another. So there is nothing to vote on: an operation has
happened for all survivors, or for none.

That holds if no survivor gives up too early. One that saw the death first and then complained about any slow rank would
leave the others one barrier behind. The rule (`Wait._check`): look who is dead, *then* who is missing, and give up only
if all the missing are dead. At that moment every living rank stands at the same barrier, and nobody writes to memory.

**Who is left?** Another rank may die just then, so that survivors differ in whom they saw die. Every change of the
members is a numbered *view*. The lowest rank of the old view that is alive decides on the members of the new one, and
writes them into its liveness segment. The others look through the lower ranks in order: they adopt the first decision
that they find, and pass over a rank that is dead and has not decided. A rank is found dead before its segment is read
once more, so no decision is overlooked, and two ranks can only decide differently if one of them was dead before it
wrote, which it cannot be. A rank that dies after the decision is lost from the new view, like any other.

This is consensus with a perfect failure detector (Chandra and Toueg, "Unreliable failure detectors for reliable
distributed systems", 1996), which the kernel's lock is, and with registers that survive their writers, which shared
memory is. Considered and rejected: messages over the control channel, whose server dies with rank 0; and MPI's
MPI_Comm_agree (ULFM), which needs an MPI that offers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ring_plugins.core.base.errors import PeerFailed
from ring_plugins.core.control.liveness import LocalPeers


class MembersLost(PeerFailed):
    """Members died before they arrived at a barrier, at which all others stand: the operation has not happened.

    If the job goes on without them, it is raised once the survivors have agreed on that, and whoever has the inputs of
    the operation repeats it. Nobody else can, so otherwise it ends the job, as the failure of any peer does.
    """


class Waiting(Protocol):
    """The part of `Wait` that an agreement needs."""

    def until(self, ready: Callable[[], bool], missing: Callable[[], list[int]], what: Callable[[], str]) -> None: ...


class Membership:
    """The members of a job on one host, of which some may be lost.

    Args:
        peers: all of them.

    Attributes:
        ranks: world ranks of the members, in order. A rank keeps its world rank for life.
        view: how often the members have changed.
    """

    def __init__(self, peers: LocalPeers) -> None:
        self._peers = peers
        self.ranks = tuple(sorted([peers.own.rank, *peers.others]))
        self.view = 0

    def agree(self, wait: Waiting) -> list[int]:
        """Agree on the next view with the other survivors; each calls this when it has raised `MembersLost`.

        Args:
            wait: waits for the rank that decides.

        Returns:
            The ranks that are lost.

        Raises:
            PeerFailed: fewer than `min_ranks` are left, or a rank failed by an exception.
        """
        peers, own = self._peers, self._peers.own.rank
        members = self._decision(wait)
        lost = [rank for rank in self.ranks if rank not in members]
        if own in lost:
            raise PeerFailed(
                f"the other ranks have gone on without rank {own}, whose lock on its own memory was lost.", members[0]
            )
        if peers.are_too_few(lost):
            raise peers.death(lost)
        self.drop(lost)
        return lost

    def drop(self, ranks: Sequence[int]) -> None:
        """Go on without these; all others call this between the same two operations."""
        self.ranks, self.view = tuple(rank for rank in self.ranks if rank not in ranks), self.view + 1
        self._peers.forget(ranks)

    def _decision(self, wait: Waiting) -> tuple[int, ...]:
        peers, view = self._peers, self.view + 1
        for rank in self.ranks:
            if rank == peers.own.rank:
                break
            peer = peers.others[rank]
            wait.until(
                lambda peer=peer: peer.decision(view) is not None or peer.is_lost(),  # type: ignore[misc]
                lambda rank=rank: [rank],  # type: ignore[misc]
                lambda: "the agreement on the ranks that are left",
            )
            # Whatever it decided before it died counts: others may have adopted it.
            if (decided := peer.decision(view)) is not None:
                return tuple(rank for rank in self.ranks if rank in decided)
        lost = peers.lost()
        members = tuple(rank for rank in self.ranks if rank not in lost)
        peers.own.decide(view, members)
        return members

    def extend(self, ranks: Sequence[int], view: int) -> None:
        """Go on with further members, which all call this between the same two operations; in the order of slots."""
        self.ranks, self.view = tuple(ranks), view
