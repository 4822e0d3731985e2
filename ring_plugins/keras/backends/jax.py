"""JAX: the compiled step makes one host call between backward and update.

On CPUs XLA calls Python on its own buffers (`jax_ffi.py`). On GPUs NCCL reduces them on request (`jax_device.py`).
Otherwise `io_callback` is used, which copies. XLA makes the host call when all gradients are ready, so communication
does not overlap with backward. "auto" therefore tries nothing: all buckets are reduced synchronously, as one operation.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import keras
import numpy as np
from jax.experimental import io_callback

from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.base import config
from ring_plugins.core.base.types import Array
from ring_plugins.core.gradients.fusion import Entry
from ring_plugins.core.gradients.trials import chosen_overlap
from ring_plugins.core.world import current
from ring_plugins.keras import backends, slices
from ring_plugins.keras.backends import BatchShare, Settings, Statistics, jax_device
from ring_plugins.keras.backends.jax_ffi import call_on_host, has_buffer_callback
from ring_plugins.keras.buckets import HostBuckets, call_weakly
from ring_plugins.keras.job import capture_exceptions, members, restore_exceptions

T = TypeVar("T")

#: Gradients of at least this many bytes are reduced in place. A separate reduction costs some microseconds, but saves
#: two copies.
_DIRECT_BYTES = 64 * 1024


def _is_traced(operands: Sequence[Any]) -> bool:
    return any(isinstance(operand, jax.core.Tracer) for operand in operands)


def _overwritten(function: Callable[[list[Array]], None], operands: Sequence[Any]) -> Sequence[Any]:
    """Let a function on the host overwrite operands, which it gets as flat arrays; traced or eagerly."""

    def on_copies(*given: Any) -> list[Array]:
        copies = [np.array(operand) for operand in given]
        function([copy.reshape(-1) for copy in copies])
        return copies

    if not _is_traced(operands):
        return [jax.numpy.array(array) for array in on_copies(*operands)]
    # Empty memory has no address.
    if jax.default_backend() == "cpu" and has_buffer_callback() and all(operand.size for operand in operands):
        return call_on_host(function, operands)
    shapes = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    found: Sequence[Any] = io_callback(capture_exceptions(on_copies), shapes, *operands, ordered=True)
    return found


class Exchange(backends.Exchange):
    """See the base class."""

    def __init__(self, variables: Sequence[Any], entries: Sequence[Entry], settings: Settings) -> None:
        self.communicator = members(settings.group).new_communicator(settings.name)
        # Compression rounds on the host.
        on_gpus = None
        if not settings.rounds_on_host:
            on_gpus = jax_device.connect(settings.name, self.communicator, settings.group)
        self.buckets: HostBuckets | jax_device.DeviceBuckets
        if on_gpus is not None:
            self.buckets = jax_device.DeviceBuckets(entries, on_gpus, settings.sizes)
        else:
            sizes = settings.sizes._replace(direct_bytes=_DIRECT_BYTES)
            chosen = chosen_overlap(settings.overlap)
            overlap = False if chosen == "auto" else chosen
            self.buckets = HostBuckets(
                entries, self.communicator, sizes, settings.rounding, True, overlap, settings.checks
            )
        self._variables, self._waited = variables, 0.0

    @property
    def statistics(self) -> Statistics:
        return super().statistics._replace(waited_seconds=self._waited)

    def average(self, gradients: dict[int, Any], rate: Any = None, share: BatchShare | None = None) -> dict[int, Any]:
        if isinstance(self.buckets, jax_device.DeviceBuckets):
            return self.buckets.average(gradients)
        indices, given = list(gradients), list(gradients.values())
        if rate is not None:
            given.append(jax.numpy.reshape(jax.numpy.asarray(rate), 1))
        # An eager step of `fit` has the values elsewhere, too.
        is_elsewhere = _is_traced(given) or any(variable._value is None for variable in self._variables)
        self.buckets.checks.weights.is_readable = not is_elsewhere
        counted = None if share is None else (share.counted, share.full)  # another shape is another step
        averages = _overwritten(functools.partial(call_weakly(self._reduce), indices, counted), given)
        return dict(zip(indices, averages, strict=False))

    def _reduce(self, indices: list[int], counted: tuple[int, int] | None, arrays: list[Array]) -> None:
        """Overwrite flat arrays with their averages; the learning rate may follow."""
        assert isinstance(self.buckets, HostBuckets)
        started = time.perf_counter()
        if len(arrays) > len(indices):
            self.buckets.checks.rates.take(float(arrays.pop()[0]))
        self.buckets.counted = counted
        self.buckets.give(indices, arrays)
        averages = self.buckets.finish()
        for i, array in zip(indices, arrays, strict=True):
            if not np.may_share_memory(averages[i], array):
                np.copyto(array, averages[i])
        self._waited += time.perf_counter() - started


class Slices(slices.Slices):
    """See the base class. Parts have values only while a step is traced or runs eagerly.

    One host call writes all ranks' parts into the memory of the whole variables. If XLA wrote this rank's, or saw the
    variables in another shape, it would copy them.
    """

    def __init__(self, variables: Sequence[Any], rank: int, size: int) -> None:
        super().__init__(variables, rank, size)
        self._free(self._parts)

    def _is_on_gpu(self, variable: Any) -> bool:
        return jax.default_backend() != "cpu"

    def load(self, i: int) -> None:
        self.variables[i].assign(self.cut(i, self._wholes[i].value))

    def cut(self, i: int, gradient: Any) -> Any:
        return jax.numpy.reshape(gradient, -1)[slice(*self.layout.ranges[i])]

    def gather(self, indices: Sequence[int], options: dict[str, Any]) -> None:
        updated = [i for i in indices if self.layout.plan.entries[i].count]
        scalars = [jax.numpy.reshape(jax.numpy.asarray(option), 1) for option in options.values()]
        cut = [i for i in updated if i in self._parts and not self.layout.is_empty(i)]
        operands = [self._wholes[i].value for i in updated] + [self.variables[i].value for i in cut] + scalars
        run = functools.partial(call_weakly(self._run), tuple(updated), tuple(cut), tuple(options))
        for i, whole in zip(updated, _overwritten(run, operands), strict=False):
            self._wholes[i].assign(jax.numpy.reshape(whole, self._wholes[i].shape))
        self._free([i for i in self._parts if i in indices])

    def _run(self, updated: Sequence[int], cut: Sequence[int], names: Sequence[str], arrays: list[Array]) -> None:
        entries, first = self.layout.plan.entries, len(updated) + len(cut)
        self.compare({name: array.item() for name, array in zip(names, arrays[first:], strict=True)})
        flats = [array.view(STORAGE[entries[i].dtype]) for i, array in zip((*updated, *cut), arrays, strict=False)]
        wholes = dict(zip(updated, flats, strict=False))
        own = {i: wholes[i] for i in updated if self.layout.is_whole(i)}
        own |= zip(cut, flats[len(updated) :], strict=True)
        for number, present in self.rounds(updated):
            self._gather.run(number, present, wholes, own)

    def _free(self, indices: Sequence[int]) -> None:
        """Drop the values of these parts, as Keras does with the variables' own during `fit`."""
        for i in indices:
            self.variables[i]._value = None
            self.variables[i]._initializer = keras.initializers.Zeros()


