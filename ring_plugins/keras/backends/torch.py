"""torch: gradients are averaged by hooks while backward runs, as in `ring_plugins.torch`."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ring_plugins.core.arrays.memory import host_array
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.averaging import Averaging
from ring_plugins.keras.moments import BatchMoments, gradient_of_own
from ring_plugins.torch.gradients import GradientAverager


class GradientAveraging(Averaging):
    """Puts hooks on the variables' parameters, and replaces `apply` to see that they did their work.

    `backward()` leaves averages in `variable.value.grad`. Gradients that did not come from there (of
    `torch.autograd.grad`, or changed since) are averaged when they are applied; that costs time, never exactness,
    since the average of equal values is that value. An optimizer that accumulates is given its averages there too:
    backward cannot know what was accumulated.
    """

    methods = ("apply",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.averager: GradientAverager | None = None
        self._seen = 0
        self._variables: list[Any] = []
        self._quiet = contextlib.ExitStack()

    @property
    def reductions(self) -> int:
        return super().reductions + (self.averager.steps if self.averager else 0)

    @property
    def waited_seconds(self) -> float:
        return super().waited_seconds + (self.averager.waited_seconds if self.averager else 0.0)

    @property
    def reduced_bytes(self) -> int:
        return super().reduced_bytes + (self.averager.reduced_bytes if self.averager else 0)

    def build(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        names = [entry.name for entry in self.entries(variables)]
        self.averager = GradientAverager(
            [(name, variable.value) for name, variable in zip(names, variables, strict=True)],
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
            sparse="densify",
            **self.wire_arguments,
        )
        if self.accumulation > 1:
            self._quiet.enter_context(self.averager.no_sync())

    def close(self) -> None:
        if self.averager is not None:
            self.averager.close()

    @torch.compiler.disable  # a compiled update would call the collectives while it is traced
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stands in for the optimizer's `apply`; takes the same."""
        given = self.variables if trainable_variables is None else trainable_variables
        variables, gradients = list(given), list(grads)
        self.prepare(self.variables if self.optimizer.built else variables)
        assert self.averager is not None
        if self.accumulation > 1:
            self.previous("apply")(self._accumulate(gradients, variables), trainable_variables)
            return
        averaged = self.averager.steps > self._seen and all(
            gradient is variable.value.grad for gradient, variable in zip(gradients, variables, strict=True)
        )
        self._seen = self.averager.steps
        if not averaged:
            gradients = self._average(gradients, variables)
        self.previous("apply")(gradients, trainable_variables)

    @torch.no_grad()
    def _accumulate(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """In the step that updates, the averages of what all steps have accumulated; else what is given."""
        assert self.averager is not None
        if (int(self.optimizer._iterations.value) + 1) % self.accumulation:
            return gradients
        for gradient, variable, accumulator in zip(gradients, variables, self.accumulators(variables), strict=True):
            variable.value.grad = gradient
            if gradient is not None and accumulator is not None:
                variable.value.grad = gradient + accumulator.value
                accumulator.value.zero_()
        self.averager.finish()
        return [
            None if gradient is None else variable.value.grad
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _average(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Average what did not come through the hooks."""
        if self.buckets is None:
            super().build(self._variables)
        assert self.buckets is not None
        dense = {
            self.index(variable): (gradient.to_dense() if gradient.is_sparse else gradient).detach().contiguous()
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        }
        self.buckets.give(list(dense), [host_array(gradient.cpu())[0] for gradient in dense.values()])
        averages = self.buckets.finish()
        for i, gradient in dense.items():
            flat = torch.from_numpy(averages[i])
            flat = flat.view(torch.bfloat16) if gradient.dtype == torch.bfloat16 else flat
            dense[i] = torch.empty_like(gradient).copy_(flat.view(gradient.shape))
        return [
            None if gradient is None else dense[self.index(variable)]
            for gradient, variable in zip(gradients, variables, strict=True)
        ]


def refuse_other_parallelism(model: Any) -> None:
    """See the protocol."""
    # Keras 3.16's TorchTrainer wraps the model in DistributedDataParallel wherever torch.distributed is initialised.
    if getattr(model, "ddp_model", None) is not None:
        raise ArgumentError(
            "Keras has wrapped the model in DistributedDataParallel, which averages gradients itself. Do not call "
            "torch.distributed.init_process_group() in this script."
        )


def is_lazy(model: Any) -> bool:
    """See the protocol; Keras builds a model on this backend before any callback is called."""
    return False


def make_train_function(model: Any) -> None:
    """See the protocol."""
    model.make_train_function(force=True)


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """See the protocol."""
    action()


class _Combined(torch.autograd.Function):
    """Moments of all ranks; backward adds up what all ranks' losses gain by them."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, count: torch.Tensor, moments: BatchMoments) -> torch.Tensor:
        found = moments.combine(count.cpu().numpy(), own.detach().cpu().numpy())
        everyones, share = (torch.from_numpy(array).to(own.device) for array in found)
        ctx.save_for_backward(own, everyones, share)
        ctx.moments = moments
        return everyones

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        own, everyones, share = ctx.saved_tensors
        total = torch.from_numpy(ctx.moments.add_up(upstream.cpu().numpy())).to(own.device)
        return gradient_of_own(own, everyones, share, total), None, None


@torch.compiler.disable
def moments_of_all(moments: BatchMoments, count: Any, own: Any) -> Any:
    """See the protocol."""
    return _Combined.apply(own, count, moments)


def seed_apart(communicator: Communicator, root: int) -> None:
    """See the protocol; torch's dropout draws from the global generator. The root's is left as it is."""
    digest: int = communicator.broadcast_object(zlib.crc32(torch.get_rng_state().numpy().tobytes()), root)
    if communicator.rank != root:
        torch.manual_seed(digest + communicator.rank)
