"""The "ring" backend of torch.distributed: its collectives, over a core communicator for each kind of memory.

torch calls the methods by the names below; where a release renamed one, both names are there. The rest of
torch.distributed (object collectives, DistributedDataParallel, DTensor, torchmetrics) is built from these.

What torch asks of a process group besides collectives: its name, its store, its device.

A process group's communicators, and how an operation runs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch re-exports them unmarked

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch.arguments import all_at, by_type, elements_by_rank, one_per_rank, operation, single
from ring_plugins.torch.device import index_of, is_on_gpu, memory_of
from ring_plugins.torch.exchanges import gather_all, reduce_and_scatter, swap
from ring_plugins.torch.monitored_barrier import monitored_barrier
from ring_plugins.torch.point_to_point import PointToPoint
from ring_plugins.torch.tensors import EqualParts, Target, Targets, flat_source, flat_sources
from ring_plugins.torch.work import DeviceRingWork, RingWork

# torch's stub describes the overloads that its C++ base accepts; nobody calls a subclass with more than one of them.
_Base: Any = dist.ProcessGroup


class NamedGroup(_Base):  # type: ignore[misc]
    """A process group written in Python, without collectives yet.

    Args:
        store: shared by the members, under a prefix that no other group uses.
        rank: of this process in the group.
        size: of the group.
    """

    # What torch asks a backend object for; a Python process group is its own only backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = ""
        self._description = ""

    def getBackendName(self) -> str:  # noqa: N802
        """The name given to `init_process_group`."""
        return "ring"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Remember the name that torch chose."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch chose."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Remember the description."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description."""
        return self._description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        """The store that the members share."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        return self


class CommunicatingGroup(NamedGroup):
    """A process group with communicators of its own, one for each kind of memory.

    Args:
        store: shared by the members, under a prefix that no other group uses.
        communicator: among the members, in group order; used by nobody else, closed with the group.
        point_to_point: messages between pairs of members.
        connect: makes a communicator for a GPU, given its index; all members call it in their first collective on
            tensors of GPUs.
    """

    def __init__(
        self,
        store: Store,
        communicator: Communicator,
        point_to_point: PointToPoint,
        connect: Callable[[int], DeviceCommunicator],
    ) -> None:
        super().__init__(store, communicator.rank, communicator.size)
        self._communicator = communicator
        self._connect = connect
        self._on_gpus: dict[int, DeviceCommunicator] = {}
        self._point_to_point = point_to_point

    def _begin(
        self,
        description: str,
        outputs: list[torch.Tensor],
        function: Callable[[Communicator[Any]], None],
        opts: Any,
        inputs: Sequence[torch.Tensor] = (),
    ) -> RingWork:
        """Run now where the caller would only wait, else on the communicator's thread; on a GPU queue it."""
        described = f"{description} in process group {self._name or 'default'!r}"
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        on_gpu = next((tensor for tensor in (*outputs, *inputs) if is_on_gpu(tensor)), None)
        if on_gpu is not None:
            device = self._on_gpu(index_of(on_gpu))
            queued = DeviceRingWork(device, described, outputs, device.start(described, lambda: function(device)))
            if waits:
                queued.wait()
            return queued
        if waits:
            function(self._communicator)
            return RingWork.done(described, outputs)
        return RingWork.start(self._communicator, described, outputs, lambda: function(self._communicator))

    def _on_gpu(self, index: int) -> DeviceCommunicator:
        if index not in self._on_gpus:
            self._on_gpus[index] = self._connect(index)
        return self._on_gpus[index]

    def wait_for_gpus(self) -> None:
        """Return when the GPUs have done all that they were given by this group."""
        for communicator in self._on_gpus.values():
            communicator.synchronize()

    def shutdown(self) -> None:
        """Let go of the communicators; `destroy_process_group` calls this on every rank."""
        self._point_to_point.close()
        for communicator in self._on_gpus.values():
            communicator.close()
        self._communicator.close()

    abort = shutdown


