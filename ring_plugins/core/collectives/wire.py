"""What numbers look like between hosts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Wire(Protocol):
    """Turns a piece of an array into what is sent, and back.

    Attributes:
        exact: whether `unpack(pack(x))` is `x`. Where it is not, a result is rounded on the rank that computed it as
            well, so that all ranks hold the same bits.
    """

    exact: bool

    def pack(self, piece: Array) -> Array:
        """What to send for a piece; may be the piece itself. Its size depends on the size of the piece only."""

    def space(self, piece: Array) -> Array:
        """Where to receive what others send for `piece`; may be the piece itself."""

    def unpack(self, received: Array, piece: Array) -> None:
        """Turn what was received into numbers; nothing to do where it was received in place."""


class AsIs:
    """A `Wire` that sends memory as it lies there."""

    exact = True

    def pack(self, piece: Array) -> Array:
        return piece

    def space(self, piece: Array) -> Array:
        return piece

    def unpack(self, received: Array, piece: Array) -> None:
        pass
