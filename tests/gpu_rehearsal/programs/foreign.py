"""Memory of TensorFlow's and JAX's kind reaches NCCL: `foreign.py tensorflow`, `foreign.py jax`.

There are only their CPU builds here, which put nothing on a GPU. So torch's memory stands for theirs: TensorFlow
exports torch's DLPack capsule, and JAX's buckets get addresses and a stream as XLA passes them.
"""

import os
import sys
from types import SimpleNamespace

os.environ["KERAS_BACKEND"] = sys.argv[1]

import torch

import ring_plugins as ring
from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.gpu import load_driver
from ring_plugins.core.world import current
from tests.worker import report

ring.init(ranks=int(os.environ["TEST_RANKS"]))
DEVICE = torch.device("cuda", ring.local_rank())
torch.cuda.set_device(DEVICE)
driver = load_driver()


def of_tensorflow() -> None:
    import tensorflow as tf

    from ring_plugins.keras.backends import tensorflow_device as face

    def exported(values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(values=values, shape=tf.TensorShape(values.shape), device=str(values.device))

    tf.experimental.dlpack.to_dlpack = lambda tensor: tensor.values.__dlpack__()
    values = torch.arange(12.0, device=DEVICE).view(3, 4) * (1 + ring.rank())
    torch.cuda.synchronize()
    memory = face.memory_of(exported(values), driver.device_of(values.data_ptr()))
    streams = face._SynchronizedStreams(driver.stream(memory.device))
    communicator = current().new_device_communicator("TensorFlow on GPUs", memory.device, streams)
    communicator.start("gradients", lambda: communicator.all_reduce(memory, Op.SUM))
    communicator.synchronize()
    report("sum", values.flatten().tolist())
    report("memory", [memory.device, memory.dtype, memory.size])
    try:
        face.memory_of(exported(torch.ones(2)), 0)
    except ring.ArgumentError as error:
        report("on the CPU", str(error))
    report("GPUs", len(tf.config.list_physical_devices("GPU")))
    communicator.close()


def of_jax() -> None:
    import jax

    from ring_plugins.core.gradients.fusion import BucketSizes, Entry
    from ring_plugins.keras.backends.jax_device import Connection, DeviceBuckets, XlaStreams

    streams, stream = XlaStreams(), torch.cuda.Stream()
    communicator = current().new_device_communicator("JAX on GPUs", DEVICE.index, streams)
    entries = [Entry("small", "float32", 12, ""), Entry("large", "float32", 1 << 19, "")]
    buckets = DeviceBuckets(entries, Connection(communicator, streams), BucketSizes())
    with torch.cuda.stream(stream):  # as XLA's is, apart from all others
        values, pointers = [], []
        for bucket in buckets.plan.buckets:
            counts = [entries[i].count for i in bucket.entries if i not in bucket.direct]
            own = [sum(counts)] * bool(counts) + [entries[i].count for i in bucket.direct]
            made = [torch.full((count,), 1.0 + ring.rank(), device=DEVICE) for count in own]
            values += made
            pointers.append([one.data_ptr() for one in made])
        for number in reversed(range(len(pointers))):
            buckets._give(number, stream.cuda_stream, pointers[number])
        given = [pointer for one in reversed(pointers) for pointer in one]
        buckets._finish(stream.cuda_stream, given)
        report("sum", sorted({value for one in values for value in one.tolist()}))
    report("GPUs", sum(device.platform == "gpu" for device in jax.devices()))
    communicator.close()


{"tensorflow": of_tensorflow, "jax": of_jax}[sys.argv[1]]()
ring.shutdown()
