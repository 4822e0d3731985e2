"""Codecs: how numbers are encoded between hosts.

By default memory is sent as it is. With compression, gradients travel as 16-bit floats: half the bytes, at the price of
rounding. What rounding loses in one step can be added to the next (error feedback: Seide et al., "1-bit stochastic
gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019). Then nothing is lost for good, and
the sum over all steps is as exact as without compression, except for the last step's rounding.
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
        exact: whether `unpack(pack(x))` is `x`. Where it is not, the rank that computed a result rounds it as well, so
            that all ranks hold the same bits.
    """

    exact: bool

    def pack(self, piece: Array) -> Array:
        """Return what to send for a piece, perhaps the piece itself. Its size depends on the piece's size only."""

    def receive_buffer(self, piece: Array) -> Array:
        """Return memory to receive what others send for `piece`, perhaps the piece itself."""

    def unpack(self, received: Array, piece: Array) -> None:
        """Decode what was received into `piece`."""


class IdentityCodec:
    """A `Codec` that sends memory as it is, and receives in place."""

    exact = True

    def pack(self, piece: Array) -> Array:
        return piece

    def receive_buffer(self, piece: Array) -> Array:
        return piece

    def unpack(self, received: Array, piece: Array) -> None:
        pass


_NAMES = {"fp16": "float16", "bf16": "bfloat16"}
_COMPRESSIBLE = ("float32", "float64")


class Compression(NamedTuple):
    """How gradients are rounded for the network.

    Attributes:
        dtype: "float16", which keeps 11 bits of numbers between 6e-8 and 65,504, or "bfloat16", which keeps 8 bits of
            numbers of any size.
        error_feedback: whether the rounding errors of a step are added to the next.
    """

    dtype: str
    error_feedback: bool

    @classmethod
    def named(cls, name: str | None, error_feedback: bool = False) -> Compression | None:
        """The compression that a user asks for: "fp16", "bf16" or None.

        Raises:
            ArgumentError: another name, or error feedback without compression.
        """
        if name is None:
            if error_feedback:
                raise ArgumentError('error_feedback=True needs compression="fp16" or compression="bf16".')
            return None
        if name not in _NAMES:
            raise ArgumentError(f'compression={name!r} must be "fp16", "bf16" or None.')
        return cls(_NAMES[name], bool(error_feedback))

    def applies_to(self, dtype: str) -> bool:
        """Whether it makes memory of this type smaller."""
        return dtype in _COMPRESSIBLE

    def __str__(self) -> str:
        return f"sent as {self.dtype}{' with error feedback' if self.error_feedback else ''}"


class HalfCodec:
    """A `Codec` of 16-bit floats, for one piece of memory that is reduced again and again.

    Args:
        compression: what to round to, and whether to add the rounding errors of a step to the next.
        can_undo: whether `undo` may be called.
    """

    exact = False

    def __init__(self, compression: Compression, can_undo: bool = False) -> None:
        self.dtype, self._error_feedback = compression
        self._start, self._can_undo = 0, can_undo
        self._errors: Array | None = None  # by element, the sum of all rounding so far
        self._packed: dict[int, Array | None] = {}  # by offset of a piece in this reduction, the errors before it

    def __str__(self) -> str:
        return f"as {self.dtype}"

    def begin(self, array: Array) -> None:
        """Begin a reduction of `array`, which has the same size every time."""
        self._start = address_of(array)
        self._packed.clear()
        if self._error_feedback and (self._errors is None or self._errors.size != array.size):
            self._errors = np.zeros(array.size, np.float32)  # pages that are never written cost nothing

    def undo(self) -> None:
        """Have the errors from before this reduction, which is given up, or repeated."""
        for offset, before in self._packed.items():
            if before is not None and self._errors is not None:
                self._errors[offset : offset + before.size] = before
        self._packed.clear()

    def pack(self, piece: Array) -> Array:
        """Round a piece. The second time in a reduction it holds the result, which is already rounded."""
        half = np.empty(piece.size, STORAGE[self.dtype])
        values = piece.astype(np.float32)
        offset = (address_of(piece) - self._start) // piece.itemsize
        if self._errors is None or offset in self._packed:
            narrow(values, half, self.dtype)
            return half
        errors = self._errors[offset : offset + piece.size]
        self._packed[offset] = errors.copy() if self._can_undo else None
        values += errors
        narrow(values, half, self.dtype)
        widen(half, errors, self.dtype)
        with np.errstate(invalid="ignore"):
            np.subtract(values, errors, out=errors)
        errors[~np.isfinite(errors)] = 0  # an overflow is for the loss scaler to see, not for every later step
        return half

    def receive_buffer(self, piece: Array) -> Array:
        return np.empty(piece.size, STORAGE[self.dtype])

    def unpack(self, received: Array, piece: Array) -> None:
        if piece.dtype == np.float32:
            widen(received, piece, self.dtype)
        else:
            values = np.empty(received.size, np.float32)
            widen(received, values, self.dtype)
            np.copyto(piece, values)
