"""Lightning's face: ``Trainer(strategy=RingStrategy())``, ``Trainer(strategy="ring")`` and the Fabric counterparts.

Importing this package registers ``"ring"``, ``"ring_fork"`` and ``"ring_notebook"`` with every installed spelling of
Lightning (``lightning`` and ``pytorch_lightning``), and tells Lightning this process's rank.
"""

from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.lightning.observe import BalanceMonitor, TimelineCallback
from ring_plugins.lightning.trees import RingFabricStrategy, RingStrategy

__all__ = ["BalanceMonitor", "RingEnvironment", "RingFabricStrategy", "RingStrategy", "TimelineCallback"]
