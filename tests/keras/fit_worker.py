"""Runs every scenario alone and on all ranks, in the same processes, and reports how they compare."""

from __future__ import annotations

import os
import traceback
from typing import Any

import keras
import numpy as np

import ring_plugins as ring
from tests.keras.scenarios import BACKEND, SCENARIOS, Outcome, Run
from tests.worker import report


def main() -> None:
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    chosen = {name: entry for name, entry in SCENARIOS.items() if BACKEND in entry.backends}
    if only := os.environ.get("TEST_ONLY"):
        chosen = {name: entry for name, entry in chosen.items() if name in only.split(",")}
    for name in chosen:
        report(name, compare(outcome(name, 0, 1), outcome(name, ring.rank(), ring.size())))


def outcome(name: str, rank: int, size: int) -> Outcome:
    keras.backend.clear_session()
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


if __name__ == "__main__":
    main()
