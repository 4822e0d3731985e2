"""A communicator that goes on when members die: `on_failure="continue"`.

**When.** A member that died leaves the others stuck at the first barrier that it did not reach, in the same operation
(core/control/membership.py says why). They agree on who is left, and every communicator of the job drops the dead one:
its pages, its staging buffers, its part of shared buffers. What the others have mapped stays where it is, so a gradient
that lives in a bucket is still there. Nothing is allocated or opened again, and nobody who holds the communicator
notices, but that `rank`, `size` and `ranks` have changed.

**What is repeated.** The operation has happened for nobody, but it may have overwritten memory that it works on in
place. Here, operations are called again where they can be: from a copy of an all-reduce's input, and from arguments
that nothing overwrites. What was called in `run_in_line` is repeated as a whole by its caller, who has the inputs (see
`GradientReducer`). In other collectives the shapes depend on the number of ranks; callers that can make new ones use
`repeated`, and for the rest `MembersLost` ends the job.

**Joining.** Where processes take the places of lost ones, all members and the newcomers map fresh control pages and
staging buffers, and the parts of shared buffers that each has already (core/control/admission.py). `renew` takes these
into use, in place. A newcomer makes its communicators while it is alone, in the order of the script, so each has its
counterpart among the members.

**All at once.** When one communicator finds a loss, all are told, and none may be in the middle of an operation. So
operations run in the thread that calls them, also those given to `start`, and a second thread that calls one meanwhile
is refused. All survivors then stand at the same place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ring_plugins.core.arrays.codec import HalfCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Work
from ring_plugins.core.collectives.executor import BackgroundWork, Members, SerialExecutor
from ring_plugins.core.collectives.fingerprint import Fingerprint
from ring_plugins.core.collectives.host import HostCommunicator
from ring_plugins.core.collectives.validation import check_rank
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.membership import MembersLost
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux.shared_memory import Address, Segment

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")


def repeated(function: Callable[[], T]) -> T:
    """Call a function whose inputs nothing overwrites, and again whenever members are lost in it."""
    while True:
        try:
            return function()
        except MembersLost:  # each time there is at least one member less
            pass


class _OneThreadExecutor(SerialExecutor):
    """A `SerialExecutor` that refuses an operation while another thread is in one, of any communicator of the job."""

    def __init__(self, name: str, wait: Wait, members: Members | None = None) -> None:
        super().__init__(name, wait, members)
        self.in_use = threading.RLock()

    def run(self, fingerprint: Fingerprint, operation: Callable[[Unpack[Ts], Fingerprint], T], *args: Unpack[Ts]) -> T:
        with self._alone(fingerprint.text):
            return super().run(fingerprint, operation, *args)

    def run_in_line(self, description: str, function: Callable[[], T]) -> T:
        with self._alone(description):
            return super().run_in_line(description, function)

    @contextlib.contextmanager
    def _alone(self, operation: str) -> Iterator[None]:
        if not self.in_use.acquire(blocking=False):
            error = ArgumentError(
                f"{self._name}: {operation} was called while another thread was in a collective. "
                'on_failure="continue" needs all collectives in one thread: a loss would interrupt both.'
            )
            self.refuse(operation, error)
            raise error
        try:
            yield
        finally:
            self.in_use.release()

    def renew(self, name: str, key: int, operations: int, failure_detector: FailureDetector | None) -> None:
        """Count on as the members do that this process has joined; arguments as in `HealingCommunicator.renew`."""
        self._wait.renew(name, key, failure_detector)
        self.statistics.operations = operations
        self._wait.refused = 0


class HealingCommunicator(HostCommunicator):
    """A `HostCommunicator` of one host that drops members which die. Arguments as there."""

    _is_in_line = False
    _shares_alone = True
    _executor: _OneThreadExecutor

    def _new_executor(self, name: str, wait: Wait, members: Members) -> _OneThreadExecutor:
        return _OneThreadExecutor(name, wait, members)

    def go_on_after(
        self, on_members_lost: Callable[[Wait], None], in_use: threading.RLock, may_grow: bool = False
    ) -> None:
        """From now on, call a function when members have died in an operation.

        Args:
            on_members_lost: has the survivors agree, and calls `keep` of all their communicators; raises if they cannot
                go on.
            in_use: held during every operation; the same for all communicators of a job.
            may_grow: whether members may join later.
        """
        self._executor.on_members_lost, self._executor.in_use = on_members_lost, in_use
        if self._node is not None:
            self._node.may_grow = may_grow

    def keep(self, ranks: Sequence[int]) -> None:
        """Go on with the members among these world ranks."""
        own = self.ranks[self.rank]
        left = tuple(rank for rank in self.ranks if rank in ranks)
        if self._node is None or left == self.ranks:  # closed, or nothing to do
            return
        self._node.keep(left)
        self.ranks, self.rank, self.size = left, left.index(own), len(left)

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self._node is not None

    @property
    def key(self) -> int:
        """What tells it from others; equal on all members."""
        return self._members.key

    @property
    def own_buffers(self) -> list[Address]:
        """Where other processes find this member's part of each shared buffer."""
        return self._node.own_buffers if self._node is not None else []

    def renew(
        self,
        ranks: Sequence[int],
        segments: Sequence[Segment],
        parts: Sequence[Sequence[Segment]],
        key: int,
        operations: int,
        failure_detector: FailureDetector | None,
    ) -> None:
        """Go on with other members, and fresh memory. All do so at the same place, and nothing of it fails.

        Args:
            ranks: world ranks of the members, in order.
            segments, parts: of all members, as in `SharedMemoryGroup.renew`.
            key: of the communicator, as the members have it that are in it already.
            operations: how many they have finished.
            failure_detector: watches them.
        """
        assert self._node is not None
        own = self.ranks[self.rank]
        self.ranks, self.rank, self.size = tuple(ranks), list(ranks).index(own), len(ranks)
        self._executor.renew(self.name, key, operations, failure_detector)
        self._members.renew(ranks, key, failure_detector)
        if failure_detector is not None:
            failure_detector.watch(key, self._executor.failure)
        self._node.renew(ranks, self.rank, segments, parts)

    # Repeated here --------------------------------------------------------------------------------

    def all_reduce(self, memory: HostMemory, op: Op, codec: HalfCodec | None = None) -> None:
        if self._is_in_line:
            super().all_reduce(memory, op, codec)
            return
        source = np.array(memory.array if memory.source is None else memory.source)
        repeated(lambda: super(HealingCommunicator, self).all_reduce(memory._replace(source=source), op, codec))

    def all_reduce_coalesced(
        self, memories: Sequence[HostMemory], op: Op, codecs: Sequence[HalfCodec | None] | None = None
    ) -> None:
        if self._is_in_line:
            super().all_reduce_coalesced(memories, op, codecs)
            return
        for memory, codec in zip(memories, codecs or [None] * len(memories), strict=True):
            self.all_reduce(memory, op, codec)

    def broadcast(self, memory: HostMemory, root: int) -> None:
        self._repeat_with(root, lambda root: super(HealingCommunicator, self).broadcast(memory, root))

    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        return self._repeat_with(root, lambda root: super(HealingCommunicator, self).broadcast_object(item, root))

    def barrier(self) -> None:
        repeated(super().barrier)

    def all_gather_object(self, item: Any) -> list[Any]:
        return repeated(lambda: super(HealingCommunicator, self).all_gather_object(item))

    def _repeat_with(self, root: int, function: Callable[[int], T]) -> T:
        """As `repeated`, for a function of the root's rank, as long as the root is not lost."""
        check_rank(root, self)
        if self._is_in_line:
            return function(root)
        world_rank = self.ranks[root]
        while True:
            try:
                return function(self.ranks.index(world_rank))
            except MembersLost:
                if world_rank not in self.ranks:
                    raise

    # In the caller's thread -----------------------------------------------------------------------

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        work = BackgroundWork(description, function, lambda _: None, self.interrupt)
        work.run()
        return work

    def run_in_line(self, description: str, function: Callable[[], T]) -> T:
        self._is_in_line = True
        try:
            return super().run_in_line(description, function)
        finally:
            self._is_in_line = False
