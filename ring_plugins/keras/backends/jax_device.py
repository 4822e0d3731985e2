"""Average JAX's gradients on CUDA GPUs: NCCL reduces the buffers of the compiled step, in order with its stream.

XLA calls us while it queues the kernels of a step (`jax_ffi.call_on_gpu`), and passes the addresses of its buffers and
its stream. So nothing is copied to the host, and nobody waits there:

- One call for each bucket lets the communication stream wait for XLA's stream, which has then computed the bucket, and
  queues NCCL's kernels. XLA's stream goes on with backward.
- One call at the end lets XLA's stream wait for the last bucket.

Each call overwrites its operands (`input_output_aliases`), and the last one takes what the others return. So between
the two, XLA neither reads the memory nor gives it to another value. How much of backward overlaps with communication is
up to the order in which XLA schedules the calls.

XLA scales the gradients and puts the small ones into buckets, in the kernels that compute them where it can. JAX gives
every variable a gradient, if only zeros. So there are no flags for missing ones, which the host would have to read.

Gradients outside of a compiled step go through a compiled function that does nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory, Memory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, DeviceError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.gpu import load_driver
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Bucket, BucketSizes, Entry, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.keras.backends.jax_ffi import call_on_gpu, has_buffer_callback
from ring_plugins.keras.buckets import call_weakly
from ring_plugins.keras.validation import all_use_nccl


class XlaStreams:
    """The stream of the call of XLA's that is being handled."""

    def __init__(self) -> None:
        self._stream = 0

    def current(self) -> int:
        return self._stream

    @contextlib.contextmanager
    def using(self, stream: int) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def scale(self, memory: DeviceMemory, factor: float) -> None:
        raise ArgumentError("JAX arrays cannot be changed in place; scale them before a SUM reduction.")


class Connection(NamedTuple):
    """A communicator of the ranks' GPUs, and the streams that it orders its own with."""

    communicator: DeviceCommunicator
    streams: XlaStreams


def connect(name: str, host: Communicator, group: Group | None = None) -> Connection | None:
    """Create a communicator for JAX's GPUs, or return None if gradients go through the host. Collective.

    Args:
        name: name of the host communicator, for messages.
        host: a communicator of these ranks.
        group: the ranks, all by default.

    Raises:
        MismatchError: some ranks request NCCL and have a GPU, and others do not.
        ArgumentError: this version of JAX passes no pointers.
    """
    if not all_use_nccl(config.JAX_NCCL, computes_on_gpus(), "JAX", host):
        return None
    if not has_buffer_callback():
        raise ArgumentError(
            f"RING_JAX_NCCL=1 needs jax.experimental.buffer_callback, which JAX {jax.__version__} lacks; upgrade JAX, "
            "or set RING_JAX_NCCL=0 on all ranks."
        )
    with jax.ensure_compile_time_eval():  # the step may be under construction
        device = load_driver().device_of(jax.numpy.zeros(1).unsafe_buffer_pointer())
    streams = XlaStreams()
    return Connection((group or current()).new_device_communicator(f"{name} on GPUs", device, streams), streams)


def computes_on_gpus() -> bool:
    """Whether JAX has a GPU."""
    return jax.default_backend() == "gpu"


