"""Predict how training scales, as `ring plan` does, and `measure` your own models."""

from ring_plugins.planning.models import REFERENCES, reference, typical
from ring_plugins.planning.profile import Gradient, Profile, measure
from ring_plugins.planning.simulation import (
    PRESETS,
    TRANSPORTS,
    Network,
    Prediction,
    TransportModel,
    advice,
    counts,
    default_sizes,
    fitted,
    needed_gigabits,
    parse,
    predict,
    remedies,
)

__all__ = [
    "PRESETS",
    "REFERENCES",
    "TRANSPORTS",
    "Gradient",
    "Network",
    "Prediction",
    "Profile",
    "TransportModel",
    "advice",
    "counts",
    "default_sizes",
    "fitted",
    "measure",
    "needed_gigabits",
    "parse",
    "predict",
    "reference",
    "remedies",
    "typical",
]
