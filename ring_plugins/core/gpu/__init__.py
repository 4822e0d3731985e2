"""NVIDIA's NCCL and the part of the CUDA driver that it takes to use it, by ctypes: nothing to compile."""

from ring_plugins.core.gpu.cuda import Driver, load_driver
from ring_plugins.core.gpu.library import load_nccl
from ring_plugins.core.gpu.nccl import Nccl

__all__ = ["Driver", "Nccl", "load_driver", "load_nccl"]
