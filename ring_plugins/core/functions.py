"""The functions of `import ring_plugins`: collectives on arrays and tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.errors import ArgumentError
from ring_plugins.core.memory import HostMemory, OnDevice, host_array, host_memory
from ring_plugins.core.operations import Op
from ring_plugins.core.results import empty, go, in_place
from ring_plugins.core.world import current


class GpuFunctions(Protocol):
    """The collectives for tensors of one framework on GPUs; arguments as below."""

    def all_reduce(self, x: Any, op: Op, out: Any, wait: bool) -> Any: ...

    def broadcast(self, x: Any, root: int, out: Any, wait: bool) -> Any: ...

    def all_gather(self, x: Any, wait: bool) -> Any: ...

    def reduce_scatter(self, x: Any, op: Op, wait: bool) -> Any: ...

    def all_to_all(self, x: Any, splits: Sequence[int] | None, wait: bool) -> Any: ...


#: By the name of a framework's package what serves its tensors on GPUs: that face puts it here.
gpu_functions: dict[str, GpuFunctions] = {}


def _on_gpu(x: Any, error: OnDevice) -> GpuFunctions:
    framework = type(x).__module__.partition(".")[0]
    if framework == "torch" and framework not in gpu_functions:
        raise ArgumentError(f"{error} `import ring_plugins.torch` brings what GPUs need.") from error
    if framework not in gpu_functions:
        raise ArgumentError(f"{error} Of tensors on GPUs, it takes torch's.") from error
    return gpu_functions[framework]


def rank() -> int:
    """Rank of this process in the job, from 0."""
    return current().place.rank


def size() -> int:
    """Number of processes in the job."""
    return current().place.size


def local_rank() -> int:
    """Rank among the processes of this host, from 0."""
    return current().place.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return current().place.local_size


def node_rank() -> int:
    """Number of this host among the job's hosts, from 0."""
    return current().place.node_rank


def num_nodes() -> int:
    """Number of hosts."""
    return current().place.num_nodes


def all_reduce(x: Any, op: Op = Op.AVERAGE, *, out: Any = None, wait: bool = True) -> Any:
    """Combine `x` of all ranks; every rank gets the same bits.

    Args:
        x: numpy array, torch tensor of CPU or GPU, or number, of equal shape and dtype on all ranks. Floats and complex
            numbers for AVERAGE, no complex for MIN and MAX; 16-bit floats are summed in float32.
        op: AVERAGE, SUM, MIN, MAX or PRODUCT.
        out: where to put the result, `x` itself to reduce in place; a new array or tensor by default.
        wait: False returns at once, with a `Work` whose `wait()` gives the result; do not touch `x` and
            `out` before.

    Returns:
        The result, of the kind that `x` is (numpy for numbers).

    Raises:
        ArgumentError: a dtype or op that cannot be, memory that is read-only, or on a device that nothing here knows.
        MismatchError: ranks gave different shapes, dtypes or ops.
        PeerFailed: another rank is gone.
    """
    communicator = current().communicator
    try:
        reduce = partial(communicator.all_reduce, op=op)
        return in_place(communicator, "all_reduce", x, out, wait, reduce, reads_source=True)
    except OnDevice as error:
        return _on_gpu(x, error).all_reduce(x, op, out, wait)


def broadcast(x: Any, root: int = 0, *, out: Any = None, wait: bool = True) -> Any:
    """The root's `x` on every rank.

    Args:
        x: array, tensor or number, of equal shape and dtype on all ranks; its values count on the root only.
        root: a rank.
        out: where to put the result, `x` itself to overwrite it; new by default.
        wait: False returns a `Work`.

    Raises:
        ArgumentError: `root` is no rank; memory as in `all_reduce`.
    """
    communicator = current().communicator
    _check_root(root, communicator)
    try:
        return in_place(communicator, "broadcast", x, out, wait, partial(communicator.broadcast, root=root))
    except OnDevice as error:
        return _on_gpu(x, error).broadcast(x, root, out, wait)


def all_gather(x: Any, *, wait: bool = True) -> Any:
    """Everyone's `x`, one after the other along the first dimension.

    Args:
        x: array, tensor or number. All dimensions but the first must be equal on all ranks; a 0-d `x` counts
            as one element.
        wait: False returns a `Work`.

    Returns:
        Array or tensor of shape (sum of first dimensions, ...).

    Raises:
        MismatchError: dtypes or trailing dimensions differ.
    """
    communicator = current().communicator
    try:
        array, dtype = host_array(x)
    except OnDevice as error:
        return _on_gpu(x, error).all_gather(x, wait)

    def run() -> Any:
        source = np.atleast_1d(np.ascontiguousarray(array))
        trailing = source.shape[1:]
        lengths = _gather_shapes(communicator, source.shape[0], trailing, dtype)
        result = empty(x, source.dtype, (sum(lengths), *trailing))
        each = int(np.prod(trailing, dtype=np.int64))
        communicator.all_gather(
            HostMemory(source.reshape(-1), dtype), host_memory(result), [length * each for length in lengths]
        )
        return result

    return go(communicator, "all_gather", run, wait)


