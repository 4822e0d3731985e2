"""The "ring" process group of torch.distributed: its collectives, over one core communicator for each kind of memory.

torch calls a process group written in Python by name, from Python (torch/distributed/distributed_c10d.py) and from C++
(PyProcessGroup in torch/csrc/distributed/c10d). DistributedDataParallel, FSDP, DTensor, object collectives and
torchmetrics are built on these calls, so they all work on any group that has them. Names differ among releases:
2.13 calls `all_gather_single`, `reduce_scatter_single`, `all_to_all_single` and their `_coalesced` forms; 2.4 to 2.12
call the names at the end of the class, and the C++ of 2.13 still falls back to those. So the class has more than 25
methods: nearly all are torch's names.

A collective runs in one of three ways. If torch would only wait for it (`opts.asyncOp` exists and is False), it runs in
the calling thread. Otherwise it runs on the communicator's thread, after everything started there before. On a GPU
it is queued on the communicator's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch re-exports them unmarked

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.torch.device import index_of, is_on_gpu, memory_of
from ring_plugins.torch.point_to_point import PointToPoint
from ring_plugins.torch.store import monitored_barrier
from ring_plugins.torch.tensors import (
    Target,
    all_at,
    all_gather,
    all_to_all,
    by_type,
    elements_by_rank,
    equal_parts,
    flat_source,
    flat_sources,
    one_per_rank,
    operation,
    reduce_scatter,
    single,
)
from ring_plugins.torch.work import GpuWork, RingWork

# torch's stub describes the overloads of the C++ class; a subclass written in Python has one method for each name.
_Base: Any = dist.ProcessGroup

F = TypeVar("F", bound=Callable[..., Any])


def _tells_rejections(collective: F) -> F:
    """Let a method tell the other members if this one rejects its arguments, so that they do not wait for it."""

    @wraps(collective)
    def telling(self: RingProcessGroup, *args: Any, **options: Any) -> Any:
        try:
            return collective(self, *args, **options)
        except Exception as error:
            what = self._described(collective.__name__)
            self._communicator.reject(what, error)
            if _has_gpu_tensor(args):
                for communicator in self._on_gpus.values():
                    communicator.reject(what, error)
            raise

    return cast("F", telling)


def _has_gpu_tensor(arguments: Any) -> bool:
    if isinstance(arguments, torch.Tensor):
        return is_on_gpu(arguments)
    return isinstance(arguments, (list, tuple)) and any(map(_has_gpu_tensor, arguments))


class RingProcessGroup(_Base):  # type: ignore[misc]
    """The "ring" process group.

    Args:
        store: shared by the members, under a prefix that no other group uses.
        communicator: among the members, in group order; used by nobody else, closed with the group.
        point_to_point: messages between pairs of members.
        connect_gpu: makes a communicator for a GPU, given its index; all members call it in their first collective on
            tensors of GPUs.
    """

    def __init__(
        self,
        store: Store,
        communicator: Communicator,
        point_to_point: PointToPoint,
        connect_gpu: Callable[[int], DeviceCommunicator],
    ) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._store = store
        self._communicator = communicator
        self._connect_gpu = connect_gpu
        self._on_gpus: dict[int, DeviceCommunicator] = {}
        self._point_to_point = point_to_point
        self._monitored_barriers = 0

    # Names --------------------------------------------------------------------------------------------
    # C++ (PyProcessGroup) calls the camel-case methods; distributed_c10d.py reads the attributes, and calls
    # `_set_group_name` and `_set_group_desc` in `_new_process_group_helper`.

    def getBackendName(self) -> str:  # noqa: N802
        """The name given to `init_process_group`."""
        return "ring"

    group_name = group_desc = ""

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Remember the name that torch chose."""
        self.group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch chose."""
        return self.group_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Remember the description."""
        self.group_desc = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description."""
        return self.group_desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def get_group_store(self) -> Store:
        """The store that the members share; `split_group` asks for it."""
        return self._store

    @property
    def job_ranks(self) -> tuple[int, ...]:
        """The members' ranks in the job."""
        return self._communicator.ranks

    # torch looks for one backend object per device type; a process group written in Python is its own.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> RingProcessGroup:
        return self

    supports_splitting = False  # read by `split_group` and `_new_process_group_helper`
    supports_coalescing = False  # read by `batch_isend_irecv`
    supports_time_estimate = False  # read by `_time_estimator`

    # All ranks combine or collect everything ----------------------------------------------------------

    @_tells_rejections
    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> RingWork:
        """Reduce tensors in place, those of one type by one collective."""
        opts = opts or dist.AllreduceOptions()
        batches = [
            (Target(of_one_type, "tensors", keep=True), operation(opts.reduceOp, of_one_type[0]))
            for of_one_type in by_type(tensors)
        ]

        def run(communicator: Communicator[Any]) -> None:
            for target, op in batches:
                communicator.all_reduce(target.memory, op)
                target.store()

        return self._start("all_reduce", list(tensors), run, opts)

    allreduce_coalesced = allreduce

    @_tells_rejections
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> RingWork:
        """Overwrite every rank's tensor with the root's."""
        opts = opts or dist.BroadcastOptions()
        root = int(opts.rootRank)
        target = Target([single(tensors, "tensors")], "tensor", keep=root == self.rank())

        def run(communicator: Communicator[Any]) -> None:
            communicator.broadcast(target.memory, root)
            if root != self.rank():
                target.store()

        return self._start("broadcast", list(tensors), run, opts)

    @_tells_rejections
    def allgather(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Fill each list with every rank's tensor; their sizes may differ."""
        triples = []
        for outputs, mine in zip(output_lists, inputs, strict=True):
            target = Target(one_per_rank(outputs, "output_tensors", self), "output_tensors")
            triples.append((flat_source(mine, "input_tensor"), target, target.counts))
        every = [output for outputs in output_lists for output in outputs]
        return self._start("all_gather", every, all_gather(triples, self), opts)

    allgather_coalesced = allgather

    @_tells_rejections
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> RingWork:  # noqa: A002
        """Fill one tensor with every rank's, one behind the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @_tells_rejections
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Do `all_gather_single` for several tensors, in one work."""
        triples = []
        for output, mine in zip(outputs, inputs, strict=True):
            counts = equal_parts(output, "output_tensor", self)
            triples.append((flat_source(mine, "input_tensor"), Target([output], "output_tensor"), counts))
        return self._start("all_gather", list(outputs), all_gather(triples, self), opts)

    # One rank sends to or receives from all -----------------------------------------------------------

    @_tells_rejections
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> RingWork:
        """Reduce the ranks' tensors into the root's; the others keep theirs."""
        opts = opts or dist.ReduceOptions()
        tensor = single(tensors, "tensors")
        op = operation(opts.reduceOp, tensor)
        target = Target([tensor], "tensor", keep=True)
        counts = all_at(int(opts.rootRank), tensor.numel(), self)
        mine = target.flat if opts.rootRank == self.rank() else target.flat[:0]

        def run(communicator: Communicator[Any]) -> None:
            communicator.reduce_scatter(target.memory, memory_of(mine), counts, op)
            if opts.rootRank == self.rank():
                target.store()

        return self._start("reduce", [tensor], run, opts)

    @_tells_rejections
    def gather(
        self, output_tensors: Sequence[Sequence[torch.Tensor]], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Fill the root's list with every rank's tensor."""
        opts = opts or dist.GatherOptions()
        root, mine = int(opts.rootRank), single(input_tensors, "input_tensors")
        outputs: list[torch.Tensor] = []
        if root == self.rank():
            outputs = one_per_rank(single(output_tensors, "gather_list"), "gather_list", self)
        run = all_to_all("gather", outputs, [mine], self, send_counts=all_at(root, mine.numel(), self))
        return self._start("gather", outputs, run, opts, [mine])

    @_tells_rejections
    def scatter(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> RingWork:
        """Give each rank its tensor of the root's list."""
        opts = opts or dist.ScatterOptions()
        root, output = int(opts.rootRank), single(output_tensors, "output_tensors")
        inputs: list[torch.Tensor] = []
        if root == self.rank():
            inputs = one_per_rank(single(input_tensors, "scatter_list"), "scatter_list", self)
        run = all_to_all("scatter", [output], inputs, self, receive_counts=all_at(root, output.numel(), self))
        return self._start("scatter", [output], run, opts, inputs)

    # Each rank receives a part ------------------------------------------------------------------------

    @_tells_rejections
    def reduce_scatter(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> RingWork:
        """Reduce the ranks' lists and leave each rank its element; the elements' sizes may differ."""
        opts = opts or dist.ReduceScatterOptions()
        inputs = one_per_rank(single(input_tensors, "input_tensors"), "input_list", self)
        output = single(output_tensors, "output_tensors")
        counts = [tensor.numel() for tensor in inputs]
        run = reduce_scatter([(output, flat_sources(inputs, "input_list"), counts)], opts.reduceOp, self)
        return self._start("reduce_scatter", [output], run, opts)

    @_tells_rejections
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> RingWork:  # noqa: A002
        """Reduce the ranks' tensors and leave each rank its equal part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @_tells_rejections
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Do `reduce_scatter_single` for several tensors, in one work."""
        triples = []
        for output, full in zip(outputs, inputs, strict=True):
            triples.append((output, flat_source(full, "input_tensor"), [output.numel()] * self.size()))
        opts = opts or dist.ReduceScatterOptions()
        run = reduce_scatter(triples, opts.reduceOp, self)
        return self._start("reduce_scatter", list(outputs), run, opts)

    @_tells_rejections
    def alltoall(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> RingWork:
        """Send the i-th input to rank i and receive the i-th output from it."""
        outputs = one_per_rank(output_tensors, "output_tensor_list", self)
        inputs = one_per_rank(input_tensors, "input_tensor_list", self)
        run = all_to_all("all_to_all", outputs, inputs, self)
        return self._start("all_to_all", outputs, run, opts, inputs)

    @_tells_rejections
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> RingWork:
        """Do `alltoall` with the rows of one tensor; split sizes count rows, none means equal parts."""
        send_counts = elements_by_rank(input, input_split_sizes, "input", self)
        receive_counts = elements_by_rank(output, output_split_sizes, "output", self)
        run = all_to_all("all_to_all", [output], [input], self, send_counts, receive_counts)
        return self._start("all_to_all", [output], run, opts, [input])

    @_tells_rejections
    def barrier(self, opts: Any = None) -> RingWork:
        """Return when all ranks have called and their GPUs have done what this group gave them."""
        for gpu in self._on_gpus.values():
            gpu.synchronize()
        return self._start("barrier", [], lambda communicator: communicator.barrier(), opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called; the error names the ranks that did not."""
        self._monitored_barriers += 1
        store = PrefixStore(f"monitored_barrier/{self._monitored_barriers}", self._store)
        monitored_barrier(store, self.rank(), self.size(), timeout, wait_all_ranks)

    # Point to point -----------------------------------------------------------------------------------

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
            f"src=None in a receive of tag {tag} on rank {self.rank()}: the 'ring' backend receives from a named rank. "
            "Name the source, or use a gloo group: torch.distributed.new_group(backend='gloo')."
        )

    # Start and shutdown -------------------------------------------------------------------------------

    def _start(
        self,
        description: str,
        outputs: list[torch.Tensor],
        function: Callable[[Communicator[Any]], None],
        opts: Any,
        inputs: Sequence[torch.Tensor] = (),
    ) -> RingWork:
        """Run a collective in the calling thread, on the communicator's thread, or on a GPU; see the module's text."""
        described = self._described(description)
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        on_gpu = next((tensor for tensor in (*outputs, *inputs) if is_on_gpu(tensor)), None)
        if on_gpu is not None:
            device = self._on_gpu(index_of(on_gpu))
            work = GpuWork(described, outputs, device.device)
            work.set_queued(device, device.start(described, lambda: function(device)))
            if waits:
                work.wait()
            return work
        if waits:
            function(self._communicator)
            return RingWork(described, outputs)
        return RingWork(described, outputs).run_on(self._communicator, lambda: function(self._communicator))

    def _described(self, operation: str) -> str:
        return f"{operation} in process group {self.group_name or 'default'!r}"

    def _on_gpu(self, index: int) -> DeviceCommunicator:
        if index not in self._on_gpus:
            self._on_gpus[index] = self._connect_gpu(index)
        return self._on_gpus[index]

    def shutdown(self) -> None:
        """Close the communicators. `destroy_process_group` calls this on every rank."""
        self._point_to_point.close()
        for communicator in self._on_gpus.values():
            communicator.close()
        self._communicator.close()

    abort = shutdown  # called by distributed_c10d.py, `_abort_process_group`

    # The older names that torch 2.4 to 2.12 call, and to which the C++ of 2.13 falls back.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
