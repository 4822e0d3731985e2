"""Reductions of numpy arrays: the only place where numbers are combined.

Arrays are reduced in pieces small enough to stay in a core's cache, so that dividing after the sum, or widening 16-bit
floats to float32 and back, does not read main memory again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.types import Array

#: Bytes of one piece: with one or two sources it stays in a second-level cache of 1 MiB.
PIECE_BYTES = 256 * 1024

_UFUNC: dict[Op, Callable[..., Array]] = {
    Op.AVERAGE: np.add,
    Op.SUM: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
}


def reduce_into(target: Array, sources: Sequence[Array], op: Op, dtype: str, divisor: float = 1) -> None:
    """Combine `sources` in their order and write the result to `target`.

    Args:
        target: 1-d storage array; may be `sources[0]`, or `sources[1]` if there are two.
        sources: 1-d storage arrays of the same length, at least one.
        op: the reduction; AVERAGE adds, and `divisor` divides.
        dtype: name of the element type (storage alone cannot tell bfloat16 from uint16).
        divisor: the result is divided by this; 1 for none.

    16-bit floats are combined in float32 and rounded once, to nearest even.
    """
    if len(sources) == 1 and divisor == 1:  # also of 16 bits, which need not be widened
        if sources[0] is not target:
            np.copyto(target, sources[0])
        return
    if dtype in _CONVERSIONS:
        _reduce_half(target, sources, op, dtype, divisor)
        return
    if len(sources) == 1 and sources[0] is target:
        divide(target, divisor)
        return
    if target.nbytes > PIECE_BYTES:
        step = PIECE_BYTES // target.itemsize
        for start in range(0, target.size, step):
            end = start + step
            reduce_into(target[start:end], [source[start:end] for source in sources], op, dtype, divisor)
        return
    if len(sources) == 1:
        np.copyto(target, sources[0])
    else:
        ufunc = _UFUNC[op]
        ufunc(sources[0], sources[1], out=target)
        if len(sources) > 2:
            for source in sources[2:]:
                ufunc(target, source, out=target)
    if divisor != 1:
        divide_by, operand = _division(divisor, target.dtype)
        divide_by(target, operand, target)


def reduce_everywhere(
    arrays: Sequence[Array], position: int, op: Op, dtype: str, divisor: float = 1, source: Array | None = None
) -> None:
    """Combine `arrays` in their order and leave the result in every one of them, piece by piece.

    Another member's array takes the sum first: if another core wrote it, reading and writing it at once moves its cache
    lines to this core for good. Reading them now and invalidating the other core's copies later takes several times as
    long.

    Args:
        arrays: those of all members, at least two 1-d storage arrays of the same length.
        position: which of them is this member's own.
        op, dtype, divisor: as in `reduce_into`.
        source: combined instead of the own array, and only read.
    """
    step = 2 * PIECE_BYTES // len(arrays) // arrays[0].itemsize
    for start in range(0, arrays[0].size, step):
        pieces = [array[start : start + step] for array in arrays]
        terms = list(pieces)
        if source is not None:
            terms[position] = source[start : start + step]
        target = pieces[0] if position else pieces[-1]
        if position or len(arrays) == 2 or dtype in _CONVERSIONS:
            reduce_into(target, terms, op, dtype, divisor)
        else:  # the last array is still to be read when the first terms are combined
            reduce_into(pieces[0], terms[:-1], op, dtype)
            reduce_into(target, [pieces[0], target], op, dtype, divisor)
        for piece in pieces:
            if piece is not target:
                np.copyto(piece, target)


def divide(piece: Array, divisor: float) -> None:
    """Divide floats in place.

    For a power of two the reciprocal is exact, so it multiplies, which is faster. Anything else is truly divided, so
    that the average of equal values is that value.
    """
    ufunc, operand = _division(divisor, piece.dtype)
    ufunc(piece, operand, piece)


@lru_cache
def _division(divisor: float, dtype: np.dtype[Any]) -> tuple[Callable[..., Array], Array]:
    """The operation that divides, and its operand as a 0-d array, which numpy takes fastest; for small messages."""
    if math.frexp(divisor)[0] == 0.5:
        return np.multiply, np.array(1.0 / divisor, dtype)
    return np.divide, np.array(divisor, dtype)


def _reduce_half(target: Array, sources: Sequence[Array], op: Op, dtype: str, divisor: float) -> None:
    widen, narrow = _CONVERSIONS[dtype]
    ufunc = _UFUNC[op]
    step = PIECE_BYTES // 4
    length = min(step, target.size)
    total, other = np.empty(length, np.float32), np.empty(length, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, target.size, step):
            piece = target[start : start + step]
            accumulated = total[: piece.size]
            widen(sources[0][start : start + step], accumulated)
            for source in sources[1:]:
                term = other[: piece.size]
                widen(source[start : start + step], term)
                ufunc(accumulated, term, out=accumulated)
            if divisor != 1:
                divide(accumulated, divisor)
            narrow(accumulated, piece)


def narrow(values: Array, half: Array, dtype: str) -> None:
    """Round float32 numbers to 16 bits, to nearest even; numbers that are too large become infinite.

    Args:
        values: 1-d float32.
        half: storage for as many elements of `dtype`, to fill.
        dtype: "float16" or "bfloat16".
    """
    with np.errstate(over="ignore", invalid="ignore"):
        _CONVERSIONS[dtype][1](values, half)


def widen(half: Array, values: Array, dtype: str) -> None:
    """Convert 16-bit numbers to float32, which is exact; arguments as in `narrow`."""
    _CONVERSIONS[dtype][0](half, values)


# numpy converts float16 one number at a time: as fast as the bits below where all numbers are normal, and up to fifty
# times slower where they are subnormal in 16 bits, as gradients below 6e-5 are.


def _widen_float16(source: Array, out: Array) -> None:
    """A float16 is a whole number of units: out of float32's mantissa, where a number with that unit has put it."""
    half = source.view(np.uint16)
    exponents = half & 0x7C00
    special = exponents == 0x7C00  # infinite, or not a number
    np.maximum(exponents, 0x0400, out=exponents)  # subnormal numbers have the unit of the smallest normal ones
    mantissas = half & 0x7FFF
    mantissas -= exponents
    mantissas += 0x0400
    base = exponents.astype(np.uint32)
    base <<= 13
    base += (127 - 15 + 13) << 23  # float32 numbers whose last bit is the unit
    np.add(base, mantissas, out=out.view(np.uint32), casting="unsafe")
    np.subtract(out, base.view(np.float32), out=out)
    signs = half.astype(np.uint32)
    signs >>= 15
    signs <<= 31
    np.bitwise_or(out.view(np.uint32), signs, out=out.view(np.uint32))
    if special.any():
        out[special] = source.view(np.float16)[special]


