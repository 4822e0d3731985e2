"""Let XLA call a Python function on its own buffers, without a copy.

`io_callback` copies every operand twice and every result once into new memory. For large gradients that takes several
times as long as reducing them. JAX's `buffer_callback` instead hands XLA's buffers to the function, and results may
share the operands' memory.

On a CPU the operands are computed when XLA calls (`call_on_host`). On a GPU they are not: XLA calls while it queues a
step's kernels, and passes the stream. What the function queues there, or orders with it, runs in its turn
(`call_on_gpu`). Several calls in one compiled function run in the order in which they were traced, on all ranks.

A compiled step keeps the functions that it calls, so these must not keep their owner: see `call_weakly`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from ring_plugins.core.arrays.memory import tensor_in
from ring_plugins.core.base.errors import ArgumentError, DeviceError
from ring_plugins.core.base.types import Array
from ring_plugins.keras.job import capture_exceptions

try:
    from jax.experimental.buffer_callback import buffer_callback
    from jax.extend.core import Primitive, get_opaque_trace_state
except ImportError:  # older versions of JAX, in which nothing below is called
    buffer_callback = None  # type: ignore[assignment]

#: The trace of the last call, and the smallest result of that call.
_last_call: tuple[Any, Any] | None = None


def has_buffer_callback() -> bool:
    """Whether this version of JAX can hand buffers to Python."""
    return buffer_callback is not None


def call_on_host(function: Callable[[list[Array]], None], operands: Sequence[Any]) -> list[Any]:
    """Make XLA call `function` on the memory of `operands`, in a step that is compiled for a CPU.

    Args:
        function: overwrites its arguments, 1-d arrays of the operands' dtypes.
        operands: traced JAX values, none of them empty.

    Returns:
        The operands after the call.
    """

    def call(context: Any, results: list[Any], *given: Any) -> None:
        arrays = [np.asarray(result) for result in results]
        for array, operand in zip(arrays, map(np.asarray, given), strict=False):  # the last may only give the order
            if array.ctypes.data != operand.ctypes.data:
                np.copyto(array, operand)
        function([array.reshape(-1) for array in arrays])

    return _in_place(call, operands)


def call_on_gpu(function: Callable[[int, list[int]], None], operands: Sequence[Any]) -> list[Any]:
    """Make XLA call `function` with its stream and the addresses of `operands`, in a step that is compiled for a GPU.

    Args:
        function: may only queue work that overwrites the operands, in order with the stream.
        operands: traced JAX values, none of them empty.

    Returns:
        The operands after that work.
    """

    def call(context: Any, results: list[Any], *given: Any) -> None:
        pointers = list(map(_address, results))
        if pointers != list(map(_address, given[: len(results)])):
            raise DeviceError("XLA gave a result other memory than the operand that it was to overwrite.")
        function(stream_of(context), pointers)

    return _in_place(call, operands)


def _address(buffer: Any) -> int:
    capsule = buffer.__dlpack__()  # without which the description is not valid
    return tensor_in(capsule).pointer


def stream_of(context: Any) -> int:
    """Handle of the CUDA stream on which XLA runs a step.

    Raises:
        DeviceError: XLA has none here.
    """
    try:
        return int(context.stream)
    except Exception as error:
        raise DeviceError(f"XLA has no CUDA stream for this step: {error}") from None


def _in_place(call: Callable[..., None], operands: Sequence[Any]) -> list[Any]:
    """Trace a call whose results share the operands' memory, behind the last one of the same trace."""
    global _last_call
    trace = get_opaque_trace_state(convention="flax")  # equal within a trace only
    # XLA runs independent calls in any order, so each call takes a result of the previous one.
    before = [_last_call[1]] if _last_call is not None and _last_call[0] == trace else []
    if any(operand is one for operand in operands for one in before):
        before = []  # the order is given, and XLA would copy what a call both overwrites and reads
    foreign = buffer_callback(
        capture_exceptions(call),
        [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands],
        has_side_effect=True,
        input_output_aliases={i: i for i in range(len(operands))},
    )
    results: list[Any] = foreign(_on_one_device.bind(operands[0]), *operands[1:], *before)
    _last_call = trace, min(results, key=lambda result: result.size)
    return results


def _reject_several_devices(ctx: Any, operand: Any) -> list[Any]:
    """Lower a value as it is, in a step that is compiled for one device; XLA's own error would have no remedy.

    Raises:
        ArgumentError: the step is compiled for several devices.
    """
    # JAX 0.10.2, interpreters/mlir.py: contexts of jit have a number of devices, those of shard_map and pmap a mesh.
    context = ctx.module_context.axis_context
    count: int = getattr(getattr(context, "mesh", context), "size", None) or getattr(context, "num_devices", None) or 1
    if count > 1:
        raise ArgumentError(
            f"this step is compiled for {count} devices of this process, and ring_plugins averages among processes of "
            "one device each. Start one process for each device, and put its variables and data there; or leave out "
            "ring_plugins, and let JAX alone divide the work among the devices of one process."
        )
    return [operand]


if has_buffer_callback():
    _on_one_device = Primitive("ring_plugins_on_one_device")
    _on_one_device.def_abstract_eval(lambda operand: operand)
    mlir.register_lowering(_on_one_device, _reject_several_devices)
