"""A communicator that goes on when members die: `on_failure="continue"`.

**When.** On one host, a member that died leaves the others stuck at the first barrier that it did not reach, in the
same operation (core/control/membership.py says why). They agree on who is left, and every communicator of the job drops
the dead one: its pages, its staging buffers, its part of shared buffers. What the others have mapped stays where it is,
so a gradient that lives in a bucket is still there. Nothing is allocated or opened again, and nobody who holds the
communicator notices, but that `rank`, `size` and `ranks` have changed.

**On several hosts** one barrier does not do: the survivors of one host may have what those of another still wait for.
So each operation, and each pass of gradients as a whole, ends with a *confirmation*, a barrier of all members, which
costs one small exchange between hosts. A member that passes it knows that all had their results. When a member is lost,
all others give up wherever they are, and agree (core/control/consensus.py): if any of them has passed the confirmation,
all have the result and take it, even if they saw the loss while they waited there; else all repeat. Those that have
passed find the loss in their next operation. So do the others: they keep it to themselves until then, since scripts may
do something else after a loss, and all must do it at the same place. The connections carry parts of messages then, so
they are closed, and new ones are made under another tag. The barriers in shared memory go on from a common number above
all others. A rank that has been left out sees that number at every barrier, and so waits at none: before each operation
it asks whether it has been.

**What is repeated.** The operation has happened for nobody, but it may have overwritten memory that it works on in
place. Here, operations are called again where they can be: from a copy of an all-reduce's input, and from arguments
that nothing overwrites. What was called in `run_synchronously` is repeated as a whole by its caller, who has the inputs
(see `GradientReducer`). In other collectives the shapes depend on the number of ranks; callers that can make new ones
use `repeated`, and for the rest `MembersLost` ends the job.

**Joining.** Where processes take the places of lost ones, all members and the joiners map fresh control pages and
staging buffers, and the parts of shared buffers that each has already (core/control/admission.py). `renew` takes these
into use, in place. A joiner makes its communicators while it is alone, in the order of the script, so each has its
counterpart among the members. It may have other shared buffers, though, where members have frozen or unfrozen
parameters since. If their owner can make them anew (`BufferOwner`), all drop them, and the next operation makes them.

**All at once.** When one communicator finds a loss, all are told, and none may be in the middle of an operation. So
operations run in the thread that calls them, also those given to `start`, and a second thread that calls one meanwhile
is rejected. All survivors then stand at the same place.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ring_plugins.core.arrays.codec import HalfCodec
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, PeerFailed
from ring_plugins.core.collectives.api import Work
from ring_plugins.core.collectives.background import BackgroundWork
from ring_plugins.core.collectives.executor import Members, SerialExecutor
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint
from ring_plugins.core.collectives.host import HostCommunicator, Member
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


class Confirmations(Protocol):
    """Counts the operations that all ranks of a job on several hosts have confirmed.

    Attributes:
        committed: how many; an agreement may raise it by one.
        pending: ranks of which the next operation is to find that they are lost; None if there are none.
    """

    committed: int
    pending: list[int] | None

    def must_agree(self) -> bool:
        """Whether ranks are lost, or the others have gone on without this one, as far as is known without a look."""

    def members_lost(self) -> MembersLost:
        """The error that says so."""


class BufferOwner(Protocol):
    """Has all shared buffers of a communicator, and can make them anew.

    Attributes:
        layout: two texts. Where the first is equal, they will be made alike; where both are, they are alike already.
    """

    @property
    def layout(self) -> tuple[str, str]: ...

    def drop_all(self) -> None:
        """Release all buffers."""


class _OneThreadExecutor(SerialExecutor):
    """A `SerialExecutor` that rejects an operation while another thread is in one, of any communicator of the job."""

    def __init__(self, name: str, wait: Wait, members: Members | None = None) -> None:
        super().__init__(name, wait, members)
        self.in_use = threading.RLock()
        self.confirmations: Confirmations | None = None

    def run(self, fingerprint: Fingerprint, operation: Callable[[Unpack[Ts], Fingerprint], T], *args: Unpack[Ts]) -> T:
        with self._alone(fingerprint.text):
            confirmations = self.confirmations
            if confirmations is not None and (confirmations.pending is not None or confirmations.must_agree()):
                super().run(fingerprint, self._give_up)
            return super().run(fingerprint, operation, *args)

    def _give_up(self, operation: Fingerprint) -> None:
        """Agree before an operation begins: one whose members have all arrived would not wait, and so find no loss."""
        assert self.confirmations is not None
        if self.confirmations.pending is None:
            raise self.confirmations.members_lost()
        raise MembersLost(f"{operation.text} is repeated without ranks that were lost in the operation before.", -1)

    def run_synchronously(self, description: str, function: Callable[[], T]) -> T:
        with self._alone(description):
            return super().run_synchronously(description, function)

    @contextlib.contextmanager
    def _alone(self, operation: str) -> Iterator[None]:
        if not self.in_use.acquire(blocking=False):
            error = ArgumentError(
                f"{self._name}: {operation} was called while another thread was in a collective. "
                'on_failure="continue" needs all collectives in one thread: a loss would interrupt both.'
            )
            self.reject(operation, error)
            raise error
        try:
            yield
        finally:
            self.in_use.release()

    def renew(self, name: str, key: int, operations: int, failure_detector: FailureDetector | None) -> None:
        """Count on as the members do that this process has joined; arguments as in `RecoveringCommunicator.renew`."""
        self._wait.renew(name, key, failure_detector)
        self.statistics.operations = operations
        self._wait.rejected = 0


_CONFIRMATION = fingerprint("confirmation")
#: Bits of a tag, and of a barrier's number, below those that tell views apart.
_VIEW_SHIFT = 40


class RecoveringCommunicator(HostCommunicator):
    """A `HostCommunicator` that drops members which are lost. Arguments as there."""

    _is_synchronous = False
    _shares_alone = True
    _confirmations: Confirmations | None = None
    _executor: _OneThreadExecutor
    _owner: weakref.ref[BufferOwner] | None = None

    def _new_executor(self, name: str, wait: Wait, members: Members) -> _OneThreadExecutor:
        return _OneThreadExecutor(name, wait, members)

    def go_on_after(
        self,
        on_members_lost: Callable[[Wait], None],
        in_use: threading.RLock,
        may_grow: bool = False,
        confirmations: Confirmations | None = None,
    ) -> None:
        """From now on, call a function when members have died in an operation.

        Args:
            on_members_lost: has the survivors agree, and calls `keep` of all their communicators; raises if they cannot
                go on.
            in_use: held during every operation; the same for all communicators of a job.
            may_grow: whether members may join later.
            confirmations: of all communicators of a job on several hosts, None on one host.
        """
        self._executor.on_members_lost, self._executor.in_use = on_members_lost, in_use
        self._confirmations = self._executor.confirmations = confirmations
        if self._node is not None:
            self._node.may_grow = may_grow

    def keep(self, ranks: Sequence[int], view: int = 0) -> None:
        """Go on with the members among these world ranks.

        Args:
            ranks: of the job.
            view: their number, on several hosts; see core/control/consensus.py.
        """
        own = self.ranks[self.rank]
        left = tuple(rank for rank in self.ranks if rank in ranks)
        if self._node is None:  # closed
            return
        if self._confirmations is None:
            if left != self.ranks:
                self._node.keep(left)
                self.ranks, self.rank, self.size = left, left.index(own), len(left)
            return
        for network in self._networks:
            network.abandon()
        self._networks = []
        members = [member for member in self._all if member.rank in left]
        node = next(member.node for member in members if member.rank == own)
        self._node.keep([member.rank for member in members if member.node == node], view << _VIEW_SHIFT)
        self.ranks, self.rank, self.size = left, left.index(own), len(left)
        self._connect(members, self._all[0].tag + (view << _VIEW_SHIFT), at_once=False)
        self._executor.renumber(view << _VIEW_SHIFT)

    def _confirmed(self, function: Callable[[], T]) -> T:
        """The result of a function, once all members have theirs.

        Raises:
            MembersLost: members are lost, and nobody has the confirmation.
        """
        confirmations = self._confirmations
        if confirmations is None or self._is_synchronous:
            return function()
        number = confirmations.committed + 1
        try:
            result = function()
        except MembersLost as error:
            if confirmations.committed >= number:
                raise PeerFailed(
                    f"{self.name}: the other ranks have finished what this one has not.", error.rank
                ) from error
            raise
        try:
            self._executor.run(_CONFIRMATION, self._bytes_barrier)
            confirmations.committed = number
        except MembersLost:
            if confirmations.committed < number:
                raise
        return result

    def _bytes_barrier(self, operation: Fingerprint) -> None:
        self._bytes.barrier(operation)

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

    def buffers_belong_to(self, owner: BufferOwner) -> None:
        """Let processes join that have other shared buffers; the owner is not kept alive."""
        self._owner = weakref.ref(owner)

    @property
    def layout(self) -> tuple[str, str]:
        """That of the shared buffers, empty texts if nobody can make them anew."""
        owner = self._owner() if self._owner is not None else None
        return owner.layout if owner is not None else ("", "")

    def _drop_buffers(self) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.drop_all()
        assert self._node is not None
        self._node.drop_buffers()

    def renew(
        self,
        ranks: Sequence[int],
        segments: Sequence[Segment],
        parts: Sequence[Sequence[Segment]] | None,
        key: int,
        operations: int,
        failure_detector: FailureDetector | None,
    ) -> None:
        """Go on with other members, and fresh memory. All do so at the same place, and nothing of it fails.

        Args:
            ranks: world ranks of the members, in order.
            segments, parts: of all members, as in `SharedMemoryGroup.renew`; no parts if all drop their buffers.
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
        if parts is None:
            self._drop_buffers()
        self._node.renew(ranks, self.rank, segments, parts or [])

    def renew_between_hosts(
        self,
        members: Sequence[Member],
        segments: Sequence[Segment],
        parts: Sequence[Sequence[Segment]] | None,
        operations: int,
        failure_detector: FailureDetector | None,
    ) -> None:
        """As `renew`, on several hosts; `keep` connects them.

        Args:
            members: all of them, in the order of ranks.
            segments, parts: of this host's members, as in `renew`; empty if these have not changed.
            operations, failure_detector: as in `renew`.
        """
        assert self._node is not None
        own, key = self.ranks[self.rank], members[0].tag
        self._all, self.ranks = tuple(members), tuple(member.rank for member in members)
        self.rank, self.size = self.ranks.index(own), len(members)
        self._executor.renew(self.name, key, operations, failure_detector)
        self._members.renew(self.ranks, key, failure_detector)
        if failure_detector is not None:
            failure_detector.watch(key, self._executor.failure)
        if parts is None:
            self._drop_buffers()
        if segments:
            here = [member.rank for member in members if member.node == members[self.rank].node]
            self._node.renew(here, here.index(own), segments, parts or [])

    # Repeated here --------------------------------------------------------------------------------

    def all_reduce(self, memory: HostMemory, op: Op, codec: HalfCodec | None = None) -> None:
        if self._is_synchronous:
            super().all_reduce(memory, op, codec)
            return
        source = np.array(memory.array if memory.source is None else memory.source)
        given = memory._replace(source=source)
        repeated(lambda: self._confirmed(lambda: super(RecoveringCommunicator, self).all_reduce(given, op, codec)))

    def all_reduce_coalesced(
        self, memories: Sequence[HostMemory], op: Op, codecs: Sequence[HalfCodec | None] | None = None
    ) -> None:
        if self._is_synchronous:
            super().all_reduce_coalesced(memories, op, codecs)
            return
        for memory, codec in zip(memories, codecs or [None] * len(memories), strict=True):
            self.all_reduce(memory, op, codec)

    def broadcast(self, memory: HostMemory, root: int) -> None:
        self._repeat_with(root, lambda root: super(RecoveringCommunicator, self).broadcast(memory, root))

    def broadcast_object(self, item: Any, root: int = 0, operation: str = "") -> Any:
        return self._repeat_with(
            root, lambda root: super(RecoveringCommunicator, self).broadcast_object(item, root, operation)
        )

    def barrier(self) -> None:
        repeated(lambda: self._confirmed(super(RecoveringCommunicator, self).barrier))

    def all_gather_object(self, item: Any, operation: str = "") -> list[Any]:
        return repeated(
            lambda: self._confirmed(lambda: super(RecoveringCommunicator, self).all_gather_object(item, operation))
        )

    # Repeated by callers, which know the new sizes ------------------------------------------------

    def all_gather(self, mine: HostMemory, out: HostMemory, counts: Sequence[int]) -> None:
        self._confirmed(lambda: super(RecoveringCommunicator, self).all_gather(mine, out, counts))

    def reduce_scatter(self, full: HostMemory, out: HostMemory, counts: Sequence[int], op: Op) -> None:
        self._confirmed(lambda: super(RecoveringCommunicator, self).reduce_scatter(full, out, counts, op))

    def all_to_all(
        self, send: HostMemory, send_counts: Sequence[int], out: HostMemory, out_counts: Sequence[int]
    ) -> None:
        self._confirmed(lambda: super(RecoveringCommunicator, self).all_to_all(send, send_counts, out, out_counts))

    def _repeat_with(self, root: int, function: Callable[[int], T]) -> T:
        """As `repeated`, for a function of the root's rank, as long as the root is not lost."""
        check_rank(root, self)
        if self._is_synchronous:
            return function(root)
        world_rank = self.ranks[root]
        while True:
            try:
                return self._confirmed(lambda: function(self.ranks.index(world_rank)))
            except MembersLost:
                if world_rank not in self.ranks:
                    raise

    # In the caller's thread -----------------------------------------------------------------------

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        return BackgroundWork.run_now(description, function, self.interrupt)

    def run_synchronously(self, description: str, function: Callable[[], T]) -> T:
        def run() -> T:
            self._is_synchronous = True
            try:
                return function()
            finally:
                self._is_synchronous = False

        return super().run_synchronously(description, lambda: self._confirmed(run))
