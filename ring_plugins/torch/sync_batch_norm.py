"""Batch norm over the batches of all ranks, on CPUs and GPUs; torch's own ``SyncBatchNorm`` refuses to work on CPUs.

Forward exchanges a count, a mean and a sum of squared deviations for each channel and rank, and combines them by the
pairwise formula of Chan, Golub and LeVeque (1979), in float64: ranks may have batches of different size, or none, and
no precision is lost to the difference of large sums. Backward exchanges two sums for each channel.

Every rank writes its numbers into its own row of a table of zeros, and the tables are added up. That is one operation
of a shape that all know, where gathering would first have to agree on sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from typing_extensions import override

from ring_plugins.core import functions, world
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.groups import Group, communicator_of

#: Why ranks cannot be in the same layers now; "" if they can.
refusal = ""


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose statistics in training are those of the batches of all ranks together.

    Parameters, buffers and files are those of torch's ``BatchNorm1d``, ``2d`` and ``3d``. Outputs, gradients and
    running statistics are those of one process with all ranks' batches, which may differ in size. With one rank, in
    evaluation, and before `ring_plugins.init()`, it is torch's layer.

    Gradients of parameters are those of this rank's samples; the optimizer averages them as those of other layers.
    Second derivatives are not supported, as with torch's.

    Args:
        num_features: channels, the second dimension of the input.
        eps, momentum, affine, track_running_stats: as for ``torch.nn.BatchNorm2d``.
        group: the ranks whose batches count, all by default.
        device, dtype: of parameters and buffers.

    Raises:
        ArgumentError: in forward, the input has other channels, or all ranks together have one value per channel.
        MismatchError: in forward or backward, the ranks are in different layers.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: Group | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.group = group

    #: Where the layer is in its model, for messages.
    place = ""

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(f"SyncBatchNorm got an input of shape {tuple(input.shape)}; it takes (N, C, ...).")

    @override
    def forward(self, input: Tensor) -> Tensor:
        return forward_over_ranks(self, self.place, self.group, input)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, group: Group | None = None) -> nn.Module:
        """Turn all batch norm layers of a module, and itself if it is one, into this class.

        Layers stay the same objects, with their parameters, buffers and hooks; so an optimizer may exist already.

        Args:
            module: any module.
            group: the ranks whose batches count, all by default.

        Returns:
            The same module.

        Raises:
            ArgumentError: a layer has a forward of its own, a parametrization, or no parameters yet.
        """
        for place, layer in batch_norms_of(module):
            layer.__class__ = cls
            layer.place, layer.group = place, group  # type: ignore[assignment]
        return module


def batch_norms_of(module: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The batch norm layers of a module and their places in it, in order.

    Raises:
        ArgumentError: there is one that cannot be synchronized.
    """
    found = [(place, layer) for place, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    for place, layer in found:
        what = f"the layer {place!r}, a {type(layer).__name__},"
        if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
            raise ArgumentError(f"{what} has no parameters yet. Call the model with a batch before its conversion.")
        if type(layer).forward not in _FORWARDS or "parametrizations" in layer._modules:
            raise ArgumentError(
                f"{what} does more than torch's batch norm layers, which would be lost: it has a forward of its own, "
                "or a parametrization. Build it of a SyncBatchNorm and a layer for the rest."
            )
        if getattr(layer, "process_group", None) is not None:
            raise ArgumentError(f"{what} has a process_group. Build it without, and pass group= to the conversion.")
    return found


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def forward_over_ranks(layer: _BatchNorm, place: str, group: Group | None, x: Tensor) -> Tensor:
    """The forward of a batch norm layer whose statistics in training are those of the batches of all ranks together.

    Args:
        layer: any of torch's.
        place: where it is in its model.
        group: the ranks, all by default.
        x: of shape (N, C, ...).
    """
    if not (layer.training and world.is_initialized() and communicator_of(group).size > 1):
        return _BatchNorm.forward(layer, x)
    if refusal:
        raise ArgumentError(refusal)
    world.current().refuse_to_recover("Batch normalization over the batches of all ranks")
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    if x.shape[1] != layer.num_features:
        raise ArgumentError(
            f"the batch norm layer {place!r} got an input of shape {tuple(x.shape)}, whose second dimension should be "
            f"its {layer.num_features} channels."
        )
    output: Tensor
    meaning = f"synchronized batch normalization{place and f' of {place}'}"
    output, mean, variance, count = _Normalize.apply(x, layer.weight, layer.bias, layer.eps, meaning, group)  # type: ignore[no-untyped-call]
    if layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            momentum = layer.momentum
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
                momentum = 1.0 / float(layer.num_batches_tracked) if momentum is None else momentum
            # Where no rank has a sample, there is nothing to learn. A float times a bool would be a float32.
            weight = (momentum or 0.0) * (count > 0).to(torch.float64)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
                running.lerp_(new.to(running.dtype), weight.to(running.dtype))
    return output


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` with mean and variance over all ranks."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        meaning: str,
        group: Group | None,
    ) -> tuple[Tensor, ...]:
        precise = torch.promote_types(x.dtype, torch.float32)
        values, channels = x.to(precise), partial(_channels, x.dim())
        mean, variance, count = _statistics(values, meaning, group)
        inverse_deviation = (variance + eps).rsqrt()
        normalized = (values - channels(mean.to(precise))) * channels(inverse_deviation.to(precise))
        output = normalized
        if weight is not None and bias is not None:
            output = output * channels(weight.to(precise)) + channels(bias.to(precise))
        ctx.save_for_backward(normalized, weight, inverse_deviation.to(precise), count)
        ctx.input_dtype, ctx.meaning, ctx.counts, ctx.group = x.dtype, meaning, _counts, group
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable  # a second derivative would need exchanges of its own
    @override
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normalized, weight, inverse_deviation, count = ctx.saved_tensors
        gradient, channels = grad_output.to(normalized.dtype), partial(_channels, normalized.dim())
        dimensions = _all_but_channels(gradient)
        grad_bias = gradient.sum(dimensions)
        grad_weight = (gradient * normalized).sum(dimensions)
        sums = _sum_over_ranks(
            torch.stack([grad_bias, grad_weight]).to(torch.float64), f"{ctx.meaning}, backward", ctx.group
        )
        # A batch that is empty on every rank has no gradient to scale.
        mean_gradient, mean_product = (sums / count.clamp(min=1)).to(gradient.dtype)
        grad_input = gradient - channels(mean_gradient) - normalized * channels(mean_product)
        scale = inverse_deviation if weight is None else inverse_deviation * weight.to(gradient.dtype)
        grad_input = (grad_input * channels(scale) * ctx.counts).to(ctx.input_dtype)
        if weight is None:
            return grad_input, *[None] * 5
        return grad_input, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None


def _statistics(values: Tensor, meaning: str, group: Group | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values of each channel over all ranks, in float64."""
    ranks = communicator_of(group)
    rank = ranks.rank
    table = torch.zeros(ranks.size, 3, values.shape[1], dtype=torch.float64, device=values.device)
    count_here = values.numel() // values.shape[1] if _counts else 0
    if count_here:
        variance, mean = torch.var_mean(values, _all_but_channels(values), correction=0)
        table[rank, 0], table[rank, 1], table[rank, 2] = count_here, mean, variance.to(torch.float64) * count_here
    counts, means, squares = _sum_over_ranks(table, meaning, group).unbind(1)
    count = counts.sum(0)
    if values.device.type == "cpu" and count[0] == 1:  # on a GPU, looking would wait for it
        raise ArgumentError(
            f"{meaning}: the batches of all ranks together have one value per channel, whose variance is unknown. Use "
            "larger batches."
        )
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    variance = (squares + counts * (means - mean) ** 2).sum(0) / divisor
    return mean, variance, count[:1]


_counts = True


@contextmanager
def uncounted() -> Iterator[None]:
    """Let this rank's batches count in no layer's statistics inside the context."""
    global _counts
    before, _counts = _counts, False
    try:
        yield
    finally:
        _counts = before


def _sum_over_ranks(numbers: Tensor, meaning: str, group: Group | None) -> Tensor:
    with purpose(meaning):
        return torch.as_tensor(functions.all_reduce(numbers, Op.SUM, out=numbers, group=group))


def _all_but_channels(x: Tensor) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _channels(dimensions: int, statistic: Tensor) -> Tensor:
    return statistic.view(1, -1, *([1] * (dimensions - 2)))
