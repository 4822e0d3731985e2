"""Runs on each rank of a shared launch: the scenarios and behaviors that TEST_ONLY names."""

from __future__ import annotations

import gc
import importlib
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import ring_plugins as ring
from tests.keras.behaviors import BEHAVIORS
from tests.keras.scenarios import BACKEND, SCENARIOS, Outcome, Run
from tests.worker import report

#: The last module has a behavior after which the ranks are no longer synchronized.
MODULES = ("metrics", "learning_rate", "broadcast", "averaging", "sharded_optimizer", "shard", "uneven", "validation")


def main() -> None:
    """Report for each name the comparison of all ranks with one process, or the result of the behavior."""
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(f"tests.keras.behaviors.{module}")
    gc.freeze()  # otherwise collections search a framework's 100,000s of objects, in a third of the time
    names = os.environ["TEST_ONLY"].split(",")
    scenarios = [name for name in SCENARIOS if name in names]
    alone = outcomes_alone(scenarios)
    for name in scenarios:
        report_result(name, lambda name=name: compare(alone[name], outcome(name, ring.rank(), ring.size())))
    for name, function in BEHAVIORS.items():
        if name in names:
            keras.backend.clear_session(free_memory=False)
            report_result(name, function)


def report_result(name: str, function: Callable[[], Any]) -> None:
    started = time.monotonic()
    try:
        report(name, {"value": function(), "seconds": time.monotonic() - started})
    except Exception:
        report(name, {"error": traceback.format_exc()})


def outcomes_alone(names: list[str]) -> dict[str, Outcome]:
    """Run every scenario in one process; the ranks divide the scenarios."""
    mine = {name: outcome(name, 0, 1) for name in names[ring.rank() :: ring.size()]}
    by_rank: list[dict[str, Outcome]] = ring.all_gather_object(mine)
    return {name: found for part in by_rank for name, found in part.items()}


def outcome(name: str, rank: int, size: int) -> Outcome:
    keras.backend.clear_session(free_memory=False)
    try:
        return SCENARIOS[name](Run(rank, size, ring.size()))
    except Exception:
        return {"error": traceback.format_exc()}


def compare(alone: Outcome, together: Outcome) -> dict[str, Any]:
    """Measure the distance of all ranks from one process, and list where ranks disagree."""
    errors = [found["error"] for found in (alone, together) if "error" in found]
    by_rank = ring.all_gather_object((errors, together))
    if any(others for others, _ in by_rank):
        raise RuntimeError("\n".join(errors) or "another rank failed")
    disagree = [key for key in together if any(not np.array_equal(together[key], other[key]) for _, other in by_rank)]
    return {
        "compared": len([key for key in alone if key.startswith("weight")]),
        "weights": relative(alone, together, "weight"),
        "state": relative(alone, together, "state"),
        "disagreements": disagree,
    }


def relative(alone: Outcome, together: Outcome, kind: str) -> float:
    """Norm of the difference between all values of a kind, relative to the norm of the values."""
    keys = [key for key in alone if key.startswith(kind)]
    if any(np.shape(alone[key]) != np.shape(together[key]) for key in keys):
        return float("inf")
    expected = np.concatenate([np.ravel(alone[key]).astype(np.float64) for key in keys] or [np.zeros(0)])
    found = np.concatenate([np.ravel(together[key]).astype(np.float64) for key in keys] or [np.zeros(0)])
    return float(np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1.0))
