"""The reductions that a collective can apply."""

from __future__ import annotations

from enum import Enum


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
