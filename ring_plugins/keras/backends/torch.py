"""torch: hooks average gradients while backward runs, as in `ring_plugins.torch`."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import keras
import torch

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Entry
from ring_plugins.core.gradients.slices import SliceGather
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.core.world import current
from ring_plugins.keras import backends, slices
from ring_plugins.keras.backends import BatchShare, Settings, Statistics
from ring_plugins.keras.buckets import unequal_gradients
from ring_plugins.keras.consistency import KerasChecks
from ring_plugins.observe.consistency import Check
from ring_plugins.observe.same_samples import tell_if_same
from ring_plugins.torch.device import array_of, streams
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.parameter_slices import DeviceArrays

T = TypeVar("T")


class _AsOne:
    """What Keras compares, as one of the checks of torch's averager, which compares the learning rate itself.

    Passes are counted as that averager does: a rank that leaves out an update has ended as many as the others.
    """

    def __init__(self, checks: KerasChecks, averager: GradientAverager) -> None:
        self._checks, self._averager, self._ended, self.say = checks, averager, 0, checks.say

    @property
    def number(self) -> int:
        for _ in range(self._averager.steps - self._ended):
            self._checks.note_compared()
        self._ended = self._averager.steps
        return self._checks.number()


class Exchange(backends.Exchange):
    """See the base class: `backward()` leaves averages in `variable.value.grad`, and `average` checks that it did.

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
            group=settings.group,
        )
        self._averager.tells_same_samples = False  # `weigh` does
        self.communicator = self._averager.communicator
        elastic = current().elastic  # as with other backends, what a group averages tells nothing
        elastic.widest = max(elastic.widest, current().topology.size)
        self._averager.compare_options(lambda: [{"lr": settings.rate()}])
        self._passes_seen, self._has_told = 0, current().replaces  # a process that joins would be alone
        checks = _AsOne(settings.checks or KerasChecks(), self._averager)
        self._averager.checks.list.append(cast("Check", checks))  # its number is a property; nobody assigns to it
        self._without_hooks = contextlib.ExitStack()
        if settings.accumulates:
            self._without_hooks.enter_context(self._averager.no_sync())

    @property
    def statistics(self) -> Statistics:
        return Statistics(self._averager.steps, self._averager.waited_seconds, self._averager.reduced_bytes)

    def weigh(self, share: BatchShare) -> None:
        self._averager.is_joined = True  # where gradients are on a GPU, wait for how much the others count
        self._averager.checks.weight = share.samples / share.full
        if not self._has_told:
            self._has_told = True
            arrays = [leaf for leaf in keras.tree.flatten(share.data) if isinstance(leaf, torch.Tensor)]
            bytes_of_first = b"".join(keras.ops.convert_to_numpy(array).tobytes() for array in arrays)
            tell_if_same(0 if share.is_filling else zlib.crc32(bytes_of_first), self.communicator)

    def average(self, gradients: dict[int, Any], rate: Any = None, share: BatchShare | None = None) -> dict[int, Any]:
        """See the base class. The averager has compared the rate."""
        if share is not None:
            _ = share.counted  # raises if what was averaged was not to count
        is_averaged = self._averager.steps > self._passes_seen and all(
            gradient is self._parameters[i].grad and self._parameters[i].requires_grad
            for i, gradient in gradients.items()
        )
        averages = gradients if is_averaged else self._average_now(gradients)
        self._passes_seen, self._averager.checks.weight = self._averager.steps, 1.0
        return averages

    @torch.no_grad()
    def _average_now(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Average gradients that the hooks did not average, in temporary place of the parameters' own.

        The parameters' own gradients keep their values (`ring_plugins.torch.gradient_buckets`). Frozen parameters are
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


class Slices(slices.Slices):
    """See the base class. Parts are views of the variables' memory, which is also where the others' parts go."""

    in_place = on_gpus = True

    def __init__(self, variables: Sequence[Any], rank: int, size: int) -> None:
        super().__init__(variables, rank, size)
        self._on_gpu: DeviceCommunicator | None = None
        self._device = variables[0].value.device if variables else torch.device("cpu")
        for variable in variables:
            if variable.value.device != self._device:
                raise ArgumentError(
                    f"{variable.path} is on {variable.value.device}, and {variables[0].path} on {self._device}; a "
                    "sharded optimizer needs all variables on one device."
                )
        for variable in variables:
            if not variable.value.is_contiguous():  # some initializers transpose
                variable.value.data = variable.value.data.contiguous()
        for i in self._parts:
            self.load(i)

    def _is_on_gpu(self, variable: Any) -> bool:
        return bool(variable.value.device.type != "cpu")

    def _gathering(self, communicator: Communicator[Any]) -> SliceGather:
        if self._device.type == "cpu":
            return super()._gathering(communicator)
        index = self._device.index
        self._on_gpu = current().new_device_communicator(
            "sharded updates on GPUs", index, streams(index), within=communicator
        )
        return SliceGather(self.layout.plan, self.layout.rounds, self._on_gpu, True, DeviceArrays(self._device))

    def disconnect(self) -> None:
        if self._on_gpu is not None:
            self._on_gpu.close()
            self._on_gpu = None

    @torch.no_grad()
    def load(self, i: int) -> None:  # a script may have replaced the variable's memory
        self.variables[i].value.data = self.cut(i, self._wholes[i].value.detach())

    def cut(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        start, stop = self.layout.ranges[i]
        return gradient.reshape(-1)[start:stop]

    @torch.no_grad()
    def gather(self, indices: Sequence[int], options: dict[str, Any]) -> None:
        self.compare({name: option.item() for name, option in options.items()})
        for number, present in self.rounds(indices):
            flats = {i: self._wholes[i].value.detach().reshape(-1) for i in present}
            wholes: Any = flats if self._on_gpu else {i: array_of(flat) for i, flat in flats.items()}
            own = {i: wholes[i][slice(*self.layout.ranges[i])] for i in present if not self.layout.is_empty(i)}
            self._gather.run(number, present, wholes, own)
            torch.autograd.graph.increment_version(list(flats.values()))  # so that it notices a late backward


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


class TorchBackend(backends.Backend):
    """See the base class. What torch.compile has made checks at each call that `apply` is still the same."""

    Exchange, Slices = Exchange, Slices

    def opaque(self, function: Callable[..., T]) -> Callable[..., T]:
        """See the base class. A compiled update would call the collectives while it is traced."""
        hidden: Callable[..., T] = torch.compiler.disable(function)
        return hidden

    def to_dense(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_dense() if gradient.is_sparse else gradient

    def check_other_parallelism(self, model: Any) -> None:
        # Keras 3.16's TorchTrainer wraps the model in DistributedDataParallel if torch.distributed is initialized.
        if getattr(model, "ddp_model", None) is not None:
            raise ArgumentError(
                "Keras has wrapped the model in DistributedDataParallel, which averages gradients itself. Do not call "
                "torch.distributed.init_process_group() in this script."
            )

    @torch.compiler.disable
    def host_call_with_gradient(
        self, forward: Callable[..., tuple[Array, Array]], backward: Callable[..., Array], own: Any, count: Any
    ) -> Any:
        return _HostCall.apply(own, count, forward, backward)

    def offset_seed(self, communicator: Communicator, root: Root) -> None:
        """See the base class. torch's dropout uses the global generator. The root keeps its state."""
        own = zlib.crc32(torch.get_rng_state().numpy().tobytes())
        digest: int = repeated(
            lambda: communicator.broadcast_object(own, root.rank_in(communicator), purpose="offset_seed")
        )
        if not root.is_here():
            torch.manual_seed(digest + communicator.ranks[communicator.rank])

    def random_state(self) -> Array | None:
        return cast("Array", torch.get_rng_state().numpy())

    def set_random_state(self, state: Array) -> None:
        torch.set_rng_state(torch.from_numpy(state))


BACKEND = TorchBackend()
