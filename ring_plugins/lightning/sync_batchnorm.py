"""Batch norm over the batches of all ranks, on the CPU, where torch's own ``SyncBatchNorm`` refuses to work."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from ring_plugins.core.collectives.fingerprint import purpose

#: What the exchanges are for.
_PURPOSE = "synchronized batch normalization"


class HostSyncBatchNorm:
    """A Lightning ``LayerSync``: batch norm layers compute their statistics over the whole batch of all ranks."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Give every batch norm layer another forward."""
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give the layers their own forward back; parameters and buffers keep what was learned."""
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                vars(module).pop("forward", None)
        return model


def _forward(layer: _BatchNorm, x: Tensor) -> Tensor:
    """The forward of a batch norm layer whose statistics in training are those of the batches of all ranks together."""
    if not layer.training:
        return type(layer).forward(layer, x)
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    output: Tensor
    output, mean, variance, count = _Normalize.apply(x, layer.weight, layer.bias, layer.eps)  # type: ignore[no-untyped-call]
    if layer.running_mean is not None and layer.running_var is not None:
        assert layer.num_batches_tracked is not None
        with torch.no_grad():
            layer.num_batches_tracked.add_(1)
            momentum = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
            unbiased = variance * (count / (count - 1).clamp(min=1))
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
    return output


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` with mean and variance over all ranks.

    Forward exchanges a count, a mean and a sum of squared deviations for each channel and rank, and combines them by
    the pairwise formula of Chan, Golub and LeVeque (1979), in float64: ranks may have batches of different size, or
    none, and no precision is lost to the difference of large sums. Backward exchanges two sums for each channel.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        precise = torch.promote_types(x.dtype, torch.float32)
        values = x.to(precise)
        own_count = x.numel() // x.shape[1]
        mean, variance, count = _statistics(values, own_count)
        inverse_deviation = (variance + eps).rsqrt()
        normalized = (values - _channels(mean.to(precise), x)) * _channels(inverse_deviation.to(precise), x)
        output = normalized
        if weight is not None and bias is not None:
            output = output * _channels(weight.to(precise), x) + _channels(bias.to(precise), x)
        ctx.save_for_backward(normalized, weight, inverse_deviation.to(precise), count)
        ctx.input_dtype = x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @override
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normalized, weight, inverse_deviation, count = ctx.saved_tensors
        gradient = grad_output.to(normalized.dtype)
        dimensions = _all_but_channels(gradient)
        grad_bias = gradient.sum(dimensions)
        grad_weight = (gradient * normalized).sum(dimensions)
        sums = torch.stack([grad_bias, grad_weight]).to(torch.float64)
        with purpose(_PURPOSE):
            dist.all_reduce(sums)
        # A batch that is empty on every rank has no gradient to scale.
        mean_gradient, mean_product = (sums / count.clamp(min=1)).to(gradient.dtype)
        grad_input = gradient - _channels(mean_gradient, gradient) - normalized * _channels(mean_product, gradient)
        scale = inverse_deviation if weight is None else inverse_deviation * weight.to(gradient.dtype)
        grad_input = grad_input * _channels(scale, gradient)
        if weight is None:
            return grad_input.to(ctx.input_dtype), None, None, None
        return grad_input.to(ctx.input_dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None


def _statistics(values: Tensor, own_count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values of each channel over all ranks, in float64."""
    own = torch.zeros(3, values.shape[1], dtype=torch.float64)
    if own_count:
        variance, mean = torch.var_mean(values, _all_but_channels(values), correction=0)
        own[0], own[1], own[2] = own_count, mean, variance.to(torch.float64) * own_count
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    with purpose(_PURPOSE):
        dist.all_gather(gathered, own)
    counts, means, squares = torch.stack(gathered, dim=1)
    count = counts.sum(0)
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    variance = (squares + counts * (means - mean) ** 2).sum(0) / divisor
    return mean, variance, count[:1]


def _all_but_channels(x: Tensor) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _channels(statistic: Tensor, like: Tensor) -> Tensor:
    return statistic.view(1, -1, *([1] * (like.dim() - 2)))
