"""Collectives between GPUs by NVIDIA's NCCL, called through ctypes together with a little of the CUDA driver."""

from ring_plugins.core.gpu.cuda import Driver, load_driver
from ring_plugins.core.gpu.nccl import Nccl, load_nccl

__all__ = ["Driver", "Nccl", "load_driver", "load_nccl"]
