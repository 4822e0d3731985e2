"""Predictions of all ranks, in the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.groups import Group
from ring_plugins.keras.job import members
from ring_plugins.keras.metrics import MetricAverageCallback
from ring_plugins.keras.shard import is_empty, shard


def predict(
    model: keras.Model,
    data: Any,
    *,
    batch_size: int = 32,
    gather_predictions: bool = True,
    group: Group | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    **options: Any,
) -> Any:
    """Predict on all ranks, each its part of the data, every sample once. Collective.

    Args:
        model: the same on all ranks.
        data: as for `shard`, the same on all ranks and not divided; a `tf.data.Dataset` of batches. It keeps its order.
        batch_size: samples per rank and step, for arrays.
        gather_predictions: whether all ranks get all predictions, in the order of the data. If not, each gets those of
            its part; of as many samples as one batch has, which are others' too, if there is nothing for it.
        group: the ranks among which the data is divided, all by default.
        callbacks, options: as for `model.predict`. Only rank 0 shows the progress bar.

    Returns:
        What `model.predict` would return in one process: arrays, or lists or dicts of them.

    Raises:
        ArgumentError: `data` cannot be divided, or the model has `steps_per_execution` above 1.
    """
    if getattr(model, "steps_per_execution", 1) > 1:
        raise ArgumentError(
            f"steps_per_execution={model.steps_per_execution}: predict() has to know where a batch ends. Compile the "
            "model with steps_per_execution=1, or set model.steps_per_execution = 1."
        )
    part = shard(data, batch_size=batch_size, shuffle=False, remainder="keep", group=group)
    sizes = _Sizes()
    shown = MetricAverageCallback(group=group)
    own = model.predict(part, callbacks=[*callbacks, shown, sizes], **options)
    if not gather_predictions:
        return own
    found = None if is_empty(part) else (sizes.sizes, own)
    told = [one for one in members(group).communicator.all_gather_object(found, "predictions") if one is not None]
    batches, parts = zip(*told, strict=True)
    return keras.tree.map_structure(lambda *arrays: _in_order(batches, arrays), *parts)


class _Sizes(keras.callbacks.Callback):
    """Notes how many samples each batch has. What Keras tells callbacks of outputs has lost their shapes and names."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_predict_begin(self, logs: dict[str, Any] | None = None) -> None:
        step = self._model.predict_function

        def noted(*arguments: Any) -> Any:
            found = step(*arguments)
            outputs = found if len(arguments) == 1 else found[0]  # on JAX a step gets the state and returns it
            self.sizes.append(int(keras.tree.flatten(outputs)[0].shape[0]))
            return found

        self._model.predict_function, self._step = noted, step

    def on_predict_end(self, logs: dict[str, Any] | None = None) -> None:
        self._model.predict_function = self._step


def _in_order(sizes: Sequence[Sequence[int]], arrays: Sequence[Any]) -> Any:
    """Put batches in the order of the data, of which ranks take one each in turn.

    Args:
        sizes: of each rank's batches.
        arrays: of each rank, its batches in one.
    """
    pieces = [np.split(array, np.cumsum(of_rank)[:-1]) for of_rank, array in zip(sizes, arrays, strict=True)]
    steps = range(max(map(len, pieces)))
    return np.concatenate([of_rank[step] for step in steps for of_rank in pieces if step < len(of_rank)])
