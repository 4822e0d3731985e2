"""Collectives on the memory of CPUs: through shared memory inside a host, over a plane between hosts."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ring_plugins.core.arrays.arithmetic import reduce_into
from ring_plugins.core.arrays.codec import HalfCodec
from ring_plugins.core.arrays.dtypes import Op, check_reducible
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import ByteCollectives
from ring_plugins.core.collectives.executor import SerialExecutor, blocking
from ring_plugins.core.collectives.fingerprint import Fingerprint, fingerprint
from ring_plugins.core.collectives.hierarchical import HierarchicalAllReduce
from ring_plugins.core.collectives.net_group import NetworkGroup
from ring_plugins.core.collectives.shm_group import SharedMemoryGroup, create_segment
from ring_plugins.core.control.failure_detector import FailureDetector
from ring_plugins.core.control.wait import Wait
from ring_plugins.core.linux.shared_memory import Address, SharedBuffer, is_available
from ring_plugins.core.net.transport import Transport


class Member(NamedTuple):
    """What a process brings to a new communicator.

    Attributes:
        rank: world rank.
        node: key of the (possibly virtual) host; equal for ranks that share memory.
        address: its segment, or None where memory cannot be shared.
        tag: the first of two message tags that no other communicator uses.
    """

    rank: int
    node: str
    address: Address | None
    tag: int


#: Gives every member's payload in rank order; how members of a new communicator meet.
Gather = Callable[[Any], list[Any]]


class HostCommunicator(SerialExecutor):
    """A `Communicator` for host memory.

    Args:
        name: for texts, equal on all members.
        rank: world rank of this process.
        node: key of its host.
        tag: the first of two message tags that this process offers; those of the first member are taken.
        gather: how the members meet.
        failure_detector: what becomes of the other ranks.
        plane: between hosts; None if all members are on one.
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
    ) -> None:
        own = create_segment() if is_available() else None
        members = [Member(*m) for m in gather(tuple(Member(rank, node, own.address if own else None, tag)))]
        super().__init__(name, Wait(name, failure_detector))
        self.ranks = tuple(member.rank for member in members)
        self.rank, self.size = self.ranks.index(rank), len(members)
        first_tag = members[0].tag

        nodes: dict[str, list[Member]] = {}
        for member in members:
            nodes.setdefault(member.node, []).append(member)
        here = nodes[node]
        position = [member.rank for member in here].index(rank)
        self._node: SharedMemoryGroup | None = None
        if len(here) > 1:
            assert own is not None
            addresses = [member.address for member in here if member.address is not None]
            self._node = SharedMemoryGroup(own, addresses, [m.rank for m in here], position, self._wait, name)
        self._flat: NetworkGroup | None = None
        self._hierarchical: HierarchicalAllReduce | None = None
        if len(nodes) > 1:
            if transport is None:
                raise RingError(
                    f"{name}: the ranks {self.ranks} do not share memory, and nothing carries data between them; "
                    "start the job with mpirun or torchrun."
                )
            owners, lane = min(map(len, nodes.values())), None
            if position < owners:
                ranks = [group[position].rank for group in nodes.values()]
                lane = NetworkGroup(transport, ranks, ranks.index(rank), first_tag, self._wait, name)
                lane.connect()
            self._hierarchical = HierarchicalAllReduce(self._node, lane, position, owners, len(nodes), self.size)
            self._flat = NetworkGroup(transport, self.ranks, self.rank, first_tag + 1, self._wait, name)

    def close(self) -> None:
        super().close()
        self._hierarchical = None
        self._node = None  # and with it all shared memory that nobody has a view of

    @property
    def _bytes(self) -> ByteCollectives:
        """For operations in which all members are alike."""
        transport = self._flat or self._node
        assert transport is not None
        return transport

    # Memory ---------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> SharedBuffer:
        everyones = self.all_gather_object(nbytes)
        if len(set(everyones)) > 1:
            raise ArgumentError(f"allocate(nbytes) must be equal on all ranks; got {everyones} in rank order.")
        return self._allocate(nbytes)

    @blocking
    def _allocate(self, nbytes: int) -> SharedBuffer:
        if self._node is None:
            return SharedBuffer([np.zeros(nbytes, np.uint8)], 0)
        node = self._node

        def exchange(address: Address) -> list[Address]:
            mine = np.array(address, np.int64)
            rows = np.empty((node.size, mine.size), np.int64)
            parts = [row.view(np.uint8) for row in rows]
            node.all_gather(mine.view(np.uint8), parts, fingerprint("allocate", count=nbytes, dtype="bytes"))
            return [(int(pid), int(fd), int(size)) for pid, fd, size in rows]

        return node.allocate(nbytes, exchange)

    def release(self, buffer: SharedBuffer) -> None:
        if self._node is not None:
            self._node.release(buffer)

    # Collectives ----------------------------------------------------------------------------------

    @blocking
    def all_reduce(self, memory: HostMemory, op: Op, codec: HalfCodec | None = None) -> None:
        array, dtype, source = memory
        check_reducible(dtype, op)
        sign = self._sign("all_reduce", dtype, array.size, op._value_ if codec is None else f"{op._value_} {codec}")
        self.statistics.nbytes += array.nbytes
        if self._hierarchical is not None:
            try:
                self._hierarchical.all_reduce(array, op, dtype, sign, codec, source)
            except MismatchError as error:
                if self._node is not None:
                    self._node.tell(error)
                raise
            return
        assert self._node is not None
        self._node.all_reduce(array, op, dtype, self.size if op is Op.AVERAGE else 1, sign, source)

    @blocking
    def broadcast(self, memory: HostMemory, root: int) -> None:
        self._check_root(root)
        array, dtype, _ = memory
        self.statistics.nbytes += array.nbytes
        sign = self._sign("broadcast", dtype, array.size, f"root {root}")
        self._bytes.broadcast(array.view(np.uint8), root, sign)

    @blocking
    def all_gather(self, mine: HostMemory, out: HostMemory, counts: Sequence[int]) -> None:
        self.statistics.nbytes += mine.array.nbytes
        parts = _split(out.array, counts, "counts")
        sign = self._sign("all_gather", mine.dtype, sum(counts))
        self._bytes.all_gather(mine.array.view(np.uint8), parts, sign)

    @blocking
    def reduce_scatter(self, full: HostMemory, out: HostMemory, counts: Sequence[int], op: Op) -> None:
        check_reducible(full.dtype, op)
        self.statistics.nbytes += full.array.nbytes
        terms = np.empty((self.size, out.array.size), out.array.dtype)
        self._bytes.all_to_all(
            _split(full.array, counts, "counts"),
            [row.view(np.uint8) for row in terms],
            self._sign("reduce_scatter", full.dtype, full.array.size, op._value_),
        )
        reduce_into(out.array, list(terms), op, full.dtype, self.size if op is Op.AVERAGE else 1)

    @blocking
    def all_to_all(
        self, send: HostMemory, send_counts: Sequence[int], out: HostMemory, out_counts: Sequence[int]
    ) -> None:
        self.statistics.nbytes += send.array.nbytes
        self._bytes.all_to_all(
            _split(send.array, send_counts, "send_counts"),
            _split(out.array, out_counts, "out_counts"),
            self._sign("all_to_all", send.dtype),
        )

    @blocking
    def barrier(self) -> None:
        self._bytes.barrier(self._sign("barrier"))

    @blocking
    def broadcast_object(self, item: Any, root: int = 0) -> Any:
        self._check_root(root)
        sign = self._sign("broadcast_object", detail=f"root {root}")
        data = _pickled(item) if self.rank == root else np.empty(0, np.uint8)
        length = np.array([data.size])
        self._bytes.broadcast(length.view(np.uint8), root, sign)
        if self.rank != root:
            data = np.empty(int(length[0]), np.uint8)
        self._bytes.broadcast(data, root, sign)
        return item if self.rank == root else pickle.loads(data.data)

    @blocking
    def all_gather_object(self, item: Any) -> list[Any]:
        return self._all_gather_object(item, self._sign("all_gather_object"))

    def _all_gather_object(self, item: Any, sign: Fingerprint) -> list[Any]:
        data = _pickled(item)
        lengths = np.empty(self.size, np.int64)
        mine = np.array([data.size], np.int64)
        self._bytes.all_gather(mine.view(np.uint8), _split(lengths, [1] * self.size, "counts"), sign)
        out = np.empty(int(lengths.sum()), np.uint8)
        parts = _split(out, lengths.tolist(), "counts")
        self._bytes.all_gather(data, parts, sign)
        return [pickle.loads(part.data) for part in parts]

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ArgumentError(f"root={root} is not a rank of {self.name}, which has {self.size}.")


def _pickled(item: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def _split(array: Array, counts: Sequence[int], name: str) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Views of consecutive `counts` elements, as bytes."""
    if sum(counts) != array.size or any(count < 0 for count in counts):
        raise ArgumentError(f"{name}={list(counts)} do not add up to the {array.size} elements given.")
    data, parts, start = array.view(np.uint8), [], 0
    for count in counts:
        parts.append(data[start : start + count * array.itemsize])
        start += count * array.itemsize
    return parts


__all__ = ["Gather", "HostCommunicator", "Member"]
