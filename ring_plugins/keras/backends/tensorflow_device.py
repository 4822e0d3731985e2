"""TensorFlow's gradients on GPUs: handed to NCCL where they are, by DLPack.

The facts that this relies on:

- A `tf.py_function` placed on a GPU is called with tensors in that GPU's memory, and what it returns stays there
  (TensorFlow's py_func.cc: `EagerPyFunc` has a kernel for GPUs; `numpy_function` has none).
- `tf.experimental.dlpack.to_dlpack` "ensures the underlying data memory is ready when returns": it waits for the
  device, so NCCL needs not follow TensorFlow's stream, which cannot be reached from Python.
- In the other direction nothing tells TensorFlow's stream to wait for ours. So the host waits until NCCL is done before
  the function returns, and only then does TensorFlow launch work that reads the averages.
- NCCL writes into tensors that were made here and that nobody else has seen.

The cost: at each bucket TensorFlow waits until everything on its stream is computed, and at the end until the last
bucket is reduced, so little communication overlaps with backward. No gradient passes through the host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ring_plugins.core.arrays import memory as dlpack
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.arrays.memory import DeviceMemory, Memory
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError, name_ranks
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu import load_driver
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Bucket, BucketSizes, Entry, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer
from ring_plugins.core.trace.steps import steps
from ring_plugins.core.world import current
from ring_plugins.keras.buckets import unequal_gradients

#: As TensorFlow names the GPU of this rank, and as DLPack names its kind.
GPU, KIND = "GPU:0", dlpack.CUDA


def connect(name: str, host: Communicator) -> DeviceCommunicator | None:
    """Make a communicator for the GPUs that TensorFlow computes on; None if gradients go through the host; collective.

    Args:
        name: of the host's communicator, for texts.
        host: a communicator of all ranks.

    Raises:
        MismatchError: some ranks ask for NCCL and have a GPU, and others do not.
    """
    is_here = config.TENSORFLOW_NCCL.get() and bool(tf.config.list_logical_devices(GPU.partition(":")[0]))
    where = host.all_gather_object(is_here)
    if not any(where):
        return None
    if not all(where):
        lacking = [rank for rank, is_there in zip(host.ranks, where, strict=True) if not is_there]
        raise MismatchError(
            f"{name_ranks(lacking)}: no GPU for TensorFlow, or no RING_TENSORFLOW_NCCL=1, unlike the others. Set the "
            "variable on all ranks or on none, and give each a GPU."
        )
    driver = load_driver()
    with tf.init_scope(), tf.device(GPU):
        index = driver.device_of(_tensor_of(tf.zeros([1]))[0].pointer)
    return current().new_device_communicator(f"{name} on GPUs", index, _SynchronizedStreams(driver.stream(index)))


def call(function: Callable[..., Any], inputs: list[Any], types: list[Any]) -> Any:
    """Make a host call with tensors that stay on the GPU; arguments and result as for `tf.numpy_function`."""
    with tf.device(GPU):
        return tf.py_function(function, inputs, types)


class DeviceBuckets:
    """Averages the gradients of one optimizer between GPUs: `HostBuckets` for the memory of GPUs.

    Args:
        entries: all gradients in the order of the model's variables.
        communicator: reduces them; used by nothing else.
        sizes: of the buckets; large gradients travel in them too.

    All ranks construct it together.

    Raises:
        MismatchError: the entries differ among ranks.
    """

    def __init__(self, entries: Sequence[Entry], communicator: DeviceCommunicator, sizes: BucketSizes) -> None:
        self.plan = FusionPlan(entries, sizes._replace(direct_bytes=None))
        self.plan.check_equal(communicator)
        self._communicator = communicator
        self._no_memory = [DeviceMemory(0, 0, bucket.dtype, communicator.device) for bucket in self.plan.buckets]
        #: The buckets of this pass; TensorFlow allocates them anew each time.
        self.memories: list[Memory] = [*self._no_memory]
        self.reducer = GradientReducer(self, communicator, lambda bucket: None, Op.SUM)  # of scaled gradients
        self._wholes: dict[int, Any] = {}
        self._given: dict[int, Any] = {}

    def give(self, indices: Sequence[int], gradients: Sequence[Any]) -> None:
        """Hand over the gradients of one bucket; it is reduced at once if those before it were given."""
        self._given.update(zip(indices, (gradient.shape for gradient in gradients), strict=True))
        found = dict(zip(indices, gradients, strict=True))
        bucket = next(bucket for bucket in self.plan.buckets if indices[0] in bucket.entries)
        self._send(bucket, found)

    def _send(self, bucket: Bucket, found: dict[int, Any]) -> None:
        """Concatenate the gradients in the bucket's order, zeros for missing ones, and a flag for each: one copy."""
        dtype = tf.as_dtype(bucket.dtype)
        with tf.device(GPU):
            parts = [
                tf.reshape(found[i], [-1]) if i in found else tf.zeros([self.plan.entries[i].count], dtype)
                for i in bucket.entries
            ]
            flags = tf.constant([1.0 if i in found else 0.0 for i in bucket.entries], dtype)
            whole = _scaled(tf.concat([*parts, flags], 0), 1 / self._communicator.size)  # always a copy
        self._wholes[bucket.index] = whole
        self.memories[bucket.index] = memory_of(whole, self._communicator.device)
        for i in bucket.entries:
            self.reducer.mark_ready(i)

    def finish(self) -> dict[int, Any]:
        """Wait for every bucket.

        Returns:
            For each given index its average, a tensor of the gradient's shape.

        Raises:
            MismatchError: a variable has a gradient on some ranks only.
            PeerFailed: another rank is gone.
        """
        given, self._given = self._given, {}
        try:
            for bucket in self.plan.buckets:
                if bucket.index not in self._wholes:
                    self._send(bucket, {})
            began = time.monotonic()
            self._communicator.synchronize()
            seconds = time.monotonic() - began
            self.reducer.waited += seconds
            steps.add_blocked_time(seconds, 0.0)
            self.reducer.finish()
        except BaseException:
            with contextlib.suppress(RingError):  # the same error again
                self.reducer.abandon()
            raise
        finally:
            wholes, self._wholes = self._wholes, {}
            self.memories[:] = self._no_memory
        averages: dict[int, Any] = {}
        flags: list[Any] = []
        with tf.device(GPU):
            for bucket in self.plan.buckets:
                counts = [self.plan.entries[i].count for i in bucket.entries]
                *parts, of_bucket = tf.split(wholes[bucket.index], [*counts, len(counts)])
                flags.append(tf.cast(of_bucket, tf.float32))
                averages.update(zip(bucket.entries, parts, strict=True))
            self._check_flags(given, tf.concat(flags, 0).numpy().tolist())
            return {i: tf.reshape(averages[i], shape) for i, shape in given.items()}

    def _check_flags(self, given: dict[int, Any], flags: list[float]) -> None:
        """Check that all ranks gave the same gradients: the averages of their flags are 1 or 0 but for rounding."""
        order = [i for bucket in self.plan.buckets for i in bucket.entries]
        for i, flag in zip(order, flags, strict=True):
            if abs(flag - (1 if i in given else 0)) > 0.5 / self._communicator.size:
                raise unequal_gradients(i in given, self.plan.entries[i].name)

    def release(self) -> None:
        """Give back memory and communicator."""
        self._wholes.clear()
        self._communicator.close()


