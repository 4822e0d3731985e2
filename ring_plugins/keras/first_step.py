"""Notices that `BroadcastCallback` is missing from a list that has another callback of ours.

Without it every rank trains a model of its own, and `MetricAverageCallback` shows averages over different models, which
look right.
"""

from __future__ import annotations

from typing import Any

import keras

from ring_plugins.core.base.errors import DriftError
from ring_plugins.core.base.log import logger
from ring_plugins.core.world import current
from ring_plugins.keras.averaging import averaging_of
from ring_plugins.keras.callback_list import check_first_step
from ring_plugins.keras.state import optimizers_of, weight_checksums
from ring_plugins.observe.consistency import differing_weights, is_check_wanted
from ring_plugins.observe.training import announce_training

_REMEDY = (
    "Add ring_plugins.keras.BroadcastCallback() to fit(callbacks=...) on all ranks: it starts them from the same "
    "weights and averages their gradients."
)


def expect_broadcast(callback: Any) -> None:
    """Compare the ranks' weights after the first step, if the list of `callback` has no `BroadcastCallback`.

    Args:
        callback: callback whose `on_train_begin` is running, on all ranks.
    """
    if is_check_wanted():
        announce_training()
        check_first_step(callback, _FirstStepCheck)


class _FirstStepCheck(keras.callbacks.Callback):
    """Raises after the first step if the weights differ among ranks; warns if nothing averages the gradients."""

    compares_weights = True

    def __init__(self) -> None:
        super().__init__()
        self._is_done = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_done:
            return
        self._is_done = True
        found = differing_weights(lambda: weight_checksums(self.model), "after the first step")
        if found:
            raise DriftError(
                f"{found} {_REMEDY} If the weights differ on purpose, RING_WEIGHT_CHECK=0 switches this comparison off."
            )
        if current().topology.rank == 0 and not any(map(averaging_of, optimizers_of(self.model))):
            logger.warning(f"no gradients are averaged: each rank trains by itself. {_REMEDY}")
