"""Let XLA call a Python function on its own buffers, without a copy.

`io_callback` copies every operand twice and every result once into new memory. For large gradients that takes several
times as long as reducing them. XLA's foreign function interface instead passes the addresses of its buffers to a
handler, and results may share the operands' memory. Handlers are usually compiled C++; this one uses ctypes and the
interface's C declarations (xla/ffi/api/c_api.h, version 0.3, shipped with jaxlib 0.10), of which only the first fields
are needed.

On a CPU the operands are computed when XLA calls (`HostCalls`). On a GPU they are not: XLA calls while it queues a
step's kernels, and passes the stream. What the function queues there, or orders with it, runs in its turn
(`DeviceCalls`).

XLA never lets go of a handler. So one handler serves all compiled steps of the process, and each call carries the
number of its function, which lives as long as the averaging that it belongs to.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from ring_plugins.core.base.errors import ArgumentError, DeviceError
from ring_plugins.keras.buckets import averaging_is_over
from ring_plugins.keras.job import capture_exceptions

try:
    from jax.extend.core import Primitive
except ImportError:  # JAX before 0.4.36
    from jax.core import Primitive  # type: ignore[no-redef, attr-defined, unused-ignore]

#: Of a host call: overwrites arrays. Of a call on a GPU: takes the handle of XLA's stream, and addresses.
HostFunction = Callable[[list[np.ndarray[Any, Any]]], None]
DeviceFunction = Callable[[int, list[int]], None]

_numbers = itertools.count()
#: The trace of the last call, and the smallest result of that call.
_last_call: tuple[Any, Any] | None = None

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


class _MessageArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
    ]


class _DestroyArguments(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p), ("error", ctypes.c_void_p)]


class _StreamArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


_MakeError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))
_GetMessage = ctypes.CFUNCTYPE(None, ctypes.POINTER(_MessageArguments))
_DestroyError = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DestroyArguments))
_GetStream = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamArguments))


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("api_version", _Version),
        ("internal_api", ctypes.c_void_p),
        ("make_error", _MakeError),
        ("get_message", _GetMessage),
        ("destroy_error", _DestroyError),
        ("register_handler", ctypes.c_void_p),
        ("get_stream", _GetStream),
    ]


class _Values(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    ]


class _Scalar(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64))]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(_Scalar))),
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
        ("attributes", _Attributes),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
    ]


class HostCalls:
    """What compiled steps call for one owner, which keeps this object; a step that is called without it raises."""

    platform = "cpu"

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call] = {}

    def _call(self, function: Any, kinds: _Kinds) -> _Call:
        return _HostCall(function, kinds)

    def in_place(self, key: Hashable, function: Any, operands: Sequence[Any]) -> list[Any] | None:
        """Make XLA call `function` on the memory of `operands`, in a step that runs on the platform.

        Several calls in one compiled function run in the order in which they were traced, on all ranks.

        Args:
            key: of the function; a new trace with the same key and operands like these calls the first function.
            function: overwrites its arguments, 1-d arrays of the operands' dtypes (on a GPU: XLA's stream and the
                operands' addresses); keeps no owner alive.
            operands: traced JAX values.

        Returns:
            The operands after the call; None if this version of JAX does not have the interface.
        """
        target = find_target(self.platform)
        if target is None or not all(operand.size for operand in operands):
            return None  # empty memory has no address
        kinds = tuple((np.dtype(one.dtype), int(np.prod(one.shape, dtype=np.int64))) for one in operands)
        call = self._calls.setdefault((key, kinds), self._call(function, kinds))
        _calls[call.number] = call
        global _last_call
        trace = _current_trace()
        before = [_last_call[1]] if _last_call is not None and _last_call[0] == trace else []
        if any(operand is one for operand in operands for one in before):
            before = []  # the order is given, and XLA would copy what a call both overwrites and reads
        shapes = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
        aliases = {i: i for i in range(len(shapes))}
        foreign = jax.ffi.ffi_call(target, shapes, has_side_effect=True, input_output_aliases=aliases)
        # XLA runs independent calls in any order, so each call takes a result of the previous one.
        results = list(foreign(_on_one_device.bind(operands[0]), *operands[1:], *before, number=np.int64(call.number)))
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


_on_one_device = Primitive("ring_plugins_on_one_device")
_on_one_device.def_abstract_eval(lambda operand: operand)
mlir.register_lowering(_on_one_device, _reject_several_devices)


class DeviceCalls(HostCalls):
    """What steps call that are compiled for GPUs; the functions may only queue work, in order with XLA's stream."""

    def __init__(self, platform: str) -> None:
        super().__init__()
        self.platform = platform

    def _call(self, function: Any, kinds: _Kinds) -> _Call:
        return _DeviceCall(function, kinds)


