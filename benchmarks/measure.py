"""Interleaved measurement: every repetition runs all variants, so that noise of the machine hits all alike."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ring_plugins as ring

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Times:
    """Seconds of one variant: of the slower rank in each repetition.

    Attributes:
        median, low, high: the median and the quartiles.
    """

    median: float
    low: float
    high: float


def interleaved(
    variants: dict[str, Callable[[], None]], repetitions: int, calls: int = 1, warm_up: int = 2
) -> dict[str, Times]:
    """Time each variant on all ranks, one after the other, over and over.

    A collective has taken as long as it took the slower rank, so the ranks' times are combined by MAX per
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
    quartiles = np.percentile(seconds, [50, 25, 75], axis=0)
    return {name: Times(*map(float, quartiles[:, i])) for i, name in enumerate(names)}


def machine() -> str:
    """One line on where this ran."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def save(name: str, record: dict[str, object]) -> None:
    """Keep what was measured beside the benchmarks, as JSON."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")
