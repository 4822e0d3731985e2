"""What a rank under test calls to hand results back to the test that launched it."""

import json
import os
from pathlib import Path
from typing import Any

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def report(key: str, value: Any, rank: int | None = None) -> None:
    """Hand `value` (what JSON can hold, or an array) to the test as `Result.reports[rank][key]`.

    Written through at once, so that it survives the SIGKILL that may follow. The last value of a key counts.
    """
    rank = _rank() if rank is None else rank
    line = json.dumps([rank, key, value], default=_plain) + "\n"
    descriptor = os.open(
        Path(os.environ["TEST_REPORTS"]) / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def report_pid() -> None:
    """Say which process this rank is; `Job.pids()` waits for this."""
    report("pid", os.getpid())


def _rank() -> int:
    from ring_plugins.core import world

    if world.is_initialized():
        return world.current().topology.rank
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"report() cannot write a {type(value).__name__}; turn it into numbers, strings, lists or dicts")
