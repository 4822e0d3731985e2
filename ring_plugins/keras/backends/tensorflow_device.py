"""Average TensorFlow's gradients on GPUs: NCCL reduces them in GPU memory, passed by DLPack.

This relies on the following facts:

- A `tf.py_function` placed on a GPU is called with tensors in that GPU's memory, and its results stay there
  (TensorFlow's py_func.cc: `EagerPyFunc` has a kernel for GPUs; `numpy_function` has none).
- `tf.experimental.dlpack.to_dlpack` "ensures the underlying data memory is ready when returns": it synchronizes the
  device, so NCCL need not wait for TensorFlow's stream, which Python cannot access.
- TensorFlow's stream cannot be made to wait for ours either. So the host waits for NCCL before the function returns,
  and only then does TensorFlow launch kernels that read the averages.
- NCCL writes only into tensors that were created here.

The cost: at each bucket the host waits for all work on TensorFlow's stream, and at the end for the last bucket, so
little communication overlaps with backward. No gradient passes through the host.
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
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu import load_driver
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import Bucket, BucketSizes, Entry, FusionPlan
from ring_plugins.core.gradients.reducer import GradientReducer, is_filled
from ring_plugins.core.groups import Group
from ring_plugins.core.trace.steps import steps
from ring_plugins.core.world import current
from ring_plugins.keras.buckets import unequal_gradients
from ring_plugins.keras.validation import all_use_nccl

#: TensorFlow's name for the GPU of this rank, and DLPack's device type.
GPU, KIND = "GPU:0", dlpack.CUDA


def connect(name: str, host: Communicator, group: Group | None = None) -> DeviceCommunicator | None:
    """Create a communicator for TensorFlow's GPUs, or return None if gradients go through the host. Collective.

    Args:
        name: name of the host communicator, for messages.
        host: a communicator of these ranks.
        group: the ranks, all by default.

    Raises:
        MismatchError: some ranks request NCCL and have a GPU, and others do not.
    """
    has_gpu = bool(tf.config.list_logical_devices(GPU.partition(":")[0]))
    if not all_use_nccl(config.TENSORFLOW_NCCL, has_gpu, "TensorFlow", host):
        return None
    driver = load_driver()
    with tf.init_scope(), tf.device(GPU):
        index = driver.device_of(_tensor_of(tf.zeros([1]))[0].pointer)
    streams = _SynchronizedStreams(driver.stream(index))
    return (group or current()).new_device_communicator(f"{name} on GPUs", index, streams)


def call(function: Callable[..., Any], inputs: list[Any], types: list[Any]) -> Any:
    """Make a host call on tensors that stay on the GPU. Arguments and result are those of `tf.numpy_function`."""
    with tf.device(GPU):
        return tf.py_function(function, inputs, types)


class DeviceBuckets:
    """Averages the gradients of one optimizer in GPU memory, as `HostBuckets` does in host memory.

    Args:
        entries: all gradients in the order of the model's variables.
        communicator: reduces them; must have no other use.
        sizes: bucket sizes; large gradients are in buckets too.

    Construction is collective.

    Raises:
        MismatchError: the entries differ among ranks.
    """

    def __init__(self, entries: Sequence[Entry], communicator: DeviceCommunicator, sizes: BucketSizes) -> None:
        self.plan = FusionPlan(entries, sizes._replace(direct_bytes=None))
        self.plan.check_equal(communicator)
        self._communicator = communicator
        self._no_memory = [DeviceMemory(0, 0, bucket.dtype, communicator.device) for bucket in self.plan.buckets]
        #: The buckets of this pass; TensorFlow allocates new ones in each pass.
        self.memories: list[Memory] = [*self._no_memory]
        self.reducer = GradientReducer(self, communicator, Op.SUM)  # gradients are scaled already
        self._wholes: dict[int, Any] = {}
        self._given: dict[int, Any] = {}

    def give(self, indices: Sequence[int], gradients: Sequence[Any]) -> None:
        """Add the gradients of one bucket, which is reduced at once if all previous buckets were given."""
        self._given.update(zip(indices, (gradient.shape for gradient in gradients), strict=True))
        found = dict(zip(indices, gradients, strict=True))
        bucket = next(bucket for bucket in self.plan.buckets if indices[0] in bucket.entries)
        self._send(bucket, found)

    def _send(self, bucket: Bucket, found: dict[int, Any]) -> None:
        """Concatenate the bucket's gradients, zeros for missing ones, and a flag for each, in one copy."""
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
            self.reducer.mark_ready(i, is_filled)

    def finish(self) -> dict[int, Any]:
        """Wait for every bucket.

        Returns:
            The average for each given index, with the gradient's shape.

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
            self.reducer.finish(is_filled)
        except BaseException:
            with contextlib.suppress(RingError):  # the same error again
                self.reducer.abandon(is_filled)
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
        """Check that all ranks gave gradients for the same variables: averaged flags are 1 or 0 except for rounding."""
        order = [i for bucket in self.plan.buckets for i in bucket.entries]
        for i, flag in zip(order, flags, strict=True):
            if abs(flag - (1 if i in given else 0)) > 0.5 / self._communicator.size:
                raise unequal_gradients(i in given, self.plan.entries[i].name)

    def release(self) -> None:
        """Release memory and communicator."""
        self._wholes.clear()
        self._communicator.close()


def _scaled(tensor: Any, factor: float) -> Any:
    """Multiply in float32 or wider, because TensorFlow would round the factor to the tensor's dtype."""
    if tensor.dtype.size > 2:
        return tensor * tf.cast(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float32) * factor, tensor.dtype)


def memory_of(tensor: Any, device: int) -> DeviceMemory:
    """Return the memory of an eager tensor on that GPU, after TensorFlow has computed it.

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
    """The streams of a framework that passes computed data and waits on the host for our results.

    Streams then need no ordering, so our own stream stands for the framework's.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def current(self) -> int:
        return self._stream

    def using(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def scale(self, memory: DeviceMemory, factor: float) -> None:
        raise ArgumentError("TensorFlow tensors cannot be changed in place; scale them before a SUM reduction.")
