"""The ranks of one host as threads of one process, over real shared memory: milliseconds instead of processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ring_plugins.core.collectives.host import HostCommunicator


def on_thread_ranks(size: int, function: Callable[[int, HostCommunicator], Any]) -> list[Any]:
    """Call `function(rank, its communicator)` on all ranks at once; returns results, or raises the first error."""
    together, items = threading.Barrier(size), [None] * size
    communicators: list[HostCommunicator] = []

    def gather(rank: int) -> Callable[[Any], list[Any]]:
        def call(item: Any) -> list[Any]:
            items[rank] = item
            together.wait(30)
            gathered = list(items)
            together.wait(30)
            return gathered

        return call

    def call(rank: int) -> Any:
        communicator = HostCommunicator("test", rank, "host", 0, gather(rank), None, None)
        communicators.append(communicator)
        together.wait(30)
        try:
            return function(rank, communicator)
        except BaseException:
            for other in communicators:  # whoever waits for this rank
                other.discard()
            raise
        finally:
            communicator.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(call, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if "no longer in use" not in str(error)), errors[0])
    return [future.result() for future in futures]
