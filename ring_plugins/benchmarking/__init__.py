"""Measurements of collectives that `ring bench`, `ring doctor` and benchmarks/ share."""

from ring_plugins.benchmarking.backends import (
    Contestant,
    check_names,
    close,
    device_contestants,
    host_contestants,
    start_gloo,
)
from ring_plugins.benchmarking.curve import Curve, all_reduce_curve, sizes
from ring_plugins.benchmarking.picture import draw
from ring_plugins.benchmarking.timing import Times, interleaved

__all__ = [
    "Contestant",
    "Curve",
    "Times",
    "all_reduce_curve",
    "check_names",
    "close",
    "device_contestants",
    "draw",
    "host_contestants",
    "interleaved",
    "sizes",
    "start_gloo",
]
