"""Measure the profile of a torch model: hooks record when in a step each gradient is complete."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.planning.profile import Gradient, Profile

_WARM_UP = 3


class _Clock:
    """Reads the host's clock or, for a model on a GPU, CUDA events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two readings."""
        if not self._cuda:
            return float(second - first)
        torch.cuda.synchronize()
        return float(first.elapsed_time(second)) * 1e-3


def measure_torch(model: nn.Module, batch: Any, loss: Any, optimizer: Any, steps: int) -> Profile:
    """`measure` for a torch module."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ArgumentError("model has no parameter that requires a gradient.")
    differentiate: Callable[[nn.Module, Any], torch.Tensor] = loss or _default_loss
    model_state = copy.deepcopy(model.state_dict())
    optimizer = optimizer or torch.optim.SGD([p for _, p in named], lr=0.0)
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    gradients = [p.grad for _, p in named]
    clock = _Clock(named[0][1].device)
    marks: dict[int, Any] = {}
    registers: list[Any] = [p.register_post_accumulate_grad_hook for _, p in named]
    hooks = [register(_mark(i, marks, clock)) for i, register in enumerate(registers)]
    model_was_training = model.training
    times: list[list[float]] = []
    try:
        model.train()
        for step in range(-_WARM_UP, steps):
            marks.clear()
            began = clock.now()
            optimizer.zero_grad()
            value = differentiate(model, batch)
            forward = clock.now()
            value.backward()  # type: ignore[no-untyped-call]
            backward = clock.now()
            optimizer.step()
            ended = clock.now()
            if step >= 0:
                points = [(began, forward), (forward, backward), (backward, ended)]
                points += [(forward, marks.get(i, backward)) for i in range(len(named))]
                times.append([clock.between(*pair) for pair in points])
    finally:
        for hook in hooks:
            hook.remove()
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        model.train(model_was_training)
        for (_, parameter), gradient in zip(named, gradients, strict=True):
            parameter.grad = gradient
    forward, backward, update, *ready = map(statistics.median, zip(*times, strict=True))
    found = tuple(
        Gradient(name, str(p.dtype).removeprefix("torch."), p.numel(), at)
        for (name, p), at in zip(named, ready, strict=True)
    )
    where = f"measured, {steps} steps on {named[0][1].device}"
    return Profile(type(model).__name__, _batch_size(batch), forward, backward, update, found, where)


def _mark(i: int, marks: dict[int, Any], clock: _Clock) -> Callable[[torch.Tensor], None]:
    def mark(_: torch.Tensor) -> None:
        marks[i] = clock.now()

    return mark


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    training_step: Any = getattr(model, "training_step", None)
    if training_step is not None:
        result = training_step(batch, 0)
        value: torch.Tensor = result["loss"] if isinstance(result, Mapping) else result
        return value
    if isinstance(batch, Mapping):
        output = model(**batch)
        if not isinstance(getattr(output, "loss", None), torch.Tensor):
            raise ArgumentError("batch is a dictionary, but the model returns no .loss; pass loss=function.")
        loss: torch.Tensor = output.loss
        return loss
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        output, target = model(batch[0]), batch[1]
        if target.is_floating_point():
            return nn.functional.mse_loss(output, target)
        return nn.functional.cross_entropy(output, target)
    if isinstance(batch, torch.Tensor):
        squares: torch.Tensor = model(batch).square().mean()
        return squares
    raise ArgumentError(f"batch={type(batch).__name__} has no default loss; pass loss=function.")


def _batch_size(batch: Any) -> int:
    """The first dimension of the first tensor."""
    return next((tensor.shape[0] for tensor in _tensors(batch) if tensor.ndim), 1)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _tensors(item)
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from _tensors(item)
