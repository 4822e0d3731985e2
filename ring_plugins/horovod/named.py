"""Named operations run once all ranks have called them, in whatever order each rank does.

They have a group of their own, whose operations run in the order in which rank 0 has told of them (see
core/control/named_calls.py). The first match makes the group, in a thread: scripts are at different places then.

What other ranks call after one has joined is such an operation, too: it takes part with what `rebuild` makes of their
call, zeros.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ring_plugins.core.base.errors import DeadlockError, MismatchError, RingError
from ring_plugins.core.base.threads import HelperThread
from ring_plugins.core.collectives.api import Work
from ring_plugins.core.control.named_calls import REFUSED, Match, NamedCalls, NameInUse
from ring_plugins.core.control.wait import PeerRejected
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.job import World
from ring_plugins.core.world import current
from ring_plugins.horovod.common.process_sets import group_of

T = TypeVar("T")

JOIN = "hvd.join"  # what ranks that wait in `join` do, for messages of the others

NAMED = "named operations"  # what their groups are for, and how the names of these begin

_IN_JOIN = (
    f"it is in {JOIN}(), and counts as zeros on GPUs in named operations only, in no optimizer's averages. Give each "
    'operation a name, such as hvd.allreduce(x, name="loss"), and ranks with such an optimizer equally many batches'
)

#: Seconds for which a rank waits for a match before it says that it waits: messages take milliseconds.
_PATIENCE = 2.0

#: Seconds for which a name stays in use after all ranks have called it, unless the script has waited for the operation.
#: A second call without waiting is an error on all ranks then, however soon the others came.
_RESERVED = 0.25

#: Runs an operation in a group, and returns its results.
Run = Callable[[Group], Sequence[Any]]

_operations: weakref.WeakKeyDictionary[World, dict[tuple[int, ...], NamedOperations]] = weakref.WeakKeyDictionary()


def all_have_joined() -> None:
    """Number what ranks call after the next `hvd.join` from 1 again, on all ranks alike."""
    for operations in _operations.get(current(), {}).values():
        operations.numbers = itertools.count(1)


def leave_gpus() -> None:
    """Let GPUs of others raise an error in operations without a name, rather than wait for this rank in `join`.

    Raises:
        MismatchError: such a rank was in `join` already, or this one's GPU has failed.
    """
    executors = [one for one in current().device_executors() if not one.name.startswith(NAMED)]
    for executor in executors:
        executor.tell_rejection("operations on GPUs without a name", MismatchError(_IN_JOIN))
    for executor in executors:  # what comes after `join` would match what is left
        executor.synchronize()


def operations_of(ranks: Sequence[int], rebuild: Callable[[Any], Run | None]) -> NamedOperations | None:
    """The named operations of some world ranks; None where nothing matches names.

    Args:
        ranks: of the members.
        rebuild: makes this rank's part of an operation out of the others' call, if it has joined.
    """
    world = current()
    if world.named_calls is None or len(ranks) == 1:
        return None
    of_world = _operations.setdefault(world, {})
    if tuple(ranks) not in of_world:
        of_world[tuple(ranks)] = NamedOperations(world, world.named_calls, tuple(ranks))
    world.named_calls.on_joined_match = lambda match: of_world[match.ranks].take_part(match, rebuild)
    return of_world[tuple(ranks)]


def in_order_or_by_name(
    name: str | None,
    process_set: Any,
    rebuild: Callable[[Any], Run | None],
    in_order: Callable[[], T],
    by_name: Callable[[NamedOperations, str], T],
) -> T:
    """Run an operation that the script waits for.

    Args:
        name: of the operation, by which the ranks' calls match; None to match by order.
        process_set: whose ranks take part.
        rebuild: as for `operations_of`.
        in_order, by_name: run it.
    """

    def found() -> NamedOperations | None:
        return operations_of(communicator_of(group_of(process_set)).ranks, rebuild)

    if name is not None and (operations := found()) is not None:
        return by_name(operations, name)
    try:
        return in_order()
    except MismatchError as error:
        # On one host, all ranks are in step after it, and make the call again as one that the joined take part in. What
        # a GPU has begun already cannot be made again.
        operations = found() if JOIN in str(error) and not isinstance(error, PeerRejected) else None
        if operations is None:
            raise
        communicator_of(group_of(process_set)).check()
        return by_name(operations, f"call {next(operations.numbers)} after hvd.join")


class NamedWork:
    """A `Work` that begins once all ranks have called its name.

    Args:
        calls, ranks: who has to.
        name: that they call.
        description: of what.

    Attributes:
        matched_at: when they had, by the monotonic clock; None before that.
    """

    def __init__(self, calls: NamedCalls, ranks: tuple[int, ...], name: str, description: str) -> None:
        self.description = description
        self._calls, self._ranks, self._name = calls, ranks, name
        self._begun: Work[Sequence[Any]] | None = None
        self._error: RingError | None = None
        self._came = threading.Event()
        self._is_seen = False  # whether the script knows that it is over
        self.matched_at: float | None = None

    def begin(self, work: Work[Sequence[Any]]) -> None:
        """Wait for this from now on."""
        self._begun = work
        self._came.set()

    def fail(self, error: RingError) -> None:
        """Raise this in `wait`."""
        self._error = error
        self._came.set()

    def done(self) -> bool:
        self._is_seen = self._is_over()
        # A script that polls waits nowhere, so that only this tells it who is gone.
        return self._is_seen or (self.matched_at is None and self._calls.are_lost(self._ranks))

    def _is_over(self) -> bool:
        return self._error is not None or (self._begun is not None and self._begun.done())

    def frees_its_name(self) -> bool:
        """Whether the name may be called again: alike on all ranks, unless one is slower by `_RESERVED`."""
        reserved = self.matched_at is None or time.monotonic() - self.matched_at < _RESERVED
        return self._is_seen or (not reserved and self._is_over())

    def _wait_for_match(self) -> None:
        def missing() -> Sequence[int]:
            return () if self.matched_at is not None else self._ranks

        while not self._came.is_set():
            try:
                self._calls.wait(self._came.is_set, missing, self._ranks, self._name, self.description)
            except DeadlockError as error:  # later calls of others are not to get the values of this one
                if self._calls.withdraw(self._ranks, self._name):
                    self.fail(error)

    def wait(self) -> Sequence[Any]:
        if not self._came.wait(_PATIENCE):
            self._wait_for_match()
        self._is_seen = True
        if self._error is not None:
            raise self._error
        assert self._begun is not None
        return self._begun.wait()


class NamedOperations:
    """Those of some ranks.

    Args:
        world, calls: of the job.
        ranks: world ranks of the members.

    Attributes:
        numbers: for operations without a name that are called as if they had one.
    """

    def __init__(self, world: World, calls: NamedCalls, ranks: tuple[int, ...]) -> None:
        self._world, self._calls, self._ranks = world, calls, ranks
        self.numbers = itertools.count(1)
        self._lock = threading.Lock()
        #: By name, the last operation whose handle the script still has.
        self._begun: weakref.WeakValueDictionary[str, NamedWork] = weakref.WeakValueDictionary()
        self._group: Group | None = None
        #: What has matched while the group is made; None once that is over.
        self._waiting: list[tuple[NamedWork, Run]] | None = []

    def prepare(self) -> None:
        """Make the group now, where all ranks are at the same place."""
        if self._waiting is not None and not self._waiting:
            self._make_group()

    def start(self, name: str, call: dict[str, Any], run: Run) -> NamedWork:
        """Call a name.

        Args:
            name: of the operation.
            call: what all ranks have to call equally; its "kind" names it.
            run: this rank's part.

        Raises:
            NameInUse: an operation of this name is under way.
        """
        earlier = self._begun.get(name)
        if earlier is not None and not earlier.frees_its_name():
            raise NameInUse(name)
        work = self._begun[name] = NamedWork(self._calls, self._ranks, name, f"{call['kind']}(name={name!r})")
        self._calls.begin(self._ranks, name, call, lambda match: self._match(match, work, run))
        return work

    def take_part(self, match: Match, rebuild: Callable[[Any], Run | None]) -> None:
        """Take part in what others call, as a rank that has joined."""
        called = [call for call in match.calls if call is not None]
        if (run := rebuild(called[0])) is not None:
            self._match(
                match, NamedWork(self._calls, self._ranks, match.name, f"{called[0]['kind']} after hvd.join"), run
            )

    def _match(self, match: Match, work: NamedWork, run: Run) -> None:
        work.matched_at = time.monotonic()
        if (error := _difference(match)) is not None:
            work.fail(error)
            return
        with self._lock:
            if self._waiting is None:
                self._begin(work, run)
                return
            self._waiting.append((work, run))
            is_first = len(self._waiting) == 1
        if is_first:
            HelperThread(self._make_group, "ring:named operations").start()

    def _begin(self, work: NamedWork, run: Run) -> None:
        group = self._group
        assert group is not None
        work.begin(group.communicator.start(work.description, lambda: run(group)))

    def _make_group(self) -> None:
        try:
            ranks = [self._world.world_ranks.index(rank) for rank in self._ranks]
            self._group = Group(ranks, purpose=NAMED)
        except RingError as error:
            with self._lock:
                for work, _ in self._waiting or ():
                    work.fail(error)
            return
        with self._lock:
            for work, run in self._waiting or ():
                self._begin(work, run)
            self._waiting = None


def _difference(match: Match) -> RingError | None:
    """Why an operation cannot be run, equal on all ranks that have called it."""
    called = {rank: call for rank, call in zip(match.ranks, match.calls, strict=True) if call is not None}
    joined = [rank for rank in match.ranks if rank not in called]
    for rank, call in called.items():
        if REFUSED in call:
            return MismatchError(f"rank {rank} takes no part in the operation {match.name!r}: {call[REFUSED]}")
    first = next(iter(called.values()))
    if any(call != first for call in called.values()):
        texts = ", ".join(f"rank {rank}: {_text(call)}" for rank, call in called.items())
        return MismatchError(f"the ranks call the operation {match.name!r} differently ({texts}).")
    if joined and not first.get("joins"):
        return MismatchError(
            f"{first['kind']} cannot take place since rank {joined[0]} is in hvd.join(), and has nothing to give. Only "
            "sums and averages of allreduce go on, in which it counts as zeros."
        )
    return None


def _text(call: dict[str, Any]) -> str:
    details = ", ".join(f"{key}={value}" for key, value in call.items() if key not in ("kind", "joins"))
    return f"{call['kind']}({details})"
