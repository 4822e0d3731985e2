"""Exchange of objects and a monitored barrier, through a torch store.

A store needs no communicator, so this works before one exists and while one hangs.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it unmarked

from ring_plugins.core.base.errors import RingError, TimeoutExceeded, name_ranks

#: torch.distributed's own default for `monitored_barrier`.
_BARRIER_TIMEOUT = timedelta(minutes=30)
_PASSED = b"passed"


def exchange_through_store(
    store: Store, name: str, rank: int, size: int, item: Any, cancelled: Callable[[], bool] = lambda: False
) -> list[Any]:
    """Exchange one picklable item per rank; return all in rank order.

    Args:
        store: shared by the ranks.
        name: never used before in this store.
        rank: of the caller among the ranks that exchange.
        size: how many ranks exchange.
        item: this rank's.
        cancelled: returns True once the result is no longer wanted.

    Raises:
        TimeoutExceeded: a rank did not call within the store's timeout.
        RingError: the exchange was cancelled.
    """
    cast(Any, store).set(f"{name}/{rank}", pickle.dumps(item))  # torch's stub does not know that bytes are allowed
    found = []
    for other in range(size):
        waiting = f"rank {rank} of {size} waited for rank {other} in {name}"
        found.append(pickle.loads(_get(store, f"{name}/{other}", waiting, cancelled)))
    return found


def _get(store: Store, key: str, waiting: str, cancelled: Callable[[], bool]) -> bytes:
    """Poll for the value of a key: a blocking `get` would lock all other threads out of the store."""
    limit = cast("timedelta", cast(Any, store).timeout).total_seconds()
    started, pause = time.monotonic(), 0.001
    while not store.check([key]):
        if cancelled():
            raise RingError(f"{waiting}, but the process group was closed meanwhile.")
        if time.monotonic() - started > limit:
            raise TimeoutExceeded(
                f"{waiting} for {limit:g} s. All ranks of a group must create it, and a message needs both ends; "
                "look for the error that the missing rank printed."
            )
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
    return store.get(key)


def monitored_barrier(
    store: Store, rank: int, size: int, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when all ranks have called. Rank 0 watches for the others and publishes the outcome.

    Args:
        store: shared by the ranks, under a prefix that only this barrier uses.
        rank: of the caller.
        size: how many ranks there are.
        timeout: how long rank 0 waits, counted from its own arrival; 30 minutes by default.
        wait_all_ranks: whether the error names every missing rank, or only the first.

    Raises:
        TimeoutExceeded: ranks are missing; the text names them.
    """
    limit = timeout or _BARRIER_TIMEOUT
    if rank == 0:
        _monitor(store, size, limit, wait_all_ranks)
        return
    store.set(f"arrived/{rank}", "")
    try:
        # Rank 0 may itself be late by as much as its own limit.
        store.wait(["outcome"], 2 * limit)
    except dist.DistError as error:
        raise TimeoutExceeded(
            f"rank 0 did not call monitored_barrier within {2 * limit} of rank {rank}; find out what it does instead."
        ) from error
    outcome = store.get("outcome")
    if outcome != _PASSED:
        raise TimeoutExceeded(outcome.decode())


def _monitor(store: Store, size: int, limit: timedelta, wait_all_ranks: bool) -> None:
    end = time.monotonic() + limit.total_seconds()
    missing = list(range(1, size))
    while missing := [other for other in missing if not store.check([f"arrived/{other}"])]:
        if time.monotonic() > end:
            text = (
                f"{name_ranks(missing if wait_all_ranks else missing[:1])} of {size} did not call monitored_barrier "
                f"within {limit} of rank 0. Have all ranks called it, and do the others' outputs show errors?"
            )
            store.set("outcome", text)
            raise TimeoutExceeded(text)
        time.sleep(0.002)
    store.set("outcome", _PASSED.decode())
