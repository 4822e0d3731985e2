"""Behaviors: functions that run on every rank of a launch and return what they observed.

The test file with the name of the module checks the results of all ranks; see `tests.keras.launches.on_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable
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


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
