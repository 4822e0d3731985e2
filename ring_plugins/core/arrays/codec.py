"""Codecs: how numbers are encoded between hosts.

By default memory is sent as it is. With compression, gradients travel in fewer bits, at the price of rounding: as
16-bit floats, or as whole numbers of 8 bits with a common exponent for each cache line. What rounding loses in one step
can be added to the next (error feedback: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al.,
"Error feedback fixes SignSGD", 2019). Then nothing is lost for good, and the sum over all steps is as exact as without
compression, except for the last step's rounding.

**Equal bits on all ranks.** A rank that has computed a part of the result rounds its own copy too, and others send that
part on. So what was unpacked must be packed without another rounding, however the array is cut meanwhile. Arrays are
cut between cache lines, so 8-bit numbers share an exponent within one, and their scale is a power of two (as in the
Open Compute Project's MX formats, of 32 numbers): multiples of it stay exact.

**The end of a bucket**, flags and control numbers, is never rounded: shares of ranks are compared with whole numbers.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ring_plugins.core.arrays.arithmetic import narrow, widen
from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.arrays.memory import CACHE_LINE
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.linux.shared_memory import address_of

#: Of a line of 8-bit numbers, as float32 counts them: smaller ones would need a scale that float32 cannot invert.
_LEAST_EXPONENT = 8
#: The place of a float32's last bits in memory.
_LAST_BYTE = 0 if sys.byteorder == "little" else 3


class Codec(Protocol):
    """Turns pieces of an array into what is sent, and back. An array that is reduced again and again has its own.

    Attributes:
        exact: whether `unpack(pack(x))` is `x`. Where it is not, the rank that computed a result rounds it as well, so
            that all ranks hold the same bits. So packing what was unpacked must give the same again.
    """

    exact: bool

    def __str__(self) -> str:
        """What it does, for the fingerprint of an operation: "as float16"."""

    def begin(self, array: Array, rounded: int | None = None) -> None:
        """Begin a reduction of `array`, which has the same size every time.

        Args:
            array: all that is reduced.
            rounded: how many numbers at its beginning may be rounded; by default all. A whole number of cache lines.
        """

    def undo(self) -> None:
        """Forget what was noted in this reduction, which is given up, or repeated."""

    def pack(self, piece: Array, holders: int = 1) -> Array:
        """Return what to send for a piece of the array, perhaps the piece itself.

        Args:
            piece: of the array.
            holders: how many members send these same numbers, sums that they have in common.
        """

    def round(self, piece: Array) -> None:
        """Round a piece of the result as the copies are rounded that others get of it."""

    def receive_buffer(self, piece: Array) -> Array:
        """Return memory to receive what others send for `piece`, perhaps the piece itself."""

    def unpack(self, received: Array, piece: Array, into: Array | None = None) -> None:
        """Decode what was received for a piece, into other memory of its size or the piece itself."""


class IdentityCodec:
    """A `Codec` that sends memory as it is, and receives in place."""

    exact = True

    def begin(self, array: Array, rounded: int | None = None) -> None:
        pass

    def undo(self) -> None:
        pass

    def pack(self, piece: Array, holders: int = 1) -> Array:
        return piece

    def round(self, piece: Array) -> None:
        pass

    def receive_buffer(self, piece: Array) -> Array:
        return piece

    def unpack(self, received: Array, piece: Array, into: Array | None = None) -> None:
        if into is not None:
            np.copyto(into, received)


class Compression(NamedTuple):
    """How gradients are rounded for the network.

    Attributes:
        name: a key of `CODECS`, or "auto" for the fastest of `tried`.
        error_feedback: whether the rounding errors of a step are added to the next; None with "auto" only.
    """

    name: str
    error_feedback: bool | None = False

    @classmethod
    def named(cls, name: str | None, error_feedback: bool | None = None) -> Compression | None:
        """The compression that a user asks for, None for none.

        Args:
            name: a key of `CODECS`, "auto", or None.
            error_feedback: None for what is best for the codec.

        Raises:
            ArgumentError: another name than those in `CODECS`, or error feedback without compression.
        """
        names = " or ".join(f'"{one}"' for one in (*CODECS, AUTO))
        if name is None:
            if error_feedback:
                raise ArgumentError(f"error_feedback=True needs compression={names}.")
            return None
        if name == AUTO:
            return cls(name, error_feedback)
        if name not in CODECS:
            raise ArgumentError(f"compression={name!r} must be {names}, or None.")
        return cls(name, CODECS[name].needs_feedback if error_feedback is None else bool(error_feedback))

    @property
    def tried(self) -> list[Compression | None]:
        """What "auto" chooses from, the most exact first. Eight bits lose too much without error feedback."""
        names = ("bf16",) if self.error_feedback is False else ("bf16", "int8")
        return [None, *(Compression.named(name, self.error_feedback) for name in names)]

    @property
    def dtype(self) -> str:
        """The 16-bit type to which GPUs round gradients before NCCL sums them, where codecs do not apply."""
        return CODECS[self.name].dtype

    @property
    def needs_host(self) -> bool:
        """Whether only memory of the host can be rounded so: then gradients of GPUs travel through it."""
        return self.name != AUTO and not self.dtype

    def applies_to(self, dtype: str) -> bool:
        """Whether it makes memory of this type smaller."""
        return dtype in CODECS[self.name].compresses

    def codec(self, can_undo: bool = False) -> Codec:
        """A new codec; `can_undo` says whether `undo` may be called."""
        return CODECS[self.name].make(bool(self.error_feedback), can_undo)

    def __str__(self) -> str:
        if self.name == AUTO:
            return f"sent as is fastest{'' if self.error_feedback is None else f', {self.error_feedback}'}"
        what = CODECS[self.name].dtype or self.name
        return f"sent as {what}{' with error feedback' if self.error_feedback else ''}"


class RoundingCodec(abc.ABC):
    """A `Codec` that rounds: what its kinds share.

    Args:
        error_feedback: whether to add the rounding errors of a step to the next.
        can_undo: whether `undo` may be called.
    """

    exact = False

    def __init__(self, error_feedback: bool = False, can_undo: bool = False) -> None:
        self._error_feedback, self._can_undo = error_feedback, can_undo
        self._start, self._rounded = 0, 0
        self._errors: Array | None = None  # by element, the sum of all rounding so far
        self._packed: dict[int, Array | None] = {}  # by offset of a piece in this reduction, the errors before it
        self._results: dict[int, Array] = {}  # by offset, what is to be sent of a piece that was rounded

    @abc.abstractmethod
    def _nbytes(self, count: int, line: int) -> int:
        """Bytes for so many numbers, of which `line` are a cache line."""

    @abc.abstractmethod
    def _encode(self, values: Array, line: int, data: Array) -> None:
        """Encode float32 numbers into `data`, of `_nbytes`."""

    @abc.abstractmethod
    def _decode(self, data: Array, line: int, values: Array) -> None:
        """Decode them."""

    def begin(self, array: Array, rounded: int | None = None) -> None:
        self._start = address_of(array)
        self._rounded = array.size if rounded is None else rounded
        self._packed.clear()
        self._results.clear()
        if self._error_feedback and (self._errors is None or self._errors.size != self._rounded):
            self._errors = np.zeros(self._rounded, np.float32)  # pages that are never written cost nothing

    def undo(self) -> None:
        for offset, before in self._packed.items():
            if before is not None and self._errors is not None:
                self._errors[offset : offset + before.size] = before
        self._packed.clear()
        self._results.clear()

    def _cut(self, piece: Array) -> tuple[int, int, int, int]:
        """The offset of a piece, how many of its numbers are rounded, their bytes, and numbers in a cache line."""
        offset = (address_of(piece) - self._start) // piece.itemsize
        count, line = min(max(self._rounded - offset, 0), piece.size), CACHE_LINE // piece.itemsize
        return offset, count, self._nbytes(count, line), line

    def pack(self, piece: Array, holders: int = 1) -> Array:
        """Round a piece. The second time in a reduction it holds the result, which is already rounded.

        Or it holds a sum that other `holders` send, too: each adds its share of the error to its own next numbers.
        """
        offset, count, nbytes, line = self._cut(piece)
        data = np.empty(nbytes + (piece.size - count) * piece.itemsize, np.uint8)
        kept = self._results.pop(offset, None)
        if kept is not None and kept.size == data.size:
            return kept
        if count < piece.size:
            data[nbytes:] = piece[count:].view(np.uint8)
        if not count:
            return data
        values, packed = piece[:count].astype(np.float32), data[:nbytes]
        if self._errors is None or (offset in self._packed and holders == 1):
            self._encode(values, line, packed)
            return data
        errors = self._errors[offset : offset + count]
        if holders == 1:
            self._packed[offset] = errors.copy() if self._can_undo else None
            values += errors
        self._encode(values, line, packed)
        before = errors.copy() if holders > 1 else None
        self._decode(packed, line, errors)
        with np.errstate(invalid="ignore"):
            np.subtract(values, errors, out=errors)
            if before is not None:
                errors /= holders
                errors += before
        errors[~np.isfinite(errors)] = 0  # an overflow is for the loss scaler to see, not for every later step
        return data

    def round(self, piece: Array) -> None:
        data = self.pack(piece)
        self.unpack(data, piece)
        if piece.size:
            self._results[self._cut(piece)[0]] = data

    def receive_buffer(self, piece: Array) -> Array:
        _, count, nbytes, _ = self._cut(piece)
        return np.empty(nbytes + (piece.size - count) * piece.itemsize, np.uint8)

    def unpack(self, received: Array, piece: Array, into: Array | None = None) -> None:
        target = piece if into is None else into
        _, count, nbytes, line = self._cut(piece)
        if count < piece.size:
            target[count:].view(np.uint8)[:] = received[nbytes:]
        if target.dtype == np.float32:
            self._decode(received[:nbytes], line, target[:count])
        else:
            values = np.empty(count, np.float32)
            self._decode(received[:nbytes], line, values)
            np.copyto(target[:count], values)


class HalfCodec(RoundingCodec):
    """A `Codec` of 16-bit floats.

    Args:
        dtype: "float16", which keeps 11 bits of numbers between 6e-8 and 65,504, or "bfloat16", which keeps 8 bits of
            numbers of any size.
        error_feedback, can_undo: as of `RoundingCodec`.
    """

    def __init__(self, dtype: str, error_feedback: bool = False, can_undo: bool = False) -> None:
        super().__init__(error_feedback, can_undo)
        self.dtype = dtype

    def __str__(self) -> str:
        return f"as {self.dtype}"

    def _nbytes(self, count: int, line: int) -> int:
        return 2 * count

    def _encode(self, values: Array, line: int, data: Array) -> None:
        narrow(values, data.view(STORAGE[self.dtype]), self.dtype)

    def _decode(self, data: Array, line: int, values: Array) -> None:
        widen(data.view(STORAGE[self.dtype]), values, self.dtype)


class Int8Codec(RoundingCodec):
    """A `Codec` of whole numbers from -127 to 127, times a power of two for each cache line: a quarter of the bytes.

    A number errs by at most 1/128 of the largest in its line; 0 stays 0. A line with a number that is infinite or none
    arrives as "not a number", for loss scalers to see. One whose numbers are all below 2**-126 becomes 0.
    """

    def __str__(self) -> str:
        return "as int8"

    def _nbytes(self, count: int, line: int) -> int:
        return -(-count // line) + count

    def _encode(self, values: Array, line: int, data: Array) -> None:
        lines = -(-values.size // line)
        if values.size % line:
            values = np.concatenate([values, np.zeros(lines * line - values.size, np.float32)])
        largest = np.maximum.reduce((values.view(np.uint32) & 0x7FFFFFFF).reshape(lines, line), axis=1)
        largest += 1 << 16  # to the next exponent if the largest number would round to 128
        exponents = largest >> 23
        np.clip(exponents, _LEAST_EXPONENT, 255, out=exponents)
        data[:lines] = exponents
        np.subtract(127 + 127 + 6, exponents, out=exponents, casting="unsafe")  # of what makes 64 to 127 of the largest
        exponents <<= 23
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = values.reshape(lines, line) * exponents.view(np.float32)[:, None]
            scaled += 3 << 22  # rounds to whole numbers, whose last byte is the 8-bit number
        data[lines:] = scaled.reshape(-1).view(np.uint8)[_LAST_BYTE::4][: data.size - lines]

    def _decode(self, data: Array, line: int, values: Array) -> None:
        lines = -(-values.size // line)
        exponents = data[:lines].astype(np.uint32)
        scales = exponents - 6
        scales <<= 23
        scales[exponents == 255] = 0x7FC00000  # not a number
        np.copyto(values, data[lines:].view(np.int8))
        factors = scales.view(np.float32)
        whole = values.size // line * line
        if whole:
            by_line = values[:whole].reshape(-1, line)
            np.multiply(by_line, factors[: whole // line, None], out=by_line)
        if whole < values.size:
            values[whole:] *= factors[-1]


class CodecKind(NamedTuple):
    """An entry of `CODECS`.

    Attributes:
        make: returns a codec, given whether it adds the rounding errors of a step to the next, and whether `undo` may
            be called.
        compresses: the element types that it makes smaller.
        dtype: see `Compression.dtype`; "" for none.
        needs_feedback: whether rounding errors are added to the next step unless the user says otherwise.
    """

    make: Callable[[bool, bool], Codec]
    compresses: tuple[str, ...]
    dtype: str = ""
    needs_feedback: bool = False


#: The types that all codecs make smaller.
_FLOATS = ("float32", "float64")
#: How a user names a codec; the keys of `CODECS`, for type checkers.
CodecName = Literal["fp16", "bf16", "int8", "auto"]
#: Leaves the choice to trials.
AUTO = "auto"
#: All codecs. A further one needs an entry here, and in `CodecName`.
CODECS = {
    "fp16": CodecKind(partial(HalfCodec, "float16"), _FLOATS, "float16"),
    "bf16": CodecKind(partial(HalfCodec, "bfloat16"), _FLOATS, "bfloat16"),
    "int8": CodecKind(Int8Codec, _FLOATS, needs_feedback=True),
}
