"""torch: hooks average gradients while backward runs, as in `ring_plugins.torch`."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.gradients.fusion import Entry
from ring_plugins.core.joining.root import Root
from ring_plugins.keras.backends import Settings
from ring_plugins.keras.buckets import unequal_gradients
from ring_plugins.keras.slices import SliceGather, SliceLayout, new_part, on_gpu
from ring_plugins.torch.device import memory_of
from ring_plugins.torch.gradients import GradientAverager


class Exchange:
    """See the protocol: `backward()` leaves averages in `variable.value.grad`, and `average` checks that it did.

    Other gradients (from `torch.autograd.grad`, or changed after backward) are averaged when they are applied, and so
    are those of an optimizer that accumulates, because backward does not know the accumulators. Averaging twice costs
    time but changes nothing, since the average of equal values is the same value.
    """

    def __init__(self, variables: Sequence[Any], entries: Sequence[Entry], settings: Settings) -> None:
        self._entries = entries
        self._parameters = [variable.value for variable in variables]
        self._averager = GradientAverager(
            [(entry.name, parameter) for entry, parameter in zip(entries, self._parameters, strict=True)],
            bucket_bytes=settings.sizes.bucket_bytes,
            first_bucket_bytes=settings.sizes.first_bucket_bytes,
            sparse="densify",
            compression=settings.compression,
            error_feedback=settings.error_feedback,
            overlap=settings.overlap,
        )
        self._averager.compare_options(lambda: [{"lr": settings.rate()}])
        self._passes_seen, self._after_pass = 0, settings.after_pass
        self._without_hooks = contextlib.ExitStack()
        if settings.accumulates:
            self._without_hooks.enter_context(self._averager.no_sync())

    @property
    def communicator(self) -> Communicator[Any]:
        return self._averager.communicator

    @property
    def passes(self) -> int:
        return self._averager.steps

    @property
    def waited_seconds(self) -> float:
        return self._averager.waited_seconds

    @property
    def reduced_bytes(self) -> int:
        return self._averager.reduced_bytes

    def average(self, gradients: dict[int, Any], rate: Any = None) -> dict[int, Any]:
        """See the protocol. The averager has compared the rate."""
        is_averaged = self._averager.steps > self._passes_seen and all(
            gradient is self._parameters[i].grad and self._parameters[i].requires_grad
            for i, gradient in gradients.items()
        )
        averages = gradients if is_averaged else self._average_now(gradients)
        self._passes_seen = self._averager.steps
        self._after_pass()
        return averages

    @torch.no_grad()
    def _average_now(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Average gradients that the hooks did not average, in temporary place of the parameters' own.

        The parameters' own gradients keep their values (`ring_plugins.torch.held_gradients`). Frozen parameters are
        averaged as well, since the caller updates them.
        """
        kept = [parameter.grad for parameter in self._parameters]
        frozen = [self._parameters[i] for i in gradients if not self._parameters[i].requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            for i, parameter in enumerate(self._parameters):
                parameter.grad = gradients[i].detach() if i in gradients else None
            self._averager.finish()
            for i, parameter in enumerate(self._parameters):
                if i not in gradients and parameter.grad is not None:
                    raise unequal_gradients(False, self._entries[i].name)
            return {i: self._parameters[i].grad for i in gradients}
        finally:
            for parameter, own in zip(self._parameters, kept, strict=True):
                parameter.grad = own
            for parameter in frozen:
                parameter.requires_grad_(False)

    def release(self) -> None:
        self._averager.close()


def slice_layout(variables: Sequence[Any], rank: int, size: int) -> SliceLayout:
    """See the protocol."""
    return SliceLayout(variables, rank, size)


class Slices:
    """See the protocol. Parts are views of the variables' memory, which is also where the others' parts go."""

    def __init__(self, variables: Sequence[Any], layout: SliceLayout) -> None:
        self._wholes, self._layout = list(variables), layout
        for variable in variables:
            if variable.value.device.type != "cpu":
                raise on_gpu(variable.path)
            if not variable.value.is_contiguous():  # some initializers transpose
                variable.value.data = variable.value.data.contiguous()
        self.variables = [
            variable if layout.is_whole(i) else new_part(variable, layout.shape(i))
            for i, variable in enumerate(variables)
        ]
        self.load(range(len(variables)))

    def connect(self, gather: SliceGather) -> None:
        self._gather = gather

    @torch.no_grad()
    def load(self, indices: Sequence[int]) -> None:
        for i in indices:
            if not self._layout.is_whole(i):  # a script may have replaced the variable's memory
                self.variables[i].value.data = self._cut(i, self._wholes[i].value.detach())

    def _cut(self, i: int, whole: torch.Tensor) -> torch.Tensor:
        start, stop = self._layout.ranges[i]
        return whole.reshape(-1)[start:stop]

    def cut(self, i: int, gradient: Any) -> Any:
        """See the protocol."""
        return gradient if self._layout.is_whole(i) else self._cut(i, gradient)

    @torch.no_grad()
    def gather(self, indices: Sequence[int], options: dict[str, Any]) -> None:
        """See the protocol."""
        self._gather.compare({name: option.item() for name, option in options.items()})
        entries = self._layout.plan.entries
        for number, one in enumerate(self._layout.rounds):
            present = [i for i in one.entries if i in indices and entries[i].count]
            if present:
                flats = {i: self._wholes[i].value.detach().reshape(-1) for i in present}
                wholes = {i: _storage(flat) for i, flat in flats.items()}
                own = {i: wholes[i][slice(*self._layout.ranges[i])] for i in present if not self._layout.is_empty(i)}
                self._gather.run(number, present, wholes, own)
                # Autograd then notices a backward that comes too late.
                torch.autograd.graph.increment_version(list(flats.values()))


def _storage(flat: torch.Tensor) -> Array:
    memory = memory_of(flat)
    assert isinstance(memory, HostMemory)
    return memory.array


def at_once() -> contextlib.AbstractContextManager[Any]:
    """See the protocol."""
    return contextlib.nullcontext()


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """See the protocol. A compiled update would call the collectives while it is traced."""
    hidden: Callable[..., Any] = torch.compiler.disable(function)
    return hidden


@torch.no_grad()
def forget_traces(optimizer: Any) -> None:
    """See the protocol. No-op: what torch.compile has made checks at each call that `apply` is still the same."""


def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """See the protocol."""
    return yes() if condition else no()


def to_dense(gradient: Any) -> Any:
    """See the protocol."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def check_other_parallelism(model: Any) -> None:
    """See the protocol."""
    # Keras 3.16's TorchTrainer wraps the model in DistributedDataParallel if torch.distributed is initialized.
    if getattr(model, "ddp_model", None) is not None:
        raise ArgumentError(
            "Keras has wrapped the model in DistributedDataParallel, which averages gradients itself. Do not call "
            "torch.distributed.init_process_group() in this script."
        )


def is_lazy(model: Any) -> bool:
    """See the protocol. On this backend Keras builds a model before it calls any callback."""
    return False


def make_train_function(model: Any, averaging: Any) -> None:
    """See the protocol."""
    model.make_train_function(force=True)


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """See the protocol."""
    action()


@torch.compiler.disable
def host_call_with_gradient(
    forward: Callable[..., tuple[Array, Array]], backward: Callable[..., Array], own: Any, count: Any
) -> Any:
    """See the protocol."""
    return _HostCall.apply(own, count, forward, backward)


class _HostCall(torch.autograd.Function):
    """The autograd function of `host_call_with_gradient`."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, count: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        found = forward(_array(own), _array(count))
        result, share = (torch.from_numpy(array).to(own.device) for array in found)
        ctx.save_for_backward(own, result, share)
        ctx.call = backward
        return result

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        arrays = [_array(tensor) for tensor in (*ctx.saved_tensors, upstream)]
        return torch.from_numpy(ctx.call(*arrays)).to(upstream.device), None, None, None


def _array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array


def offset_seed(communicator: Communicator, root: Root) -> None:
    """See the protocol. torch's dropout uses the global generator. The root keeps its state."""
    own = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    digest: int = repeated(
        lambda: communicator.broadcast_object(own, root.rank_in(communicator), operation="offset_seed")
    )
    if not root.is_here():
        torch.manual_seed(digest + communicator.ranks[communicator.rank])
