"""Element types by name, and how numpy stores them.

The reductions that a collective can apply.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np

from ring_plugins.core.base.errors import ArgumentError


class Op(Enum):
    """How the values of all ranks become one.

    `AVERAGE` divides the sum by the number of ranks inside the collective, never in a pass of its
    own. On booleans `SUM` and `MAX` mean "any", `PRODUCT` and `MIN` mean "all".
    """

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    __hash__ = object.__hash__  # members are single; Enum's own hash is written in Python, and shows in small messages


AVERAGE = Op.AVERAGE
SUM = Op.SUM
MIN = Op.MIN
MAX = Op.MAX
PRODUCT = Op.PRODUCT


FLOATS = ("float16", "bfloat16", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
#: On GPUs only.
FLOATS8 = ("float8_e4m3fn", "float8_e5m2")

#: Name -> numpy type of the same bytes. numpy has no bfloat16: its bits travel as uint16.
STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in (*FLOATS, *SIGNED, *UNSIGNED, *COMPLEX, "bool") if name != "bfloat16"
}
STORAGE["bfloat16"] = np.dtype("uint16")

_NAMES = {dtype: name for name, dtype in STORAGE.items() if name != "bfloat16"}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return 1 if dtype in FLOATS8 else STORAGE[dtype].itemsize


def name_of(dtype: np.dtype[Any]) -> str:
    """Name of a numpy dtype, also of the bfloat16 that JAX registers with numpy.

    Raises:
        ArgumentError: a type that cannot be reduced or moved (strings, objects, records).
    """
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    name = dtype.name
    if name not in STORAGE or not dtype.isnative:
        raise ArgumentError(
            f"dtype={dtype} cannot be sent; use one of {', '.join(sorted(STORAGE))}, "
            "or all_gather_object / broadcast_object for arbitrary Python objects."
        )
    return name


@lru_cache
def check_reducible(dtype: str, op: Op) -> None:
    """Refuse combinations of type and reduction that have no meaning.

    Raises:
        ArgumentError: an average of integers or booleans, an order of complex numbers.
    """
    if op is Op.AVERAGE and dtype not in (*FLOATS, *COMPLEX, *FLOATS8):
        raise ArgumentError(f"op=AVERAGE of dtype={dtype} would round; convert to float32 first, or use op=SUM.")
    if op in (Op.MIN, Op.MAX) and dtype in COMPLEX:
        raise ArgumentError(f"op={op.name} of dtype={dtype}: complex numbers have no order.")
