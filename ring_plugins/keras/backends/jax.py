"""JAX: the compiled step makes one host call between backward and update.

On CPUs XLA calls Python on its own buffers (`jax_ffi.py`). On GPUs NCCL reduces them on request (`jax_device.py`).
Otherwise `io_callback` is used, which copies. XLA makes the host call when all gradients are ready, so communication
does not overlap with backward. "auto" therefore tries nothing: all buckets are reduced synchronously, as one operation.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import io_callback

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import Entry
from ring_plugins.core.gradients.trials import chosen_overlap
from ring_plugins.core.joining.root import Root
from ring_plugins.core.world import current
from ring_plugins.keras.backends import Settings, jax_device
from ring_plugins.keras.backends.jax_ffi import HostCalls
from ring_plugins.keras.buckets import HostBuckets, call_weakly
from ring_plugins.keras.job import capture_exceptions, connect, restore_exceptions
from ring_plugins.keras.slices import SliceGather, SliceLayout, new_part, on_gpu

#: Gradients of at least this many bytes are reduced in place. A separate reduction costs some microseconds, but saves
#: two copies.
_DIRECT_BYTES = 64 * 1024


class Exchange:
    """See the protocol."""

    def __init__(self, variables: Sequence[Any], entries: Sequence[Entry], settings: Settings) -> None:
        self.communicator = connect().new_communicator(settings.name)
        # Compression rounds on the host.
        on_gpus = None if settings.compression else jax_device.connect(settings.name, self.communicator)
        self.buckets: HostBuckets | jax_device.DeviceBuckets
        if on_gpus is not None:
            self.buckets = jax_device.DeviceBuckets(entries, on_gpus, settings.sizes)
        else:
            sizes = settings.sizes._replace(direct_bytes=_DIRECT_BYTES)
            chosen = chosen_overlap(settings.overlap)
            overlap = False if chosen == "auto" else chosen
            self.buckets = HostBuckets(
                entries, self.communicator, sizes, settings.rounding, in_place=True, overlap=overlap
            )
        self._calls, self._after_pass = HostCalls(), settings.after_pass
        self.waited_seconds = 0.0

    @property
    def passes(self) -> int:
        return self.buckets.reducer.passes

    @property
    def reduced_bytes(self) -> int:
        return self.buckets.reducer.reduced_bytes

    def average(self, gradients: dict[int, Any], rate: Any = None) -> dict[int, Any]:
        """See the protocol."""
        if isinstance(self.buckets, jax_device.DeviceBuckets):
            return self.buckets.average(gradients)
        indices, given = list(gradients), list(gradients.values())
        reduce = functools.partial(call_weakly(self._reduce), indices)
        if rate is not None:
            given.append(jax.numpy.reshape(jax.numpy.asarray(rate), 1))

        def reduce_copies(*operands: Any) -> list[Array]:
            copies = [np.array(operand) for operand in operands]
            reduce([copy.reshape(-1) for copy in copies])
            return copies

        averages: Any = None
        if not any(isinstance(gradient, jax.core.Tracer) for gradient in given):
            averages = [jax.numpy.array(average) for average in reduce_copies(*given)]
            self._after_pass()
        elif jax.default_backend() == "cpu":
            averages = self._calls.in_place(tuple(indices), reduce, given)
        if averages is None:
            shapes = [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in given]
            averages = io_callback(capture_exceptions(reduce_copies), shapes, *given, ordered=True)
        return dict(zip(indices, averages, strict=False))

    def _reduce(self, indices: list[int], arrays: list[Array]) -> None:
        """Overwrite flat arrays with their averages; the learning rate may follow."""
        assert isinstance(self.buckets, HostBuckets)
        started = time.perf_counter()
        if len(arrays) > len(indices):
            self.buckets.follow_rate(float(arrays.pop()[0]))
        self.buckets.give(indices, arrays)
        averages = self.buckets.finish()
        for i, array in zip(indices, arrays, strict=True):
            if not np.may_share_memory(averages[i], array):
                np.copyto(array, averages[i])
        self.waited_seconds += time.perf_counter() - started

    def release(self) -> None:
        self.buckets.release()
        self.communicator.close()


def slice_layout(variables: Sequence[Any], rank: int, size: int) -> SliceLayout:
    """See the protocol."""
    return SliceLayout(variables, rank, size)


class Slices:
    """See the protocol. Parts have values only while a step is traced or runs eagerly.

    One host call writes all ranks' parts into the memory of the whole variables. If XLA wrote this rank's, or saw the
    variables in another shape, it would copy them.
    """

    def __init__(self, variables: Sequence[Any], layout: SliceLayout) -> None:
        if jax.default_backend() != "cpu":
            raise on_gpu(variables[0].path if variables else "a variable")
        self._wholes, self._layout, self._calls = list(variables), layout, HostCalls()
        self.variables = [
            variable if layout.is_whole(i) else new_part(variable, layout.shape(i))
            for i, variable in enumerate(variables)
        ]
        self._parts = [i for i in range(len(variables)) if not layout.is_whole(i)]
        self._free(self._parts)

    def connect(self, gather: SliceGather) -> None:
        self._gather = gather

    def load(self, indices: Sequence[int]) -> None:
        for i in indices:
            if not self._layout.is_whole(i):
                self.variables[i].assign(self._cut(i, self._wholes[i].value))

    def _cut(self, i: int, whole: Any) -> Any:
        return jax.numpy.reshape(whole, -1)[slice(*self._layout.ranges[i])]

    def cut(self, i: int, gradient: Any) -> Any:
        """See the protocol."""
        return gradient if self._layout.is_whole(i) else self._cut(i, gradient)

    def gather(self, indices: Sequence[int], options: dict[str, Any]) -> None:
        """See the protocol."""
        updated = [i for i in indices if self._layout.plan.entries[i].count]
        scalars = [jax.numpy.reshape(jax.numpy.asarray(option), 1) for option in options.values()]
        cut = [i for i in updated if not self._layout.is_whole(i) and not self._layout.is_empty(i)]
        operands = [self._wholes[i].value for i in updated] + [self.variables[i].value for i in cut] + scalars
        run = functools.partial(call_weakly(self._run), tuple(updated), tuple(cut), tuple(options))

        def run_on_copies(*arrays: Any) -> list[Array]:
            copies = [np.array(array) for array in arrays]
            run(copies)
            return copies

        found: Any = None
        if not any(isinstance(operand, jax.core.Tracer) for operand in operands):
            found = [jax.numpy.array(array) for array in run_on_copies(*operands)]
        else:
            found = self._calls.in_place(tuple(updated), run, operands)
        if found is None:
            shapes = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
            found = io_callback(capture_exceptions(run_on_copies), shapes, *operands, ordered=True)
        for i, whole in zip(updated, found, strict=False):
            self._wholes[i].assign(jax.numpy.reshape(whole, self._wholes[i].shape))
        self._free([i for i in self._parts if i in indices])

    def _run(self, updated: Sequence[int], cut: Sequence[int], names: Sequence[str], arrays: list[Array]) -> None:
        entries, layout = self._layout.plan.entries, self._layout
        first = len(updated) + len(cut)
        self._gather.compare({name: array.item() for name, array in zip(names, arrays[first:], strict=True)})
        flats = [array.reshape(-1) for array in arrays[:first]]
        wholes = {i: flat.view(STORAGE[entries[i].dtype]) for i, flat in zip(updated, flats, strict=False)}
        own = {i: flat.view(STORAGE[entries[i].dtype]) for i, flat in zip(cut, flats[len(updated) :], strict=True)}
        own |= {i: wholes[i] for i in updated if layout.is_whole(i)}
        for number, one in enumerate(layout.rounds):
            present = [i for i in one.entries if i in wholes]
            if present:
                self._gather.run(number, present, wholes, own)

    def _free(self, indices: Sequence[int]) -> None:
        """Drop the values of these parts, as Keras does with the variables' own during `fit`."""
        for i in indices:
            self.variables[i]._value = None
            self.variables[i]._initializer = keras.initializers.Zeros()


