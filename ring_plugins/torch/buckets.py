"""Where the gradients of a torch model are while they are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.memory import Memory
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Bucket, BucketMemory, BucketSizes, Entry, FusionBuffer, FusionPlan
from ring_plugins.torch.compression import HalfBuckets
from ring_plugins.torch.device import index_of, is_capturing, is_on_gpu, memory_of
from ring_plugins.torch.layout import dense_memory, laid_out, memory_like, view_of

Named = tuple[str, nn.Parameter]


class GradientBuckets:
    """The buckets of a plan as torch sees them.

    A small gradient lives in its bucket: `p.grad` is a view of it. A large one stays where autograd put it.

    Args:
        named: (name, parameter) pairs that take part, equal on all ranks.
        communicator: reduces them.
        sizes: of buckets, and of the tensors that are too large for them.
        compression: how gradients travel, as they are by default.

    Raises:
        MismatchError: the pairs differ among ranks.
        ArgumentError: a parameter is not where the communicator works.
    """

    def __init__(
        self,
        named: Sequence[Named],
        communicator: Communicator[Any],
        sizes: BucketSizes,
        compression: Compression | None = None,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        gpu = communicator.device if isinstance(communicator, DeviceCommunicator) else None
        self.plan = FusionPlan([_entry(*pair, gpu, compression) for pair in named], *sizes)
        self.plan.check_equal(communicator)
        self.buffer: BucketMemory
        self._half: HalfBuckets | None = None  # on a GPU; elsewhere the communicator rounds
        if not isinstance(communicator, DeviceCommunicator):
            host = self.buffer = FusionBuffer(self.plan, communicator)
            arrays = [memory.array for memory in host.memories]
            wholes = [
                torch.frombuffer(array, dtype=getattr(torch, bucket.dtype))
                for bucket, array in zip(self.plan.buckets, arrays, strict=True)
            ]
        else:
            on_device = self.buffer = DeviceBuffer(self.plan, self.parameters[0].device if named else None)
            wholes = on_device.wholes
            if compression is not None:
                self._half = self.buffer = HalfBuckets(self.plan, wholes, compression)
        #: By parameter its place in the bucket, None for those that stay where they are.
        self.views: list[torch.Tensor | None] = [None] * len(named)
        self._flags: list[torch.Tensor] = []
        for bucket, whole in zip(self.plan.buckets, wholes, strict=True):
            self._flags.append(whole[bucket.flags : bucket.flags + len(bucket.entries)])
            for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                if i not in bucket.direct:
                    self.views[i] = view_of(whole, offset, self.parameters[i])
        #: An average of flags above this says that a rank has the gradient, also after rounding.
        self._any = 0.5 / communicator.size
        #: Where the average goes of gradients that this rank does not have, in this pass.
        self._absent: dict[int, torch.Tensor] = {}
        #: Parameters found to have sparse gradients. While `collects_sparse` they are left alone.
        self.sparse: set[int] = set()
        self.collects_sparse = False

    def fill(self, bucket: Bucket) -> list[Memory]:
        """Get a bucket ready to be reduced.

        Gradients that autograd put elsewhere move in, by one fused copy, and `p.grad` is then the view.

        Returns:
            The memory of the direct gradients.
        """
        to: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        moved: list[int] = []
        zero_flags: list[int] = []
        direct: list[torch.Tensor] = []
        for place, i in enumerate(bucket.entries):
            parameter, view = self.parameters[i], self.views[i]
            gradient = parameter.grad
            if gradient is view and view is not None:
                continue
            if gradient is not None and gradient.is_sparse:
                gradient = self._densified(i, gradient)
            if gradient is None:
                zero_flags.append(place)
                stand_in = memory_like(parameter).zero_() if view is None else view.zero_()
                self._absent[i] = stand_in
                if view is None:
                    direct.append(stand_in)
            elif view is not None:
                to.append(view)
                source.append(gradient)
                moved.append(i)
            else:
                direct.append(laid_out(parameter, gradient))
        with torch.no_grad():
            if to:
                torch._foreach_copy_(to, source)
            flags = self._flags[bucket.index]
            flags.fill_(1)
            for place in zero_flags:
                flags[place] = 0
        for i in moved:
            self.parameters[i].grad = self.views[i]
        if self._half is not None:
            return self._half.pack(bucket, direct)
        return [dense_memory(gradient) for gradient in direct]

    def _densified(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.collects_sparse:
            self.sparse.add(i)
            return None
        parameter = self.parameters[i]
        with torch.no_grad():
            parameter.grad = memory_like(parameter).copy_(gradient.to_dense())
        return parameter.grad

    def scratch(self, bucket: Bucket) -> list[Memory]:
        """Memory of the direct gradients' sizes, for a pass whose result nobody wants."""
        likes = [memory_like(self.parameters[i]).zero_() for i in bucket.direct]
        return [dense_memory(like) for like in likes] if self._half is None else self._half.pack(bucket, likes)

    def settle(self) -> None:
        """After a pass: gradients that this rank does not have are the average if any rank has them, else None."""
        if self._half is not None:
            self._half.unpack()
        absent, self._absent = self._absent, {}
        if not absent:
            return
        for bucket, flags in zip(self.plan.buckets, self._flags, strict=True):
            if absent.keys().isdisjoint(bucket.entries):
                continue
            if is_on_gpu(flags) and is_capturing():
                names = ", ".join(self.names[i] for i in sorted(absent))
                raise RingError(
                    f"a CUDA graph is being captured, and this rank has no gradient for {names}: whether others have "
                    "one must be read from the GPU, which a capture cannot. Freeze them (requires_grad_(False))."
                )
            for i, flag in zip(bucket.entries, flags.tolist(), strict=True):
                if i in absent and flag > self._any and i not in self.sparse:
                    self.parameters[i].grad = absent[i]

    def release(self) -> None:
        """Give the memory back; gradients in it stay valid."""
        self.buffer.release()


class DeviceBuffer:
    """The buckets of a plan in the memory of a GPU, which torch allocates.

    Attributes:
        plan, memories: as `BucketMemory` has them.
        wholes: each bucket as a tensor.
    """

    def __init__(self, plan: FusionPlan, device: torch.device | None) -> None:
        self.plan = plan
        flat = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
        parts = torch.split(flat, [bucket.nbytes for bucket in plan.buckets])
        self.wholes = [
            part.view(getattr(torch, bucket.dtype)) for bucket, part in zip(plan.buckets, parts, strict=True)
        ]
        self.memories = [memory_of(whole) for whole in self.wholes]

    def release(self) -> None:
        """Nothing to do: torch frees it with its last view, after what our communicator still does with it."""


def _entry(name: str, parameter: nn.Parameter, gpu: int | None, compression: Compression | None) -> Entry:
    if (index_of(parameter) if is_on_gpu(parameter) else None) != gpu:
        raise ArgumentError(
            f"parameter {name} is on {parameter.device}, and gradients are averaged on {_device_text(gpu)}, where the "
            "parameters were when averaging was set up. Move the model before that."
        )
    strides = "" if parameter.is_contiguous() else f", strides {tuple(parameter.stride())}"
    dtype = str(parameter.dtype).removeprefix("torch.")
    wire = f", {compression}" if compression is not None else ""
    return Entry(name, dtype, parameter.numel(), f"shape {tuple(parameter.shape)}{strides}{wire}")


def _device_text(gpu: int | None) -> str:
    return "the CPU" if gpu is None else f"GPU {gpu}"