class DeviceBuckets:
    """Averages the gradients of one optimizer in GPU memory, in compiled steps.

    Args:
        entries: all gradients in the order of the model's variables.
        connection: reduces them; must have no other use.
        sizes: sizes of the buckets, and of gradients that are too large for them.

    Construction is collective.

    Raises:
        MismatchError: the entries differ among ranks.
    """

    def __init__(self, entries: Sequence[Entry], connection: Connection, sizes: BucketSizes) -> None:
        self._communicator, self._streams = connection
        self.plan = FusionPlan(entries, sizes)
        self.plan.check_equal(self._communicator)
        self._no_memory = [DeviceMemory(0, 0, bucket.dtype, self._communicator.device) for bucket in self.plan.buckets]
        #: The small gradients of each bucket in this step; XLA allocates new memory in each.
        self.memories: list[Memory] = [*self._no_memory]
        self._small = [tuple(i for i in bucket.entries if i not in bucket.direct) for bucket in self.plan.buckets]
        self._counts = [[self.plan.entries[i].count for i in small] for small in self._small]
        self._large: dict[int, list[DeviceMemory]] = {}  # those of this step, by bucket
        self._given: list[int] = []  # addresses of all of them
        self.reducer = GradientReducer(self, self._communicator, Op.SUM)  # they are scaled already
        self._compiled = jax.jit(call_weakly(self._average))

    def average(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Average gradients, by index of their variables, traced or not.

        Raises:
            ArgumentError: one is missing.
        """
        with rejections_told(self._communicator, "averaging gradients"):
            missing = [entry.name for i, entry in enumerate(self.plan.entries) if i not in gradients]
            if missing:
                raise ArgumentError(
                    f"this rank's step has no gradient for {missing[0]}. RING_JAX_NCCL=1 needs one for every variable "
                    "of the optimizer, such as zeros; or set RING_JAX_NCCL=0 on all ranks."
                )
        is_traced = any(isinstance(gradient, jax.core.Tracer) for gradient in gradients.values())
        return self._average(gradients) if is_traced else self._compiled(gradients)

    def _average(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Trace a call for each bucket and one for the averages."""
        parts: dict[int, list[Any]] = {}
        for bucket in self.plan.buckets:
            scaled = {i: _scaled(gradients[i], 1 / self._communicator.size) for i in bucket.entries}
            small = [scaled[i].reshape(-1) for i in self._small[bucket.index]]
            operands = [jax.numpy.concatenate(small)] if sum(self._counts[bucket.index]) else []
            operands += [scaled[i] for i in bucket.direct]
            if operands:
                parts[bucket.index] = call_on_gpu(functools.partial(call_weakly(self._give), bucket.index), operands)
        if not parts:
            return dict(gradients)
        flat = [part for of_bucket in parts.values() for part in of_bucket]
        results = iter(call_on_gpu(call_weakly(self._finish), flat))
        averages = dict(gradients)
        for index in parts:
            if sum(self._counts[index]):
                ends = list(itertools.accumulate(self._counts[index]))[:-1]
                for i, part in zip(self._small[index], jax.numpy.split(next(results), ends), strict=True):
                    averages[i] = part.reshape(gradients[i].shape)
            averages.update({i: next(results) for i in self.plan.buckets[index].direct})
        return averages

    def _give(self, index: int, stream: int, pointers: list[int]) -> None:
        """Let NCCL reduce a bucket behind the work that XLA's stream has so far."""
        self._communicator.check()
        if index in self._large:
            raise self._broken("an earlier step ended before its gradients were averaged")
        bucket, own, device = self.plan.buckets[index], iter(pointers), load_driver().device_of(pointers[0])
        if count := sum(self._counts[index]):
            self.memories[index] = DeviceMemory(next(own), count, bucket.dtype, device)
        self._large[index] = [
            DeviceMemory(pointer, self.plan.entries[i].count, bucket.dtype, device)
            for i, pointer in zip(bucket.direct, own, strict=True)
        ]
        self._given += pointers
        with self._streams.using(stream):
            self.reducer.begin()
            self.reducer.mark_some_ready(index, len(bucket.entries), self._large_of)

    def _large_of(self, bucket: Bucket) -> list[DeviceMemory]:
        return self._large.get(bucket.index, [])

    def _finish(self, stream: int, pointers: list[int]) -> None:
        """Let XLA's stream wait for every bucket.

        Raises:
            PeerFailed: another rank is gone.
            DeviceError: XLA has moved the gradients meanwhile.
        """
        if pointers != self._given:
            raise self._broken("XLA has moved gradients that NCCL works on")
        try:
            with self._streams.using(stream):
                self.reducer.finish(self._large_of)
        finally:
            self._forget()

    def _broken(self, what: str) -> RingError:
        """An error after which no rank may go on."""
        error = DeviceError(f"{self._communicator.name}: {what}; set RING_JAX_NCCL=0 on all ranks.")
        self._communicator.interrupt("averaging gradients", error)
        self._forget()
        return error

    def _forget(self) -> None:
        self.memories[:] = self._no_memory
        self._large.clear()
        self._given.clear()

    def release(self) -> None:
        """Release the communicator."""
        self._communicator.close()


def _scaled(gradient: Any, factor: float) -> Any:
    """Multiply in float32 or wider, because JAX would round the factor to the gradient's dtype."""
    if gradient.dtype.itemsize > 2:
        return gradient * factor
    return (gradient.astype("float32") * factor).astype(gradient.dtype)