def _scaled(tensor: Any, factor: float) -> Any:
    """Multiply in float32 at least; TensorFlow would round the factor to the tensor's type."""
    if tensor.dtype.size > 2:
        return tensor * tf.cast(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float32) * factor, tensor.dtype)


def memory_of(tensor: Any, device: int) -> DeviceMemory:
    """Return the memory of an eager tensor on that GPU once TensorFlow has computed it.

    Raises:
        ArgumentError: the tensor is not on a GPU.
    """
    found, capsule = _tensor_of(tensor)
    if found.device_type != KIND:
        raise ArgumentError(
            f"TensorFlow computed a gradient on {tensor.device}, not on a GPU, with RING_TENSORFLOW_NCCL=1; unset it."
        )
    return DeviceMemory(found.pointer, int(tensor.shape.num_elements()), found.dtype, device, (tensor, capsule))


def _tensor_of(tensor: Any) -> tuple[dlpack.DLTensor, Any]:
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return dlpack.tensor_in(capsule), capsule


class _SynchronizedStreams:
    """The streams of a framework that hands over data when it is ready and goes on when we are done.

    Nothing needs to be ordered then, so the stream of the framework may as well be ours.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def current(self) -> int:
        return self._stream

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scale(self, memory: DeviceMemory, factor: float) -> None:
        raise ArgumentError("TensorFlow's tensors cannot be changed in place; scale before the reduction, and sum.")
