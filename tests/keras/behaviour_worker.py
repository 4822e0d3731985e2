"""Runs every behaviour of a backend on this rank and reports what it saw."""

from __future__ import annotations

import os
import traceback

import keras

import ring_plugins as ring
from tests.keras.behaviours import BEHAVIOURS
from tests.keras.scenarios import BACKEND
from tests.worker import report


def main() -> None:
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    ring.init(ranks=int(os.environ["TEST_RANKS"]))
    only = os.environ.get("TEST_ONLY", "")
    for name, (function, backends) in BEHAVIOURS.items():
        if BACKEND not in backends or (only and name not in only.split(",")):
            continue
        keras.backend.clear_session()
        try:
            report(name, {"value": function()})
        except Exception:
            report(name, {"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
