"""Horovod's operations on TensorFlow's tensors, and their gradients.

Gradients have the factors of Horovod 0.28, for which its scripts chose their learning rates. With n ranks, those of
`allgather` and `broadcast` are 1/n times, and those of `reducescatter` n times the gradients of the sum of all ranks'
losses. They are made of the same operations, so second derivatives exist, too.

An operation is that of a group with one tensor. What a group does on the host stands in host.py.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    Sum,
    compressor_of,
    op_of,
    rank,
    reduction_of,
    scaled,
    size,
    told,
)
from ring_plugins.horovod.tensorflow import host
from ring_plugins.horovod.tensorflow.errors import NotSupported, with_tensorflow_errors
from ring_plugins.keras.backends.tensorflow_xla import reject_inside_xla
from ring_plugins.keras.job import capture_exceptions, connect, restore_exceptions

#: The name and the process set of an operation.
Call = tuple[str | None, Any]

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


def as_it_is(function: F) -> F:
    """Keep AutoGraph, which rewrites what a `tf.function` calls, from rewriting this function."""
    return cast("F", tf.autograph.experimental.do_not_convert(function))


def operation(function: F) -> F:
    """Make an operation of Horovod's out of a function that calls collectives."""
    return as_it_is(with_tensorflow_errors(cast("F", told(function, by_name=True))))


@operation
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
    ignore_name_scope: bool = False,
) -> Any:
    """Combine a tensor of all ranks. Average and Sum pass gradients.

    Args:
        tensor: of equal shape and dtype on all ranks. The rows of `tf.IndexedSlices` of all ranks are concatenated.
        average: Horovod's older argument: False sums.
        device_dense, device_sparse, ignore_name_scope: have no effect.
        compression: `Compression.fp16` sends floats in 16 bits, but for `tf.IndexedSlices`; or a compressor of yours.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`; for `tf.IndexedSlices` one of the first two.
        prescale_factor, postscale_factor: factors before and after, not for `tf.IndexedSlices`.
        name: by which the ranks' calls match.
        process_set: the processes that take part, all by default.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_reduce`.
    """
    factors = (prescale_factor, postscale_factor)
    return _all_reduced([tensor], average, compression, op, factors, (name, process_set))[0]


