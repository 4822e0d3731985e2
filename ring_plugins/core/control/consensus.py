"""How ranks agree on who is left when one is lost: Paxos, whose quorum shrinks with proven deaths.

**Problem.** Inside a host the kernel says who is dead. Between hosts it does not. A rank may hear nothing more of
another one because that has died, because its host has lost power, or because the network between them is cut while
both live. If both sides of a cut went on, there would be two jobs, which overwrite each other's checkpoints. And
survivors may stand one operation apart: some have its confirmation already, which others will never get.

**What a rank knows of another.** It is *reachable* as long as the connection to it stands, however slow its script is:
a stopped rank is not dead. It has *left* if it said so, with the number of operations that it had confirmed. It is
*dead* on evidence only: its host's kernel has refused a connection to its port (listen_probe.py), or has dropped the
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

This file has no input or output, so that tests can drive it through any order of messages, deaths and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.facts import Facts

#: A ballot is a round times this, plus the rank of its leader.
_STRIDE = 1 << 20

Message = dict[str, Any]


class Decision(NamedTuple):
    """What the ranks have agreed on.

    Attributes:
        members: of the view, in order.
        committed: how many operations are confirmed for all of them.
        leaving: ranks that have left because they were told to end.
        joining: members that were not in the view before.
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
        facts: who is dead or silent, or has left with how many operations confirmed; also what a leader has told.
        send: sends a rank a message of the kind "agree"; messages of one rank to another arrive in order, if they
            arrive.
        hang_up: closes the connection to a rank, so that nothing that it has sent arrives any more.
        view: number of that view.

    Attributes:
        view: number of the last view that is decided.
        members: of that view.
        decisions: by view.
        has_no_quorum: whether this rank, as the leader, does not reach enough others.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        facts: Facts,
        send: Callable[[int, str, Message], None],
        hang_up: Callable[[int], None],
        view: int = 0,
    ) -> None:
        self.rank, self.view, self.members = rank, view, tuple(members)
        self.decisions: dict[int, Decision] = {}
        self.has_no_quorum = False
        self._facts, self._send, self._hang_up = facts, send, hang_up
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
        return [rank for rank in self.members if rank in self._facts.dead or rank in self._facts.silent]

    def must_agree(self) -> bool:
        """Whether this rank has to interrupt what it does, and to arrive in the next agreement."""
        return self._must_agree

    def awaited(self) -> list[int]:
        """Ranks on which the agreement waits, as far as this rank can tell."""
        reachable = self._reachable()
        if reachable[0] != self.rank:
            return reachable[:1]
        heard = self._promises if self._proposal is None else self._acceptances
        return [rank for rank in reachable if rank not in heard]

    # Events ---------------------------------------------------------------------------------------

    def arrive(self, view: int, committed: int, leaving: Collection[int] = (), joining: Collection[int] = ()) -> None:
        """This rank's script has stopped, to agree on a view.

        Args:
            view: its number.
            committed: how many operations this rank has confirmed.
            leaving: ranks that are to end, as the last of those operations says.
            joining: for which this rank is prepared.
        """
        if view == self.view + 1 and self._committed is None and self.rank in self.members:
            self._committed, self._leaving, self._joining = committed, frozenset(leaving), frozenset(joining)
            self._step()

    def take_over(self, decision: Decision) -> None:
        """Begin with the view by which this rank has joined, and tell the others of it, which may not know yet."""
        self.decisions[self.view] = decision
        for rank in self.members:
            if rank != self.rank:
                self._tell(rank, "decided", self.view, decision=list(decision))

    def note_dead(self, rank: int) -> None:
        """A rank's process has ended without a word."""
        facts = self._facts
        if rank not in facts.dead and rank not in facts.left and rank != self.rank:
            facts.dead.add(rank)
            self._must_agree |= rank in self.members
            self._step()

    def note_silent(self, *ranks: int) -> None:
        """Ranks cannot be reached any more; nothing is proposed before all of them count as silent."""
        facts = self._facts
        silent = {rank for rank in ranks if rank not in facts.silent and rank not in facts.left and rank != self.rank}
        if silent:
            facts.silent |= silent
            self._must_agree |= not silent.isdisjoint(self.members)
            self._step()

    def note_left(self, rank: int, committed: int) -> None:
        """A rank has left normally, after having confirmed so many operations."""
        self._facts.left.setdefault(rank, committed)
        self._step()

    def receive(self, sender: int, message: Message) -> None:
        """Take a message of another rank.

        Raises:
            ValueError: it is none of this algorithm's, so that the sender cannot be trusted; nothing has changed.
        """
        check(message)
        view, kind, body = message["view"], message["kind"], message["body"]
        if view <= self.view:
            if kind in ("prepare", "accept") and view in self.decisions:
                self._tell(sender, "decided", view, decision=list(self.decisions[view]))
            return
        facts, accepted = self._facts, body.get("accepted")
        is_member = self.rank in self.members and sender not in facts.dead and sender not in facts.silent
        if view != self.view + 1 or not is_member:
            return
        found = accepted[1] if accepted is not None else body.get("decision")
        decision = Decision.told(found) if found is not None else None
        if decision is not None:
            if not {*decision.members, *decision.leaving} <= {*self.members, *decision.joining}:
                raise ValueError(f"{message!r} has members that the view before has not")
            if not self._joining.issuperset(decision.joining):
                raise ValueError(f"{message!r} lets ranks join for which this one is not prepared")
        (self._receive_answer if kind in _ANSWERS else self._receive_request)(sender, kind, body, decision)
        self._step()

    def _receive_answer(self, sender: int, kind: str, body: Message, decision: Decision | None) -> None:
        """Take a message to the leader; `decision` is the one that a promise reports."""
        if kind == "rejected":
            self._seen = max(self._seen, body["promised"])
        if body["ballot"] != self._ballot:
            return
        if kind == "rejected":
            self._ballot = 0  # and the next step begins a higher one
        elif kind == "accepted":
            self._acceptances.add(sender)
        else:
            silent, leaving, joining = (frozenset(body[name]) for name in ("silent", "leaving", "joining"))
            accepted = (body["accepted"][0], decision) if decision is not None else None
            self._promises[sender] = _Promise(body["committed"], silent, leaving, joining, accepted)

    def _receive_request(self, sender: int, kind: str, body: Message, decision: Decision | None) -> None:
        """Take a message of a leader, or of one that has arrived and takes this rank for it."""
        if kind in ("call", "prepare"):
            self._must_agree = True
        if kind == "prepare":
            for rank in body["dead"]:
                if rank != self.rank and rank not in self._facts.left:
                    self._facts.dead.add(rank)
                    self._hang_up(rank)
            self._prepares[sender] = body["ballot"]
        elif kind == "accept" and decision is not None:
            if body["ballot"] == self._promised:
                self._accepted = self._promised, decision
                self._tell(sender, "accepted", ballot=self._promised)
            else:
                self._tell(sender, "rejected", ballot=body["ballot"], promised=self._promised)
        elif kind == "decided" and decision is not None:
            self._adopt(decision)

    def _tell(self, rank: int, kind: str, view: int | None = None, **body: Any) -> None:
        self._send(rank, "agree", {"view": self.view + 1 if view is None else view, "kind": kind, "body": body})

    # The algorithm --------------------------------------------------------------------------------

    def _reachable(self) -> list[int]:
        """Members that can answer; the first is the leader, to which this rank promises."""
        facts = self._facts
        gone = {*facts.dead, *facts.silent, *facts.left} - {self.rank}
        return [rank for rank in self.members if rank not in gone]

    def _step(self) -> None:
        """Do what can be done now; called after every event."""
        if self._committed is None or self.rank not in self.members:
            return
        leader = self._reachable()[0]
        if leader != self.rank:
            if (ballot := self._prepares.pop(leader, None)) is not None:
                self._answer(leader, ballot)
            if leader != self._has_called and not (self._promised and self._promised % _STRIDE == leader):
                self._has_called = leader
                self._tell(leader, "call")  # it may know of no loss itself
            return
        known_dead = frozenset(self._facts.dead)
        if not self._ballot or (self._proposal is None and known_dead != self._known_dead):
            self._begin_ballot(known_dead)
        if self._proposal is None and self._have_answered(self._promises):
            self._propose()
        if self._proposal is not None and self._have_answered(self._acceptances):
            self._adopt(self._proposal)

    def _answer(self, leader: int, ballot: int) -> None:
        if ballot <= self._promised:
            self._tell(leader, "rejected", ballot=ballot, promised=self._promised)
            return
        self._promised = ballot
        own = self._own_promise()
        told: Message = {name: sorted(getattr(own, name)) for name in ("silent", "leaving", "joining")}
        accepted = None if own.accepted is None else [own.accepted[0], list(own.accepted[1])]
        self._tell(leader, "promise", ballot=ballot, committed=own.committed, accepted=accepted, **told)

    def _own_promise(self) -> _Promise:
        assert self._committed is not None
        return _Promise(self._committed, frozenset(self._facts.silent), self._leaving, self._joining, self._accepted)

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
        promises[self.rank] = self._own_promise()  # some of those that have promised may be silent since
        accepted = [promise.accepted for promise in promises.values() if promise.accepted is not None]
        proposal = max(accepted)[1] if accepted else self._own_proposal()
        if proposal is None:
            self.has_no_quorum = True
            return
        self._proposal, self._acceptances = proposal, {self.rank}
        self._accepted = self._ballot, proposal
        for rank in self._reachable():
            if rank != self.rank:
                self._tell(rank, "accept", ballot=self._ballot, decision=list(proposal))

    def _have_answered(self, answers: Collection[int]) -> bool:
        """Whether all have answered that can, and they are enough."""
        if any(rank not in answers for rank in self._reachable()):
            return False
        silent = self._facts.silent - self._facts.dead
        if not silent.isdisjoint(self.members) and not self._is_quorum(answers):
            self.has_no_quorum = True
            return False
        return True

    def _own_proposal(self) -> Decision | None:
        """What follows from the promises, None if too few of those that have answered reach each other."""
        kept: list[int] = []
        for rank in sorted(self._promises):
            silent = self._promises[rank].silent
            if not any(other in silent or rank in self._promises[other].silent for other in kept):
                kept.append(rank)
        if len(kept) < len(self._promises) and not self._is_quorum(kept):
            return None
        left = {rank: committed for rank, committed in self._facts.left.items() if rank in self.members}
        promises = self._promises.values()
        committed = [*(promise.committed for promise in promises), *left.values()]
        leaving = frozenset[int]().union(*(promise.leaving for promise in promises))
        joining = frozenset[int]()
        if len(kept) == len(self.members):  # all are there: those join for which all are prepared
            joining = frozenset.intersection(*(promise.joining for promise in promises))
            joining = joining.difference(self._facts.dead, self._facts.silent)
        members = tuple(sorted({*kept, *left, *joining} - leaving))
        return Decision(members, max(committed), tuple(sorted(leaving)), tuple(sorted(joining)))

    def _is_quorum(self, ranks: Collection[int]) -> bool:
        twice = 2 * sum(rank in ranks for rank in self.members)
        return twice > len(self.members) or (twice == len(self.members) and self.members[0] in ranks)

    def _adopt(self, decision: Decision) -> None:
        for rank in (*self._reachable(), *decision.joining):
            if rank != self.rank:
                self._tell(rank, "decided", decision=list(decision))
        self.view += 1
        self.decisions[self.view] = decision
        self.members = decision.members
        self._begin_view()


