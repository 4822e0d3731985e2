"""Horovod's operations on TensorFlow's tensors, and their gradients.

Gradients have the factors of Horovod 0.28, for which its scripts chose their learning rates. With n ranks, those of
`allgather` and `broadcast` are 1/n times, and those of `reducescatter` n times the gradients of the sum of all ranks'
losses. They are made of the same operations, so second derivatives exist, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.groups import Group
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    Sum,
    begin,
    compressor_of,
    grouped,
    op_of,
    rank,
    reduction_of,
    scaled,
    size,
    told,
)
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
    return as_it_is(with_tensorflow_errors(cast("F", told(function))))


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
        name: compared among the ranks.
        process_set: the processes that take part, all by default.

    Raises:
        ArgumentError, MismatchError: as `ring_plugins.all_reduce`.
    """
    factors = (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        return _reduced_rows(tensor, average, op, factors, (name, process_set))
    reduction = op_of(average, op)
    return _scaled(
        tensor, compression, reduction, factors, process_set, lambda x, op: _reduced(x, op, (name, process_set))
    )


grouped_allreduce = operation(grouped(allreduce, list))


def _reduced(x: Any, op: Op, call: Call) -> Any:
    def gradient(upstream: Any, _: Any) -> Any:
        _check_has_gradient("allreduce", op)
        return _reduced(upstream, op, call)

    reduce = functools.partial(ring.all_reduce, op=op)
    return _differentiable("allreduce", call, reduce, [x], [(x.dtype, x.shape)], gradient)


def _reduced_rows(slices: Any, average: bool | None, op: Op | None, factors: tuple[float, float], call: Call) -> Any:
    if op not in (None, Average, Sum) or factors != (1.0, 1.0):
        raise NotSupported(
            f"tensor is a tf.IndexedSlices, for which op={op}, prescale_factor={factors[0]} and postscale_factor="
            f"{factors[1]} are not supported; pass tf.convert_to_tensor(tensor)."
        )
    name, process_set = call
    values, indices = (allgather(one, name, process_set=process_set) for one in (slices.values, slices.indices))
    if op_of(average, op) is Average:
        values /= tf.cast(size(process_set), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


@operation
def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None) -> Any:
    """Concatenate the tensors of all ranks, whose first dimensions may differ; averages gradients."""
    x, call = tf.convert_to_tensor(tensor), (name, process_set)

    def gradient(upstream: Any, _: Any) -> Any:
        averages = _reduced(upstream, Average, call)
        own = tf.reshape(tf.shape(x), [-1])[:1] if x.shape.rank != 0 else tf.constant([1])
        counts = _host_call("allgather", call, ring.all_gather, [own], [(own.dtype, [None])])
        start = tf.reduce_sum(counts[: rank() if process_set is None else process_set.rank()])
        return tf.reshape(averages[start : start + own[0]], tf.shape(x))

    return _differentiable("allgather", call, ring.all_gather, [x], [(x.dtype, _any_rows(x))], gradient)


grouped_allgather = operation(grouped(allgather, list))


@operation
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> Any:
    """The root's tensor, on every rank; its gradient is the average of the ranks' gradients."""
    x, call = tf.convert_to_tensor(tensor), (name, process_set)

    def gradient(upstream: Any, _: Any) -> Any:
        averages = _reduced(upstream, Average, call)
        return averages if rank() == root_rank else averages * 0

    send = functools.partial(ring.broadcast, root=root_rank)
    return _differentiable("broadcast", call, send, [x], [(x.dtype, x.shape)], gradient)


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
        name: compared among the ranks.
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


def _exchanged(x: Any, sent: list[Any], call: Call) -> Any:
    """The rows that came, and how many from each rank; `sent` holds how many go to each rank, or nothing."""

    def exchange(rows: Any, *sent: Any, group: Group | None) -> tuple[Any, Any]:
        received = ring.all_to_all(rows, sent[0].tolist() if sent else None, group=group)
        ranks = size(call[1])
        counts = sent[0] if sent else np.full(ranks, len(rows) // ranks, np.int32)
        return received, ring.all_to_all(counts, group=group)

    def gradient(upstream: Any, results: Any) -> Any:
        return _exchanged(upstream, [results[1]], call)[0]

    types = [(x.dtype, _any_rows(x)), (tf.int32, [None])]
    return _differentiable("alltoall", call, exchange, [x, *sent], types, gradient)


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
    reduction = op_of(None, op)

    def gradient(upstream: Any, _: Any) -> Any:
        _check_has_gradient("reducescatter", reduction)
        gathered = allgather(upstream, name, process_set=process_set)
        return gathered * tf.cast(size(process_set), gathered.dtype) if reduction is Sum else gathered

    def scattered(x: Any, op: Op) -> Any:
        scatter, types = functools.partial(ring.reduce_scatter, op=op), [(x.dtype, _any_rows(x))]
        return _differentiable("reducescatter", (name, process_set), scatter, [x], types, gradient)

    return _scaled(tensor, compression, reduction, (prescale_factor, postscale_factor), process_set, scattered)


grouped_reducescatter = operation(grouped(reducescatter, list))


def _scaled(
    tensor: Any,
    compression: Any,
    op: Op,
    factors: tuple[float, float],
    process_set: Any,
    reduce: Callable[[Any, Op], Any],
) -> Any:
    """A reduction of what is sent for a tensor, between two factors, in the tensor's dtype."""
    compressor = compressor_of(compression)
    sent, context = compressor.compress(tf.convert_to_tensor(tensor))
    is_whole = sent.dtype.is_integer
    called, after = reduction_of(op, factors[1], size(process_set), is_whole)
    reduced = reduce(scaled(sent, factors[0], is_whole), called)
    return compressor.decompress(scaled(reduced, after, is_whole), context)


def _check_has_gradient(kind: str, op: Op) -> None:
    if op not in (Average, Sum):
        raise ArgumentError(f"op={op} of hvd.{kind} passes no gradient; only Average and Sum do.")


def _any_rows(tensor: Any) -> Any:
    """The shape of a tensor with any number of rows; numbers count as one row each."""
    return None if tensor.shape.rank is None else [None, *tensor.shape[1:]]


def _differentiable(
    kind: str,
    call: Call,
    collective: Callable[..., Any],
    inputs: list[Any],
    results: list[tuple[Any, Any]],
    gradient: Callable[[Any, Any], Any],
) -> Any:
    """A `_host_call` that passes gradients to its first input.

    Args:
        kind, call, collective, inputs, results: as for `_host_call`.
        gradient: the gradient of the first input, from that of the first result and from all results.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def operation(x: Any) -> tuple[Any, Callable[..., Any]]:
        found = _host_call(kind, call, collective, [x, *inputs[1:]], results)
        return found, lambda *upstream: gradient(tf.convert_to_tensor(upstream[0]), found)

    return operation(inputs[0])


def _host_call(
    kind: str, call: Call, collective: Callable[..., Any], inputs: list[Any], results: list[tuple[Any, Any]]
) -> Any:
    """Call a collective on the host, now or whenever the `tf.function` that is being traced runs.

    Args:
        kind: of the operation.
        call: its name, and its process set.
        collective: called with arrays, and the group.
        inputs: tensors.
        results: dtype and shape of each result.
    """
    reject_inside_xla(
        f"hvd.{kind}", "Call it outside that function: in one without jit_compile=True, which may call compiled ones."
    )
    connect()

    def run(*arrays: np.ndarray[Any, Any]) -> Any:
        found = collective(*arrays, group=begin(kind, *call))
        return [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]

    with restore_exceptions():
        found = tf.numpy_function(capture_exceptions(run), inputs, [dtype for dtype, _ in results])
    pairs = zip(tf.nest.flatten(found), results, strict=True)
    shaped = tuple(tf.ensure_shape(one, shape) for one, (_, shape) in pairs)
    return shaped if len(shaped) > 1 else shaped[0]