def _narrow_float16(source: Array, out: Array) -> None:
    """Round to nearest even by adding a number whose last bit is the unit of the result, as float32's sum rounds so."""
    bits = source.view(np.uint32)
    total = bits & 0x7FFFFFFF
    np.minimum(total, 0x47800000, out=total)  # 65,536 becomes infinite in 16 bits
    base = total & 0x7F800000
    np.maximum(base, 0x38800000, out=base)  # subnormal numbers have the unit of the smallest normal ones
    base += 13 << 23
    np.add(total.view(np.float32), base.view(np.float32), out=total.view(np.float32))
    total -= base  # units
    base >>= 13
    total += base
    total -= 126 << 10
    np.right_shift(bits, 16, out=base)
    base &= 0x8000
    total += base
    not_a_number = np.isnan(source)
    if not_a_number.any():
        total[not_a_number] = 0x7E00
    np.copyto(out.view(np.uint16), total, casting="unsafe")


def _widen_bfloat16(source: Array, out: Array) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, source)
    np.left_shift(bits, 16, out=bits)


def _narrow_bfloat16(source: Array, out: Array) -> None:
    """Round to nearest even on the bits: a bfloat16 is the upper half of a float32."""
    bits = source.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    not_a_number = np.isnan(source)
    if not_a_number.any():
        rounded[not_a_number] = 0x7FC0
    np.copyto(out, rounded, casting="unsafe")


_CONVERSIONS: dict[str, tuple[Callable[[Array, Array], None], Callable[[Array, Array], None]]] = {
    "float16": (_widen_float16, _narrow_float16),
    "bfloat16": (_widen_bfloat16, _narrow_bfloat16),
}