# Messages of others, which a faulty memory or another version may have changed -----------------------------

#: What a field of a message holds: a number; ranks; a `Decision`; a ballot and the decision accepted in it, or None.
NUMBER, _RANKS, _DECISION, _ACCEPTED = range(4)
#: The fields of each kind of message, and the kinds that answer a leader.
_BODIES: dict[str, dict[str, int]] = {
    "call": {},
    "prepare": {"ballot": NUMBER, "dead": _RANKS},
    "promise": {
        "ballot": NUMBER,
        "committed": NUMBER,
        "silent": _RANKS,
        "leaving": _RANKS,
        "joining": _RANKS,
        "accepted": _ACCEPTED,
    },
    "rejected": {"ballot": NUMBER, "promised": NUMBER},
    "accept": {"ballot": NUMBER, "decision": _DECISION},
    "accepted": {"ballot": NUMBER},
    "decided": {"decision": _DECISION},
}
_ANSWERS = ("promise", "rejected", "accepted")


def fits(value: Any, form: int) -> bool:
    """Whether a value may stand in a field of this form."""
    if form == NUMBER:
        return type(value) is int and 0 <= value < 1 << 62
    if not isinstance(value, (list, tuple)):
        return form == _ACCEPTED and value is None
    if form == _RANKS:
        return all(type(one) is int and 0 <= one < _STRIDE for one in value)
    forms = (_RANKS, NUMBER, _RANKS, _RANKS) if form == _DECISION else (NUMBER, _DECISION)
    if len(value) != len(forms) or not all(map(fits, value, forms)):
        return False
    return form == _ACCEPTED or list(value[0]) == sorted(set(value[0]))


def check(message: Any) -> None:
    """Check what another rank has sent.

    Raises:
        ValueError: it is no message of the algorithm.
    """
    if isinstance(message, dict) and message.keys() == {"view", "kind", "body"} and fits(message["view"], NUMBER):
        kind, body = message["kind"], message["body"]
        form = _BODIES.get(kind) if isinstance(kind, str) else None
        is_complete = form is not None and isinstance(body, dict) and body.keys() == form.keys()
        if form is not None and is_complete and all(fits(body[name], of) for name, of in form.items()):
            return
    raise ValueError(f"{str(message)[:200]} is no message of an agreement")
