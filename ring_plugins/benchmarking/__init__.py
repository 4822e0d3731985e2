"""Measurements of collectives that `ring bench`, `ring doctor` and benchmarks/ share."""

from ring_plugins.benchmarking.backends import (
    Backend,
    check_names,
    close,
    device_backends,
    host_backends,
    start_gloo,
)
from ring_plugins.benchmarking.curve import Curve, Times, all_reduce_curve, interleaved, sizes

__all__ = [
    "Backend",
    "Curve",
    "Times",
    "all_reduce_curve",
    "check_names",
    "close",
    "device_backends",
    "host_backends",
    "interleaved",
    "sizes",
    "start_gloo",
]
