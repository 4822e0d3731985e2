"""Codecs: how numbers are encoded between hosts.

By default memory is sent as it is. With compression, gradients travel as 16-bit floats: half the bytes, at the price of
rounding. What rounding loses in one step can be added to the next (error feedback: Seide et al., "1-bit stochastic
gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019). Then nothing is lost for good, and
the sum over all steps is as exact as without compression, except for the last step's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ring_plugins.core.arrays.arithmetic import narrow, widen
from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.linux.shared_memory import address_of


class Codec(Protocol):
    """Turns pieces of an array into what is sent, and back. An array that is reduced again and again has its own.

    Attributes:
        exact: whether `unpack(pack(x))` is `x`. Where it is not, the rank that computed a result rounds it as well, so
            that all ranks hold the same bits. So packing what was unpacked must give the same again.
    """

    exact: bool

    def __str__(self) -> str:
        """What it does, for the fingerprint of an operation: "as float16"."""

    def begin(self, array: Array) -> None:
        """Begin a reduction of `array`, which has the same size every time."""

    def undo(self) -> None:
        """Forget what was noted in this reduction, which is given up, or repeated."""

    def pack(self, piece: Array) -> Array:
        """Return what to send for a piece, perhaps the piece itself. Its size depends on the piece's size only."""

    def receive_buffer(self, piece: Array) -> Array:
        """Return memory to receive what others send for `piece`, perhaps the piece itself."""

    def unpack(self, received: Array, piece: Array) -> None:
        """Decode what was received into `piece`."""


class IdentityCodec:
    """A `Codec` that sends memory as it is, and receives in place."""

    exact = True

    def begin(self, array: Array) -> None:
        pass

    def undo(self) -> None:
        pass

    def pack(self, piece: Array) -> Array:
        return piece

    def receive_buffer(self, piece: Array) -> Array:
        return piece

    def unpack(self, received: Array, piece: Array) -> None:
        pass


class Compression(NamedTuple):
    """How gradients are rounded for the network.

    Attributes:
        name: a key of `CODECS`.
        error_feedback: whether the rounding errors of a step are added to the next.
    """

    name: str
    error_feedback: bool = False

    @classmethod
    def named(cls, name: str | None, error_feedback: bool = False) -> Compression | None:
        """The compression that a user asks for, None for none.

        Raises:
            ArgumentError: another name than those in `CODECS`, or error feedback without compression.
        """
        names = " or ".join(f'"{one}"' for one in CODECS)
        if name is None:
            if error_feedback:
                raise ArgumentError(f"error_feedback=True needs compression={names}.")
            return None
        if name not in CODECS:
            raise ArgumentError(f"compression={name!r} must be {names}, or None.")
        return cls(name, bool(error_feedback))

    @property
    def dtype(self) -> str:
        """The 16-bit type to which GPUs round gradients before NCCL sums them, where codecs do not apply.

        Raises:
            ArgumentError: the codec has none.
        """
        found = CODECS[self.name].dtype
        if not found:
            raise ArgumentError(f"compression={self.name!r} does not work between GPUs; leave it out.")
        return found

    def applies_to(self, dtype: str) -> bool:
        """Whether it makes memory of this type smaller."""
        return dtype in CODECS[self.name].compresses

    def codec(self, can_undo: bool = False) -> Codec:
        """A new codec; `can_undo` says whether `undo` may be called."""
        return CODECS[self.name].make(self.error_feedback, can_undo)

    def __str__(self) -> str:
        what = CODECS[self.name].dtype or self.name
        return f"sent as {what}{' with error feedback' if self.error_feedback else ''}"


class HalfCodec:
    """A `Codec` of 16-bit floats.

    Args:
        dtype: "float16", which keeps 11 bits of numbers between 6e-8 and 65,504, or "bfloat16", which keeps 8 bits of
            numbers of any size.
        error_feedback: whether to add the rounding errors of a step to the next.
        can_undo: whether `undo` may be called.
    """

    exact = False

    def __init__(self, dtype: str, error_feedback: bool = False, can_undo: bool = False) -> None:
        self.dtype, self._error_feedback = dtype, error_feedback
        self._start, self._can_undo = 0, can_undo
        self._errors: Array | None = None  # by element, the sum of all rounding so far
        self._packed: dict[int, Array | None] = {}  # by offset of a piece in this reduction, the errors before it

    def __str__(self) -> str:
        return f"as {self.dtype}"

    def begin(self, array: Array) -> None:
        self._start = address_of(array)
        self._packed.clear()
        if self._error_feedback and (self._errors is None or self._errors.size != array.size):
            self._errors = np.zeros(array.size, np.float32)  # pages that are never written cost nothing

    def undo(self) -> None:
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


class CodecKind(NamedTuple):
    """An entry of `CODECS`.

    Attributes:
        make: returns a codec, given whether it adds the rounding errors of a step to the next, and whether `undo` may
            be called.
        compresses: the element types that it makes smaller.
        dtype: see `Compression.dtype`; "" for none.
    """

    make: Callable[[bool, bool], Codec]
    compresses: tuple[str, ...]
    dtype: str = ""


#: How a user names a codec; the keys of `CODECS`, for type checkers.
CodecName = Literal["fp16", "bf16"]
#: All codecs. A further one needs an entry here, and in `CodecName`.
CODECS = {
    name: CodecKind(partial(HalfCodec, dtype), ("float32", "float64"), dtype)
    for name, dtype in {"fp16": "float16", "bf16": "bfloat16"}.items()
}
