"""Keras 3 on all ranks: `model.fit(callbacks=[BroadcastCallback()])`, on TensorFlow, torch and JAX."""

from ring_plugins.keras.averaging import DistributedOptimizer, communication_of, undistribute
from ring_plugins.keras.batch_norm import synchronize_batch_norm
from ring_plugins.keras.broadcast import BroadcastCallback
from ring_plugins.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from ring_plugins.keras.metrics import BestModelCheckpoint, MetricAverageCallback
from ring_plugins.keras.observe import BalanceMonitor, TimelineCallback
from ring_plugins.keras.shard import shard
from ring_plugins.keras.state import broadcast_variables

__all__ = [
    "BalanceMonitor",
    "BestModelCheckpoint",
    "BroadcastCallback",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "TimelineCallback",
    "broadcast_variables",
    "communication_of",
    "shard",
    "synchronize_batch_norm",
    "undistribute",
]
