"""The profile of a model: the bytes of its gradients, and when in a step each is ready; and how to measure yours."""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import Entry

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        name: name of the parameter.
        dtype: element type.
        count: number of elements.
        ready: seconds from the start of backward until it is complete.
    """

    name: str
    dtype: str
    count: int
    ready: float


@dataclass(frozen=True)
class Profile:
    """A training step of a single process.

    Attributes:
        name: name of the model.
        batch: samples per step.
        forward: seconds from the start of the step to the start of backward.
        backward: seconds of backward.
        update: seconds after backward.
        gradients: gradients in the order of the model's parameters.
        source: source of the times, for display.
    """

    name: str
    batch: int
    forward: float
    backward: float
    update: float
    gradients: tuple[Gradient, ...]
    source: str

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.forward + self.backward + self.update

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(g.count * STORAGE[g.dtype].itemsize for g in self.gradients)

    @property
    def entries(self) -> list[Entry]:
        """The gradients as arguments of `FusionPlan`."""
        return [Entry(g.name, g.dtype, g.count) for g in self.gradients]

    def at_step(self, seconds: float) -> Profile:
        """The same model on a device on which a step takes `seconds`; all times are scaled.

        Raises:
            ArgumentError: `seconds` is not positive.
        """
        if seconds <= 0:
            raise ArgumentError(f"a step of {seconds} seconds is not possible; give a positive time.")
        factor = seconds / self.step
        gradients = tuple(Gradient(g.name, g.dtype, g.count, g.ready * factor) for g in self.gradients)
        return Profile(
            self.name,
            self.batch,
            self.forward * factor,
            self.backward * factor,
            self.update * factor,
            gradients,
            f"{self.source}, scaled to the step time given",
        )

    def save(self, file: Path | str) -> None:
        """Write the profile as JSON."""
        Path(file).write_text(json.dumps({"ring_plugins_profile": 1, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(file: Path | str) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            ArgumentError: the file is missing, or is not a profile.
        """
        try:
            record = json.loads(Path(file).read_text())
            gradients = tuple(Gradient(**one) for one in record["gradients"])
            forward, backward, update = (float(record[name]) for name in ("forward", "backward", "update"))
            return Profile(record["name"], record["batch"], forward, backward, update, gradients, record["source"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"{file} is not a profile ({type(error).__name__}: {error}); make one with "
                "ring_plugins.planning.measure(model, batch, file=...)."
            ) from error


def from_costs(
    name: str, batch: int, layers: Sequence[tuple[str, int, float]], step: float, source: str, update: float = 0.0
) -> Profile:
    """Derive a profile from the arithmetic of each layer and the time of the whole step.

    Backward takes twice as long as forward, since it computes two products for each of forward's. The time of each
    layer is in proportion to its arithmetic.

    Args:
        name, batch, source: as in `Profile`.
        layers: (name, parameters, operations per sample) in the order of forward.
        step: seconds of a whole step.
        update: seconds of the update, which is part of the step.
    """
    forward = (step - update) / 3
    backward = 2 * forward
    total = sum(operations for _, _, operations in layers)
    ready, done = [0.0] * len(layers), 0.0
    for i in reversed(range(len(layers))):
        done += layers[i][2] / total
        ready[i] = done * backward
    gradients = tuple(
        Gradient(layer, "float32", count, at) for (layer, count, _), at in zip(layers, ready, strict=True) if count
    )
    return Profile(name, batch, forward, backward, update, gradients, source)


_WARM_UP = 3


def measure(
    model: Any,
    batch: Any,
    loss: Any = None,
    optimizer: Any = None,
    *,
    steps: int = 10,
    file: Path | str | None = None,
) -> Profile:
    """Run training steps of a model on this rank alone, and record when in backward each gradient is complete.

    Weights, running statistics and the optimizer's state are restored afterwards. Keras does not report when a gradient
    is complete, so the whole step is timed and divided among layers in proportion to their arithmetic.

    Args:
        model: a torch module (a LightningModule too), or a compiled Keras model.
        batch: batch of one rank for one step, on the model's device. For torch: the argument of `loss`; without a
            loss, a pair (inputs, targets), a dictionary for a model that returns an object with `.loss`, or inputs
            alone. For Keras: (x, y).
        loss: for torch, `loss(model, batch)` returning a number to differentiate. By default `model.training_step`
            if there is one, else cross entropy for integer targets and squared error for others.
        optimizer: for torch, the optimizer whose step is timed; SGD by default.
        steps: number of steps to time; the profile has their medians.
        file: file to which the profile is written as JSON, for `ring plan --profile`.

    Raises:
        ArgumentError: the model is neither a torch nor a Keras model, or cannot take the batch.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps={steps!r} is not a positive number of steps.")
    kinds = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if "keras" in kinds:
        profile = _measure_keras(model, batch, steps)
    elif "torch" in kinds:
        profile = _measure_torch(model, batch, loss, optimizer, steps)
    else:
        raise ArgumentError(f"model={type(model).__name__} is neither a torch module nor a Keras model.")
    if file is not None:
        profile.save(file)
    return profile


class _Clock:
    """Reads the host's clock or, for a model on a GPU, CUDA events of its stream."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda if device.type == "cuda" else None

    def now(self) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event: Any = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two readings."""
        if self._cuda is None:
            return float(second - first)
        self._cuda.synchronize()
        return float(first.elapsed_time(second)) * 1e-3


def _measure_torch(model: nn.Module, batch: Any, loss: Any, optimizer: Any, steps: int) -> Profile:
    """Hooks record when in a step each gradient is complete."""
    import torch

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
    hooks = [register(lambda _, i=i: marks.update({i: clock.now()})) for i, register in enumerate(registers)]
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
    samples = next((tensor.shape[0] for tensor in _tensors(batch) if tensor.ndim), 1)
    return Profile(type(model).__name__, samples, forward, backward, update, found, where)


def _default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    import torch
    from torch import nn

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


def _tensors(batch: Any) -> Iterator[Any]:
    if isinstance(batch, (tuple, list, Mapping)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)
    elif hasattr(batch, "ndim"):
        yield batch


def _measure_keras(model: Any, batch: Any, steps: int) -> Profile:
    """The time of a step is divided among layers in proportion to their arithmetic."""
    import keras

    if getattr(model, "optimizer", None) is None:
        raise ArgumentError("model is not compiled; call model.compile(optimizer, loss) before measure.")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ArgumentError(f"batch={type(batch).__name__} must be (x, y), or (x, y, sample_weight).")
    if not model.built:
        model(batch[0])
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(variable) for variable in variables]
    seconds = []
    try:
        for step in range(-_WARM_UP, steps):
            began = time.perf_counter()
            model.train_on_batch(*batch)
            if step >= 0:
                seconds.append(time.perf_counter() - began)
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        model.reset_metrics()
    layers = [
        (variable.path, _size(variable.shape), _operations(layer, variable))
        for layer in model._flatten_layers(include_self=False, recursive=True)
        for variable in layer._trainable_variables
        if layer.trainable
    ]
    if not layers:
        raise ArgumentError("model has no trainable variable.")
    x = batch[0]
    first = x if hasattr(x, "shape") else next(iter(x.values() if isinstance(x, dict) else x))
    source = f"step measured over {steps} steps with Keras on {keras.backend.backend()}, layers by their arithmetic"
    return from_costs(model.name, int(first.shape[0]), layers, statistics.median(seconds), source)


def _operations(layer: Any, variable: Any) -> float:
    """Operations of a product with a kernel: two per weight and output position; one for any other variable."""
    if len(variable.shape) < 2:
        return 1.0
    try:
        shape = layer.output.shape
    except (AttributeError, ValueError):  # the layer is used more than once, or by a subclassed model
        return 2.0 * _size(variable.shape)
    channels_first = getattr(layer, "data_format", "") == "channels_first"
    positions = shape[2:] if channels_first else shape[1:-1]
    return 2.0 * _size(variable.shape) * _size(n for n in positions if n)


def _size(shape: Iterable[int]) -> int:
    return math.prod(int(n) for n in shape)
