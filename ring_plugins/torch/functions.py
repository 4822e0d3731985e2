"""The collectives of `import ring_plugins` for tensors on GPUs; arguments and errors as in `core.functions`.

Ranks agree on shapes, and memory for results is allocated, before an operation is queued: on a GPU `start` runs its
function at once, with the communication stream current, and memory allocated there would belong to that stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.recovery import repeated
from ring_plugins.core.collectives.validation import check_splits, exchange_rows, rows_of, scatter_rows
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gpu.recovery import Finished
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.torch.device import index_of, is_on_gpu, memory_of, streams
from ring_plugins.torch.tensors import Target, check_dense


def all_reduce(x: torch.Tensor, op: Op, out: Any, wait: bool, group: Group | None = None) -> Any:
    """Combine `x` of all ranks."""
    return _in_place(
        "all_reduce", x, out, wait, group, lambda communicator, memory: communicator.all_reduce(memory, op)
    )


def broadcast(x: torch.Tensor, root: int, out: Any, wait: bool, group: Group | None = None) -> Any:
    """Return the root's `x` on every rank."""
    return _in_place(
        "broadcast", x, out, wait, group, lambda communicator, memory: communicator.broadcast(memory, root)
    )


def all_gather(x: torch.Tensor, wait: bool, group: Group | None = None) -> Any:
    """Concatenate `x` of all ranks along the first dimension."""
    communicator, source = _communicator(x, group), _source(x)
    lengths = [rows for (rows,) in _exchange_rows(communicator, source, source.shape[:1], "all_gather")]
    result = source.new_empty((sum(lengths), *source.shape[1:]))
    each = prod(source.shape[1:])

    def run() -> torch.Tensor:
        communicator.all_gather(_memory(source), _memory(result), [rows * each for rows in lengths])
        return result

    return _run(communicator, "all_gather", run, wait)


def reduce_scatter(x: torch.Tensor, op: Op, wait: bool, group: Group | None = None) -> Any:
    """Combine `x` of all ranks and give each rank one part of the result."""
    communicator = _communicator(x, group)
    lengths = scatter_rows(rows_of(x.shape, "reduce_scatter"), communicator.size)
    source = _source(x)
    result = source.new_empty((lengths[communicator.rank], *source.shape[1:]))
    each = prod(source.shape[1:])

    def run() -> torch.Tensor:
        communicator.reduce_scatter(_memory(source), _memory(result), [rows * each for rows in lengths], op)
        return result

    return _run(communicator, "reduce_scatter", run, wait)


def all_to_all(x: torch.Tensor, splits: Sequence[int] | None, wait: bool, group: Group | None = None) -> Any:
    """Send part i of `x` to rank i, and receive a part from every rank."""
    communicator = _communicator(x, group)
    send = check_splits(splits, rows_of(x.shape, "all_to_all"), communicator.size)
    source = _source(x)
    receive = [theirs[communicator.rank] for theirs in _exchange_rows(communicator, source, send, "all_to_all")]
    result = source.new_empty((sum(receive), *source.shape[1:]))
    each = prod(source.shape[1:])

    def run() -> torch.Tensor:
        communicator.all_to_all(
            _memory(source), [rows * each for rows in send], _memory(result), [rows * each for rows in receive]
        )
        return result

    return _run(communicator, "all_to_all", run, wait)


def _in_place(
    name: str,
    x: torch.Tensor,
    out: Any,
    wait: bool,
    group: Group | None,
    operate: Callable[[DeviceCommunicator, DeviceMemory], None],
) -> Any:
    communicator = _communicator(x, group)
    with torch.no_grad():
        if out is None:
            result = x.detach().clone(memory_format=torch.contiguous_format)
        elif not isinstance(out, torch.Tensor) or not is_on_gpu(out) or (out.shape, out.dtype) != (x.shape, x.dtype):
            raise ArgumentError(f"out must be a tensor on the GPU with x's shape {tuple(x.shape)} and type {x.dtype}.")
        else:
            result = out if out is x else out.copy_(x)

        def run() -> torch.Tensor:
            with torch.no_grad():
                target = Target([result], "out", keep=True)
                operate(communicator, cast(DeviceMemory, target.memory))
                target.store()
            return result

        if not communicator.recovers or name != "all_reduce":
            return _run(communicator, name, run, wait)
        saved = result.clone()
        return _run(communicator, name, lambda: repeated(lambda: (result.copy_(saved), run())[1]), wait)


def _run(communicator: DeviceCommunicator, name: str, run: Callable[[], torch.Tensor], wait: bool) -> Any:
    if communicator.recovers and not wait:  # at once, so that it can be repeated
        return Finished(name, run())
    return run() if wait else communicator.start(name, run)


def _communicator(x: torch.Tensor, group: Group | None) -> DeviceCommunicator:
    check_dense(x, "x")
    return (current() if group is None else group).device_communicator(index_of(x), streams(index_of(x)))


def _source(x: torch.Tensor) -> torch.Tensor:
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(1) if plain.dim() == 0 else plain


def _memory(tensor: torch.Tensor) -> DeviceMemory:
    return cast(DeviceMemory, memory_of(tensor.view(-1)))


def _exchange_rows(
    communicator: DeviceCommunicator, source: torch.Tensor, rows: Sequence[int], collective: str
) -> list[tuple[int, ...]]:
    """As `validation.exchange_rows`, for a tensor."""
    return exchange_rows(communicator, rows, source.shape[1:], str(source.dtype), collective)
