"""Operations that ranks begin in different orders, and match by their names.

**Problem.** Collectives match by their order. A script whose operations begin in hooks, whose order differs among
ranks, gives them names instead, and expects an operation to run once every rank has called it.

**Idea.** Each rank tells rank 0 of a call. Once all have called a name, rank 0 tells all of them, and each runs what
has this name then. Messages of one connection stay in order, so all ranks run operations in the order in which rank 0
told of them. As with meetings (meetings.py), rank 0's channel does that, not its script.

A rank that has joined has no more calls of its own. It counts as if it had made each, until all ranks have joined.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ring_plugins.core.base.errors import ArgumentError, PeerFailed, RingError, is_rejection
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.control.channel import Body, Channel
from ring_plugins.core.control.failure_detector import IN_ONE, OF_NAMES, FailureDetector
from ring_plugins.core.control.meetings import over_rank_0
from ring_plugins.core.control.wait import Wait, waits_of_communicators

_Ranks = tuple[int, ...]

#: Key of a call that its rank has rejected; the value says why.
REFUSED = "refused"


class NameInUse(ArgumentError):
    """This rank has called the name, and that operation is not over."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"name={name!r} is in use: this rank has begun an operation of that name, and has not waited for it. Wait "
            "for it first, or give each operation its own name."
        )

    def __reduce__(self) -> Any:
        return ArgumentError, (str(self),)


class Match(NamedTuple):
    """What all ranks have called.

    Attributes:
        ranks: world ranks of those that take part.
        name: of the call.
        calls: what they have called, in the order of `ranks`; None for a rank that has joined.
    """

    ranks: _Ranks
    name: str
    calls: list[dict[str, Any] | None]


