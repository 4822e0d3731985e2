"""The communicator for host memory: shared memory inside a host, a network transport between hosts.

An all-reduce takes three steps: `HostCommunicator.all_reduce` fingerprints the operation, `SerialExecutor.run` executes
it in order, and a group does the work (host_groups.py): the `SharedMemoryGroup` on one host, on several
`HierarchicalAllReduce`, which combines it with a `NetworkGroup`. For the other collectives `HierarchicalCollectives`
does; where no two ranks share a host, the `NetworkGroup` alone.

Where members may be lost, an operation of the script's own is a *whole* (recovery.py): it calls itself inside one, and
again if members are lost in it, from inputs that nothing overwrites. Where the sizes depend on the number of ranks, the
caller repeats it.

`HostCommunicator` has more methods than other classes, since `Communicator` has.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from ring_plugins.core.arrays.codec import Codec
from ring_plugins.core.arrays.dtypes import Op, check_reducible
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.arguments import read_address, read_as, read_each
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.base.member import Member
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.api import Activity, BufferOwner, Communicator, Work
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint, fingerprint_of_several
from ring_plugins.core.collectives.host_groups import LOSS_SHIFT, VIEW_SHIFT, HostGroups
from ring_plugins.core.collectives.pair_executor import PairExecutor
from ring_plugins.core.collectives.recovery import HostRecovery, JobRecovery, Recovery
from ring_plugins.core.collectives.shm_group import SharedMemoryGroup, create_segment
from ring_plugins.core.collectives.validation import check_counts, check_own_count, check_rank
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux.shared_memory import Address, Segment, SharedBuffer, is_available
from ring_plugins.core.net.transport import Transport

T = TypeVar("T")

#: Exchanges one item per member and returns all in rank order; bootstraps a new communicator.
Gather = Callable[[Any], list[Any]]

#: What pickle raises for an object. Anything else, such as a time limit of the script, interrupts it.
_NOT_PICKLABLE = (pickle.PickleError, TypeError, AttributeError, NotImplementedError, RecursionError)


def _read_offer(item: Sequence[Any]) -> tuple[Member, Address | None, int]:
    """A member, the address of its memory for a new communicator, and the tag that it offers, as JSON has them."""
    rank, node, address, tag = item
    member = Member(read_as(int, rank), node=read_as(str, node))
    return member, None if address is None else read_address(address), read_as(int, tag)


class HostCommunicator(Communicator[HostMemory]):
    """A `Communicator` for host memory.

    Args:
        name: for error texts, equal on all members.
        rank: world rank of this process.
        node: key of its host.
        tag: for messages, which this process offers; the first member's is used.
        gather: exchanges items among the members, before the communicator can.
        failure_detector: watches the other ranks.
        transport: between hosts; None if all members are on one.
        check_gather: raises if a member has been interrupted in `gather`, and does not come.
        executor: on whose thread the members meet; by default a new one.
        recovery: how the communicators of the job go on when members are lost; None if they do not.

    Attributes:
        groups: who the members are, and what moves their bytes.
        within_host: how members of one host go on without asking others; None if they do not.

    Raises:
        RingError: the members do not share memory, and there is no transport.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        node: str,
        tag: int,
        gather: Gather,
        failure_detector: FailureDetector | None,
        transport: Transport | None,
        check_gather: Callable[[], object] = lambda: None,
        executor: PairExecutor | None = None,
        recovery: JobRecovery | None = None,
    ) -> None:
        segment = create_segment() if is_available() else None
        offers = read_each(gather((rank, node, segment.address if segment else None, tag)), _read_offer)
        members, key = [member for member, _, _ in offers], offers[0][2]
        self.name, self.recovers = name, recovery is not None
        self._recovery = Recovery(recovery, name) if recovery is not None else None
        self.within_host = recovery if isinstance(recovery, HostRecovery) else None
        wait = Wait(name, failure_detector, key) if executor is None else executor.wait
        wait.is_within_host = self.within_host is not None
        self.groups = HostGroups(name, rank, members, key, wait, failure_detector, transport, recovery)
        if executor is not None:
            executor.connect(key, failure_detector, self.groups)
        self._wait = wait
        self._executor: SerialExecutor = executor or SerialExecutor(name, wait, self.groups, self._recovery)
        if recovery is not None and self._recovery is not None:
            recovery.add(self._executor, self._recovery)
        self._follow(failure_detector)
        self.statistics = self._executor.statistics
        with wait.constructing(check_gather):
            try:
                self.groups.connect(segment, {member.rank: address for member, address, _ in offers})
            except BaseException as error:  # the others may have connected already
                self._executor.interrupt("its construction", error)
                raise

    # When members change ------------------------------------------------------------------------------

    def _follow(self, failure_detector: FailureDetector | None) -> None:
        """Have the numbers of the groups, and hear of failures."""
        groups = self.groups
        self.ranks, self.rank, self.size = groups.ranks, groups.rank, len(groups.ranks)
        self._executor.goes_on_after_mismatch = groups.is_on_one_host
        if failure_detector is not None:
            failure_detector.watch(groups.key, self._executor.failure)

    def keep(self, ranks: Sequence[int], view: int, losses: int = 0) -> None:
        """Go on with some members; arguments as in `HostGroups.keep`. The communicator has not been closed."""
        self.groups.keep(ranks, view, losses)
        # Members that have given up an operation have not all finished equally many.
        base = (view << VIEW_SHIFT) + (losses << LOSS_SHIFT)
        self._executor.number_base, self._wait.rejected = base - self.statistics.operations, 0
        self._follow(None)

    def renew(
        self,
        members: Sequence[Member],
        key: int,
        segments: Sequence[Segment],
        parts: Sequence[Sequence[Segment]] | None,
        operations: int,
        failure_detector: FailureDetector | None,
    ) -> None:
        """Go on with other members; arguments as in `HostGroups.renew`.

        Args:
            operations: how many they have finished.
        """
        self.groups.renew(members, key, segments, parts, failure_detector)
        self._wait.renew(self.name, self.groups.key, failure_detector)
        self.statistics.operations = operations
        self._follow(failure_detector)

    def buffers_belong_to(self, owner: BufferOwner) -> None:
        self.groups.buffers_belong_to(owner)

    # Collectives ----------------------------------------------------------------------------------

    def all_reduce(self, memory: HostMemory, op: Op, codec: Codec | None = None) -> None:
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            self._recovery.repeat(self._executor, "all_reduce", partial(self.all_reduce, _saved(memory), op, codec))
            return
        array, dtype, source, shape = memory
        self._executor.run(
            _all_reduce(dtype, shape or array.size, op, "" if codec is None else str(codec)),
            self.groups.reducer.all_reduce,
            array,
            array if source is None else source,
            op,
            dtype,
            codec,
        )

    def all_reduce_coalesced(
        self, memories: Sequence[HostMemory], op: Op, codecs: Sequence[Codec | None] | None = None
    ) -> None:
        if len(memories) == 1:
            self.all_reduce(memories[0], op, codecs[0] if codecs else None)
            return
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            saved = list(map(_saved, memories))
            self._recovery.repeat(self._executor, "all_reduce", partial(self.all_reduce_coalesced, saved, op, codecs))
            return
        codecs = codecs or [None] * len(memories)
        if not isinstance(self.groups.reducer, SharedMemoryGroup):
            super().all_reduce_coalesced(memories, op, codecs)
            return
        details = tuple(sorted({str(codec) for codec in codecs if codec is not None}))
        self._executor.run(
            _all_reduce_of_several(tuple([(memory.dtype, memory.array.size) for memory in memories]), op, details),
            self.groups.reducer.all_reduce_coalesced,
            [memory.array for memory in memories],
            [memory.array if memory.source is None else memory.source for memory in memories],
            op,
            [memory.dtype for memory in memories],
        )

    def broadcast(self, memory: HostMemory, root: int) -> None:
        check_rank(root, self)
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            self._repeat_from(root, "broadcast", lambda root: self.broadcast(memory, root))
            return
        array, dtype, _, shape = memory
        operation = fingerprint("broadcast", dtype, shape or array.size, f"root {root}")
        self._executor.run(operation, self.groups.bytes.broadcast, array.view(np.uint8), root)

    def transfer(self, memory: HostMemory, sender: int, tag: int) -> None:
        """Overwrite the memory of the other one of two members with the sender's; both pass the same size and tag."""
        array, dtype, _, _ = memory
        operation = fingerprint("send/recv", dtype, array.size, f"tag {tag}")
        self._executor.run(operation, self.groups.bytes.broadcast, array.view(np.uint8), sender)

    def all_gather(self, mine: HostMemory, out: HostMemory, counts: Sequence[int]) -> None:
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            self._recovery.whole(self._executor, "all_gather", partial(self.all_gather, mine, out, counts))
            return
        parts = _split(out.array, counts, "counts")
        check_own_count(counts, mine.array.size, self, "input")
        operation = fingerprint("all_gather", mine.dtype, sum(counts), _counts_text(counts))
        self._executor.run(operation, self.groups.bytes.all_gather, mine.array.view(np.uint8), parts)

    def reduce_scatter(self, full: HostMemory, out: HostMemory, counts: Sequence[int], op: Op) -> None:
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            self._recovery.whole(self._executor, "reduce_scatter", partial(self.reduce_scatter, full, out, counts, op))
            return
        check_reducible(full.dtype, op)
        parts = [part.view(out.array.dtype) for part in _split(full.array, counts, "counts")]
        check_own_count(counts, out.array.size, self, "output")
        detail = ", ".join(filter(None, (op._value_, _counts_text(counts))))
        operation = fingerprint("reduce_scatter", full.dtype, full.shape or full.array.size, detail)
        self._executor.run(operation, self.groups.bytes.reduce_scatter, parts, out.array, op, full.dtype)

    def all_to_all(
        self, send: HostMemory, send_counts: Sequence[int], out: HostMemory, out_counts: Sequence[int]
    ) -> None:
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            self._recovery.whole(
                self._executor, "all_to_all", partial(self.all_to_all, send, send_counts, out, out_counts)
            )
            return
        outgoing = _split(send.array, send_counts, "send_counts")
        incoming = _split(out.array, out_counts, "out_counts")
        self._executor.run(fingerprint("all_to_all", send.dtype), self.groups.bytes.all_to_all, outgoing, incoming)

    def barrier(self) -> None:
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            self._recovery.repeat(self._executor, "barrier", self.barrier)
            return
        self._executor.run(fingerprint("barrier"), self.groups.bytes.barrier)

    def broadcast_object(self, item: Any, root: int = 0, purpose: str = "") -> Any:
        check_rank(root, self)
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            return self._repeat_from(root, "broadcast", lambda root: self.broadcast_object(item, root, purpose))
        kind = purpose or "broadcast_object"
        data = self._pickled(item, kind) if self.rank == root else np.empty(0, np.uint8)
        return self._executor.run(fingerprint(kind, detail=f"root {root}"), self._broadcast_object, item, data, root)

    def _broadcast_object(self, item: Any, data: Bytes, root: int, operation: Fingerprint) -> Any:
        length = np.array([data.size])
        self.groups.bytes.broadcast(length.view(np.uint8), root, operation)
        if self.rank != root:
            data = np.empty(int(length[0]), np.uint8)
        self.groups.bytes.broadcast(data, root, operation)
        return item if self.rank == root else _loaded(data, operation)

    def all_gather_object(self, item: Any, purpose: str = "") -> list[Any]:
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            return self._recovery.repeat(
                self._executor, "all_gather_object", partial(self.all_gather_object, item, purpose)
            )
        kind = purpose or "all_gather_object"
        return self._executor.run(fingerprint(kind), self._all_gather_object, self._pickled(item, kind))

    def _pickled(self, item: Any, operation: str) -> Bytes:
        try:
            return np.frombuffer(pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
        except _NOT_PICKLABLE as reason:
            error = ArgumentError(
                f"{operation}: a {type(item).__name__} of rank {self.ranks[self.rank]} cannot be pickled ({reason}). "
                "Functions and classes must be at the top level of a module; send what they are made from instead."
            )
            self.reject(operation, error)
            raise error from reason

    def _all_gather_object(self, data: Bytes, operation: Fingerprint) -> list[Any]:
        lengths = np.empty(self.size, np.int64)
        mine = np.array([data.size], np.int64)
        self.groups.bytes.all_gather(mine.view(np.uint8), _split(lengths, [1] * self.size, "counts"), operation)
        out = np.empty(int(lengths.sum()), np.uint8)
        parts = _split(out, lengths.tolist(), "counts")
        self.groups.bytes.all_gather(data, parts, operation)
        return [_loaded(part, operation) for part in parts]

    def _repeat_from(self, root: int, operation: str, function: Callable[[int], T]) -> T:
        """As `Recovery.repeat`, for a function of the root's rank, as long as the root is not lost."""
        assert self._recovery is not None
        of = self.ranks[root]
        return self._recovery.repeat(
            self._executor, operation, lambda: function(self.ranks.index(of)), lambda: of in self.ranks
        )

    # Order ----------------------------------------------------------------------------------------

    def start(self, description: str, function: Callable[[], T], repeats: bool = False) -> Work[T]:
        return self._executor.start(description, function, repeats)

    def wait_for(self, works: Sequence[Work[Any]]) -> None:
        if self._recovery is not None:
            self._recovery.wait_for(self._executor, works)
        else:
            super().wait_for(works)

    def run_synchronously(self, description: str, function: Callable[[], T]) -> T:
        if self._recovery is not None and self._recovery.is_outside(self._executor):
            run = partial(self._executor.run_synchronously, description, function)
            return self._recovery.whole(self._executor, description, run)
        return self._executor.run_synchronously(description, function)

    def whole(self, operation: str, function: Callable[[], T]) -> T:
        """As `Recovery.whole`, where members may be lost."""
        assert self._recovery is not None
        return self._recovery.whole(self._executor, operation, function)

    def reject(self, operation: str, error: BaseException) -> None:
        self._executor.reject(operation, error)

    def activity(self) -> Activity | None:
        return self._executor.activity()

    # Memory and shutdown --------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Allocate memory that all members of a host map.

        Raises:
            MismatchError: the ranks ask for different sizes.
        """
        sizes = self.all_gather_object(nbytes, "allocate")
        if len(set(sizes)) > 1:
            raise MismatchError(f"allocate(nbytes) must be equal on all ranks; got {sizes} in rank order.")
        return self._executor.run(fingerprint("allocate", "bytes", nbytes), self._allocate, nbytes)

    def _allocate(self, nbytes: int, operation: Fingerprint) -> SharedBuffer:
        """An operation even where a rank is alone on its host: members in step have run equally many."""
        if self.groups.node is None:
            return SharedBuffer([np.zeros(nbytes, np.uint8)], 0)
        return self.groups.node.allocate(nbytes, operation)

    def release(self, buffer: SharedBuffer) -> None:
        if self.groups.node is not None:
            self.groups.node.release(buffer)

    def check(self) -> None:
        self._executor.failure.check()

    def interrupt(self, operation: str, cause: BaseException) -> None:
        self._executor.interrupt(operation, cause)

    def close(self) -> None:
        self._executor.close()
        self.groups.close()

    def discard(self) -> None:
        self._executor.discard()  # memory and connections go with the last reference to this

    def detach_after_fork(self) -> None:
        self._executor.detach_after_fork()


@lru_cache(maxsize=4096)
def _all_reduce(dtype: str, count: int | tuple[int, ...], op: Op, codec: str) -> Fingerprint:
    """Check an all-reduce and fingerprint it: one look-up for a small message."""
    check_reducible(dtype, op)
    return fingerprint("all_reduce", dtype, count, f"{op._value_} {codec}" if codec else op._value_)


@lru_cache(maxsize=256)
def _all_reduce_of_several(arrays: tuple[tuple[str, int], ...], op: Op, details: tuple[str, ...]) -> Fingerprint:
    """Check an all-reduce of several arrays and fingerprint it."""
    for dtype, _ in arrays:
        check_reducible(dtype, op)
    return fingerprint_of_several("all_reduce", arrays, " ".join([op._value_, *details]))


def _loaded(data: Bytes, operation: Fingerprint) -> Any:
    try:
        return pickle.loads(data.data)
    except Exception as reason:
        raise RingError(
            f"{operation.text}: an object of another rank cannot be loaded here ({type(reason).__name__}: {reason}). "
            "All ranks need the modules that its class comes from."
        ) from reason


def _saved(memory: HostMemory) -> HostMemory:
    """The same with a copy of what it holds as the source, so that nothing overwrites this rank's numbers."""
    return memory._replace(source=np.array(memory.array if memory.source is None else memory.source))


def _counts_text(counts: Sequence[int]) -> str:
    """Counts that differ, as a part of a fingerprint; equal ones follow from their sum."""
    return f"counts {list(counts)}" if len(set(counts)) > 1 else ""


def _split(array: Array, counts: Sequence[int], name: str) -> list[Bytes]:
    """Views of consecutive `counts` elements, as bytes."""
    check_counts(counts, array.size, name)
    data, parts, start = array.view(np.uint8), [], 0
    for count in counts:
        parts.append(data[start : start + count * array.itemsize])
        start += count * array.itemsize
    return parts