class JaxBackend(backends.Backend):
    """See the base class.

    JAX traces only the host call of a collective, has no sparse gradients, and makes a step's variables its arguments,
    so that none can be read at once. Its layers use only seed generators. `keras.distribution` is rejected elsewhere.
    """

    Exchange, Slices = Exchange, Slices

    nccl = config.JAX_NCCL

    def has_gpus(self) -> bool:
        return jax_device.computes_on_gpus()

    def forget_traces(self, optimizer: Any) -> None:
        jax.clear_caches()  # all of them: JAX does not tell which have updated with this optimizer

    def choose(self, condition: Any, yes: Callable[[], T], no: Callable[[], T]) -> T:
        if isinstance(condition, jax.core.Tracer):
            found: T = jax.lax.cond(condition, yes, no)
            return found
        return super().choose(condition, yes, no)

    def make_train_function(self, model: Any, averaging: Any) -> None:
        super().make_train_function(model, averaging)
        train_function = model.train_function

        @functools.wraps(train_function)
        def step_with_original_errors(state: Any, iterator: Any) -> Any:
            with restore_exceptions():
                results = train_function(state, iterator)
                if current().recovers:
                    # JAX returns before the step is over. But after a loss all ranks must stand at the same collective,
                    # so those that the callbacks call come after the step's.
                    jax.block_until_ready(results)
                return results

        model.train_function = step_with_original_errors

    def host_call_with_gradient(
        self, forward: Callable[..., tuple[Array, Array]], backward: Callable[..., Array], own: Any, count: Any
    ) -> Any:
        """See the base class. The calls are ordered: independent layers must run in the same order on all ranks."""
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


BACKEND = JaxBackend()
