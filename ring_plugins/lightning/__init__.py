"""Strategies for Lightning: ``Trainer(strategy=RingStrategy())`` or ``Trainer(strategy="ring")``, and Fabric alike.

Importing this package registers ``"ring"``, ``"ring_fork"`` and ``"ring_notebook"`` with `lightning` and with
`pytorch_lightning`, whichever are installed, and tells Lightning this process's rank.
"""

# everything below needs Lightning

import importlib.util

from ring_plugins.core.base.errors import MissingDependency

if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
    raise MissingDependency(
        "ring_plugins.lightning needs Lightning, which is not installed. Add it with:"
        " pip install 'ring_plugins[lightning]'"
    )

from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.lightning.observe import BalanceMonitor, TimelineCallback
from ring_plugins.lightning.packages import RingFabricStrategy, RingStrategy

__all__ = ["BalanceMonitor", "RingEnvironment", "RingFabricStrategy", "RingStrategy", "TimelineCallback"]
