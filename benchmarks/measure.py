"""Describe the machine of a benchmark, and save its results."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import ring_plugins as ring

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """One line about the machine and its ranks. It also shows whether ranks of one host were recognized as such."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    ranks = f", {ring.size()} ranks on {ring.num_nodes()} host(s)" if ring.is_initialized() else ""
    return f"{model}, {os.cpu_count()} cores{ranks}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def save(name: str, record: dict[str, object]) -> None:
    """Save a result as JSON in benchmarks/results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")
