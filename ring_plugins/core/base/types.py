"""Types of numpy arrays in signatures."""

from __future__ import annotations

from typing import Any

import numpy as np

#: An array of any shape and element type.
Array = np.ndarray[Any, np.dtype[Any]]
#: Memory as bytes: uint8, one-dimensional unless said otherwise.
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
