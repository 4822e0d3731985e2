"""Behaviors: functions that run on every rank of a launch and return what they observed.

The test file with the name of the module checks the results of all ranks; see `tests.keras.launches.on_ranks`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tests.keras.scenarios import features

Behavior = Callable[[], Any]

BEHAVIORS: dict[str, Behavior] = {}


def behavior(function: Behavior) -> Behavior:
    """Register a function by its name."""
    BEHAVIORS[function.__name__] = function
    return function


def fit(model: Any, callbacks: Any, steps: int = 4, **options: Any) -> Any:
    x, y = features(1, steps)
    return model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks, **options)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of this package's logger on this rank."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("ring_plugins")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
