"""Where the result of a collective goes, and in what kind of array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.errors import ArgumentError
from ring_plugins.core.memory import HostMemory, host_array

Array = np.ndarray[Any, np.dtype[Any]]


def in_place(
    communicator: Communicator,
    name: str,
    x: Any,
    out: Any,
    wait: bool,
    operate: Callable[[HostMemory], None],
    reads_source: bool = False,
) -> Any:
    """Operate on `out`, or on new memory, after copying `x` there.

    Args:
        communicator: of the operation.
        name: of the operation.
        x, out, wait: as the caller gave them.
        operate: the operation, in place.
        reads_source: whether it knows `HostMemory.source`, which spares the copy.

    Returns:
        The result, or its `Work` where nobody waits.
    """
    source, dtype = host_array(x)
    if out is x and wait and source.flags.c_contiguous and source.flags.writeable:
        operate(HostMemory(source if source.ndim == 1 else source.reshape(-1), dtype))
        return x
    result = empty_like(x, source) if out is None else out
    memory, finish = _writable(result, "out")
    if memory.dtype != dtype or memory.array.size != source.size:
        raise ArgumentError(
            f"out has {memory.array.size} elements of {memory.dtype}, but x has {source.size} of {dtype}."
        )
    if reads_source and source.flags.c_contiguous and not np.may_share_memory(source, memory.array):
        memory = memory._replace(source=source.reshape(-1))

    def run() -> Any:
        if out is not x and memory.source is None:
            np.copyto(memory.array.reshape(source.shape), source)
        operate(memory)
        finish()
        return result

    return go(communicator, name, run, wait)


def go(communicator: Communicator, name: str, run: Callable[[], Any], wait: bool) -> Any:
    """The result, or its `Work` where nobody waits."""
    return run() if wait else communicator.start(name, run)


def empty_like(x: Any, source: Array) -> Any:
    """New memory in the shape and of the kind of `x`, whose numbers are in `source`."""
    if hasattr(x, "new_empty"):
        return x.new_empty(x.shape)
    if isinstance(x, np.ndarray):
        return np.empty(x.shape, x.dtype)
    return np.empty(source.shape, source.dtype)


def empty(x: Any, storage: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """New memory of the kind of `x` in another shape; of type `storage` where `x` has none."""
    if hasattr(x, "new_empty"):
        return x.new_empty(shape)
    return np.empty(shape, x.dtype if isinstance(x, np.ndarray) else storage)


def _writable(result: Any, name: str) -> tuple[HostMemory, Callable[[], None]]:
    """Contiguous memory for a result, and what to do when it is there."""
    array, dtype = host_array(result, name)
    if not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only memory and cannot take the result; pass a writable copy.")
    if array.flags.c_contiguous:
        return HostMemory(array if array.ndim == 1 else array.reshape(-1), dtype), lambda: None
    staged = np.ascontiguousarray(array)
    return HostMemory(staged.reshape(-1), dtype), lambda: np.copyto(array, staged)
