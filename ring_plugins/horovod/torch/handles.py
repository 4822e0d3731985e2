"""Handles of operations that were begun, for `hvd.poll` and `hvd.synchronize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Handle:
    """An operation under way, for `poll` and `synchronize`.

    Args:
        works: what it waits for, in this order.
        finish: makes the result out of theirs.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[..., Any]) -> None:
        self._works, self._finish = works, finish
        self._results: list[Any] = []

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._results) or all(work.done() for work in self._works)

    def wait(self) -> Any:
        """The result."""
        if not self._results:
            self._results.append(self._finish(*[work.wait() for work in self._works]))
        return self._results[0]

    __call__ = wait  # as scripts end a `sparse_allreduce_async`


def poll(handle: Handle) -> bool:
    """Whether an operation is over."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result: a tensor, a list for a group, and for `alltoall_async` a pair."""
    return handle.wait()
