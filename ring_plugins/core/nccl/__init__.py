"""NVIDIA's NCCL and the part of the CUDA driver that it takes to use it, by ctypes: nothing to compile."""

from ring_plugins.core.nccl.calls import Nccl
from ring_plugins.core.nccl.driver import Driver, load_driver
from ring_plugins.core.nccl.library import load_nccl

__all__ = ["Driver", "Nccl", "load_driver", "load_nccl"]
