"""Element types and reductions: their names, how numpy stores a type, and which reduction makes sense for a type."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from ring_plugins.core.base.errors import ArgumentError

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
#: On GPUs only: numpy has no 8-bit floats.
FLOATS8 = ("float8_e4m3fn", "float8_e5m2")

#: Name -> numpy type that stores it. numpy has no bfloat16: its bits are stored as uint16.
STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in (*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, "bool") if name != "bfloat16"
}
STORAGE["bfloat16"] = np.dtype("uint16")

_NAMES = {dtype: name for name, dtype in STORAGE.items() if name != "bfloat16"}


def itemsize(dtype: str) -> int:
    """Number of bytes of one element."""
    return 1 if dtype in FLOATS8 else STORAGE[dtype].itemsize


def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a numpy dtype, or of the bfloat16 that JAX registers with numpy.

    Raises:
        ArgumentError: the type cannot be sent (strings, objects, records, foreign byte order).
    """
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    name = dtype.name
    if name in STORAGE and not dtype.isnative:
        raise ArgumentError(
            f"dtype={dtype} cannot be sent, since its byte order is not that of this processor: pass "
            "x.astype(x.dtype.newbyteorder('=')), or use all_gather_object / broadcast_object."
        )
    if name not in STORAGE:
        raise ArgumentError(
            f"dtype={dtype} cannot be sent; use one of {', '.join(sorted(STORAGE))}, "
            "or all_gather_object / broadcast_object for arbitrary Python objects."
        )
    return name


class Op(Enum):
    """A reduction: how a collective combines the values of all ranks.

    `AVERAGE` divides the sum by the number of ranks inside the collective, never in a pass of its own. On booleans,
    `SUM` and `MAX` mean "any", `PRODUCT` and `MIN` mean "all".
    """

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    # Enum's own hash is written in Python and slows down small messages. Members are singletons.
    __hash__ = object.__hash__


AVERAGE = Op.AVERAGE
SUM = Op.SUM
MIN = Op.MIN
MAX = Op.MAX
PRODUCT = Op.PRODUCT


@lru_cache
def check_reducible(dtype: str, op: Op) -> None:
    """Check that a reduction makes sense for a type.

    Raises:
        ArgumentError: AVERAGE of integers or booleans, MIN or MAX of complex numbers, or no `Op` at all.
    """
    if type(op) is not Op:
        raise ArgumentError(f"op={op!r} is not one of {', '.join(f'ring_plugins.{one.name}' for one in Op)}.")
    if op is Op.AVERAGE and dtype not in (*FLOATS, *COMPLEX, *FLOATS8):
        # The sum of booleans is their logical or.
        instead = "" if dtype == "bool" else ", or use op=SUM"
        raise ArgumentError(f"op=AVERAGE of dtype={dtype} would round; convert to float32 first{instead}.")
    if op in (Op.MIN, Op.MAX) and dtype in COMPLEX:
        raise ArgumentError(f"op={op.name} of dtype={dtype}: complex numbers have no order.")
