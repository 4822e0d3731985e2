"""How ranks agree on who is left when one is lost: Paxos, whose quorum shrinks with proven deaths.

**Problem.** Inside a host the kernel says who is dead. Between hosts it does not. A rank may hear nothing more of
another one because that has died, because its host has lost power, or because the network between them is cut while
both live. If both sides of a cut went on, there would be two jobs, which overwrite each other's checkpoints. And
survivors may stand one operation apart: some have its confirmation already, which others will never get.

**What a rank knows of another.** It is *reachable* as long as the connection to it stands, however slow its script is:
a stopped rank is not dead. It has *left* if it said so, with the number of operations that it had confirmed. It is
*dead* on evidence only: its host's kernel has refused a connection to its port (ends.py), or has dropped the
lock on its memory (liveness.py). It is *silent* if its host's kernel has acknowledged nothing for RING_NETWORK_TIMEOUT.
None of this is ever taken back. Evidence is never wrong, silence may be.

**Views.** Every change of the members is a numbered view. The ranks of a view agree on the next one: its members, and
how many operations are confirmed. An operation ends with a confirmation that a rank passes only when all have entered
it (collectives/recovery.py). So if any survivor has passed it, all have the result: they take the largest number that
any of them has confirmed, and whoever stands in that confirmation has passed it, too.

**Algorithm.** Single-decree Paxos for each view (Lamport, "Paxos made simple", 2001): a leader collects promises,
proposes the value of the highest ballot that a promise reports, or else one of its own, and has it accepted.

- Rank r leads for those to whom no lower rank is reachable. A rank promises to its own leader only. Deaths and silence
  are never taken back, so leaders change a finite number of times, and no two compete for ever.
- A rank promises when its script has arrived in the agreement. So when a view is decided, all of its members have
  stopped, and none writes to memory that others read.
- A leader waits for all that are reachable. If nobody is silent, these are all that live, and they suffice, however few
  they are: whoever might know of another decision is either asked or dead.
- If somebody is silent, the ranks that answer must be more than half of the view, or half of it with its lowest rank.
  Any two such sets have a rank in common. The others are *without a quorum*: they end, and save nothing.
- What the dead have sent may still be under way, such as a decision that only they had accepted. So a leader says whom
  it takes for dead, and a rank closes its connections to those before it promises: whatever arrives later counts for
  nobody, and what arrived before is in the promise.
- Two ranks may be silent to each other but not to the leader. It leaves out the higher one of each such pair.
- A rank that learns of a decision passes it on to all before it does anything else.

**Leaving.** Ranks that are to end (core/members/preemption_notice.py) are known from an operation of all. Whoever has
its result arrives and says so with its promise, those ranks too, and the view that is decided then lacks them. So they
count in every quorum until they are gone, and a rank that dies at the same moment is lost in the same view. Considered
and rejected: to drop them without an agreement, since those that have the result already would count with other quorums
than those that have not.

**Joining.** A process that takes the place of a lost rank (control/mesh_admission.py) becomes a member by a decision,
too. Members arrive with the process for which they have prepared everything, or without. It is in the next view if all
members of this one have promised, and all are prepared: if one is lost or is not, nobody joins, and all find that. It
does not vote before, and it learns of the decision from each member that does.

The dead do not count in the first case but do in the second: if of four ranks one is killed while another is silent,
the other two go on only if they have the lowest rank. A rule that took the dead out of the count first would be wrong:
these may have helped the other side to a decision before they died.

Considered and rejected: majorities alone, which cannot go on with one of two hosts, or half of the ranks, though all
others are known to be dead. Raft and a replicated log: nothing but the last view is needed, and its members hold it.
An outside witness (etcd, torchft's lighthouse), which the user would have to run, and which may be lost, too.
MPI_Comm_agree (ULFM) needs an MPI that offers it, and does not say which side of a cut goes on.

This file has no input or output, so that tests can drive it through any order of messages, deaths and cuts. It is
longer than others, and `Consensus` has 35 methods: they are one proof, which is read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

#: A ballot is a round times this, plus the rank of its leader.
_STRIDE = 1 << 20

Message = dict[str, Any]


class Decision(NamedTuple):
    """What the ranks have agreed on.

    Attributes:
        members: of the view, in order.
        committed: how many operations are confirmed for all of them.
        leaving: ranks that are no members any more since they were told to end.
        joining: those of the members that were none in the view before.
    """

    members: tuple[int, ...]
    committed: int
    leaving: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()

    @classmethod
    def told(cls, told: Sequence[Any]) -> Decision:
        """As a message has it."""
        return cls(tuple(told[0]), int(told[1]), tuple(told[2]), tuple(told[3]))


class _Promise(NamedTuple):
    """A rank's answer to a leader."""

    committed: int
    silent: frozenset[int]
    leaving: frozenset[int]
    joining: frozenset[int]
    accepted: tuple[int, Decision] | None


