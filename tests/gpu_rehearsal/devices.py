"""What a program under rehearsal asks of its simulated GPU."""

import ctypes

import torch

import ring_plugins as ring


def count(what: str) -> int:
    """How often something has happened in this process: a function of CUDA or NCCL, or one of settings.cpp's words."""
    counted = ctypes.CDLL("libsimulated_devices.so").simulated_count
    counted.restype = ctypes.c_long
    return int(counted(what.encode()))


def make_default() -> "Launches":
    """Let torch put new tensors on this rank's GPU, for checks that know of no GPUs; returns what it launches."""
    device = torch.device("cuda", ring.local_rank())
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return Launches()


class Launches:
    """As long as the log of the stand-in's NCCL: one for each kernel of NCCL's."""

    def __len__(self) -> int:
        return count("NCCL kernels")
