"""What becomes of gradients that Keras computes on GPUs."""

from __future__ import annotations

import functools
import warnings

import keras

from ring_plugins.core.base import config


@functools.lru_cache(maxsize=1)
def say_what_gpus_cost(rank: int) -> None:
    """Warn, once and on rank 0, where gradients leave the GPU to be averaged.

    On torch they do not: NCCL reduces them where they are. On TensorFlow they do unless that is asked for, since the
    way around has never run on a card (`backends/tensorflow_device.py`), and JAX compiles its collectives itself.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow" and config.TENSORFLOW_NCCL.get():
        return
    if rank != 0 or backend not in ("tensorflow", "jax") or not _computes_on_gpus(backend):
        return
    cost = (
        f"ring_plugins averages gradients of the {backend} backend in the memory of the CPU: each step copies all of "
        "them from the GPU and back (two passes over PCIe; 100 MB of gradients take some 10 ms a step or more at 20 "
        "GB/s). KERAS_BACKEND=torch averages them on the GPUs."
    )
    if backend == "jax":
        cost += " On one host with several GPUs, keras.distribution.DataParallel keeps them there too."
    else:
        cost += " RING_TENSORFLOW_NCCL=1 does so on TensorFlow too, which nobody has tried on a GPU yet."
    warnings.warn(cost, stacklevel=2)


def _computes_on_gpus(backend: str) -> bool:
    if backend == "jax":
        import jax

        return str(jax.default_backend()) == "gpu"
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))  # asking for logical ones would start TensorFlow here