class Consensus:
    """One rank's part in the agreements of a job.

    Args:
        rank: world rank of this process.
        members: world ranks of the view with which this rank begins.
        send: sends a message to a rank; messages of one rank to another arrive in order, if they arrive.
        hang_up: closes the connection to a rank, so that nothing that it has sent arrives any more.
        view: number of that view.

    Attributes:
        view: number of the last view that is decided.
        members: of that view.
        decisions: by view.
        dead, silent: ranks, of any view.
        left: ranks that left normally, with the number of operations that each had confirmed.
        has_no_quorum: whether this rank, as the leader, does not reach enough others.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        send: Callable[[int, Message], None],
        hang_up: Callable[[int], None],
        view: int = 0,
    ) -> None:
        self.rank, self.view, self.members = rank, view, tuple(members)
        self.decisions: dict[int, Decision] = {}
        self.dead: set[int] = set()
        self.silent: set[int] = set()
        self.left: dict[int, int] = {}
        self.has_no_quorum = False
        self._send, self._hang_up = send, hang_up
        self._begin_view()

    def _begin_view(self) -> None:
        self._committed: int | None = None  # of this rank, once its script has arrived
        self._leaving: frozenset[int] = frozenset()  # that it knows of
        self._joining: frozenset[int] = frozenset()  # for which it is prepared
        self._promised = self._seen = 0
        self._accepted: tuple[int, Decision] | None = None
        self._prepares: dict[int, int] = {}  # ballots of leaders that this rank has not answered
        self._must_agree = bool(self.lost())
        self._has_called: int | None = None  # the leader that this rank has told of its arrival
        # As the leader:
        self._ballot = 0
        self._known_dead: frozenset[int] = frozenset()
        self._promises: dict[int, _Promise] = {}
        self._proposal: Decision | None = None
        self._acceptances: set[int] = set()

    # What the rest of the process asks ------------------------------------------------------------

    def lost(self) -> list[int]:
        """Members without whom the job may have to go on."""
        return [rank for rank in self.members if rank in self.dead or rank in self.silent]

    def must_agree(self) -> bool:
        """Whether this rank has to interrupt what it does, and to arrive in the next agreement."""
        return self._must_agree

    def is_excluded(self) -> bool:
        """Whether the others have gone on without this rank."""
        return self.rank not in self.members

    def awaited(self) -> list[int]:
        """Ranks on which the agreement waits, as far as this rank can tell."""
        leader = self.leader()
        if leader != self.rank:
            return [leader]
        heard = self._promises if self._proposal is None else self._acceptances
        return [rank for rank in self._reachable() if rank not in heard]

    # Events ---------------------------------------------------------------------------------------

    def arrive(self, view: int, committed: int, leaving: Collection[int] = (), joining: Collection[int] = ()) -> None:
        """This rank's script has stopped, to agree on a view.

        Args:
            view: its number.
            committed: how many operations this rank has confirmed.
            leaving: ranks that are to end, as the last of those operations says.
            joining: for which this rank is prepared.
        """
        if view == self.view + 1 and self._committed is None and not self.is_excluded():
            self._committed, self._leaving, self._joining = committed, frozenset(leaving), frozenset(joining)
            self._step()

    def take_over(self, decision: Decision) -> None:
        """Begin with the view by which this rank has joined, and tell the others of it, which may not know yet."""
        self.decisions[self.view] = decision
        for rank in self.members:
            if rank != self.rank:
                self._tell_decision(rank, self.view)

    def note_dead(self, rank: int) -> None:
        """A rank's process has ended without a word."""
        if rank not in self.dead and rank not in self.left and rank != self.rank:
            self.dead.add(rank)
            self._must_agree |= rank in self.members
            self._step()

    def note_silent(self, *ranks: int) -> None:
        """Ranks cannot be reached any more; nothing is proposed before all of them count as silent."""
        silent = {rank for rank in ranks if rank not in self.silent and rank not in self.left and rank != self.rank}
        if silent:
            self.silent |= silent
            self._must_agree |= not silent.isdisjoint(self.members)
            self._step()

    def note_left(self, rank: int, committed: int) -> None:
        """A rank has left normally, after having confirmed so many operations."""
        self.left.setdefault(rank, committed)
        self._step()

    def receive(self, sender: int, message: Message) -> None:
        """Take a message of another rank.

        Raises:
            ValueError: it is none of this algorithm's, so that the sender cannot be trusted; nothing has changed.
        """
        check(message)
        if message["view"] <= self.view:
            if message["kind"] in ("prepare", "accept") and message["view"] in self.decisions:
                self._tell_decision(sender, message["view"])
            return
        is_current = message["view"] == self.view + 1
        if not is_current or self.is_excluded() or sender in self.dead or sender in self.silent:
            return
        decisions = _decisions_in(message)
        if not all({*one.members, *one.leaving} <= {*self.members, *one.joining} for one in decisions):
            raise ValueError(f"{message!r} has members that the view before has not")
        if not all(self._joining.issuperset(one.joining) for one in decisions):
            raise ValueError(f"{message!r} lets ranks join for which this one is not prepared")
        getattr(self, f"_receive_{message['kind']}")(sender, **message["body"])
        self._step()

    # Messages -------------------------------------------------------------------------------------

    def _tell(self, rank: int, kind: str, view: int | None = None, **body: Any) -> None:
        self._send(rank, {"view": self.view + 1 if view is None else view, "kind": kind, "body": body})

    def _tell_decision(self, rank: int, view: int) -> None:
        self._tell(rank, "decided", view, decision=list(self.decisions[view]))

    def _receive_call(self, sender: int) -> None:
        self._must_agree = True

    def _receive_prepare(self, sender: int, ballot: int, dead: Sequence[int]) -> None:
        self._must_agree = True
        for rank in dead:
            if rank != self.rank and rank not in self.left:
                self.dead.add(rank)
                self._hang_up(rank)
        self._prepares[sender] = ballot

    def _receive_promise(
        self,
        sender: int,
        ballot: int,
        committed: int,
        silent: Sequence[int],
        leaving: Sequence[int],
        joining: Sequence[int],
        accepted: Sequence[Any] | None,
    ) -> None:
        if ballot == self._ballot:
            value = (int(accepted[0]), Decision.told(accepted[1])) if accepted is not None else None
            self._promises[sender] = _Promise(
                committed, frozenset(silent), frozenset(leaving), frozenset(joining), value
            )

    def _receive_rejected(self, sender: int, ballot: int, promised: int) -> None:
        self._seen = max(self._seen, promised)
        if ballot == self._ballot:
            self._ballot = 0  # and the next step begins a higher one

    def _receive_accept(self, sender: int, ballot: int, decision: Sequence[Any]) -> None:
        if ballot == self._promised:
            self._accepted = ballot, Decision.told(decision)
            self._tell(sender, "accepted", ballot=ballot)
        else:
            self._tell(sender, "rejected", ballot=ballot, promised=self._promised)

    def _receive_accepted(self, sender: int, ballot: int) -> None:
        if ballot == self._ballot:
            self._acceptances.add(sender)

    def _receive_decided(self, sender: int, decision: Sequence[Any]) -> None:
        self._adopt(Decision.told(decision))

    # The algorithm --------------------------------------------------------------------------------

    def _is_reachable(self, rank: int) -> bool:
        return rank not in self.dead and rank not in self.silent and rank not in self.left

    def _reachable(self) -> list[int]:
        return [rank for rank in self.members if rank == self.rank or self._is_reachable(rank)]

    def leader(self) -> int:
        """The rank to which this one promises."""
        return self._reachable()[0]

    def _step(self) -> None:
        """Do what can be done now; called after every event."""
        if self._committed is None or self.is_excluded():
            return
        leader = self.leader()
        self._answer(leader)
        if leader == self.rank:
            self._lead()
        elif leader != self._has_called and not (self._promised and self._promised % _STRIDE == leader):
            self._has_called = leader
            self._tell(leader, "call")  # it may know of no loss itself

    def _answer(self, leader: int) -> None:
        ballot = self._prepares.pop(leader, None)
        if ballot is None:
            return
        if ballot <= self._promised:
            self._tell(leader, "rejected", ballot=ballot, promised=self._promised)
            return
        self._promised = ballot
        own = self._own_promise()
        accepted = None if own.accepted is None else [own.accepted[0], list(own.accepted[1])]
        told: dict[str, Any] = {
            "committed": own.committed,
            "silent": sorted(own.silent),
            "leaving": sorted(own.leaving),
            "joining": sorted(own.joining),
        }
        self._tell(leader, "promise", ballot=ballot, accepted=accepted, **told)

    def _own_promise(self) -> _Promise:
        assert self._committed is not None
        return _Promise(self._committed, frozenset(self.silent), self._leaving, self._joining, self._accepted)

    def _lead(self) -> None:
        known_dead = frozenset(self.dead)
        if not self._ballot or (self._proposal is None and known_dead != self._known_dead):
            self._begin_ballot(known_dead)
        if self._proposal is None:
            self._propose()
        if self._proposal is not None and self._have_answered(self._acceptances):
            self._adopt(self._proposal)

    def _begin_ballot(self, known_dead: frozenset[int]) -> None:
        highest = max(self._promised, self._seen, *self._prepares.values(), 0)
        self._ballot = self._promised = (highest // _STRIDE + 1) * _STRIDE + self.rank
        self._known_dead, self._proposal, self._acceptances = known_dead, None, set()
        self._promises = {self.rank: self._own_promise()}
        for rank in known_dead:
            self._hang_up(rank)
        for rank in self._reachable():
            if rank != self.rank:
                self._tell(rank, "prepare", ballot=self._ballot, dead=sorted(known_dead))

    def _propose(self) -> None:
        promises = self._promises
        if not self._have_answered(promises):
            return
        promises[self.rank] = self._own_promise()  # some of those that have promised may be silent since
        accepted = [promise.accepted for promise in promises.values() if promise.accepted is not None]
        proposal = max(accepted)[1] if accepted else self._own_proposal()
        if proposal is None:
            return
        self._proposal, self._acceptances = proposal, {self.rank}
        self._accepted = self._ballot, proposal
        for rank in promises:
            if rank != self.rank and self._is_reachable(rank):
                self._tell(rank, "accept", ballot=self._ballot, decision=list(proposal))

    def _have_answered(self, answers: Collection[int]) -> bool:
        """Whether all have answered that can, and they are enough."""
        if any(rank not in answers for rank in self._reachable()):
            return False
        if any(rank in self.silent and rank not in self.dead for rank in self.members) and not self._is_quorum(answers):
            self.has_no_quorum = True
            return False
        return True

    def _own_proposal(self) -> Decision | None:
        kept: list[int] = []
        for rank in sorted(self._promises):
            silent = self._promises[rank].silent
            if not any(other in silent or rank in self._promises[other].silent for other in kept):
                kept.append(rank)
        if len(kept) < len(self._promises) and not self._is_quorum(kept):
            self.has_no_quorum = True
            return None
        left = {rank: committed for rank, committed in self.left.items() if rank in self.members}
        promises = self._promises.values()
        committed = [*(promise.committed for promise in promises), *left.values()]
        leaving = frozenset[int]().union(*(promise.leaving for promise in promises))
        joining = self._all_prepared_for() if len(kept) == len(self.members) else frozenset()
        members = tuple(sorted({*kept, *left, *joining} - leaving))
        return Decision(members, max(committed), tuple(sorted(leaving)), tuple(sorted(joining)))

    def _all_prepared_for(self) -> frozenset[int]:
        """Those that can join, once all members have promised."""
        prepared = frozenset.intersection(*(promise.joining for promise in self._promises.values()))
        return prepared.difference(self.dead, self.silent)

    def _is_quorum(self, ranks: Collection[int]) -> bool:
        twice = 2 * sum(rank in ranks for rank in self.members)
        return twice > len(self.members) or (twice == len(self.members) and self.members[0] in ranks)

    def _adopt(self, decision: Decision) -> None:
        before = self.members
        self.view += 1
        self.decisions[self.view] = decision
        self.members = decision.members
        for rank in (*before, *decision.joining):
            if rank != self.rank and self._is_reachable(rank):
                self._tell_decision(rank, self.view)
        self._begin_view()


# Messages of others, which a faulty memory or another version may have changed -----------------------------


def is_number(value: Any) -> bool:
    """Whether it may count or number something in a message."""
    return type(value) is int and 0 <= value < 1 << 62


def _are_ranks(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(is_number(one) and one < _STRIDE for one in value)


def _is_decision(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 4:
        return False
    members, committed, leaving, joining = value
    are_ranks = _are_ranks(members) and _are_ranks(leaving) and _are_ranks(joining)
    return are_ranks and list(members) == sorted(set(members)) and is_number(committed)


def _is_accepted(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, (list, tuple)) and len(value) == 2 and is_number(value[0]) and _is_decision(value[1])


#: What the body of each kind of message holds.
_BODIES: dict[str, dict[str, Callable[[Any], bool]]] = {
    "call": {},
    "prepare": {"ballot": is_number, "dead": _are_ranks},
    "promise": {
        "ballot": is_number,
        "committed": is_number,
        "silent": _are_ranks,
        "leaving": _are_ranks,
        "joining": _are_ranks,
        "accepted": _is_accepted,
    },
    "rejected": {"ballot": is_number, "promised": is_number},
    "accept": {"ballot": is_number, "decision": _is_decision},
    "accepted": {"ballot": is_number},
    "decided": {"decision": _is_decision},
}


def check(message: Any) -> None:
    """Check what another rank has sent.

    Raises:
        ValueError: it is no message of the algorithm.
    """
    if isinstance(message, dict) and message.keys() == {"view", "kind", "body"} and is_number(message["view"]):
        kind, body = message["kind"], message["body"]
        form = _BODIES.get(kind) if isinstance(kind, str) else None
        is_complete = form is not None and isinstance(body, dict) and body.keys() == form.keys()
        if form is not None and is_complete and all(is_right(body[name]) for name, is_right in form.items()):
            return
    raise ValueError(f"{str(message)[:200]} is no message of an agreement")


def _decisions_in(message: Message) -> list[Decision]:
    body = message["body"]
    accepted = body.get("accepted")
    found = [body.get("decision"), accepted[1] if accepted is not None else None]
    return [Decision.told(decision) for decision in found if decision is not None]
