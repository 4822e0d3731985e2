"""One output directory for all ranks of a script under `hydra.main`, where the script starts the other ranks itself.

Hydra names the directory by the time of its start, and the others start later. They run the same command, to which
overrides are added: the directory, and that they leave the copy of the configuration and the log's file to rank 0.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ring_plugins.core.rendezvous.spawn import further_arguments


def register() -> None:
    """Have ranks that a script starts use its directory."""
    further_arguments.append(_overrides)


def _overrides(rank: int) -> list[str]:
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return []
    found = hydra.HydraConfig.get()
    name = "sweep" if str(found.mode).endswith("MULTIRUN") else "run"
    directory = os.path.join(found.runtime.cwd, found[name].dir)
    quoted = directory.replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.{name}.dir='{quoted}'", "hydra.output_subdir=null", f"hydra.job.name={found.job.name}_rank_{rank}"]
