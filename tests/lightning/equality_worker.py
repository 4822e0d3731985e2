"""Runs every scenario of a world size with DDP, then with ours, in the same processes, and reports how they compare."""

import os
import traceback
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything

import ring_plugins as ring
from ring_plugins.torch.rendezvous import store_from_world
from tests.lightning.scenarios import SCENARIOS, Outcome, Run
from tests.worker import report


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    rank, size = ring.rank(), ring.size()
    slow = bool(os.environ.get("TEST_SLOW"))
    chosen = {name: entry for name, entry in SCENARIOS.items() if size in entry.ranks and entry.slow == slow}
    if only := os.environ.get("TEST_ONLY"):
        chosen = {name: entry for name, entry in chosen.items() if name in only.split(",")}

    store, _, _ = store_from_world()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ddp = {name: outcome(name, Run("ddp", rank, size)) for name, entry in chosen.items() if entry.same_as_ddp}
    dist.destroy_process_group()
    for name in chosen:
        mine = outcome(name, Run("ring", rank, size))
        report(name, compare(mine, ddp.get(name)))
    report("backend", dist.get_backend() if dist.is_initialized() else None)


def outcome(name: str, run: Run) -> Outcome:
    seed_everything(1, verbose=False)
    del os.environ["PL_GLOBAL_SEED"]
    try:
        return SCENARIOS[name].function(run)
    except Exception:
        return {"error": f"{run.kind}:\n{traceback.format_exc()}"}


def compare(mine: Outcome, reference: Outcome | None) -> dict[str, Any]:
    """The largest difference between `mine` and what it should be, and what the ranks disagree on."""
    errors = [found["error"] for found in (mine, reference or {}) if "error" in found]
    gathered: list[Any] = ring.all_gather_object([errors, mine])
    if any(others for others, _ in gathered):
        return {"error": "\n".join(errors) or "another rank failed"}
    expected = {name.removesuffix(".expected"): value for name, value in mine.items() if name.endswith(".expected")}
    if reference is not None:
        expected |= {name: value for name, value in reference.items() if name in mine}
    differences = {name: difference(mine[name], value) for name, value in expected.items()}
    common = [name for name in mine if not name.startswith("own_")]
    return {
        "compared": len(expected),
        "missing": sorted(set(reference or {}) - set(mine)),
        "differences": {name: value for name, value in differences.items() if value != 0},
        "disagreements": [
            name for name in common if any(difference(mine[name], other.get(name)) != 0 for _, other in gathered)
        ],
    }


def difference(first: Any, second: Any) -> float:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return float("inf")
        if torch.equal(first, second):
            return 0.0
        return float((first.double() - second.double()).abs().max()) or float("nan")
    if isinstance(first, torch.Tensor) and isinstance(second, (int, float)):
        return abs(float(first) - second)
    if isinstance(first, float) and isinstance(second, float):
        return abs(first - second)
    return 0.0 if first == second else float("inf")


if __name__ == "__main__":
    main()
