"""Errors that are also TensorFlow's, by which Horovod's scripts catch them: Horovod's operations are TensorFlow's own.

The classes are made when an error is raised: an `ArgumentError` becomes an error of both `ArgumentError` and
`tf.errors.InvalidArgumentError`. Errors of a `tf.function` are TensorFlow's alone, with the text of ours in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import tensorflow as tf

from ring_plugins.core.base.errors import ArgumentError, MismatchError, NotInitialized, RingError


class NotSupported(ArgumentError, NotImplementedError):
    """What Horovod has not either; scripts catch its NotImplementedError."""


F = TypeVar("F", bound=Callable[..., Any])

#: What Horovod raises where this package raises one of these; `tf.errors.UnknownError` for all others.
_KINDS: tuple[tuple[type[RingError], type[Any], int], ...] = (
    (ArgumentError, tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
    (MismatchError, tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    (NotInitialized, tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    (RingError, tf.errors.UnknownError, tf.errors.UNKNOWN),
)


def with_tensorflow_errors(operation: F) -> F:
    """Let an operation raise errors that are also TensorFlow's."""

    @wraps(operation)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return operation(*arguments, **options)
        except RingError as error:
            if isinstance(error, tf.errors.OpError):
                raise
            raise _also_of_tensorflow(error).with_traceback(error.__traceback__) from error.__cause__

    return cast("F", call)


def _also_of_tensorflow(error: RingError) -> RingError:
    own, code = next((kind, code) for ours, kind, code in _KINDS if isinstance(error, ours))
    found = _both(type(error), own, code)(None, None, str(error))
    found.args = error.args
    vars(found).update(vars(error))
    return found


def _both(ours: type[RingError], own: type[Any], code: int) -> type[RingError]:
    if ours not in _classes:

        def initialize(self: RingError, node_def: Any, op: Any, message: str, *_: Any) -> None:  # as AutoGraph calls it
            self.args = (message,)
            vars(self).update(_node_def=node_def, _op=op, _message=message, _error_code=code, _experimental_payloads={})

        def reduce(self: RingError) -> Any:  # a process without TensorFlow can read it
            return ours, *ours.__reduce__(self)[1:]

        members = {"__module__": ours.__module__, "__init__": initialize, "__reduce__": reduce}
        _classes[ours] = type(ours.__name__, (ours, own), members)
    return _classes[ours]


_classes: dict[type[RingError], type[RingError]] = {}
