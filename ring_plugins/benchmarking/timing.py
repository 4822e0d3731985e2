"""Interleaved timing: every repetition runs all variants, so that noise of the machine hits all alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

import ring_plugins as ring


@dataclass(frozen=True)
class Times:
    """Seconds of one variant: of the slowest rank in each repetition.

    Attributes:
        median, low, high: the median and the quartiles.
        least: the shortest.
    """

    median: float
    low: float
    high: float
    least: float


def interleaved(
    variants: Mapping[str, Callable[[], object]], repetitions: int, calls: int = 1, warm_up: int = 2
) -> dict[str, Times]:
    """Time each variant on all ranks, one after the other, over and over; collective.

    A collective has taken as long as it took the slowest rank, so the ranks' times are combined by MAX per
    repetition. The order of variants is turned around in every other repetition.

    Args:
        variants: what to time, by name.
        repetitions: samples of each.
        calls: how often a variant is called for one sample, which is then the time of one call.
        warm_up: repetitions that do not count.
    """
    names = list(variants)
    seconds = np.zeros((repetitions, len(names)))
    gc.collect()
    gc.disable()
    try:
        for repetition in range(-warm_up, repetitions):
            order = range(len(names)) if repetition % 2 else reversed(range(len(names)))
            for i in order:
                ring.barrier()
                started = time.perf_counter()
                variant = variants[names[i]]
                for _ in range(calls):
                    variant()
                elapsed = (time.perf_counter() - started) / calls
                if repetition >= 0:
                    seconds[repetition, i] = elapsed
    finally:
        gc.enable()
    seconds = ring.all_reduce(seconds, ring.MAX)
    quantiles = np.percentile(seconds, [50, 25, 75, 0], axis=0)
    return {name: Times(*map(float, quantiles[:, i])) for i, name in enumerate(names)}
