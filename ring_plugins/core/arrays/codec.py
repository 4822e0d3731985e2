"""Gradients in 16 bits on the wire: half the bytes, at the price of rounding.

What rounding loses in one step can be added to the next (error feedback; Seide et al., "1-bit stochastic gradient
descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019): then nothing is lost for good, and the sum of
all steps is as exact as without compression, but for the last step's rounding.

What numbers look like between hosts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ring_plugins.core.arrays.arithmetic import narrow, widen
from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.linux.shared_memory import address_of


class Codec(Protocol):
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


class IdentityCodec:
    """A `Wire` that sends memory as it lies there."""

    exact = True

    def pack(self, piece: Array) -> Array:
        return piece

    def space(self, piece: Array) -> Array:
        return piece

    def unpack(self, received: Array, piece: Array) -> None:
        pass


_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
_COMPRESSIBLE = ("float32", "float64")


class Compression(NamedTuple):
    """How gradients travel.

    Attributes:
        dtype: "float16", which keeps 11 bits of numbers between 6e-8 and 65,504, or "bfloat16", which keeps 8 bits of
            numbers of any size.
        feedback: whether the rounding errors of a step are added to the next.
    """

    dtype: str
    feedback: bool

    @classmethod
    def named(cls, name: str | None, error_feedback: bool = False) -> Compression | None:
        """What a user asks for: "fp16", "bf16" or None.

        Raises:
            ArgumentError: another name, or error feedback of nothing.
        """
        if name is None:
            if error_feedback:
                raise ArgumentError('error_feedback=True needs compression="fp16" or compression="bf16".')
            return None
        if name not in _NAMES:
            raise ArgumentError(f'compression={name!r} must be "fp16", "bf16" or None.')
        return cls(_NAMES[name], bool(error_feedback))

    def applies_to(self, dtype: str) -> bool:
        """Whether memory of this type gets smaller by it."""
        return dtype in _COMPRESSIBLE

    def __str__(self) -> str:
        return f"sent as {self.dtype}{' with error feedback' if self.feedback else ''}"


class HalfCodec:
    """A `core.arrays.codec.Wire` of 16-bit floats, for one piece of memory that is reduced again and again.

    Args:
        compression: what to round to, and whether to remember what that loses.
    """

    exact = False

    def __init__(self, compression: Compression) -> None:
        self.dtype, self._feedback = compression
        self._start = 0
        self._lost: Array | None = None  # by element, what rounding has lost so far
        self._seen: set[int] = set()

    def __str__(self) -> str:
        return f"as {self.dtype}"

    def begin(self, array: Array) -> None:
        """Another reduction starts, of `array`, which is as large as those before."""
        self._start = address_of(array)
        self._seen.clear()
        if self._feedback and (self._lost is None or self._lost.size != array.size):
            self._lost = np.zeros(array.size, np.float32)  # pages that are never written cost nothing

    def pack(self, piece: Array) -> Array:
        """Round a piece. What was rounded before in this reduction is a result, which rounding does not change."""
        half = np.empty(piece.size, STORAGE[self.dtype])
        values = piece.astype(np.float32)
        offset = (address_of(piece) - self._start) // piece.itemsize
        if self._lost is None or offset in self._seen:
            narrow(values, half, self.dtype)
            return half
        self._seen.add(offset)
        lost = self._lost[offset : offset + piece.size]
        values += lost
        narrow(values, half, self.dtype)
        widen(half, lost, self.dtype)
        with np.errstate(invalid="ignore"):
            np.subtract(values, lost, out=lost)
        lost[~np.isfinite(lost)] = 0  # an overflow is for the loss scaler to see, not for every step after it
        return half

    def space(self, piece: Array) -> Array:
        """Where to receive what others packed."""
        return np.empty(piece.size, STORAGE[self.dtype])

    def unpack(self, received: Array, piece: Array) -> None:
        """Turn what was packed into numbers."""
        if piece.dtype == np.float32:
            widen(received, piece, self.dtype)
        else:
            values = np.empty(received.size, np.float32)
            widen(received, values, self.dtype)
            np.copyto(piece, values)