def reduce_scatter(x: Any, op: Op = Op.AVERAGE, *, wait: bool = True) -> Any:
    """Combine `x` of all ranks and give each rank one part of it.

    Args:
        x: array or tensor of at least one dimension, of equal shape and dtype on all ranks. The first
            dimension is cut into as many parts as there are ranks; the first parts are one longer where it
            does not divide evenly.
        op: as in `all_reduce`.
        wait: False returns a `Work`.

    Returns:
        This rank's part.
    """
    communicator = current().communicator
    try:
        array, dtype = host_array(x)
    except OnDevice as error:
        return _on_gpu(x, error).reduce_scatter(x, op, wait)

    def run() -> Any:
        if array.ndim == 0:
            raise ArgumentError("x has no dimension to cut; reduce_scatter takes an array of at least one.")
        source = np.ascontiguousarray(array)
        quotient, rest = divmod(source.shape[0], communicator.size)
        lengths = [quotient + (i < rest) for i in range(communicator.size)]
        each = int(np.prod(source.shape[1:], dtype=np.int64))
        result = empty(x, source.dtype, (lengths[communicator.rank], *source.shape[1:]))
        communicator.reduce_scatter(
            HostMemory(source.reshape(-1), dtype), host_memory(result), [length * each for length in lengths], op
        )
        return result

    return go(communicator, "reduce_scatter", run, wait)


def all_to_all(x: Any, splits: Sequence[int] | None = None, *, wait: bool = True) -> Any:
    """Send part i of `x` to rank i, and receive a part from everyone.

    Args:
        x: array or tensor of at least one dimension; dtype and trailing dimensions equal on all ranks.
        splits: how many rows of `x` go to each rank, adding up to its first dimension; equal parts by default.
        wait: False returns a `Work`.

    Returns:
        The received parts in rank order along the first dimension.

    Raises:
        ArgumentError: `splits` do not add up, or `x` cannot be cut equally.
    """
    communicator = current().communicator
    try:
        source, dtype = host_array(x)
    except OnDevice as error:
        return _on_gpu(x, error).all_to_all(x, splits, wait)
    if source.ndim == 0:
        raise ArgumentError("x has no dimension to cut; all_to_all takes an array of at least one.")
    rows = source.shape[0]
    if splits is None and rows % communicator.size:
        raise ArgumentError(f"x has {rows} rows, which {communicator.size} ranks cannot share equally; pass splits.")
    send = [rows // communicator.size] * communicator.size if splits is None else [int(s) for s in splits]
    if len(send) != communicator.size or sum(send) != rows or min(send) < 0:
        raise ArgumentError(f"splits={send} must be {communicator.size} numbers that add up to the {rows} rows of x.")

    def run() -> Any:
        data = np.ascontiguousarray(source)
        trailing = data.shape[1:]
        everyones = communicator.all_gather_object((send, trailing, dtype))
        _check_equal([(t, d) for _, t, d in everyones], "all_to_all")
        receive = [other[0][communicator.rank] for other in everyones]
        each = int(np.prod(trailing, dtype=np.int64))
        result = empty(x, data.dtype, (sum(receive), *trailing))
        communicator.all_to_all(
            HostMemory(data.reshape(-1), dtype),
            [count * each for count in send],
            host_memory(result),
            [count * each for count in receive],
        )
        return result

    return go(communicator, "all_to_all", run, wait)


def barrier() -> None:
    """Return when all ranks have called."""
    current().communicator.barrier()


def broadcast_object(item: Any, root: int = 0) -> Any:
    """The root's object, which must be picklable, on every rank."""
    communicator = current().communicator
    _check_root(root, communicator)
    return communicator.broadcast_object(item, root)


def all_gather_object(item: Any) -> list[Any]:
    """Everyone's object, which must be picklable, in rank order."""
    return current().communicator.all_gather_object(item)


def _check_root(root: int, communicator: Communicator) -> None:
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < communicator.size:
        raise ArgumentError(f"root={root!r} is not a rank of this job of {communicator.size}.")


def _gather_shapes(communicator: Communicator, length: int, trailing: tuple[int, ...], dtype: str) -> list[int]:
    everyones = communicator.all_gather_object((length, trailing, dtype))
    _check_equal([(t, d) for _, t, d in everyones], "all_gather")
    return [other[0] for other in everyones]


def _check_equal(values: Sequence[tuple[tuple[int, ...], str]], what: str) -> None:
    if len(set(values)) > 1:
        said = ", ".join(f"rank {i}: (*, {', '.join(map(str, t))}) {d}" for i, (t, d) in enumerate(values))
        raise ArgumentError(f"x of {what} must have equal trailing dimensions and dtype on all ranks, but {said}.")