def at_once() -> contextlib.AbstractContextManager[Any]:
    """See the protocol. A traced step has its optimizer's values as arguments only."""
    return contextlib.nullcontext()


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """See the protocol. No-op, because JAX traces only the host call."""
    return function


def forget_traces(optimizer: Any) -> None:
    """See the protocol. JAX does not tell which functions these are, so all are compiled anew."""
    jax.clear_caches()


def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """See the protocol."""
    if isinstance(condition, jax.core.Tracer):
        return jax.lax.cond(condition, yes, no)
    return yes() if condition else no()


def to_dense(gradient: Any) -> Any:
    """See the protocol. JAX has no sparse gradients."""
    return gradient


def check_other_parallelism(model: Any) -> None:
    """See the protocol. `check_other_parallelism` in validation.py rejects `keras.distribution` on all backends."""


def is_lazy(model: Any) -> bool:
    """See the protocol. On this backend Keras builds a model before it calls any callback."""
    return False


def make_train_function(model: Any, averaging: Any) -> None:
    """See the protocol."""
    model.make_train_function(force=True)
    train_function = model.train_function

    @functools.wraps(train_function)
    def step_with_original_errors(state: Any, iterator: Any) -> Any:
        with restore_exceptions():
            results = train_function(state, iterator)
            if current().recovers:
                # JAX returns before the step is over. But after a loss all ranks must stand at the same collective, so
                # those that the callbacks call come after the step's.
                jax.block_until_ready(results)
            return results

    model.train_function = step_with_original_errors


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """See the protocol."""
    action()


def host_call_with_gradient(
    forward: Callable[..., tuple[Array, Array]], backward: Callable[..., Array], own: Any, count: Any
) -> Any:
    """See the protocol. The calls are ordered, since independent layers must run in the same order on all ranks."""
    like, number = jax.ShapeDtypeStruct(own.shape, own.dtype), jax.ShapeDtypeStruct((), own.dtype)

    def on_host(function: Callable[..., Any], shapes: Any, *operands: Any) -> Any:
        call = capture_exceptions(lambda *arrays: function(*map(np.asarray, arrays)))
        return io_callback(call, shapes, *operands, ordered=True)

    def call(own: Any, count: Any) -> tuple[Any, Any]:
        result, share = on_host(forward, (like, number), own, count)
        return result, (own, result, share)

    def gradient(saved: Any, upstream: Any) -> tuple[Any, None]:
        return on_host(backward, like, *saved, upstream), None

    called = jax.custom_vjp(lambda own, count: call(own, count)[0])
    called.defvjp(call, gradient)
    return called(own, count)


def offset_seed(communicator: Communicator, root: Root) -> None:
    """See the protocol. No-op: on this backend layers use only seed generators."""
