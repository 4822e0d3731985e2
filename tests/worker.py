"""What a rank under test calls to hand results to the test that launched it."""

import json
import os
from pathlib import Path
from typing import Any

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def report(key: str, value: Any, rank: int | None = None) -> None:
    """Hand `value` (anything JSON can hold, or an array) to the test as `Result.reports[rank][key]`.

    Each report is written at once, so that it survives a SIGKILL. The last value of a key counts.
    """
    rank = _rank() if rank is None else rank
    line = json.dumps([rank, key, value], default=_as_json) + "\n"
    file = Path(os.environ["TEST_REPORTS"]) / f"{os.getpid()}.jsonl"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def report_pid() -> None:
    """Report this rank's process id, for which `Job.pids()` waits."""
    report("pid", os.getpid())


def transport() -> Any:
    """The transport that moves this rank's data between hosts."""
    from ring_plugins.core import world

    return world.current()._rendezvous.transport


def _rank() -> int:
    from ring_plugins.core import world

    if world.is_initialized():
        return world.current().topology.rank
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"report() cannot write a {type(value).__name__}; turn it into numbers, strings, lists or dicts")
