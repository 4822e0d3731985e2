"""`import ring_plugins.horovod.tensorflow as hvd`: what scripts with a `GradientTape` use of `horovod.tensorflow`.

Operations work eagerly and inside `tf.function`, where they are calls of the host; `jit_compile=True` cannot contain
these. Functions of TensorFlow 1 (sessions, hooks) do not exist here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ring_plugins.horovod import basics
from ring_plugins.horovod import keras as horovod_keras

# isort: split
import keras
import numpy as np
import tensorflow as tf

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.validation import refusals_told
from ring_plugins.core.functions import all_or_none
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.core.world import constructed_by_all
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    Sum,
    check_averages,
    check_compression,
    check_name,
    check_process_set,
    op_of,
    size,
)
from ring_plugins.horovod.basics import refuse_join as join
from ring_plugins.keras.averaging import BUCKET_BYTES, describe_gradient
from ring_plugins.keras.backends import Exchange, Settings, backend
from ring_plugins.keras.job import capture_exceptions, connect
from ring_plugins.keras.state import broadcast_all, broadcast_values
from ring_plugins.other_names import no_attribute

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])

DistributedOptimizer = horovod_keras.DistributedOptimizer

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "grouped_allreduce",
    "join",
]
__all__ += basics.__all__


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


def _as_it_is(function: F) -> F:
    """Keep AutoGraph, which rewrites what a `tf.function` calls, from rewriting this function."""
    return cast("F", tf.autograph.experimental.do_not_convert(function))


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` returns averages over all ranks.

    Args:
        gradtape: the tape that it stands for; everything but `gradient` is the tape's own.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average`; no other reduction of gradients is supported.
        process_set: all processes.
        device_dense, device_sparse, sparse_as_dense, gradient_predivide_factor, num_groups, groups,
            scale_local_gradients: have no effect.

    Raises:
        ArgumentError: an argument is not supported, or Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: Op = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
    ) -> None:
        check_averages(op, gradient_predivide_factor)
        check_process_set(process_set)
        if keras.backend.backend() != "tensorflow":
            raise ArgumentError(
                f"KERAS_BACKEND={keras.backend.backend()!r}, but DistributedGradientTape needs Keras on TensorFlow."
            )
        self._tape, self._compression = gradtape, check_compression(compression)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tape.__exit__(*exception)

    @_as_it_is
    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """The tape's gradients of `target`, averaged over all ranks.

        Args:
            target: as for the tape.
            sources: variables of TensorFlow or Keras, in any structure; those of a rank whose gradient is None get
                None, too.
            arguments, options: further arguments of the tape's `gradient`.

        Raises:
            ArgumentError: a source is no variable. Take gradients by other tensors from the tape itself.
            MismatchError: the variables differ among ranks.
        """
        own = self._tape.gradient(target, sources, *arguments, **options)
        if size() == 1:
            return own
        pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(own), strict=True)
        present = {i: pair for i, pair in enumerate(pairs) if pair[1] is not None}
        if not present:
            return own
        self._check_dtypes(present)
        exchange = _exchange_for({i: variable for i, (variable, _) in present.items()}, self._compression)
        averages = _averaged(exchange, [gradient for _, gradient in present.values()])
        found = dict(zip(present, averages, strict=True))
        return tf.nest.pack_sequence_as(sources, [found.get(i) for i in range(len(tf.nest.flatten(sources)))])

    def _check_dtypes(self, present: dict[int, tuple[Any, Any]]) -> None:
        """Refuse gradients of another dtype than their variable's, whose bytes the buckets would misread."""
        for variable, gradient in present.values():
            expected, found = (keras.backend.standardize_dtype(one.dtype) for one in (variable, gradient))
            if found != expected:
                raise ArgumentError(
                    f"the gradient of {variable.name!r} has dtype={found}, the variable {expected}. Compute the target "
                    "in the variable's dtype, on all ranks."
                )


#: By identity of the variables that have gradients: what averages them. Scripts make a new tape for every step.
_exchanges: dict[tuple[int, ...], Exchange] = {}


def _exchange_for(variables: dict[int, Any], compression: Any) -> Exchange:
    """What averages the gradients of these variables, made at their first step; collective then.

    Args:
        variables: by their number among the tape's sources. If other variables than before have a gradient, on all
            ranks, that is another exchange; if only on some ranks, it is a MismatchError.
        compression: as for `Settings`.
    """
    key = tuple(map(id, variables.values()))
    if key not in _exchanges:
        with constructed_by_all("the first gradients of a DistributedGradientTape"):
            if wrong := [one for one in variables.values() if not isinstance(one, (tf.Variable, keras.Variable))]:
                raise ArgumentError(
                    f"sources has a {type(wrong[0]).__name__}, whose gradients are this rank's own; take them from the "
                    "tape itself, and only those of variables from the DistributedGradientTape."
                )
            entries = [describe_gradient(i, variable) for i, variable in variables.items()]
            sizes = BucketSizes(BUCKET_BYTES).checked()
            settings = Settings(f"gradients of tape {len(_exchanges)}", sizes, compression)
            _exchanges[key] = backend().Exchange(list(variables.values()), entries, settings)
        for variable in variables.values():  # whose identity another may have afterwards
            weakref.finalize(variable, _forget, key)
    return _exchanges[key]


def _forget(key: tuple[int, ...]) -> None:
    if (exchange := _exchanges.pop(key, None)) is not None:
        exchange.release()


