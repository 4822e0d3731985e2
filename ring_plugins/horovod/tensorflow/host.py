"""What Horovod's operations do on the host, on arrays of TensorFlow's tensors.

The arrays of a group are laid one behind the other, those of each dtype, so that a group takes few collectives however
many tensors it has. That does not tell shapes apart, so ranks compare them with the operation.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.fingerprint import purpose
from ring_plugins.core.collectives.validation import rows_of
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.world import current
from ring_plugins.horovod.basics import Average, Sum, begin
from ring_plugins.horovod.named import NamedOperations, in_order_or_by_name, operations_of


class Collective(NamedTuple):
    """A collective on arrays of the host.

    Attributes:
        kind: the operation's name.
        collective: called with arrays, and `group`; returns arrays.
        detail: what else all ranks have to call equally; "joins" is whether it goes on without ranks that have joined.
        rows_differ: whether ranks may have different numbers of rows.
        compared: how many of the arrays have to be alike on all ranks; None for all.
    """

    kind: str
    collective: Callable[..., Sequence[Array]]
    detail: dict[str, Any]
    rows_differ: bool = False
    compared: int | None = None

    def run(self, call: tuple[str | None, Any], arrays: Sequence[Array]) -> Sequence[Array]:
        """Call it with these arrays; `call` holds the name and the process set of the operation."""
        name, process_set = call
        described = [[array.dtype.name, list(array.shape)[self.rows_differ :]] for array in arrays[: self.compared]]
        content = {"kind": self.kind, **self.detail, "tensors": described}
        return in_order_or_by_name(
            name,
            process_set,
            _rebuilt,
            lambda: self.collective(*arrays, group=begin(self.kind, name, process_set)),
            lambda operations, name: operations.start(
                name, content, lambda group: self.collective(*arrays, group=group)
            ).wait(),
        )


def follow_names() -> NamedOperations | None:
    """Be ready to take part in named operations of all ranks as one that has joined."""
    return operations_of(current().communicator.ranks, _rebuilt)


def _rebuilt(content: dict[str, Any]) -> Callable[[Group], Sequence[Array]] | None:
    """The part in others' operation of a rank that has joined: zeros; None where it has none."""
    if not content.get("joins"):
        return None
    reduce = all_reduction(next(op for op in Op if op.name == content["op"])).collective
    zeros = [np.zeros(shape, tf.as_dtype(dtype).as_numpy_dtype) for dtype, shape in content["tensors"]]
    return lambda group: reduce(*zeros, group=group)


def all_reduction(op: Op) -> Collective:
    """All-reduces, one for each dtype."""

    def reduce(*arrays: Array, group: Group | None) -> list[Array]:
        if len(arrays) == 1:
            return [ring.all_reduce(arrays[0], op, group=group)]
        kinds = _by_dtype(arrays)
        with _one_group("grouped_allreduce", arrays):
            flat = [ring.all_reduce(_laid_out([arrays[i] for i in some]), op, group=group) for some in kinds]
        return _taken_apart(flat, kinds, [array.shape for array in arrays])

    return Collective("allreduce", reduce, {"op": op.name, "joins": op in (Average, Sum)})


def _gather(*arrays: Array, group: Group | None) -> list[Array]:
    if len(arrays) == 1:
        return [ring.all_gather(arrays[0], group=group)]
    kinds = _by_dtype(arrays)
    with _one_group("grouped_allgather", arrays, rows_differ=True):
        rows = np.array([len(array) if array.ndim else 1 for array in arrays], np.int64)
        by_rank = np.asarray(ring.all_gather(rows, group=group)).reshape(-1, len(arrays))
        flat = [ring.all_gather(_laid_out([arrays[i] for i in some]), group=group) for some in kinds]
    results = list(arrays)
    for values, some in zip(flat, kinds, strict=True):
        shapes = [(of_rank[i], *arrays[i].shape[1:]) for of_rank in by_rank for i in some]
        parts = _taken_apart([values], [range(len(shapes))], shapes)
        for place, i in enumerate(some):
            results[i] = np.concatenate(parts[place :: len(some)])
    return results


GATHERING = Collective("allgather", _gather, {}, rows_differ=True)


def broadcasting(root: Any) -> Collective:
    """A broadcast from a rank of the job."""
    number = int(root) if hasattr(root, "__index__") else root  # it may be numpy's

    def send(array: Array, *, group: Group | None) -> list[Array]:
        return [ring.broadcast(array, root, group=group)]

    return Collective("broadcast", send, {"root": number})


def _exchange(rows: Array, *sent: Array, group: Group | None) -> list[Array]:
    received = ring.all_to_all(rows, sent[0].tolist() if sent else None, group=group)
    ranks = communicator_of(group).size
    counts = sent[0] if sent else np.full(ranks, len(rows) // ranks, np.int32)
    return [received, ring.all_to_all(counts, group=group)]


#: Its results are the rows that came, and how many from each rank.
EXCHANGE = Collective("alltoall", _exchange, {}, rows_differ=True, compared=1)


def scattering(op: Op) -> Collective:
    """Reduce-scatters, one for each dtype: of rows of equal length, of which each holds what one rank gets."""

    def scatter(*arrays: Array, group: Group | None) -> list[Array]:
        if len(arrays) == 1:
            return [ring.reduce_scatter(arrays[0], op, group=group)]
        for array in arrays:
            rows_of(array.shape, "reduce_scatter")
        communicator, kinds = communicator_of(group), _by_dtype(arrays)
        parts = [np.array_split(array, communicator.size) for array in arrays]
        flat = []
        with _one_group("grouped_reducescatter", arrays):
            for some in kinds:
                rows = [_laid_out([parts[i][rank] for i in some]) for rank in range(communicator.size)]
                packed = np.zeros((communicator.size, len(rows[0])), rows[0].dtype)  # the first is the longest
                for own, row in zip(packed, rows, strict=True):
                    own[: len(row)] = row
                flat.append(ring.reduce_scatter(packed, op, group=group).reshape(-1))
        return _taken_apart(flat, kinds, [part[communicator.rank].shape for part in parts])

    return Collective("reducescatter", scatter, {"op": op.name})


def _by_dtype(arrays: Sequence[Array]) -> list[Sequence[int]]:
    """The numbers of the arrays of each dtype."""
    kinds: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        kinds.setdefault(array.dtype, []).append(i)
    return list(kinds.values())


def _laid_out(arrays: Sequence[Array]) -> Array:
    """One behind the other."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def _taken_apart(
    flat: Sequence[Array], kinds: Sequence[Sequence[int]], shapes: Sequence[tuple[int, ...]]
) -> list[Array]:
    """What lies one behind the other, by `_by_dtype`, in arrays of these shapes."""
    results: list[Any] = [None] * len(shapes)
    for values, some in zip(flat, kinds, strict=True):
        end = 0
        for i in some:
            start, end = end, end + math.prod(shapes[i])
            results[i] = values[start:end].reshape(shapes[i])
    return results


@contextlib.contextmanager
def _one_group(kind: str, arrays: Sequence[Array], rows_differ: bool = False) -> Iterator[None]:
    """Let the ranks compare dtypes and shapes of the arrays in the collectives of this block."""
    shapes = zlib.crc32(repr([(array.shape[rows_differ:], array.dtype.name) for array in arrays]).encode())
    with purpose(f"{kind} of {len(arrays)} tensors ({shapes:08x})"):
        yield
