"""What one rank of a launch does: every scenario alone and together, then every behaviour, or what TEST_ONLY names."""

from __future__ import annotations

import gc
import os
import traceback
from typing import Any

import keras
import numpy as np

import ring_plugins as ring
from tests.keras.behaviours import BEHAVIOURS
from tests.keras.scenarios import BACKEND, SCENARIOS, Outcome, Run
from tests.worker import report


def main() -> None:
    """Report, for each name, how the ranks together compare with one process, or what the behaviour returned."""
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    gc.freeze()  # or every collection looks through a framework's hundred thousands of objects, for a third of the time
    only = os.environ.get("TEST_ONLY", "").split(",")
    chosen = lambda name, backends, is_slow=False: (  # noqa: E731
        BACKEND in backends and (name in only or (only == [""] and not is_slow))
    )
    scenarios = [name for name, entry in SCENARIOS.items() if chosen(name, entry.backends, entry.is_slow)]
    report("scenarios", scenarios)
    alone = outcomes_alone(scenarios)
    for name in scenarios:
        report(name, compare(alone[name], outcome(name, ring.rank(), ring.size())))
    for name, (function, backends) in BEHAVIOURS.items():
        if chosen(name, backends):
            keras.backend.clear_session(free_memory=False)
            try:
                report(name, {"value": function()})
            except Exception:
                report(name, {"error": traceback.format_exc()})


def outcomes_alone(names: list[str]) -> dict[str, Outcome]:
    """Every scenario as one process runs it, each on one of the ranks."""
    mine = {name: outcome(name, 0, 1) for name in names[ring.rank() :: ring.size()]}
    everyones: list[dict[str, Outcome]] = ring.all_gather_object(mine)
    return {name: found for part in everyones for name, found in part.items()}


def outcome(name: str, rank: int, size: int) -> Outcome:
    keras.backend.clear_session(free_memory=False)
    try:
        return SCENARIOS[name].function(Run(rank, size, ring.size()))
    except Exception:
        return {"error": traceback.format_exc()}


def compare(alone: Outcome, together: Outcome) -> dict[str, Any]:
    """How far the ranks together are from the process alone, and what they disagree on."""
    errors = [found["error"] for found in (alone, together) if "error" in found]
    everyones = ring.all_gather_object((errors, together))
    if any(others for others, _ in everyones):
        return {"error": "\n".join(errors) or "another rank failed"}
    disagree = [key for key in together if any(not np.array_equal(together[key], other[key]) for _, other in everyones)]
    return {
        "compared": len([key for key in alone if key.startswith("weight")]),
        "weights": relative(alone, together, "weight"),
        "state": relative(alone, together, "state"),
        "disagreements": disagree,
    }


def relative(alone: Outcome, together: Outcome, kind: str) -> float:
    """Length of the difference between all values of a kind, relative to the length of the values."""
    keys = [key for key in alone if key.startswith(kind)]
    if any(np.shape(alone[key]) != np.shape(together[key]) for key in keys):
        return float("inf")
    expected = np.concatenate([np.ravel(alone[key]).astype(np.float64) for key in keys] or [np.zeros(0)])
    found = np.concatenate([np.ravel(together[key]).astype(np.float64) for key in keys] or [np.zeros(0)])
    return float(np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1.0))
