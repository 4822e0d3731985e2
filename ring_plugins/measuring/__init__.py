"""Measurements of collectives that `ring bench`, `ring doctor` and benchmarks/ share."""

from ring_plugins.measuring.contestants import Contestant, close, host_contestants, start_gloo
from ring_plugins.measuring.curve import Curve, all_reduce_curve, sizes
from ring_plugins.measuring.timing import Times, interleaved

__all__ = [
    "Contestant",
    "Curve",
    "Times",
    "all_reduce_curve",
    "close",
    "host_contestants",
    "interleaved",
    "sizes",
    "start_gloo",
]
