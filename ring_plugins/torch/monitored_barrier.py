"""A barrier that says who is missing. It goes through the store alone, so it works when a collective hangs."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports these unmarked

from ring_plugins.core.base.errors import TimeoutExceeded

_DEFAULT = timedelta(minutes=30)
_PASSED = b"passed"


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when all ranks have called; rank 0 looks for the others and tells them how it went.

    Args:
        store: shared by the ranks, under a prefix of this barrier's own.
        rank: of the caller.
        size: how many ranks there are.
        timeout: how long rank 0 waits, counted from its own arrival; 30 minutes by default.
        wait_all_ranks: whether to name all missing ranks, or the first one.

    Raises:
        TimeoutExceeded: naming the ranks that did not come.
    """
    limit = timeout or _DEFAULT
    if rank != 0:
        store.set(f"arrived/{rank}", "")
        try:
            # Rank 0 may itself come late by as much as its own limit.
            store.wait(["verdict"], 2 * limit)
        except dist.DistError as error:
            raise TimeoutExceeded(
                f"rank 0 did not come to monitored_barrier within {2 * limit} of rank {rank}; "
                "look for what it does instead."
            ) from error
        verdict = store.get("verdict")
        if verdict != _PASSED:
            raise TimeoutExceeded(verdict.decode())
        return
    end = time.monotonic() + limit.total_seconds()
    missing = list(range(1, size))
    while missing := [other for other in missing if not store.check([f"arrived/{other}"])]:
        if time.monotonic() > end:
            named = missing if wait_all_ranks else missing[:1]
            text = (
                f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))} of {size} did not come to "
                f"monitored_barrier within {limit} of rank 0. Have all ranks called it, and do the others' "
                "outputs show errors?"
            )
            store.set("verdict", text)
            raise TimeoutExceeded(text)
        time.sleep(0.002)
    store.set("verdict", _PASSED.decode())
