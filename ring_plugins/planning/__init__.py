"""How a model will scale: what `ring plan` prints, for scripts, and `measure` for models of one's own."""

from ring_plugins.planning.measure import measure
from ring_plugins.planning.models import REFERENCES, reference
from ring_plugins.planning.network import PRESETS, TRANSPORTS, Network, Transport, parse
from ring_plugins.planning.picture import draw
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
    "Transport",
    "counts",
    "default_sizes",
    "draw",
    "measure",
    "needed_gigabits",
    "parse",
    "predict",
    "reference",
]
