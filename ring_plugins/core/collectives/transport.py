"""How bytes move among the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ring_plugins.core.collectives.signature import Signature

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Transport(Protocol):
    """Moves bytes; knows nothing of element types. All arrays are 1-d uint8 and may be empty.

    Every member calls the same method in the same order with an equal signature.
    """

    def all_gather(self, mine: Bytes, parts: Sequence[Bytes], signature: Signature) -> None:
        """Fill `parts[i]` with member i's `mine`; sizes may differ and are known to all."""

    def all_to_all(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes], signature: Signature) -> None:
        """Fill `incoming[i]` with what member i has for this one in its `outgoing`."""

    def broadcast(self, data: Bytes, root: int, signature: Signature) -> None:
        """Fill `data` with the root's."""

    def barrier(self, signature: Signature) -> None:
        """Return when all members have called."""