@operation
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of several tensors as one operation; further arguments as there."""
    factors = (prescale_factor, postscale_factor)
    return _all_reduced(tensors, average, compression, op, factors, (name, process_set))


def _all_reduced(
    tensors: Sequence[Any],
    average: bool | None,
    compression: Any,
    op: Op | None,
    factors: tuple[float, float],
    call: Call,
) -> list[Any]:
    are_rows = [isinstance(tensor, tf.IndexedSlices) for tensor in tensors]
    rows = iter([_reduced_rows(one, average, op, factors, call) for one in itertools.compress(tensors, are_rows)])
    reduction, dense = op_of(average, op), itertools.compress(tensors, map(operator.not_, are_rows))
    others = iter(_scaled([*dense], compression, reduction, factors, call, lambda xs, op: _reduced(xs, op, call)))
    return [next(rows if is_one else others) for is_one in are_rows]


def _reduced(xs: list[Any], op: Op, call: Call) -> list[Any]:
    def gradient(upstream: list[Any], *_: Any) -> list[Any]:
        _check_has_gradient("allreduce", op)
        return _reduced(upstream, op, call)

    return _differentiable(host.all_reduction(op), call, xs, [(x.dtype, x.shape) for x in xs], gradient)


def _reduced_rows(slices: Any, average: bool | None, op: Op | None, factors: tuple[float, float], call: Call) -> Any:
    if op not in (None, Average, Sum) or factors != (1.0, 1.0):
        raise NotSupported(
            f"tensor is a tf.IndexedSlices, for which op={op}, prescale_factor={factors[0]} and postscale_factor="
            f"{factors[1]} are not supported; pass tf.convert_to_tensor(tensor)."
        )
    values, indices = (_gathered([tf.convert_to_tensor(one)], call)[0] for one in (slices.values, slices.indices))
    if op_of(average, op) is Average:
        values /= tf.cast(size(call[1]), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


@operation
def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None) -> Any:
    """Concatenate the tensors of all ranks, whose first dimensions may differ; averages gradients."""
    return _gathered([tf.convert_to_tensor(tensor)], (name, process_set))[0]


@operation
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> list[Any]:
    """`allgather` of several tensors as one operation."""
    return _gathered([tf.convert_to_tensor(tensor) for tensor in tensors], (name, process_set))


def _gathered(xs: list[Any], call: Call) -> list[Any]:
    def gradient(upstream: list[Any], xs: list[Any], _: Any) -> list[Any]:
        averages = _reduced(upstream, Average, call)
        own = tf.stack([tf.shape(x)[0] if x.shape.rank != 0 else tf.constant(1) for x in xs])
        counts = tf.reshape(_host_call(host.GATHERING, call, [own], [(own.dtype, [None])])[0], [-1, len(xs)])
        starts = tf.reduce_sum(counts[: rank() if call[1] is None else call[1].rank()], 0)
        return [
            tf.reshape(average[starts[i] : starts[i] + own[i]], tf.shape(x))
            for i, (average, x) in enumerate(zip(averages, xs, strict=True))
        ]

    return _differentiable(host.GATHERING, call, xs, [(x.dtype, _any_rows(x)) for x in xs], gradient)


@operation
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> Any:
    """The root's tensor, on every rank; its gradient is the average of the ranks' gradients."""
    x, call = tf.convert_to_tensor(tensor), (name, process_set)

    def gradient(upstream: list[Any], *_: Any) -> list[Any]:
        averages = _reduced(upstream, Average, call)
        return averages if rank() == root_rank else [averages[0] * 0]

    return _differentiable(host.broadcasting(root_rank), call, [x], [(x.dtype, x.shape)], gradient)[0]


@operation
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> Any:
    """Send some rows to each rank; gradients go back the same way.

    Args:
        tensor: of at least one dimension.
        splits: how many rows each rank gets, in a list or tensor; equal parts by default.
        name: by which the ranks' calls match.
        ignore_name_scope: has no effect.
        process_set: the processes that take part, all by default.

    Returns:
        The rows that came, in rank order; with `splits` also how many came from each rank.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_to_all`.
    """
    sent = [] if splits is None else [tf.cast(splits, tf.int32)]
    rows, received = _exchanged(tf.convert_to_tensor(tensor), sent, (name, process_set))
    return rows if splits is None else (rows, received)


def _exchanged(x: Any, sent: list[Any], call: Call) -> list[Any]:
    """The rows that came, and how many from each rank; `sent` holds how many go to each rank, or nothing."""

    def gradient(upstream: list[Any], _: Any, results: list[Any]) -> list[Any]:
        return _exchanged(upstream[0], [results[1]], call)[:1]

    types = [(x.dtype, _any_rows(x)), (tf.int32, [None])]
    return _differentiable(host.EXCHANGE, call, [x], types, gradient, sent)


@operation
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = Average,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine a tensor of all ranks and keep this rank's rows; the first ranks get one more if it does not divide.

    Average and Sum pass gradients: with Average the concatenation of the ranks' gradients, with Sum n times that.
    """
    return _scattered([tensor], compression, op, (prescale_factor, postscale_factor), (name, process_set))[0]


@operation
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """`reducescatter` of several tensors as one operation; further arguments as there."""
    return _scattered(tensors, compression, op, (prescale_factor, postscale_factor), (name, process_set))


def _scattered(tensors: Sequence[Any], compression: Any, op: Op, factors: tuple[float, float], call: Call) -> list[Any]:
    reduction = op_of(None, op)

    def gradient(upstream: list[Any], *_: Any) -> list[Any]:
        _check_has_gradient("reducescatter", reduction)
        gathered = _gathered(upstream, call)
        factor = size(call[1]) if reduction is Sum else 1
        return gathered if factor == 1 else [one * tf.cast(factor, one.dtype) for one in gathered]

    def scattered(xs: list[Any], op: Op) -> list[Any]:
        return _differentiable(host.scattering(op), call, xs, [(x.dtype, _any_rows(x)) for x in xs], gradient)

    return _scaled(tensors, compression, reduction, factors, call, scattered)


def _scaled(
    tensors: Sequence[Any],
    compression: Any,
    op: Op,
    factors: tuple[float, float],
    call: Call,
    reduce: Callable[[list[Any], Op], list[Any]],
) -> list[Any]:
    """A reduction of what is sent for tensors, between two factors, in the tensors' dtypes."""
    compressor = compressor_of(compression)
    sent = [compressor.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    found: list[Any] = [None] * len(sent)
    for is_whole in (False, True):  # whose averages are different reductions
        some = [i for i, (x, _) in enumerate(sent) if x.dtype.is_integer == is_whole]
        called, after = reduction_of(op, factors[1], size(call[1]), is_whole)
        results = reduce([scaled(sent[i][0], factors[0], is_whole) for i in some], called) if some else []
        for i, result in zip(some, results, strict=True):
            found[i] = compressor.decompress(scaled(result, after, is_whole), sent[i][1])
    return found


def _check_has_gradient(kind: str, op: Op) -> None:
    if op not in (Average, Sum):
        raise ArgumentError(f"op={op} of hvd.{kind} passes no gradient; only Average and Sum do.")


def _any_rows(tensor: Any) -> Any:
    """The shape of a tensor with any number of rows; numbers count as one row each."""
    return None if tensor.shape.rank is None else [None, *tensor.shape[1:]]


def _differentiable(
    collective: host.Collective,
    call: Call,
    inputs: list[Any],
    results: list[tuple[Any, Any]],
    gradient: Callable[[list[Any], list[Any], list[Any]], list[Any]],
    others: Sequence[Any] = (),
) -> list[Any]:
    """A `_host_call` that passes gradients to its inputs.

    Args:
        collective, call, inputs, results: as for `_host_call`.
        gradient: the gradients of inputs, from those of their results, from these inputs, and from all results.
        others: further inputs, which get no gradient.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def operation(*xs: Any) -> tuple[list[Any], Callable[..., Any]]:
        found = _host_call(collective, call, [*xs, *others], results)

        def backward(*upstream: Any) -> list[Any]:
            some = [i for i, x in enumerate(xs) if x.dtype.is_floating or x.dtype.is_complex]
            own = [tf.convert_to_tensor(upstream[i]) for i in some]
            gradients = dict(zip(some, gradient(own, [xs[i] for i in some], found) if some else (), strict=True))
            return [gradients.get(i) for i in range(len(xs))]

        return found, backward

    found: list[Any] = operation(*inputs) if inputs else []
    return found


def _host_call(collective: host.Collective, call: Call, inputs: list[Any], results: list[tuple[Any, Any]]) -> list[Any]:
    """Call a collective on the host, now or whenever the `tf.function` that is being traced runs.

    Args:
        collective: to call.
        call: the operation's name, and its process set.
        inputs: tensors.
        results: dtype and shape of each result.
    """
    reject_inside_xla(
        f"hvd.{collective.kind}",
        "Call it outside that function: in one without jit_compile=True, which may call compiled ones.",
    )
    connect()

    def run(*arrays: np.ndarray[Any, Any]) -> Any:
        return [np.asarray(one) for one in collective.run(call, arrays)]

    with restore_exceptions():
        found = tf.numpy_function(capture_exceptions(run), inputs, [dtype for dtype, _ in results])
    pairs = zip(tf.nest.flatten(found), results, strict=True)
    return [tf.ensure_shape(one, shape) for one, (_, shape) in pairs]
