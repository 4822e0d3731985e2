"""Predict how training scales, as `ring plan` does, and `measure` your own models."""

from ring_plugins.planning.measure import measure
from ring_plugins.planning.models import REFERENCES, reference
from ring_plugins.planning.network import PRESETS, TRANSPORTS, Network, TransportModel, parse
from ring_plugins.planning.profile import Gradient, Profile
from ring_plugins.planning.simulation import Prediction, counts, default_sizes, needed_gigabits, predict

__all__ = [
    "PRESETS",
    "REFERENCES",
    "TRANSPORTS",
    "Gradient",
    "Network",
    "Prediction",
    "Profile",
    "TransportModel",
    "counts",
    "default_sizes",
    "measure",
    "needed_gigabits",
    "parse",
    "predict",
    "reference",
]
