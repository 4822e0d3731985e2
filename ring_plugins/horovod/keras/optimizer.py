"""Optimizers of Keras with what Horovod's have beyond averages: sums, several passes, and gradients of one rank alone.

What averages replaces methods of the optimizer (`ring_plugins.keras.averaging`); here its `average` is replaced in the
same way. With one rank there is nothing to average, and `apply` itself is replaced where gradients are multiplied.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras

from ring_plugins import keras as ring_keras
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.world import current
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    check_compression,
    gradient_factor,
    size,
)
from ring_plugins.horovod.common.process_sets import group_of
from ring_plugins.keras.averaging import GradientAveraging, averaging_of
from ring_plugins.keras.backends import backend
from ring_plugins.keras.consistency import LOCAL
from ring_plugins.keras.patches import Patch

O = TypeVar("O", bound=keras.optimizers.Optimizer)  # noqa: E741 - one letter, as type variables are


def DistributedOptimizer(  # noqa: N802 - known by this name
    optimizer: O,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> O:
    """`ring_plugins.keras.DistributedOptimizer` with Horovod's arguments, and its method `register_local_var`.

    Args:
        optimizer: any Keras optimizer.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average` or `Sum`.
        backward_passes_per_step: passes whose gradients are added before an update. They become the optimizer's own
            `gradient_accumulation_steps`, so that `iterations` counts updates; Horovod's counts passes.
        average_aggregated_gradients: whether the sum of these passes is divided by their number.
        process_set: the processes that train together, all by default.
        scale_local_gradients: whether gradients of local variables, which stay this rank's own, are divided by the
            number of ranks, as an average over ranks would be of which only this one has a gradient.
        name, device_dense, device_sparse, sparse_as_dense, gradient_predivide_factor, num_groups, groups: have no
            effect.

    Returns:
        The same optimizer. `optimizer.register_local_var(variable)`, before the first step, leaves the gradient of a
        variable to each rank.

    Raises:
        ArgumentError: an argument is not supported.
    """
    factor = gradient_factor(op, gradient_predivide_factor, size(process_set))
    check_size_stays(factor)
    group = group_of(process_set)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentError(
            f"optimizer={type(optimizer).__name__} of {type(optimizer).__module__} is not of Keras 3; pass one of "
            "keras.optimizers. In a loop, ring_plugins.horovod.tensorflow.DistributedGradientTape serves any optimizer."
        )
    _accumulate(optimizer, backward_passes_per_step)
    ring_keras.DistributedOptimizer(optimizer, compression=check_compression(compression), group=group)
    passes = 1 if average_aggregated_gradients else backward_passes_per_step
    averaging = averaging_of(optimizer)
    if averaging is None:
        if passes > 1:
            _multiply(optimizer, passes)
    elif "average" not in vars(averaging):  # not a second call for the same optimizer
        factors = _Factors(factor, passes, 1 / size(process_set) if scale_local_gradients else 1)
        average = functools.partial(_average, weakref.ref(averaging), factors)
        Patch(averaging, average=average, accumulators=functools.partial(_accumulators, weakref.ref(averaging)))
    Patch(optimizer, register_local_var=functools.partial(_register, weakref.ref(optimizer)))
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 - known by this name
    optimizer: O,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Op = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> O:
    """A `DistributedOptimizer` to which the weights of some layers are local variables.

    Args:
        local_layers: built Keras layers, or one.
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, groups, process_set, scale_local_gradients: as for
            `DistributedOptimizer`.

    Raises:
        ArgumentError: something else is in `local_layers`; otherwise as `DistributedOptimizer`.
    """
    layers = layers_in(local_layers)
    DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        0,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            _register(weakref.ref(optimizer), variable)
    return optimizer


def layers_in(local_layers: Any) -> list[Any]:
    """Horovod's argument `local_layers` as a list: none, a layer, or several.

    Raises:
        ArgumentError: something in it is no layer, or has no variables yet.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ArgumentError(f"local_layers has {layer!r:.80}, which is not a keras.layers.Layer.")
        if not layer.built:
            raise ArgumentError(
                f"layer {layer.name!r} of local_layers is not built, so that its weights are not known. Begin the "
                "model with keras.Input(...), or call it once, before."
            )
    return layers


def check_size_stays(factor: int) -> None:
    """Raise ArgumentError if compiled steps are to multiply by a number of ranks that may change."""
    if factor > 1 and current().recovers:
        raise ArgumentError(
            f"op=hvd.Sum multiplies averages by {factor}, the number of ranks, but this job goes on without lost "
            "ranks. Pass hvd.Average, and a learning rate that is multiplied by hvd.size()."
        )


def mark_local(variables: Iterable[Any], begins_so: bool) -> None:
    """Let variables be each rank's own: nothing compares or averages them.

    Args:
        variables: of Keras.
        begins_so: whether they are not broadcast either.
    """
    for variable in variables:
        setattr(variable, LOCAL, begins_so or getattr(variable, LOCAL, False))


class _Factors(NamedTuple):
    """What gradients are multiplied by: averages over ranks, means over passes, and those of local variables."""

    ranks: float
    passes: float
    local: float


def _average(
    of: weakref.ref[GradientAveraging],
    by: _Factors,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    rate: Any = None,
) -> list[Any]:
    """Replaces an averaging's `average`, with the same arguments and result."""
    averaging = of()
    assert averaging is not None
    is_local = [getattr(variable, _OWN, False) for variable in variables]
    gradients = [_times(gradient, by.passes) for gradient in gradients]
    if averaging.accumulation_steps > 1:  # what is added up is averaged later
        gradients = [_times(gradient, by.ranks) for gradient in gradients]
    shared = [None if local else gradient for gradient, local in zip(gradients, is_local, strict=True)]
    found = GradientAveraging.average(averaging, shared, list(variables), rate)
    if averaging.accumulation_steps == 1:
        found = [_times(gradient, by.ranks) for gradient in found]
    return [
        _times(own, by.local) if local else average
        for own, average, local in zip(gradients, found, is_local, strict=True)
    ]


def _accumulators(of: weakref.ref[GradientAveraging]) -> list[Any]:
    """Replaces an averaging's `accumulators`: those of local variables are not averaged."""
    averaging = of()
    assert averaging is not None
    found = GradientAveraging.accumulators(averaging)
    local = [one for one in averaging.variables if getattr(one, _OWN, False)]
    own = [averaging._accumulator(one) for one in local if found]
    return [one for one in found if not any(one is other for other in own)]


#: Attribute of a variable whose gradients are each rank's own.
_OWN = "_ring_own_gradient"


def _register(of: weakref.ref[Any], variable: Any) -> None:
    """Leave the gradient of a variable to each rank. All ranks call it, before the optimizer's first step."""
    averaging = None if (optimizer := of()) is None else averaging_of(optimizer)
    if keras.backend.backend() == "torch":
        raise ArgumentError(
            "a variable with gradients of its own on each rank needs Keras on TensorFlow or JAX: on PyTorch, backward "
            "averages all gradients. Leave it out of this optimizer, and update it with one that is not distributed."
        )
    if averaging is not None and averaging.exchange is not None:
        raise ArgumentError(
            f"variable {getattr(variable, 'path', variable)!r} was registered as local after the optimizer's first "
            "step; register it before."
        )
    setattr(variable, _OWN, True)
    mark_local([variable], begins_so=False)


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let an optimizer add the gradients of several passes.

    Raises:
        ArgumentError: it cannot do so, or not any more.
    """
    if not isinstance(passes, int) or passes < 1:
        raise ArgumentError(f"backward_passes_per_step={passes!r} must be a whole number, at least 1.")
    if passes in (1, optimizer.gradient_accumulation_steps):
        return
    if optimizer.built or hasattr(optimizer, "inner_optimizer") or optimizer.gradient_accumulation_steps:
        raise ArgumentError(
            f"backward_passes_per_step={passes!r} needs an optimizer that has made no step, accumulates nothing itself "
            f"and is no LossScaleOptimizer. Give that one's inner optimizer gradient_accumulation_steps={passes!r}."
        )
    optimizer.gradient_accumulation_steps = passes


def _multiply(optimizer: Any, factor: float) -> None:
    """Multiply the gradients that an optimizer gets, where nothing averages them."""
    apply = optimizer.apply

    def multiplied(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        return apply([_times(gradient, factor) for gradient in grads], trainable_variables)

    Patch(optimizer, apply=backend().opaque(multiplied))


def _times(gradient: Any, factor: float) -> Any:
    """A gradient times a factor: None, dense, or rows as TensorFlow has them."""
    if gradient is None or factor == 1:
        return gradient
    if hasattr(gradient, "dense_shape") and hasattr(gradient, "values"):
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
