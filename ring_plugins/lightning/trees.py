"""Which spellings of Lightning are installed, and which of them our public names stand for.

Both are imported where both exist: the second costs a tenth of a second after the first, and only then does
``Trainer(strategy="ring")`` work whichever one the user's script prefers.
"""

import importlib.util
from typing import TYPE_CHECKING

from ring_plugins.core.base.errors import MissingDependency
from ring_plugins.lightning.adoption import make_interchangeable


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


_HAS_LIGHTNING = _is_installed("lightning")
_HAS_PYTORCH_LIGHTNING = _is_installed("pytorch_lightning")

if TYPE_CHECKING or _HAS_LIGHTNING:
    from ring_plugins.lightning.for_lightning import RingFabricStrategy, RingStrategy
elif _HAS_PYTORCH_LIGHTNING:
    from ring_plugins.lightning.for_pytorch_lightning import RingFabricStrategy, RingStrategy
else:
    raise MissingDependency(
        "ring_plugins.lightning needs Lightning, which is not installed. Add it with:"
        " pip install 'ring_plugins[lightning]'"
    )

if _HAS_LIGHTNING and _HAS_PYTORCH_LIGHTNING:
    from ring_plugins.lightning import for_pytorch_lightning as _twins

    make_interchangeable(RingStrategy, _twins.RingStrategy)
    make_interchangeable(RingFabricStrategy, _twins.RingFabricStrategy)

__all__ = ["RingFabricStrategy", "RingStrategy"]
