"""Strategies for Lightning: ``Trainer(strategy=RingStrategy())`` or ``Trainer(strategy="ring")``, and Fabric alike.

Importing this package registers ``"ring"``, ``"ring_fork"`` and ``"ring_notebook"`` with `lightning` and with
`pytorch_lightning`, whichever the script has imported or imports later, and tells Lightning this process's rank. It
imports neither of them before ``RingStrategy`` or another name that derives from a class of theirs is asked for.
"""

# everything below needs Lightning and torch

import importlib
from typing import TYPE_CHECKING, Any

from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.install import is_installed, missing

if not (is_installed("lightning") or is_installed("pytorch_lightning")):
    raise missing("ring_plugins.lightning", "Lightning", None, "lightning")
try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise missing("ring_plugins.lightning", "PyTorch", error, "lightning") from error

from ring_plugins.lightning import packages as _packages
from ring_plugins.lightning.environment import RingEnvironment
from ring_plugins.other_names import no_attribute

if TYPE_CHECKING:
    from ring_plugins.lightning.observe import BalanceMonitor, TimelineCallback
    from ring_plugins.lightning.packages import RingFabricStrategy, RingStrategy

__all__ = ["BalanceMonitor", "RingEnvironment", "RingFabricStrategy", "RingStrategy", "TimelineCallback"]


def __getattr__(name: str) -> Any:
    """The names that derive from a class of Lightning's, once they are asked for."""
    if name in ("RingFabricStrategy", "RingStrategy"):
        return getattr(_packages, name)
    if name in ("BalanceMonitor", "TimelineCallback"):
        return getattr(importlib.import_module("ring_plugins.lightning.observe"), name)
    raise no_attribute(__name__, name)


check_calls(globals(), ("RingEnvironment",))
