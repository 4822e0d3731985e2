"""Keras 3 on all ranks: `model.fit(callbacks=[BroadcastCallback()])`, on TensorFlow, torch and JAX."""

from ring_plugins.keras.averaging import communication_of
from ring_plugins.keras.broadcast import BroadcastCallback
from ring_plugins.keras.optimizer import DistributedOptimizer, broadcast_variables, undistribute

__all__ = ["BroadcastCallback", "DistributedOptimizer", "broadcast_variables", "communication_of", "undistribute"]
