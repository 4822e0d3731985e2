"""What a program under rehearsal asks of its simulated GPU."""

import ctypes
import os

import ring_plugins as ring


def count(what: str) -> int:
    """How often something has happened in this process: a function of CUDA or NCCL, or one of settings.cpp's words."""
    counted = ctypes.CDLL("libsimulated_devices.so").simulated_count
    counted.restype = ctypes.c_long
    return int(counted(what.encode()))


def load() -> None:
    """Load what is simulated before TensorFlow or JAX, which have functions of the same names."""
    for library in ("libcuda.so.1", os.environ["RING_NCCL_LIBRARY"]):
        ctypes.CDLL(library)


def make_default() -> "Launches":
    """Let torch put new tensors on this rank's GPU, for checks that know of no GPUs; returns what it launches."""
    import torch

    device = torch.device("cuda", ring.local_rank())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return Launches()


class Launches:
    """As many as NCCL has launched kernels."""

    def __len__(self) -> int:
        return count("NCCL kernels")
