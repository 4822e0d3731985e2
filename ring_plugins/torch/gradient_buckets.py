"""The gradients of some parameters, and how they are reduced: in buckets, in place, or gathered as sparse rows.

A small gradient lives in its bucket: `p.grad` is a view of the bucket's memory. A large one is reduced where autograd
put it. Both need the same layout on all ranks, without gaps. Autograd accumulates fastest into a gradient that is laid
out like its parameter, so gradients have that layout unless it has gaps.

**What a script keeps.** A script may keep `p.grad`, or a view or an array of it, and clear `p.grad`: it expects the
values to stay, as they do in one process. But the next pass fills the bucket. Or the script assigns to `p.grad` a
tensor that it reads later, as a part of one long buffer: it expects sums and averages there. So before a bucket is
filled, counts of references tell whether anybody else has its memory. If so, the pass runs in it all the same, since
where ranks share memory they reduce in each other's. Afterwards the averages get memory of their own, and the old
values come back. Nobody reads them in between, while backward runs. A gradient that autograd has added to, and that
others refer to, gets its average when the pass is over, and is `p.grad` again. torch counts the tensors that share
memory, numpy arrays and DLPack hold one of them, and Python counts the references to tensors. Both counts together
take 9 µs for 400 gradients.

**Where ranks may be lost**, a step's averages are taken again when a rank dies in the middle of them
(core/gradients/reducer), from the gradients themselves. Autograd has made a new tensor for each, and it is intact if
nothing writes to it. Tensors that were moved into a bucket are held until the pass is over. The average of a large
gradient, which is not moved, is written to other memory, and that becomes `p.grad`; the tensor itself is the memory for
the next step's average, so two of them take turns. A tensor to which something was written after autograd made it
(`_version`) is left to be copied: it may lie in a bucket, or belong to somebody who expects it to stay `p.grad`, as
after `zero_grad(set_to_none=False)`.

The file is longer than others, and its class has more methods, since it is the way of a gradient from the first hook to
its average: what a pass writes to a bucket and what it reads there belong together.
"""

from __future__ import annotations

import collections
import itertools
import operator
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.dtypes import STORAGE, Op
from ring_plugins.core.arrays.memory import HostMemory, Memory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.collectives.api import Communicator, Work
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Bucket, BucketMemory, BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer
from ring_plugins.core.gradients.trials import ALWAYS, UNCHANGED, Choice
from ring_plugins.observe.consistency import COUNT, bits_of, differ, listed
from ring_plugins.torch.changes import Claim, Replaced
from ring_plugins.torch.compared_options import options_error
from ring_plugins.torch.consistency import TorchChecks, samples_checksum
from ring_plugins.torch.device import index_of, is_capturing, is_on_gpu, streams
from ring_plugins.torch.device_buckets import DeviceBuckets, HalfBuckets, HostedBuckets, through_host
from ring_plugins.torch.sparse import average_mixed, average_sparse
from ring_plugins.torch.tensor_memory import (
    check_plain,
    dense_memory,
    gradient_dtype,
    host_memory_of,
    is_shared,
    laid_out,
    memory_like,
    view_of,
)

Named = tuple[str, nn.Parameter]

#: Read attributes of many tensors without a step of Python for each.
_gradient_of, _is_sparse = operator.attrgetter("grad"), operator.attrgetter("is_sparse")
_version_of = operator.attrgetter("_version")
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
#: Control numbers of a pass: the shares of ranks whose backward raised, of those that found sparse gradients, and of
#: those with other averagers, of those that want ranks to leave or join, of those that have run out of data, and of
#: those whose weight is not 1; and these ranks' weights, not what they lack to 1: where a weight is small, 16 bits
#: cannot tell that from 1; and the share of those whose pass is part of a CUDA graph. The options of the optimizers
#: follow.
_FAILED, _SPARSE, _OTHERS, _CHANGE, _ENDED, _PARTS, _WEIGHTS, _CAPTURED = range(8)
_OPTIONS = 8
_CONTROL = _OPTIONS + COUNT
#: The shares where no rank tells anything.
_NOTHING_TOLD = (0.0,) * _CONTROL
#: Element types whose memory numpy can show.
_KNOWN_TO_NUMPY = frozenset({"float16", "float32", "float64", "complex64", "complex128"})
#: How many numbers' bits are kept as tensors.
_KEPT_BITS = 32


class Outcome(NamedTuple):
    """How a pass ended, the same on all ranks.

    Attributes:
        failed: share of the ranks whose backward raised: 0.0 if gradients are averages. Any other leaves useless ones.
        found_sparse: parameters found to have sparse gradients. Pass them as `known_sparse` from now on.
        has_others: whether `GradientBuckets.has_others` was true on some rank.
        options_differ: whether the options of the optimizers, or places in the script, are not the same on all ranks.
        members_change: whether `GradientBuckets.wants_change` was true on some rank.
        ended: share of the ranks that have run out of data (`observe.consistency.Checks.has_ended`).
    """

    failed: float
    found_sparse: list[nn.Parameter]
    has_others: bool = False
    options_differ: bool = False
    members_change: bool = False
    ended: float = 0.0