class NamedCalls:
    """The named calls of a job that ends with its first lost rank.

    Args:
        channel: over rank 0.
        failure_detector: watches the other ranks.

    Attributes:
        on_joined_match: called on the channel's thread with a match in which this rank takes part as one that has
            joined.
    """

    def __init__(self, channel: Channel, failure_detector: FailureDetector) -> None:
        self._channel, self._failure_detector = channel, failure_detector
        self._lock = threading.Lock()
        self._own: dict[tuple[_Ranks, str], tuple[Callable[[Match], object], Wait]] = {}
        self._withdrawn = set[tuple[_Ranks, str]]()
        self._in_join: dict[_Ranks, Wait] = {}
        self._all_joined: dict[_Ranks, int] = {}
        self.on_joined_match: Callable[[Match], object] = lambda match: None
        # On rank 0: what has been called, by name and rank; and who has joined, in order.
        self._called: dict[_Ranks, dict[str, dict[int, deque[Any]]]] = {}
        self._joined: dict[_Ranks, list[int]] = {}
        channel.on("calls", self._note_call, at_once=True)
        channel.on("all have called", self._note_match, at_once=True)
        channel.on("all have joined", self._note_all_joined, at_once=True)

    def begin(self, ranks: Sequence[int], name: str, call: dict[str, Any], matched: Callable[[Match], object]) -> None:
        """Tell of a call.

        Args:
            ranks: world ranks of all that call it, in an order that is equal on all.
            name: of the call.
            call: what JSON can hold, by keys of which none is `REFUSED`.
            matched: called on the channel's thread, or in this one, once all have called; must not wait.

        Raises:
            NameInUse: this rank has called that name before, and the others have not.
        """
        key = tuple(ranks), name
        with self._lock:
            if key in self._own:
                raise NameInUse(name)
            self._own[key] = matched, self._begun(_identity(key[0], name))
        self._channel.tell(0, "calls", {"ranks": list(ranks), "name": name, "call": call})

    def withdraw(self, ranks: Sequence[int], name: str) -> bool:
        """Take back a call, so that no later call of others matches it; returns False if all have called meanwhile.

        If a rank is gone, the job is over, so that no later call matches either.
        """
        key = tuple(ranks), name
        self._channel.tell(0, "calls", {"ranks": list(ranks), "name": name, "call": None})
        try:
            self.wait(lambda: key not in self._own, lambda: (0,), ranks, "", f"the withdrawal of {name!r}")
        except PeerFailed:  # the caller has an error of its own to raise
            with self._lock:
                if self._own.pop(key, None) is not None:
                    return True
        with self._lock:
            is_withdrawn = key in self._withdrawn
            self._withdrawn.discard(key)
        return is_withdrawn

    def refuse(self, ranks: Sequence[int], name: str, error: BaseException) -> None:
        """Tell the others that this rank's call of a name has been rejected here."""
        if is_rejection(error) and not isinstance(error, NameInUse):
            call = {REFUSED: f"{type(error).__name__}: {error}"[:500]}
            self._channel.tell(0, "calls", {"ranks": list(ranks), "name": name, "call": call})

    def join(self, ranks: Sequence[int]) -> None:
        """Count as one that has made each call, from now on until all have joined."""
        self._all_joined.pop(tuple(ranks), None)
        self._in_join[tuple(ranks)] = self._begun(_identity(ranks))
        self._channel.tell(0, "calls", {"ranks": list(ranks), "name": None, "call": None})

    def wait_for_all_joined(self, ranks: Sequence[int]) -> int:
        """Wait until all ranks have joined, and return the world rank that came last."""
        key = tuple(ranks)
        self.wait(lambda: key in self._all_joined, lambda: ranks, ranks, "hvd.join", "hvd.join")
        return self._all_joined.pop(key)

    def wait(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], Sequence[int]],
        ranks: Sequence[int],
        name: str,
        what: str,
    ) -> None:
        """Wait until `ready()`, for which `missing()` have to make calls.

        Args:
            ready, missing: as said; `missing` may contain this rank.
            ranks, name: of the call.
            what: it is, for messages.

        Raises:
            PeerFailed: one of them is gone.
            DeadlockError: one of them waits for this one elsewhere.
        """
        own, identity = self._channel.rank, _identity(ranks, name)
        wait = Wait(identity, self._failure_detector)
        if _blocks_the_script():
            wait.caller_blocked_since = time.monotonic()
        try:
            wait.until(
                ready,
                over_rank_0(
                    self._channel,
                    lambda: [rank for rank in missing() if rank != own],
                    f"begin {what}",
                    "Let rank 0 stay until all named operations are over.",
                ),
                lambda: what,
                arrival=True,
            )
        finally:
            self._failure_detector.deadlocks.pop(identity, None)  # the name may be called again

    def _begun(self, identity: str) -> Wait:
        """Lets others, who wait for this call, find out that this rank has made it, as long as the result is kept."""
        wait = waits_of_communicators[identity] = Wait(identity, self._failure_detector)
        wait.entered = 1
        return wait

    def are_lost(self, ranks: Sequence[int]) -> bool:
        """Whether `wait` for these ranks would raise since one of them is gone."""
        try:
            others = [rank for rank in ranks if rank != self._channel.rank]
            self._failure_detector.check("named operations", others, "a named operation")
        except RingError:
            return True
        return False

    # On rank 0 --------------------------------------------------------------------------------------

    def _note_call(self, sender: int, body: Body) -> None:
        ranks, name = tuple(body["ranks"]), body["name"]
        if sender not in ranks:
            raise ValueError(f"rank {sender} is not one of these")
        called, joined = self._called.setdefault(ranks, {}), self._joined.setdefault(ranks, [])
        if name is None:
            joined.append(sender)
        elif body["call"] is None:
            if queued := called.get(name, {}).get(sender):
                queued.pop()
                called[name] = {rank: calls for rank, calls in called[name].items() if calls}
                self._channel.tell(sender, "all have called", {"ranks": list(ranks), "name": name, "calls": []})
        else:
            called.setdefault(name, {}).setdefault(sender, deque()).append(body["call"])
        for complete in [one for one, calls in called.items() if calls.keys() | {*joined} == {*ranks}]:
            by_rank = {rank: queued.popleft() for rank, queued in called[complete].items()}
            # What is left are calls of ranks whose first one was rejected there.
            called[complete] = {rank: queued for rank, queued in called[complete].items() if queued}
            if not called[complete]:
                del called[complete]
            body = {"ranks": list(ranks), "name": complete, "calls": [by_rank.get(rank) for rank in ranks]}
            self._tell_all(ranks, "all have called", body)
        if {*joined} == {*ranks}:
            self._tell_all(ranks, "all have joined", {"ranks": list(ranks), "last": joined[-1]})
            joined.clear()

    def _tell_all(self, ranks: _Ranks, kind: str, body: Body) -> None:
        for rank in ranks:
            self._channel.tell(rank, kind, body)

    # On all -----------------------------------------------------------------------------------------

    def _note_match(self, sender: int, body: Body) -> None:
        match = Match(tuple(body["ranks"]), str(body["name"]), list(body["calls"]))
        if not match.calls:
            with self._lock:
                if self._own.pop((match.ranks, match.name), None) is not None:
                    self._withdrawn.add((match.ranks, match.name))
            return
        own = match.calls[match.ranks.index(self._channel.rank)]
        if own is None:
            self.on_joined_match(match)
        elif REFUSED not in own:
            with self._lock:
                called = self._own.pop((match.ranks, match.name), None)
            if called is not None:  # otherwise withdrawn, as a rank was gone
                called[0](match)

    def _note_all_joined(self, sender: int, body: Body) -> None:
        self._in_join.pop(tuple(body["ranks"]), None)
        self._all_joined[tuple(body["ranks"])] = int(body["last"])


def _identity(ranks: Sequence[int], name: str = "") -> str:
    """Of the wait for a call; without a name, of all of these ranks' calls, which one that has joined has made."""
    return f"{OF_NAMES} of {','.join(map(str, ranks))}{IN_ONE if name else ''}{name}"


def _blocks_the_script() -> bool:
    """Whether this thread is one of TensorFlow's, for which the only thread of the script waits."""
    kinds = threading._DummyThread, HelperThread, type(threading.main_thread())
    return isinstance(threading.current_thread(), kinds[0]) and all(isinstance(t, kinds) for t in threading.enumerate())
