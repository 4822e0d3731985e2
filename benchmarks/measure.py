"""What the benchmarks share beyond `ring_plugins.measuring`: where they ran, and where their results are kept."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


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