#: The outcome of most passes.
_ORDINARY = Outcome(0.0, [])


class GradientBuckets:
    """The buckets of one set of parameters that are not frozen, and their reducer.

    Args:
        named: (name, parameter) pairs of the whole model, equal on all ranks. Frozen parameters are left out.
        communicator: reduces the gradients; used by nobody else.
        sizes: of buckets, and of the gradients that are too large for them.
        compression: how gradients travel; None for unchanged.
        known_sparse: parameters whose gradients are gathered as sparse rows.
        gathers_sparse: whether gradients that turn out to be sparse are gathered too; if not, they are made dense.
        order: positions in `named` of all that are not frozen, first gradient first, equal on all ranks; None if that
            is not known yet.
        overlap: whether reductions overlap backward.
        checks: what passes compare.
        is_trained: by position in `named` whether the parameter takes part; by default those that are not frozen.
        rounding: how gradients travel between hosts in each pass; between GPUs it is always `compression`.

    Attributes:
        is_trained: as given.
        reducer: launches the buckets.
        entries, bucket_of: by position in `named` the entry of the plan, and its bucket; -1 for parameters that the
            reducer does not know.
        parameters, names: by entry.
        trained: names of the set's parameters, sparse ones too.
        views: by entry the gradient's place in its bucket, None for those that are reduced in place.
        is_ordered: whether buckets fill in the order in which gradients really come.
        has_others: what to tell the other ranks in this pass: whether this one has other averagers.
        wants_change: the same: whether this one is to leave after it, or sees processes that wait to join.
        replaced: by name, parameters that this rank's script has replaced in a module, which may be its model.
        noted: what else its script has done with parameters, to be compared in this pass; "" as a rule.
        first: checksum of this rank's own gradients of the first pass; None behind it, and where order was known.

    Raises:
        MismatchError: the parameters differ among ranks.
        ArgumentError: a parameter is not on the communicator's device.
    """

    def __init__(
        self,
        named: Sequence[Named],
        communicator: Communicator[Any],
        sizes: BucketSizes,
        compression: Compression | None,
        known_sparse: set[nn.Parameter],
        gathers_sparse: bool,
        order: Sequence[int] | None = None,
        overlap: Choice[bool] = ALWAYS,
        checks: TorchChecks | None = None,
        is_trained: Sequence[bool] | None = None,
        rounding: Choice[Compression | None] = UNCHANGED,
    ) -> None:
        self._checks, self._gathers_sparse = checks or TorchChecks(Claim("")), gathers_sparse
        self._recovers = communicator.recovers  # then buckets stay as they are: no loss may interrupt making others
        self._communicator, self.is_ordered = communicator, order is not None or self._recovers
        self.first: int | None = None if self.is_ordered else 0
        self.has_others, self.wants_change, self.replaced, self.noted = False, False, dict[str, Replaced](), ""
        gpu = communicator.device if isinstance(communicator, DeviceCommunicator) else None
        self._streams = None if gpu is None else streams(gpu)
        self.is_trained = is_trained or [p.requires_grad for _, p in named]
        trained = list(itertools.compress(range(len(named)), self.is_trained))
        positions = [position for position in trained if named[position][1] not in known_sparse]
        self._sparse = [named[position][1] for position in trained if named[position][1] in known_sparse]
        entry_of = {position: entry for entry, position in enumerate(positions)}
        self.entries = [entry_of.get(position, -1) for position in range(len(named))]
        self.names, self.parameters = [named[i][0] for i in positions], [named[i][1] for i in positions]
        own = through_host(self.parameters, communicator, compression) if gpu is None else gpu
        entries = [_entry(*named[position], own, compression) for position in positions]
        self._forms = [(gradient_dtype(parameter), parameter.shape) for parameter in self.parameters]
        # Where there are copies in 16 bits, NCCL reduces those, so registering the buckets would gain nothing.
        self._is_registered = gpu is not None and compression is None and config.NCCL_REGISTER.get()
        if self._is_registered or own != gpu:
            sizes = sizes._replace(direct_bytes=None)  # large gradients too: one pointer for each bucket
        self.plan = FusionPlan(
            entries, sizes, control=_CONTROL, order=None if order is None else self._entries_of(order)
        )
        self.plan.check_equal(communicator)
        self.trained, self._trained_checksum = _described(named, trained, self.plan)
        self._half: HalfBuckets | HostedBuckets | None = None  # on GPUs; elsewhere the communicator rounds
        self._buffer, self._tensors = self._allocate(compression)
        self.views: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._gradients: list[torch.Tensor] = []
        self._flags: list[torch.Tensor] = []
        #: By bucket what follows its gradients, its flags and perhaps the control numbers, and what a rank writes there
        #: that has all gradients, and nothing to tell but its options.
        self._tails: list[torch.Tensor] = []
        for bucket, tensor in zip(self.plan.buckets, self._tensors, strict=True):
            self._gradients.append(tensor[: bucket.flags])
            self._flags.append(tensor[bucket.flags : bucket.flags + len(bucket.entries)])
            control = self.plan.control if bucket is self.plan.buckets[-1] else 0
            self._tails.append(tensor[bucket.flags : bucket.flags + len(bucket.entries) + control])
            for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                if i not in bucket.direct:
                    self.views[i] = view_of(tensor, offset, self.parameters[i])
        #: By entry the memory that receives the average of a gradient that this rank does not have in this pass; and
        #: entries whose gradients were found to be sparse in it.
        self._absent, self._found_sparse = dict[int, torch.Tensor](), set[int]()
        self._small = [_Small(bucket, self.parameters, self.views) for bucket in self.plan.buckets]
        self._usual_tails = [torch.ones_like(tail) for tail in self._tails]
        self._control, self._usual_control = self._tails[-1][-_CONTROL:], self._usual_tails[-1][-_CONTROL:].zero_()
        self._written_number: int | None = None  # of `_checks`, there
        self._bits: dict[int, torch.Tensor] = {}  # by number that was written before
        #: Control numbers of the last pass, for which the host did not wait; None if it reads them in every pass.
        self._late_control = (
            None if gpu is None else torch.zeros(_CONTROL, device="cpu", pin_memory=torch.cuda.is_available())
        )
        #: Gathers the gradients that are known to be sparse, if `launch_rest` launched that.
        self._sparse_work: Work[None] | None = None
        self._is_failing, self._is_first = False, True
        self.reducer = GradientReducer(
            *(self._buffer, communicator, Op.AVERAGE if gpu is None else Op.SUM, rounding),
            holds_last=True,
            overlap=overlap,
        )
        self.bucket_of = [-1 if entry < 0 else self.reducer.bucket_of[entry] for entry in self.entries]
        #: By bucket how many tensors share its memory if nobody else has one.
        self._uses = list(map(_uses_of, self._tensors))
        #: By bucket and entry what somebody holds; by entry what gets the average and is `p.grad` again.
        self._held, self._staying = dict[int, dict[int, torch.Tensor]](), dict[int, torch.Tensor]()
        self._spare: dict[int, torch.Tensor] = {}  # by entry, memory for an average, where ranks may be lost

    def _allocate(self, compression: Compression | None) -> tuple[BucketMemory, list[torch.Tensor]]:
        """The buckets' memory, and each bucket as a 1-d tensor."""
        if not isinstance(self._communicator, DeviceCommunicator):
            host = FusionBuffer(self.plan, self._communicator)
            arrays = [memory.array for memory in host.memories]
            tensors = [
                torch.frombuffer(array, dtype=getattr(torch, bucket.dtype))
                for bucket, array in zip(self.plan.buckets, arrays, strict=True)
            ]
            if through_host(self.parameters, self._communicator, compression) is None:
                return host, tensors
            self._half = HostedBuckets(self.plan, tensors, self.parameters[0].device)
            return host, self._half.tensors
        device = self.parameters[0].device if self.parameters else None
        on_gpu = DeviceBuckets(self.plan, device, self._communicator if self._is_registered else None)
        if compression is None:
            return on_gpu, on_gpu.tensors
        self._half = HalfBuckets(self.plan, on_gpu.tensors, compression)
        return self._half, on_gpu.tensors

    def _entries_of(self, order: Sequence[int]) -> list[int]:
        return [entry for position in order if (entry := self.entries[position]) >= 0]

    def fills_as(self, order: Sequence[int]) -> bool:
        """Whether buckets made in this order of positions would be the same."""
        return self.plan.fills_as(self._entries_of(order))

    @property
    def _any_rank_has_it(self) -> float:
        """Flags are 1 on ranks that have the gradient. A sum or average above this means some rank has it.

        The number of ranks changes: a process that joins has made its buckets while it was alone.
        """
        return 0.5 / self._communicator.size

    @property
    def _scale(self) -> float:
        """NCCL sums gradients that were scaled before (see `core.gpu.communicator`); on the host the sum is divided."""
        return 1.0 if self._streams is None else 1 / self._communicator.size

    # A pass, from the first gradient to the averages ----------------------------------------------------

    def fill(self, bucket: Bucket) -> list[Memory]:
        """Prepare a bucket for its reduction.

        One fused copy moves in the gradients that autograd put elsewhere, and their `p.grad` becomes the view.

        Returns:
            The memory of the direct gradients.
        """
        if (on_gpu := self._streams or self._half) is not None:
            on_gpu.catch_up()
        small = self._small[bucket.index]
        if list(map(_address, small.views)) != small.addresses:  # a script has given `p.grad.data` other memory
            small = self._renewed(bucket)
        gradients = small.gradients()
        if gradients != []:
            self._keep_held(bucket, small)
        others = small.others if gradients is not None else list(enumerate(bucket.entries))
        moved, source, direct, absent = self._sorted(others) if others else ([], [], [], [])
        if gradients or source:
            self._note_staying(small.entries if gradients else moved, gradients or source)
        to = [view for i in moved if (view := self.views[i]) is not None] if moved else []
        with torch.inference_mode():  # takes a third less than `no_grad` for small tensors
            if gradients:
                small.take(gradients, lambda: self._check_unchanged(*bucket.entries))
            if to:
                torch._foreach_copy_(to, source)
            if self._streams is not None and (kept := self.reducer.kept) is not None:
                in_place = [self._gradients[bucket.index], *direct]
                copies = [gradient.clone() for gradient in in_place]
                kept.refill_by(bucket.index, partial(self._restore, bucket, in_place, copies, absent))
            if self.first is not None and not (self._streams is not None and is_capturing()):
                self.first += samples_checksum([*small.views, *direct])
            self._scale_and_tell(bucket, direct, absent)
        if moved:
            self._check_unchanged(*moved)
            for i in moved:
                self.parameters[i].grad = self.views[i]
        if not direct and self._half is None and (self.reducer.kept is None or self._streams is not None):
            return []
        return self._memories(bucket, direct, source + (gradients or []), to + (small.views if gradients else []))

    def _scale_and_tell(self, bucket: Bucket, direct: Sequence[torch.Tensor], absent: Sequence[int]) -> None:
        """Scale what the reduction sums, and write what a bucket tells; arguments as `_sorted` returns them."""
        # NCCL's reduction does not divide by the number of ranks.
        if self._streams is not None and (scale := self._scale) != 1.0:
            for gradient in [self._gradients[bucket.index], *direct] if bucket.flags else direct:
                gradient.mul_(scale)  # torch 2.13's `_foreach_mul_` on the CPU rounds the factor to bfloat16
        self._write_tail(bucket)
        for place in absent:
            self._flags[bucket.index][place].fill_(0)

    @torch.inference_mode()
    def _restore(
        self, bucket: Bucket, in_place: list[torch.Tensor], copies: list[torch.Tensor], absent: Sequence[int]
    ) -> None:
        """On a GPU, where ranks were lost: let a bucket hold again what this rank has computed, for those left."""
        torch._foreach_copy_(in_place, copies)
        self._scale_and_tell(bucket, in_place[1:], absent)

    def _sorted(
        self, others: list[tuple[int, int]]
    ) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor], list[int]]:
        """What becomes of those gradients of a bucket that are not all new, dense and small.

        Args:
            others: pairs of place in the bucket and entry.

        Returns:
            Entries and gradients that are moved into the bucket, what is reduced where it is, and the places of
            gradients that this rank does not have.
        """
        moved, source, direct, absent = list[int](), list[torch.Tensor](), list[torch.Tensor](), list[int]()
        for place, i in others:
            parameter, view = self.parameters[i], self.views[i]
            gradient = parameter.grad
            if gradient is view and view is not None:
                continue
            if gradient is not None and gradient.is_sparse:
                gradient = self._densified(i, gradient)
            if gradient is None:
                absent.append(place)
                zeros = memory_like(parameter).zero_() if view is None else view.zero_()
                self._absent[i] = zeros
                if view is None:
                    direct.append(zeros)
            elif view is not None:
                moved.append(i)
                source.append(gradient)
            else:
                self._check_unchanged(i)
                direct.append(dense := laid_out(parameter, gradient))
                if dense is not gradient and gradient._version and is_shared(gradient):
                    self._staying[i] = gradient
        return moved, source, direct, absent

    def _renewed(self, bucket: Bucket) -> _Small:
        """The gradients that live in a bucket, with new views."""
        for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
            if i not in bucket.direct:
                self._check_unchanged(i)  # `model.half()` converts gradients in this way, too
                self.views[i] = view_of(self._tensors[bucket.index], offset, self.parameters[i])
        small = self._small[bucket.index] = _Small(bucket, self.parameters, self.views)
        return small

    def _check_unchanged(self, *entries: int) -> None:
        """Check that parameters are as they were when the buckets were planned.

        Raises:
            ArgumentError: the dtype or shape of one has changed.
        """
        for i in entries:
            parameter, (dtype, shape) = self.parameters[i], self._forms[i]
            now = gradient_dtype(parameter, self.names[i])
            if now != dtype or parameter.shape != shape:
                raise ArgumentError(
                    f"parameter {self.names[i]} was {dtype} of shape {tuple(shape)} when averaging was set up, and is "
                    f"{now} of shape {tuple(parameter.shape)} now. Convert the model before that, or set averaging up "
                    "anew on all ranks: close() what averages, and construct it again."
                )

    def _memories(
        self, bucket: Bucket, direct: list[torch.Tensor], moved: list[torch.Tensor], views: list[torch.Tensor]
    ) -> list[Memory]:
        """The memory of a bucket's direct gradients; others have been moved to these views."""
        if self._half is not None:
            return self._half.pack(bucket, direct)
        memory_of: Callable[[torch.Tensor], Memory] = dense_memory
        if self._streams is None and bucket.dtype in _KNOWN_TO_NUMPY:
            memory_of = partial(host_memory_of, dtype=bucket.dtype)
        if (kept := self.reducer.kept) is None or self._streams is not None:
            return list(map(memory_of, direct))
        if moved and len(moved) == len(bucket.entries) - len(bucket.direct) and _are_new(moved):
            kept.refill_by(bucket.index, partial(_move, views, moved))  # else other gradients lie in the bucket
        memories: list[Memory] = []
        for i, gradient in zip(bucket.direct, direct, strict=True):
            memory, spare = memory_of(gradient), self._spare.pop(i, None)
            if i not in self._absent and _are_new([gradient]):
                in_use = spare is not None and (sys.getrefcount(spare) > _REFERENCES_OF_LOCAL or is_shared(spare))
                average = memory_like(self.parameters[i]) if spare is None or in_use else spare
                self._spare[i], self.parameters[i].grad = gradient, average
                target = memory_of(average)
                assert isinstance(target, HostMemory)
                assert isinstance(memory, HostMemory)
                memory = target._replace(source=memory.array)
            memories.append(memory)
        return memories

    # What a script keeps ------------------------------------------------------------------------------

    def _keep_held(self, bucket: Bucket, small: _Small) -> None:
        """Before a bucket is filled, copy what somebody else holds of it."""
        views, entries, parameters = small.views, small.entries, self.parameters
        if _uses_of(self._tensors[bucket.index]) == self._uses[bucket.index]:
            if sum(map(sys.getrefcount, views)) == _REFERENCES_OF_VIEW * len(views):
                return
            away = [view for i, view in zip(entries, views, strict=True) if parameters[i].grad is not view]
            if sum(map(sys.getrefcount, away)) == (_REFERENCES_OF_VIEW + 1) * len(away):
                return
        self._held[bucket.index] = {
            i: view.clone() for i, view in zip(entries, views, strict=True) if parameters[i].grad is not view
        }

    def _note_staying(self, entries: Sequence[int], gradients: list[torch.Tensor]) -> None:
        """Note which gradients stay `p.grad` though they are about to be moved into a bucket.

        Args:
            entries: whose.
            gradients: theirs; nothing but this list and the parameters refers to them.
        """
        if gradients[0].is_inference():
            return
        references = list(map(sys.getrefcount, gradients))
        # Only two are asked for their versions: that of all takes as long as moving them.
        is_new = not gradients[0]._version + gradients[-1]._version
        if is_new and sum(references) == _REFERENCES_OF_GRADIENT * len(gradients):
            return
        for i, gradient, count in zip(entries, gradients, references, strict=True):
            if gradient._version and (count > _REFERENCES_OF_GRADIENT or is_shared(gradient)):
                self._staying[i] = gradient

    @torch.no_grad()
    def _give_back(self) -> None:
        """After a pass, give everyone the values that they expect."""
        for values in self._held.values():
            for i, value in values.items():
                view, parameter = self.views[i], self.parameters[i]
                assert view is not None
                if i in self._absent:
                    self._absent[i] = memory_like(parameter).copy_(view)
                elif parameter.grad is view:
                    parameter.grad = memory_like(parameter).copy_(view)
                view.copy_(value)
        for i, gradient in self._staying.items():
            if (average := self.parameters[i].grad) is not None:
                self.parameters[i].grad = gradient.copy_(average)
        self._held, self._staying = {}, {}

    # What a pass tells --------------------------------------------------------------------------------

    def _write_tail(self, bucket: Bucket) -> None:
        """Write the flags of a bucket, as if no gradient were missing, and the control numbers of the last one."""
        is_last = bucket.index == len(self.plan.buckets) - 1
        captures = self._streams is not None and is_capturing()
        if is_last and not captures:
            if self.replaced and (gone := [name for name, one in self.replaced.items() if not one.is_used]):
                self.noted = f"{self.noted}{' and ' if self.noted else ''}has replaced {listed(gone)} in the model"
            trained = self._checks.trained
            if trained.names is not self.trained or trained.noted != self.noted:
                trained.take(self.trained, self._trained_checksum, self.noted)
            number = self._checks.number()
            if number != self._written_number:  # write the bits of what all ranks are to have
                if (bits := self._bits.get(number)) is None:
                    bits = torch.from_numpy(bits_of(number)).to(self._usual_control.dtype)
                    if self._late_control is not None and torch.cuda.is_available():
                        bits = bits.pin_memory()  # or the host would wait for the GPU
                    if len(self._bits) >= _KEPT_BITS:
                        self._bits.clear()
                    self._bits[number] = bits
                self._usual_control[_OPTIONS:].copy_(bits, non_blocking=True)
                self._written_number = number
        self._tails[bucket.index].copy_(self._usual_tails[bucket.index])
        is_part = self._checks.weight != 1 or self._checks.has_ended
        if is_last and captures:
            self._control[_CAPTURED].fill_(1)
        if is_last and (self._is_failing or self._found_sparse or self.has_others or self.wants_change or is_part):
            # By fill_, since an assignment copies a number from the host: no CUDA graph can capture that.
            told = self._is_failing, bool(self._found_sparse), self.has_others, self.wants_change
            for number, value in zip((_FAILED, _SPARSE, _OTHERS, _CHANGE), told, strict=True):
                self._control[number].fill_(value)
            self._control[_ENDED].fill_(self._checks.has_ended)
            if (weight := self._checks.weight) != 1:
                self._control[_PARTS].fill_(1)
                self._control[_WEIGHTS].fill_(weight)
            if self._checks.has_ended:
                self._control[_OPTIONS:].fill_(0)  # neither a bit nor its inverse, so it differs from nobody

    def _densified(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient as a dense one; None if it is to stay sparse, which is only noted."""
        is_hosted = isinstance(self._half, HostedBuckets)
        if self._gathers_sparse and (self._recovers or is_hosted):
            what = "compression in 8 bits between GPUs" if is_hosted else "on_failure='continue'"
            raise ArgumentError(
                f"the gradient of {self.names[i]} is sparse, which {what} does not support: pass sparse='densify'."
            )
        if self._gathers_sparse:
            self._found_sparse.add(i)
            return None
        parameter = self.parameters[i]
        with torch.no_grad():
            parameter.grad = memory_like(parameter).copy_(gradient.to_dense())
        return parameter.grad

    def launch_rest(self) -> None:
        """Launch what is left, sparse gradients too, without waiting."""
        self.reducer.launch_rest(self.fill)
        if self._sparse and self._streams is None and self._sparse_work is None:
            self._sparse_work = self._communicator.start("sparse gradients", self._average_sparse)

    def _average_sparse(self) -> None:
        """Gather the gradients that are known to be sparse, unless a rank has none; after all buckets of the pass."""
        if not self._shares(self._control)[_FAILED]:
            for parameter in self._sparse:
                average_sparse(parameter, self._communicator)

    def _wait_for_sparse(self) -> None:
        work, self._sparse_work = self._sparse_work, None
        if work is not None:
            work.wait()

    def finish(self, at_once: bool = False) -> Outcome:
        """Finish a pass: every gradient is the average when this returns, unless another rank's backward raised.

        Args:
            at_once: whether the host waits for a GPU to learn the outcome, equal on all ranks. If not, `check_late`
                tells later.
        """
        try:
            self.reducer.finish(self.fill)
            if self._half is not None:
                self._half.unpack()
        finally:
            if self._held or self._staying:
                self._give_back()
        told = self._read_control(at_once)
        if told is _NOTHING_TOLD and not self._sparse and not self._absent:
            self._checks.note_compared()
            return _ORDINARY
        failed, any_sparse, has_others, members_change, ended, *_ = told
        options = told[_OPTIONS:]
        if told[_CAPTURED]:
            self._reject_captured_alone()
        if failed:
            self._forget_pass()
            return Outcome(failed, [])
        if self._sparse_work is None:
            for parameter in self._sparse:
                average_sparse(parameter, self._communicator)
        self._wait_for_sparse()
        found = list[int]()
        if any_sparse:
            by_rank = self._communicator.all_gather_object(sorted(self._found_sparse), "sparse gradients")
            found, self._found_sparse = sorted(set().union(*by_rank)), set()
        self._assign_absent(found)
        sparse = [self.parameters[i] for i in found]
        if self._control[_PARTS]:
            self._weigh()
        self._checks.note_compared()
        return Outcome(0.0, sparse, has_others > 0, differ(options), members_change > 0, ended)

    @torch.no_grad()
    def _weigh(self) -> None:
        """Turn averages over all ranks into those over the ranks, or samples, that came."""
        parts, weights = self._control[_PARTS : _WEIGHTS + 1].real.tolist()
        if not parts:
            return
        ranks = self._communicator.size if self._scale == 1.0 else 1  # by which these were divided
        came = self._communicator.size - round(parts * ranks) + weights * ranks
        if came < 1e-5:  # none
            return
        gradients = [g for p in {*self.parameters, *self._sparse} if (g := p.grad) is not None]
        factor = self._communicator.size / came
        for gradient in gradients:
            gradient.mul_(factor)

    def fail(self) -> Outcome:
        """Finish a pass that this rank cannot, and tell the others so; gradients are useless then."""
        self._is_failing = True
        try:
            self.reducer.abandon(self._scratch)
            if self._half is not None:
                self._half.unpack()
        finally:
            self._is_failing = False
            self._give_back()
        failed, *_ = self._read_control(at_once=True)
        self._forget_pass()
        return Outcome(failed, [])

    def _forget_pass(self) -> None:
        self._wait_for_sparse()
        self._absent, self._found_sparse = {}, set()
        self.reducer.forget_errors()
        if self._half is not None:
            self._half.forget_errors()

    def _read_control(self, at_once: bool) -> tuple[float, ...]:
        """The control numbers of the pass that was just reduced, as shares of the ranks; 0 if not known yet."""
        if self._late_control is not None:
            if is_capturing():
                return _NOTHING_TOLD
            if not at_once and not self._is_first:
                self._late_control.copy_(self._control.real, non_blocking=True)
                if self._found_sparse:
                    self._reject_late_sparse()
                return _NOTHING_TOLD
        elif torch.equal(self._control, self._usual_control):
            return _NOTHING_TOLD  # an average equals what this rank wrote only if all wrote the same
        self._is_first = False
        return self._shares(self._control)

    def _shares(self, control: torch.Tensor) -> tuple[float, ...]:
        least, divisor = self._any_rank_has_it, 1 if self._streams is None else self._communicator.size
        return tuple([share / divisor if share > least else 0.0 for share in control.real.tolist()])

    def check_late(self) -> float:
        """The share of ranks whose backward raised in an earlier pass, as far as a GPU has told by now.

        Raises:
            RingError: a rank found a sparse gradient that was dense, or missing on all ranks, in the first pass.
            MismatchError: the options of the optimizers differed, or another rank replays a CUDA graph.
        """
        if self._late_control is None:
            return 0.0
        failed, sparse, captured, options = self._late()
        if (failed or sparse or captured or differ(options)) and torch.cuda.is_available() and not is_capturing():
            torch.cuda.synchronize()  # the copy may be under way: a part of it beside a part of the one before
            failed, sparse, captured, options = self._late()
        if captured:
            self._reject_captured_alone()
        if sparse:
            self._reject_late_sparse()
        if differ(options) and not failed:
            error = options_error([self._checks.options.texts], [self._communicator.ranks[self._communicator.rank]])
            self._checks.options.reject(error, self._communicator.rank, self._checks.passes - 1)
        return failed

    def _late(self) -> tuple[float, float, float, tuple[float, ...]]:
        shares = self._shares(cast("torch.Tensor", self._late_control))
        return shares[_FAILED], shares[_SPARSE], shares[_CAPTURED], shares[_OPTIONS:]

    def _reject_captured_alone(self) -> None:
        """Raise on this rank, before it waits for a comparison that a replayed graph takes no part in."""
        communicator = self._communicator
        error = MismatchError(
            f"{communicator.name}: rank {communicator.ranks[communicator.rank]} takes an ordinary step while another "
            "rank replays a CUDA graph of its step, which compares nothing with others. Capture and replay at the same "
            "steps on all ranks, or on none."
        )
        communicator.interrupt("averaging gradients", error)  # whose GPU would wait for this rank
        raise error

    def _reject_late_sparse(self) -> None:
        names = ", ".join(self.names[i] for i in sorted(self._found_sparse)) or "a parameter on another rank"
        raise RingError(
            f"the gradient of {names} is sparse, and was not in the first backward. On GPUs that must be known before: "
            "give the averager the module with its sparse embeddings, or use sparse='densify'."
        )

    def _assign_absent(self, found_sparse: Sequence[int]) -> None:
        """Assign the averages of gradients that this rank does not have and another rank has; the rest stay None.

        Args:
            found_sparse: entries for which some rank has a sparse gradient. The bucket holds the average of the dense
                ones, to which that of the sparse ones is added.
        """
        absent, self._absent = self._absent, {}
        for i in found_sparse:
            bucket = self.plan.buckets[self.reducer.bucket_of[i]]
            flag = float(self._flags[bucket.index][bucket.entries.index(i)].real)
            is_dense_somewhere = flag > self._any_rank_has_it
            average_mixed(self.parameters[i], absent.pop(i, None), is_dense_somewhere, self._communicator)
        if not absent:
            return
        buckets = [bucket for bucket in self.plan.buckets if not absent.keys().isdisjoint(bucket.entries)]
        flags = [self._flags[bucket.index] for bucket in buckets]
        if is_on_gpu(flags[0]) and is_capturing():
            names = ", ".join(self.names[i] for i in sorted(absent))
            raise RingError(
                f"a CUDA graph is being captured, and this rank has no gradient for {names}. Whether another rank "
                "has one must be read from the GPU, which a capture cannot do. Freeze these parameters "
                "(requires_grad_(False))."
            )
        entries = [i for bucket in buckets for i in bucket.entries]
        values = torch.cat([of_bucket.real.float() for of_bucket in flags]).tolist()  # the host waits for a GPU once
        for i, flag in zip(entries, values, strict=True):
            if i in absent and flag > self._any_rank_has_it:
                self.parameters[i].grad = absent[i]

    def _scratch(self, bucket: Bucket) -> list[Memory]:
        """Memory of the direct gradients' sizes, in place of gradients that may not exist; all share it."""
        self._keep_held(bucket, self._small[bucket.index])
        counts = [self.plan.entries[i].count for i in bucket.direct]
        tensor = self._gradients[bucket.index]
        whole = torch.zeros(max(counts, default=0), dtype=tensor.dtype, device=tensor.device)
        zeros = [whole[:count] for count in counts]
        tell = partial(torch.no_grad()(self._write_tail), bucket)
        tell()
        if self._streams is not None and (kept := self.reducer.kept) is not None:
            kept.refill_by(bucket.index, tell)
        return [dense_memory(zero) for zero in zeros] if self._half is None else self._half.pack(bucket, zeros)

    def release(self) -> None:
        """Give the memory back; gradients in it stay valid."""
        self._buffer.release()


class _Small:
    """The gradients of a bucket that live in it, handled without a step of Python for each, as there may be thousands.

    Args:
        bucket: where.
        parameters, views: by entry, see `GradientBuckets`.

    Attributes:
        entries, views: of these gradients.
        addresses: of the views.
        others: the bucket's other gradients, as pairs of place and entry.
    """

    def __init__(
        self, bucket: Bucket, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor | None]
    ) -> None:
        self.entries = [i for i in bucket.entries if views[i] is not None]
        self._parameters = [parameters[i] for i in self.entries]
        self.views = [view for i in self.entries if (view := views[i]) is not None]
        self.addresses = list(map(_address, self.views))
        self.others = [(place, i) for place, i in enumerate(bucket.entries) if views[i] is None]

    def gradients(self) -> list[torch.Tensor] | None:
        """All gradients if they are new and dense; nothing if all are in the bucket already; None for any mixture."""
        gradients = list(map(_gradient_of, self._parameters))
        in_place = sum(map(operator.is_, gradients, self.views))
        if in_place == len(gradients):
            return []
        if in_place or any(map(operator.is_, gradients, itertools.repeat(None))) or any(map(_is_sparse, gradients)):
            return None
        return gradients

    def take(self, gradients: list[torch.Tensor], explain: Callable[[], None]) -> None:
        """Move what `gradients` returned into the bucket; called without recording gradients.

        Args:
            gradients: see above.
            explain: raises a better error than torch if the gradients do not fit any more.
        """
        try:
            torch._foreach_copy_(self.views, gradients)
            collections.deque(map(setattr, self._parameters, itertools.repeat("grad"), self.views), maxlen=0)
        except RuntimeError:
            explain()
            raise