_Kinds = Sequence[tuple[np.dtype[Any], int]]


class _Call:
    """A function and the dtype and length of each of its arguments."""

    def __init__(self, function: Any, kinds: _Kinds) -> None:
        self.number, self._function, self._kinds = next(_numbers), function, kinds

    def run(self, frame: _Frame) -> None:
        """Call the function for one call of XLA's."""
        raise NotImplementedError


class _HostCall(_Call):
    _function: HostFunction

    def run(self, frame: _Frame) -> None:
        arrays = []
        for i, (dtype, count) in enumerate(self._kinds):
            operand, result, nbytes = _data(frame.arguments, i), _data(frame.results, i), count * dtype.itemsize
            if operand != result:
                ctypes.memmove(result, operand, nbytes)
            arrays.append(np.frombuffer((ctypes.c_char * nbytes).from_address(result), dtype, count))
        self._function(arrays)


class _DeviceCall(_Call):
    _function: DeviceFunction

    def run(self, frame: _Frame) -> None:
        pointers = [_data(frame.arguments, i) for i in range(len(self._kinds))]
        if pointers != [_data(frame.results, i) for i in range(len(self._kinds))]:
            raise DeviceError("XLA gave a result other memory than the operand that it was to overwrite.")
        self._function(stream_of(frame), pointers)


def stream_of(frame: _Frame) -> int:
    """Handle of the CUDA stream on which XLA runs a step.

    Raises:
        DeviceError: XLA has none here.
    """
    api = frame.api.contents
    arguments = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
    error = api.get_stream(ctypes.byref(arguments))
    if error:
        message = _MessageArguments(ctypes.sizeof(_MessageArguments), None, error, None)
        api.get_message(ctypes.byref(message))
        text = (message.message or b"").decode(errors="replace")
        api.destroy_error(ctypes.byref(_DestroyArguments(ctypes.sizeof(_DestroyArguments), None, error)))
        raise DeviceError(f"XLA has no CUDA stream for this step: {text}")
    return int(arguments.stream or 0)


#: All calls by number; their owners keep them.
_calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()


@functools.cache
def find_target(platform: str = "cpu") -> str | None:
    """The name under which XLA knows the handler; None if this version of JAX does not have the interface."""
    name = "ring_plugins"
    jax.default_backend()  # starts it: a handler registered before would be rejected then, and the backend with it
    try:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.cast(_handler, ctypes.c_void_p)), platform=platform)
    except Exception:  # other versions of the interface may raise anything
        return None
    return name


def _current_trace() -> Any:
    """A token of the trace in progress; tokens of one trace are equal, and of different traces are not."""
    try:
        from jax.extend.core import get_opaque_trace_state
    except ImportError:  # JAX before 0.5
        from jax.core import get_opaque_trace_state
    return get_opaque_trace_state(convention="flax")


def _handle(frame: _Frame) -> int | None:
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
        _run(frame)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message, _INTERNAL)
        return int(frame.api.contents.make_error(ctypes.byref(arguments)))
    return None


@capture_exceptions
def _run(frame: _Frame) -> None:
    call = _calls.get(frame.attributes.values[0].contents.value.contents.value)
    if call is None:
        raise averaging_is_over()
    call.run(frame)


def _data(values: _Values, i: int) -> int:
    return ctypes.cast(values.values[i], ctypes.POINTER(_Buffer)).contents.data or 0


#: Lives as long as the process, since XLA keeps its address.
_handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(lambda frame: _handle(frame.contents))
