"""Which adapter serves."""

from __future__ import annotations

import functools
import importlib
from typing import cast

import keras

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.backends.protocol import Backend

_KNOWN = ("tensorflow", "torch", "jax")


@functools.cache
def backend() -> Backend:
    """The adapter for the backend Keras runs on.

    Raises:
        ArgumentError: a backend that does not train (numpy, openvino).
    """
    name = keras.backend.backend()
    if name not in _KNOWN:
        raise ArgumentError(f"KERAS_BACKEND={name!r} has no gradients to average; use one of {', '.join(_KNOWN)}.")
    return cast("Backend", importlib.import_module(f"ring_plugins.keras.backends.{name}"))