def _described(named: Sequence[Named], trained: Sequence[int], plan: FusionPlan) -> tuple[list[str], int]:
    """The names of a set of parameters, with their positions if one occurs twice, and a checksum of it."""
    has_twice = len({name for name, _ in named}) < len(named)
    names = [named[i][0] + (f" (number {i})" if has_twice else "") for i in trained]
    return names, zlib.crc32(repr((plan.fingerprint, names)).encode())


def _entry(name: str, parameter: nn.Parameter, gpu: int | None, compression: Compression | None) -> Entry:
    check_plain(parameter, f"parameter {name}", is_written=True)
    if (index_of(parameter) if is_on_gpu(parameter) else None) != gpu:
        where = "the CPU" if gpu is None else f"GPU {gpu}"
        raise ArgumentError(
            f"parameter {name} is on {parameter.device}, but gradients are averaged on {where}, where the parameters "
            "were when averaging was set up. Move the model before that."
        )
    strides = "" if parameter.is_contiguous() else f", strides {tuple(parameter.stride())}"
    dtype = str(gradient_dtype(parameter, name)).removeprefix("torch.")
    if dtype not in STORAGE:
        raise ArgumentError(
            f"the gradient of parameter {name} is {dtype}, which cannot be averaged. Freeze it "
            "(requires_grad_(False)), or train weights of another type, such as torch.bfloat16."
        )
    codec = f", {compression}" if compression is not None else ""
    return Entry(name, dtype, parameter.numel(), f"shape {tuple(parameter.shape)}{strides}{codec}")


# References -----------------------------------------------------------------------------------------


def _are_new(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether nothing has written to these since autograd made them."""
    try:
        return not any(map(_version_of, gradients))
    except RuntimeError:  # of inference mode, which counts no versions
        return False


def _move(views: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(views, gradients)


def _uses_of(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory, itself and a temporary reference included.

    As `tensor_memory.is_shared` counts them, in this file since each step asks.
    """
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def _counted_references() -> tuple[int, int, int]:
    """What `sys.getrefcount` says of a view in two lists, a gradient in one, and a local variable's value."""
    parameter, views, one = nn.Parameter(torch.empty(0)), [torch.empty(0)], object()
    others = views.copy()
    of_view = sum(map(sys.getrefcount, others))
    parameter.grad = torch.empty(0)
    gradients = [parameter.grad]
    return of_view, sum(map(sys.getrefcount, gradients)), sys.getrefcount(one)


_REFERENCES_OF_VIEW, _REFERENCES_OF_GRADIENT, _REFERENCES_OF_LOCAL = _counted_references()
