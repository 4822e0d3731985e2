"""Keras 3 on all ranks: `model.fit(callbacks=[BroadcastCallback()])`, on TensorFlow, torch and JAX."""

import os

from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.install import missing
from ring_plugins.other_names import no_attribute

try:
    import keras as _keras  # noqa: F401 - everything below needs it, and it imports its backend
except ImportError as error:
    _backends = ("tensorflow", "torch", "jax")
    _wanted = [name for name in (error.name, os.environ.get("KERAS_BACKEND")) if name in _backends]
    raise missing(
        "ring_plugins.keras", "Keras 3 and its backend", error, "keras", (*_wanted, _backends[0])[0]
    ) from error

from ring_plugins.keras.averaging import DistributedOptimizer, communication_of, undistribute
from ring_plugins.keras.batch_norm import SyncBatchNormalization, synchronize_batch_norm
from ring_plugins.keras.broadcast import BroadcastCallback, broadcast_variables
from ring_plugins.keras.joining import TrainingState
from ring_plugins.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from ring_plugins.keras.metrics import MetricAverageCallback
from ring_plugins.keras.observe import BalanceMonitor, TimelineCallback
from ring_plugins.keras.predict import predict
from ring_plugins.keras.shard import shard
from ring_plugins.keras.writers import BestModelCheckpoint

__all__ = [
    "BalanceMonitor",
    "BestModelCheckpoint",
    "BroadcastCallback",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "SyncBatchNormalization",
    "TimelineCallback",
    "TrainingState",
    "broadcast_variables",
    "communication_of",
    "predict",
    "shard",
    "synchronize_batch_norm",
    "undistribute",
]
check_calls(globals(), __all__)


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)
