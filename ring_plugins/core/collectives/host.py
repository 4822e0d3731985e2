"""The communicator for host memory: shared memory inside a host, a network transport between hosts.

An all-reduce takes three steps: `HostCommunicator.all_reduce` fingerprints the operation, `SerialExecutor.run` executes
it in order, and a group does the work. On one host that is the `SharedMemoryGroup`; on several, `HierarchicalAllReduce`
combines it with a `NetworkGroup`. For the other collectives `HierarchicalCollectives` does; where no two ranks share a
host, the `NetworkGroup` alone.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import HalfCodec
from ring_plugins.core.arrays.dtypes import Op, check_reducible
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.base.records import read_address, read_each, read_record
from ring_plugins.core.base.types import Array, Bytes
from ring_plugins.core.collectives.api import REMEDY, Activity, ByteCollectives, Reducer, Work
from ring_plugins.core.collectives.executor import SerialExecutor
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint, fingerprint_of_several
from ring_plugins.core.collectives.hierarchical import HierarchicalAllReduce
from ring_plugins.core.collectives.hierarchical_collectives import HierarchicalCollectives
from ring_plugins.core.collectives.net_group import NetworkGroup
from ring_plugins.core.collectives.shm_group import SharedMemoryGroup, create_segment
from ring_plugins.core.collectives.validation import check_counts, check_own_count, check_rank
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux.shared_memory import Address, Segment, SharedBuffer, is_available
from ring_plugins.core.net.transport import Transport

T = TypeVar("T")

#: Exchanges one item per member and returns all in rank order; bootstraps a new communicator.
Gather = Callable[[Any], list[Any]]

#: Added to the numbers of operations on GPUs, which are counted apart from those of the host.
_ON_GPU = 1 << 40


class Member(NamedTuple):
    """A process's entry in the bootstrap of a communicator.

    Attributes:
        rank: world rank.
        node: key of the (possibly virtual) host; equal for ranks that share memory.
        address: of its shared-memory segment, or None where memory cannot be shared.
        tag: for messages, used by no other communicator.
    """

    rank: int
    node: str
    address: Address | None
    tag: int

    @classmethod
    def read(cls, item: Sequence[Any]) -> Member:
        """One that has traveled as JSON, which makes lists of tuples."""
        rank, node, address, tag = item
        return read_record(cls, (rank, node, None if address is None else read_address(address), tag))


class HostCommunicator:
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

    Raises:
        RingError: the members do not share memory, and there is no transport.
    """

    #: Whether a single member has shared memory, too, for others that may join it, or whose host may be left alone.
    _shares_alone = False

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
        executor: SerialExecutor | None = None,
    ) -> None:
        segment = create_segment() if is_available() else None
        own = Member(rank, node, segment.address if segment else None, tag)
        members = read_each(gather(tuple(own)), Member.read)
        nodes = _by_node(members)
        self.name = name
        self.ranks = tuple(member.rank for member in members)
        self.rank, self.size = self.ranks.index(rank), len(members)
        key = members[0].tag
        self._members = _Members(rank, self.ranks, name, key, failure_detector)
        if executor is None:
            wait = Wait(name, failure_detector, key)
            executor = self._new_executor(name, wait, self._members)
        else:
            wait = executor.connect(key, failure_detector, self._members)
        wait.number = wait.entered = -1  # until all members have made it
        wait.check_construction = check_gather
        self._wait, self._transport, self._all, self._executor = wait, transport, tuple(members), executor
        if failure_detector is not None:
            failure_detector.watch(key, self._executor.failure)
        self.statistics = self._executor.statistics
        self._node: SharedMemoryGroup | None = None
        self._networks: list[NetworkGroup] = []
        self._bytes: ByteCollectives
        self._reducer: Reducer
        try:
            self._share_memory(nodes[node], segment)
            self._connect(members, key, at_once=True)
            if len(nodes) > 1:  # a connection is made without the other end's script, which may have been interrupted
                self._bytes.barrier(fingerprint("connect"))
        except BaseException as error:  # the others may have connected already
            self._executor.interrupt("its construction", error)
            raise
        wait.check_construction = lambda: None
        wait.number = wait.entered = 0

    def _new_executor(self, name: str, wait: Wait, members: _Members) -> SerialExecutor:
        return SerialExecutor(name, wait, members)

    def _share_memory(self, local: Sequence[Member], segment: Segment | None) -> None:
        """Make the group of this host's members, where there are several; collective."""
        if len(local) > 1 or self._shares_alone:
            assert segment is not None
            ranks = [member.rank for member in local]
            addresses = [member.address for member in local if member.address is not None]
            place = ranks.index(self.ranks[self.rank])
            self._node = SharedMemoryGroup(segment, addresses, ranks, place, self._wait, self.name)
            self._members.node = self._node

    def _connect(self, members: Sequence[Member], tag: int, at_once: bool) -> None:
        """Make what does the work: the group of this host, or groups between hosts; collective.

        Args:
            members: all of them.
            tag: for messages.
            at_once: whether to connect now, so that an unreachable member is found before training begins.
        """
        nodes = _by_node(members)
        name, wait, transport = self.name, self._wait, self._transport
        self._executor.goes_on_after_mismatch = len(nodes) == 1
        if len(nodes) == 1:
            assert self._node is not None
            self._bytes = self._reducer = self._node
            return
        if transport is None:
            raise RingError(
                f"{name}: the ranks {self.ranks} do not share memory, and there is no transport between them; "
                "start the job with mpirun or torchrun."
            )
        rank = self.ranks[self.rank]
        node = self._node if self._node is not None and self._node.size > 1 else None
        local_rank = node.position if node is not None else 0
        rails, rail = min(map(len, nodes.values())), None
        interrupt = node.barriers.raise_reported if node is not None else None
        if local_rank < rails:
            ranks = [node_members[local_rank].rank for node_members in nodes.values()]
            behind = [[member.rank for member in node_members] for node_members in nodes.values()]
            rail = NetworkGroup(transport, ranks, ranks.index(rank), tag, wait, name, behind, interrupt)
            self._networks = [rail]
            if at_once:
                rail.connect()
        self._reducer = HierarchicalAllReduce(node, rail, local_rank, rails, len(nodes), self.size)
        if rail is not None and len(nodes) == self.size:
            self._bytes = rail
            return
        hosts = [[self.ranks.index(member.rank) for member in node_members] for node_members in nodes.values()]
        everyone = NetworkGroup(transport, self.ranks, self.rank, tag, wait, name, interrupt=interrupt)
        self._networks.append(everyone)
        self._bytes = HierarchicalCollectives(node, rail, everyone, hosts, self.rank, self.ranks, name)

    # Collectives ----------------------------------------------------------------------------------

    def all_reduce(self, memory: HostMemory, op: Op, codec: HalfCodec | None = None) -> None:
        array, dtype, source, shape = memory
        self._executor.run(
            _all_reduce(dtype, shape or array.size, op, "" if codec is None else str(codec)),
            self._reducer.all_reduce,
            array,
            array if source is None else source,
            op,
            dtype,
            codec,
        )

    def all_reduce_coalesced(
        self, memories: Sequence[HostMemory], op: Op, codecs: Sequence[HalfCodec | None] | None = None
    ) -> None:
        codecs = codecs or [None] * len(memories)
        if len(memories) == 1 or not isinstance(self._reducer, SharedMemoryGroup):
            for memory, codec in zip(memories, codecs, strict=True):
                self.all_reduce(memory, op, codec)
            return
        details = tuple(sorted({str(codec) for codec in codecs if codec is not None}))
        self._executor.run(
            _all_reduce_of_several(tuple([(memory.dtype, memory.array.size) for memory in memories]), op, details),
            self._reducer.all_reduce_coalesced,
            [memory.array for memory in memories],
            [memory.array if memory.source is None else memory.source for memory in memories],
            op,
            [memory.dtype for memory in memories],
        )

    def broadcast(self, memory: HostMemory, root: int) -> None:
        check_rank(root, self)
        array, dtype, _, shape = memory
        operation = fingerprint("broadcast", dtype, shape or array.size, f"root {root}")
        self._executor.run(operation, self._bytes.broadcast, array.view(np.uint8), root)

    def transfer(self, memory: HostMemory, sender: int, tag: int) -> None:
        """Overwrite the memory of the other one of two members with the sender's; both pass the same size and tag."""
        array, dtype, _, _ = memory
        operation = fingerprint("send/recv", dtype, array.size, f"tag {tag}")
        self._executor.run(operation, self._bytes.broadcast, array.view(np.uint8), sender)

    def all_gather(self, mine: HostMemory, out: HostMemory, counts: Sequence[int]) -> None:
        parts = _split(out.array, counts, "counts")
        check_own_count(counts, mine.array.size, self, "input")
        operation = fingerprint("all_gather", mine.dtype, sum(counts), _counts_text(counts))
        self._executor.run(operation, self._bytes.all_gather, mine.array.view(np.uint8), parts)

    def reduce_scatter(self, full: HostMemory, out: HostMemory, counts: Sequence[int], op: Op) -> None:
        check_reducible(full.dtype, op)
        parts = _split(full.array, counts, "counts")
        check_own_count(counts, out.array.size, self, "output")
        detail = ", ".join(filter(None, (op._value_, _counts_text(counts))))
        operation = fingerprint("reduce_scatter", full.dtype, full.shape or full.array.size, detail)
        self._executor.run(operation, self._reduce_scatter, parts, out.array, op, full.dtype)

    def _reduce_scatter(self, parts: list[Bytes], out: Array, op: Op, dtype: str, operation: Fingerprint) -> None:
        if isinstance(self._bytes, HierarchicalCollectives):
            typed = [part.view(out.dtype) for part in parts]
            target = np.empty_like(out) if any(np.may_share_memory(part, out) for part in parts) else out
            self._bytes.reduce_scatter(typed, target, op, dtype, operation)
            if target is not out:
                np.copyto(out, target)
            return
        terms = np.empty((self.size, out.size), out.dtype)
        self._bytes.all_to_all(parts, [term.view(np.uint8) for term in terms], operation)
        reduce_into(out, list(terms), op, dtype, self.size if op is Op.AVERAGE else 1)

    def all_to_all(
        self, send: HostMemory, send_counts: Sequence[int], out: HostMemory, out_counts: Sequence[int]
    ) -> None:
        outgoing = _split(send.array, send_counts, "send_counts")
        incoming = _split(out.array, out_counts, "out_counts")
        self._executor.run(fingerprint("all_to_all", send.dtype), self._bytes.all_to_all, outgoing, incoming)

    def barrier(self) -> None:
        self._executor.run(fingerprint("barrier"), self._bytes.barrier)

    def broadcast_object(self, item: Any, root: int = 0, operation: str = "") -> Any:
        check_rank(root, self)
        kind = operation or "broadcast_object"
        data = self._pickled(item, kind) if self.rank == root else np.empty(0, np.uint8)
        return self._executor.run(fingerprint(kind, detail=f"root {root}"), self._broadcast_object, item, data, root)

    def _broadcast_object(self, item: Any, data: Bytes, root: int, operation: Fingerprint) -> Any:
        length = np.array([data.size])
        self._bytes.broadcast(length.view(np.uint8), root, operation)
        if self.rank != root:
            data = np.empty(int(length[0]), np.uint8)
        self._bytes.broadcast(data, root, operation)
        return item if self.rank == root else _loaded(data, operation)

    def all_gather_object(self, item: Any, operation: str = "") -> list[Any]:
        kind = operation or "all_gather_object"
        return self._executor.run(fingerprint(kind), self._all_gather_object, self._pickled(item, kind))

    def _pickled(self, item: Any, operation: str) -> Bytes:
        try:
            return np.frombuffer(pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
        except Exception as reason:
            error = ArgumentError(
                f"{operation}: a {type(item).__name__} of rank {self.ranks[self.rank]} cannot be pickled ({reason}). "
                "Functions and classes must be at the top level of a module; send what they are made from instead."
            )
            self.reject(operation, error)
            raise error from reason

    def _all_gather_object(self, data: Bytes, operation: Fingerprint) -> list[Any]:
        lengths = np.empty(self.size, np.int64)
        mine = np.array([data.size], np.int64)
        self._bytes.all_gather(mine.view(np.uint8), _split(lengths, [1] * self.size, "counts"), operation)
        out = np.empty(int(lengths.sum()), np.uint8)
        parts = _split(out, lengths.tolist(), "counts")
        self._bytes.all_gather(data, parts, operation)
        return [_loaded(part, operation) for part in parts]

    # Order ----------------------------------------------------------------------------------------

    def start(self, description: str, function: Callable[[], T]) -> Work[T]:
        return self._executor.start(description, function)

    def run_synchronously(self, description: str, function: Callable[[], T]) -> T:
        return self._executor.run_synchronously(description, function)

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: every operation starts as soon as it is called."""
        return contextlib.nullcontext()

    def reject(self, operation: str, error: BaseException) -> None:
        self._executor.reject(operation, error)

    def reject_on_gpu(self, number: int, before: int, operation: str, error: BaseException) -> None:
        """As `reject`, for the communicator of GPUs that this one belongs to, whose hosts wait for nothing.

        Args:
            number, before: operations of that communicator, and calls rejected since.
            operation, error: as in `reject`.
        """
        self._members.reject(_ON_GPU + number, before, operation, error)

    def rejection_on_gpu(self, number: int, before: int) -> str:
        """Why another member rejected an operation there, "" if none did."""
        return self._members.rejection(_ON_GPU + number, before)

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
        if self._node is None:
            return SharedBuffer([np.zeros(nbytes, np.uint8)], 0)
        return self._node.allocate(nbytes, operation)

    def release(self, buffer: SharedBuffer) -> None:
        if self._node is not None:
            self._node.release(buffer)

    def check(self) -> None:
        self._executor.failure.check()

    def interrupt(self, operation: str, cause: BaseException) -> None:
        self._executor.interrupt(operation, cause)

    def close(self) -> None:
        self._executor.close()
        # Frees the groups' shared memory and connections now; views that others hold stay valid.
        self._node = None
        self._bytes = self._reducer = _CLOSED
        networks, self._networks = self._networks, []
        for network in networks:
            network.close()

    def discard(self) -> None:
        self._executor.discard()  # memory and connections go with the last reference to this

    def detach_after_fork(self) -> None:
        self._executor.detach_after_fork()


def _by_node(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Members by the host that they are on, both in order."""
    nodes: dict[str, list[Member]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member)
    return nodes


class _Members:
    """Reaches the other members for an executor that was interrupted: by the control channel, and in shared memory."""

    def __init__(
        self, rank: int, ranks: Sequence[int], name: str, key: int, failure_detector: FailureDetector | None
    ) -> None:
        self._rank, self._ranks, self._name, self.key = rank, ranks, name, key
        self._failure_detector = failure_detector
        self.node: SharedMemoryGroup | None = None

    def renew(self, ranks: Sequence[int], key: int, failure_detector: FailureDetector | None) -> None:
        """Reach other members from now on; arguments as in the constructor."""
        self._ranks, self.key, self._failure_detector = tuple(ranks), key, failure_detector

    def tell(self, operation: str, cause: BaseException) -> None:
        if self._failure_detector is not None:
            self._failure_detector.break_communicator(self.key, self._text(operation, cause), self._ranks)

    def reject(self, number: int, before: int, operation: str, error: BaseException) -> None:
        if self._failure_detector is not None:
            if isinstance(error, ArgumentError):
                text = f"rank {self._rank} rejected the arguments of {operation}: {error}"
            else:
                reason = f"{type(error).__name__}: {error}".rstrip(": .")
                text = f"rank {self._rank} could not take part in {operation}: {reason}."
            self._failure_detector.reject(self.key, number, before, text)

    def rejection(self, number: int, before: int) -> str:
        if self._failure_detector is None:
            return ""
        others = [rank for rank in self._ranks if rank != self._rank]
        return self._failure_detector.rejection(self.key, number, before, others)

    def withdraw(self, operation: str, cause: BaseException) -> None:
        if self.node is not None:
            self.node.barriers.withdraw(self._text(operation, cause))

    def _text(self, operation: str, cause: BaseException) -> str:
        if isinstance(cause, RingError):
            what = f"rank {self._rank} gave up {operation} ({cause})"
        else:
            what = f"rank {self._rank} was interrupted in {operation} by {type(cause).__name__}"
        return f"{self._name}: {what} and is out of step with the other ranks; {REMEDY}."


class _Closed:
    """Stands in for the groups of a closed communicator, whose executor rejects every call before it gets here."""

    def __getattr__(self, name: str) -> Any:
        return None


_CLOSED: Any = _Closed()


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
