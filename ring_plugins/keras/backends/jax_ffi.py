"""Let XLA call a Python function on its own buffers, without a copy.

`io_callback` copies every operand twice and every result once into new memory. For large gradients that takes several
times as long as reducing them. XLA's foreign function interface instead passes the addresses of its buffers to a
handler, and results may share the operands' memory. Handlers are usually compiled C++; this one uses ctypes and the
interface's C declarations (xla/ffi/api/c_api.h, version 0.3, shipped with jaxlib 0.10), of which only the first fields
are needed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_numbers = itertools.count()
#: The trace of the last call, and the smallest result of that call.
_last_call: tuple[Any, Any] | None = None
_keep: list[Any] = []  # handlers must outlive every compiled step

_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_MAJOR = 0


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("api_version", _Version)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    ]


_MakeError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("api_version", _Version),
        ("internal_api", ctypes.c_void_p),
        ("make_error", _MakeError),
    ]


class _Values(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    ]


class _Frame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Values),
        ("results", _Values),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    ]


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))


def in_place(function: Callable[[list[np.ndarray[Any, Any]]], None], operands: Sequence[Any]) -> list[Any] | None:
    """Make XLA call `function` on the memory of `operands`, in a step that runs on the CPU.

    Several calls in one compiled function run in the order in which they were traced, on all ranks.

    Args:
        function: overwrites its arguments, 1-d arrays of the operands' dtypes.
        operands: traced JAX values.

    Returns:
        The operands after the call; None if this version of JAX does not have the interface.
    """
    if not all(operand.size for operand in operands):
        return None  # empty memory has no address
    kinds = [(np.dtype(operand.dtype), int(np.prod(operand.shape, dtype=np.int64))) for operand in operands]

    def on_frame(frame: _Frame) -> None:
        arrays = []
        for i, (dtype, count) in enumerate(kinds):
            operand, result, nbytes = _data(frame.arguments, i), _data(frame.results, i), count * dtype.itemsize
            if operand != result:
                ctypes.memmove(result, operand, nbytes)
            arrays.append(np.frombuffer((ctypes.c_char * nbytes).from_address(result), dtype, count))
        function(arrays)

    name = f"ring_plugins_{next(_numbers)}"
    handler = _Handler(lambda frame: _handle(frame.contents, on_frame))
    try:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p)), platform="cpu")
    except Exception:  # other versions of the interface may raise anything
        return None
    _keep.append(handler)
    global _last_call
    trace = _current_trace()
    before = [_last_call[1]] if _last_call is not None and _last_call[0] == trace else []
    shapes = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    call = jax.ffi.ffi_call(name, shapes, has_side_effect=True, input_output_aliases={i: i for i in range(len(shapes))})
    # XLA runs independent calls in any order, so each call takes a result of the previous one.
    results = list(call(*operands, *before))
    _last_call = trace, min(results, key=lambda result: result.size)
    return results


def _current_trace() -> Any:
    """A token of the trace in progress; tokens of one trace are equal, and of different traces are not."""
    try:
        from jax.extend.core import get_opaque_trace_state
    except ImportError:  # JAX before 0.5
        from jax.core import get_opaque_trace_state
    return get_opaque_trace_state(convention="flax")


def _handle(frame: _Frame, on_frame: Callable[[_Frame], None]) -> int | None:
    """Handle a call of XLA: first for the handler's version, then in every step. Returns an error or None."""
    extension = frame.extension_start
    if extension and extension.contents.type == _METADATA:
        metadata = ctypes.cast(extension, ctypes.POINTER(_MetadataExtension)).contents.metadata.contents
        known = frame.api.contents.api_version
        metadata.api_version.major, metadata.api_version.minor = _MAJOR, known.minor
        return None
    if frame.stage != _EXECUTE:
        return None
    try:
        on_frame(frame)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message, _INTERNAL)
        return int(frame.api.contents.make_error(ctypes.byref(arguments)))
    return None


def _data(values: _Values, i: int) -> int:
    return ctypes.cast(values.values[i], ctypes.POINTER(_Buffer)).contents.data or 0