def _averaged(exchange: Exchange, gradients: Sequence[Any]) -> list[Any]:
    """Averages in memory of their own: those of the exchange are views of buckets that the next step overwrites."""
    copies: list[Any] = []

    def copy(averages: list[Any], _: Any) -> None:
        for average in averages:
            if isinstance(average, tf.IndexedSlices):
                copies.append(average)
            else:
                copies.append(tf.ensure_shape(tf.raw_ops.DeepCopy(x=average), average.shape))

    with refusals_told(exchange.communicator, "averaging gradients"):
        averages = exchange.average(dict(enumerate(gradients)))
        exchange.update(copy, [averages[i] for i in range(len(gradients))], None)
    return copies


@_as_it_is
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> None:
    """Give all ranks the root's values of variables, now or whenever the `tf.function` that is being traced runs.

    Args:
        variables: `model.variables`, `optimizer.variables`, or `optimizer.variables()` of older Keras versions.
        root_rank: whose values all get.
        process_set: all processes.
        inplace: has no effect; variables are always overwritten.

    Raises:
        MismatchError: the variables differ among ranks.
    """
    check_process_set(process_set)
    these = list(variables() if callable(variables) else variables)
    if tf.executing_eagerly() or not these:
        broadcast_all(these, root_rank)
        return
    connect()

    def call(*values: Any) -> list[Any]:
        return broadcast_values(these, values, root_rank)

    own = [tf.convert_to_tensor(variable) for variable in these]
    values = tf.numpy_function(capture_exceptions(call), own, [value.dtype for value in own])
    for variable, value in zip(these, tf.nest.flatten(values), strict=True):
        variable.assign(tf.ensure_shape(value, variable.shape))


class _Variables(list[Any]):
    """`optimizer.variables` which scripts may call, as they had to before Keras 2.11: `optimizer.variables()`.

    Keras 2 has the same list for the same reason; the optimizers of Keras 3 have lost it.
    """

    def __call__(self) -> _Variables:
        return self


def _make_variables_callable(kind: Any) -> None:
    read = kind.variables.fget
    kind.variables = property(lambda optimizer: _Variables(read(optimizer)), doc=kind.variables.__doc__)


if keras.backend.backend() == "tensorflow":
    # Scripts read the list before this package sees their optimizer, so the classes must have it.
    for _kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _make_variables_callable(_kind)


@_as_it_is
@all_or_none
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Combine a tensor of all ranks. Average and Sum pass gradients.

    Args:
        tensor: dense, of equal shape and dtype on all ranks.
        average: Horovod's older argument: False sums.
        device_dense, device_sparse: have no effect.
        compression: `Compression.fp16` sends floats in 16 bits.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: factors before and after.
        name: compared among the ranks.
        process_set: all processes.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_reduce`.
    """
    check_process_set(process_set)
    reduction = op_of(average, op)
    if isinstance(tensor, tf.IndexedSlices):
        raise ArgumentError("tensor is a tf.IndexedSlices; pass tf.convert_to_tensor(tensor).")
    tensor = tf.convert_to_tensor(tensor)
    is_sent_in_half = check_compression(compression) and tensor.dtype.is_floating
    sent = tf.cast(tensor, tf.float16) if is_sent_in_half else tensor

    def reduce(x: Any) -> Any:
        return _host_call(lambda x: ring.all_reduce(x, reduction), x, x.shape, "allreduce", name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            if reduction not in (Average, Sum):
                raise ArgumentError(f"op={reduction} of hvd.allreduce passes no gradient; only Average and Sum do.")
            return reduce(upstream)

        return reduce(x), gradient

    scaled = sent if prescale_factor == 1.0 else sent * tf.cast(prescale_factor, sent.dtype)
    result = reduced(scaled)
    result = result if postscale_factor == 1.0 else result * tf.cast(postscale_factor, sent.dtype)
    return tf.cast(result, tensor.dtype)


@_as_it_is
@all_or_none
def grouped_allreduce(tensors: Sequence[Any], *arguments: Any, **options: Any) -> list[Any]:
    """Combine several tensors of all ranks; further arguments as for `allreduce`."""
    return [allreduce(tensor, *arguments, **options) for tensor in tensors]


@_as_it_is
@all_or_none
def allgather(tensor: Any, name: str | None = None, process_set: Any = None) -> Any:
    """Concatenate the tensors of all ranks, whose first dimensions may differ; a gradient through it is an error."""
    check_process_set(process_set)
    tensor = tf.convert_to_tensor(tensor)
    return _without_gradient(ring.all_gather, tensor, [None, *tensor.shape[1:]], "allgather", name)


@_as_it_is
@all_or_none
def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """The root's tensor, on every rank; a gradient through it is an error."""
    check_process_set(process_set)
    tensor = tf.convert_to_tensor(tensor)
    return _without_gradient(lambda x: ring.broadcast(x, root_rank), tensor, tensor.shape, "broadcast", name)


def _without_gradient(collective: Callable[[Any], Any], tensor: Any, shape: Any, kind: str, name: str | None) -> Any:
    """A collective whose gradient raises, instead of being None, which optimizers skip in silence."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            raise ArgumentError(f"hvd.{kind} passes no gradient on TensorFlow; give it tf.stop_gradient(tensor).")

        return _host_call(collective, x, shape, kind, name), gradient

    return call(tensor)


def _host_call(collective: Callable[[Any], Any], x: Any, shape: Any, kind: str, name: str | None) -> Any:
    """Call a collective on the host, now or whenever the `tf.function` that is being traced runs."""
    connect()

    def call(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        check_name(kind, name)
        return np.asarray(collective(array))

    return tf.ensure_shape(tf.numpy_function(capture_exceptions(call), [x], x.dtype), shape)