class RingProcessGroup(CommunicatingGroup):
    """The "ring" process group; its arguments are those of `CommunicatingGroup`."""

    _monitored_barriers = 0

    # Everyone has, or combines, everything -----------------------------------------------------------

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> RingWork:
        """Combine everyone's tensor in place."""
        return self.allreduce_coalesced([single(tensors, "tensors")], opts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> RingWork:
        """Combine several tensors in place, those of one type in one go."""
        opts = opts or dist.AllreduceOptions()
        batches = []
        for of_one_type in by_type(tensors):
            op = operation(opts.reduceOp, of_one_type[0])
            if len(of_one_type) == 1:
                target: Target | Targets = Target(of_one_type[0], "tensor", keep=True)
            else:
                target = Targets(of_one_type, "tensors", keep=True)
            batches.append((target, op))

        def run(communicator: Communicator[Any]) -> None:
            for target, op in batches:
                communicator.all_reduce(target.memory, op)
                target.store()

        return self._begin("all_reduce", list(tensors), run, opts)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> RingWork:
        """Overwrite everyone's tensor with the root's."""
        opts = opts or dist.BroadcastOptions()
        tensor = single(tensors, "tensors")
        root = int(opts.rootRank)
        target = Target(tensor, "tensor", keep=root == self.rank())

        def run(communicator: Communicator[Any]) -> None:
            communicator.broadcast(target.memory, root)
            if root != self.rank():
                target.store()

        return self._begin("broadcast", [tensor], run, opts)

    def allgather(
        self, output_tensors: Sequence[Sequence[torch.Tensor]], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Fill the list with everyone's tensor; their sizes may differ."""
        outputs = one_per_rank(single(output_tensors, "output_tensors"), "output_tensors", self)
        source = flat_source(single(input_tensors, "input_tensors"), "input_tensor")
        targets = Targets(outputs, "output_tensors")
        return self._begin("all_gather", outputs, gather_all([(source, targets)], self), opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> RingWork:  # noqa: A002
        """Fill one tensor with everyone's, one behind the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """As `all_gather_single`, for several tensors in one work."""
        pairs = []
        for output, mine in zip(outputs, inputs, strict=True):
            pairs.append((flat_source(mine, "input_tensor"), EqualParts(output, self.size(), "output_tensor")))
        return self._begin("all_gather", list(outputs), gather_all(pairs, self), opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """As `allgather`, for several tensors in one work."""
        pairs = []
        for outputs, mine in zip(output_lists, inputs, strict=True):
            checked = one_per_rank(outputs, "output_tensors", self)
            pairs.append((flat_source(mine, "input_tensor"), Targets(checked, "output_tensors")))
        every = [output for outputs in output_lists for output in outputs]
        return self._begin("all_gather", every, gather_all(pairs, self), opts)

    # One gives or gets ------------------------------------------------------------------------------

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> RingWork:
        """Combine everyone's tensor into the root's; the others keep theirs."""
        opts = opts or dist.ReduceOptions()
        tensor = single(tensors, "tensors")
        op = operation(opts.reduceOp, tensor)
        target = Target(tensor, "tensor", keep=True)
        counts = all_at(int(opts.rootRank), tensor.numel(), self)
        mine = target.flat if opts.rootRank == self.rank() else target.flat[:0]

        def run(communicator: Communicator[Any]) -> None:
            communicator.reduce_scatter(target.memory, memory_of(mine), counts, op)
            if opts.rootRank == self.rank():
                target.store()

        return self._begin("reduce", [tensor], run, opts)

    def gather(
        self, output_tensors: Sequence[Sequence[torch.Tensor]], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Fill the root's list with everyone's tensor."""
        opts = opts or dist.GatherOptions()
        root, mine = int(opts.rootRank), single(input_tensors, "input_tensors")
        outputs: list[torch.Tensor] = []
        if root == self.rank():
            outputs = one_per_rank(single(output_tensors, "gather_list"), "gather_list", self)
        run = swap("gather", outputs, [mine], self, send_counts=all_at(root, mine.numel(), self))
        return self._begin("gather", outputs, run, opts, [mine])

    def scatter(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> RingWork:
        """Give every rank its tensor of the root's list."""
        opts = opts or dist.ScatterOptions()
        root, output = int(opts.rootRank), single(output_tensors, "output_tensors")
        inputs: list[torch.Tensor] = []
        if root == self.rank():
            inputs = one_per_rank(single(input_tensors, "scatter_list"), "scatter_list", self)
        run = swap("scatter", [output], inputs, self, out_counts=all_at(root, output.numel(), self))
        return self._begin("scatter", [output], run, opts, inputs)

    # Everyone gets a part ---------------------------------------------------------------------------

    def reduce_scatter(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> RingWork:
        """Combine everyone's lists and leave to each rank its element; their sizes may differ."""
        opts = opts or dist.ReduceScatterOptions()
        inputs = one_per_rank(single(input_tensors, "input_tensors"), "input_list", self)
        output = single(output_tensors, "output_tensors")
        counts = [tensor.numel() for tensor in inputs]
        run = reduce_and_scatter([(output, flat_sources(inputs, "input_list"), counts)], opts.reduceOp, self)
        return self._begin("reduce_scatter", [output], run, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> RingWork:  # noqa: A002
        """Combine everyone's tensor and leave to each rank its equal part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """As `reduce_scatter_single`, for several tensors in one work."""
        triples = []
        for output, full in zip(outputs, inputs, strict=True):
            triples.append((output, flat_source(full, "input_tensor"), [output.numel()] * self.size()))
        opts = opts or dist.ReduceScatterOptions()
        run = reduce_and_scatter(triples, opts.reduceOp, self)
        return self._begin("reduce_scatter", list(outputs), run, opts)

    def alltoall(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Send the i-th input to rank i and receive the i-th output from it."""
        outputs = one_per_rank(output_tensors, "output_tensor_list", self)
        inputs = one_per_rank(input_tensors, "input_tensor_list", self)
        return self._begin("all_to_all", outputs, swap("all_to_all", outputs, inputs, self), opts, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> RingWork:
        """As `alltoall` with the rows of one tensor; split sizes count rows, none means equal parts."""
        send_counts = elements_by_rank(input, input_split_sizes, "input", self)
        out_counts = elements_by_rank(output, output_split_sizes, "output", self)
        run = swap("all_to_all", [output], [input], self, send_counts, out_counts)
        return self._begin("all_to_all", [output], run, opts, [input])

    def barrier(self, opts: Any = None) -> RingWork:
        """Return when everyone has called."""
        self.wait_for_gpus()
        return self._begin("barrier", [], lambda communicator: communicator.barrier(), opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks which did not come in time."""
        self._monitored_barriers += 1
        store = PrefixStore(f"monitored_barrier/{self._monitored_barriers}", self._store)
        monitored_barrier(store, self.rank(), self.size(), timeout, wait_all_ranks)

    # From one to another ----------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst_rank: int, tag: int = 0) -> RingWork:
        """Send a tensor to one rank."""
        return self._point_to_point.send(single(tensors, "tensors"), dst_rank, tag)

    def recv(self, tensors: Sequence[torch.Tensor], src_rank: int, tag: int = 0) -> RingWork:
        """Receive a tensor from one rank."""
        return self._point_to_point.receive(single(tensors, "tensors"), src_rank, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> RingWork:
        """Not offered.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"src=None on rank {self.rank()}: the 'ring' backend cannot receive from just any rank; "
            "name the source rank, or use a gloo group: torch.distributed.new_group(backend='gloo')."
        )

    # Names of the same in other torch releases (2.4 to 2.12), which torch's C++ still falls back to.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
