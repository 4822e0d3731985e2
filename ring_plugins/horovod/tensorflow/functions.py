"""Horovod's broadcasts of variables and objects, for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import keras
import tensorflow as tf

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.horovod import basics
from ring_plugins.horovod.common.process_sets import group_of
from ring_plugins.horovod.tensorflow.collectives import as_it_is
from ring_plugins.horovod.tensorflow.errors import NotSupported, with_tensorflow_errors
from ring_plugins.keras.job import capture_exceptions, connect
from ring_plugins.keras.state import broadcast_all

__all__ = [
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


@as_it_is
@with_tensorflow_errors
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> None:
    """Give all ranks the root's values of variables, now or whenever the `tf.function` that is being traced runs.

    Args:
        variables: `model.variables`, `optimizer.variables`, or `optimizer.variables()` of older Keras versions.
        root_rank: whose values all get.
        process_set: the processes that take part, all by default.
        inplace: has no effect; variables are always overwritten.

    Raises:
        ArgumentError: there are no variables.
        MismatchError: the variables differ among ranks.
    """
    group = group_of(process_set)
    these = list(variables() if callable(variables) else variables)
    if tf.executing_eagerly() or not these:
        broadcast_all(these, root_rank, group=group)
        return
    connect()

    def call(*values: Any) -> list[Any]:
        return broadcast_all(these, root_rank, values, group)

    own = [tf.convert_to_tensor(variable) for variable in these]
    values = tf.numpy_function(capture_exceptions(call), own, [value.dtype for value in own])
    for variable, value in zip(these, tf.nest.flatten(values), strict=True):
        variable.assign(tf.ensure_shape(value, variable.shape))


@as_it_is
@with_tensorflow_errors
def broadcast_(variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: Any = None) -> list[Any]:
    """As `broadcast_variables`, and return the new values in tensors; `name` has no effect."""
    these = list(variables)
    broadcast_variables(these, root_rank, process_set)
    return [tf.convert_to_tensor(variable) for variable in these]


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Reject: as with Horovod, this is for graphs of TensorFlow 1, which do not exist here."""
    raise NotSupported(
        f"broadcast_global_variables({root_rank!r}) is for graphs of TensorFlow 1; write "
        "hvd.broadcast_variables(model.variables, root_rank=0), and the same for optimizer.variables."
    )


def broadcast_object(
    obj: Any = None, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """The root's object, on every rank. There are no sessions of TensorFlow 1, so `session` is None."""
    _check_session(session)
    return basics.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Callable[[Any], Any]:
    """A function from an object to the root's, with the arguments of `broadcast_object`."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj: Any, session: Any = None, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, in rank order. There are no sessions of TensorFlow 1, so `session` is None."""
    _check_session(session)
    return basics.allgather_object(obj, name, process_set)


def _check_session(session: Any) -> None:
    if session is not None:
        raise ArgumentError(
            f"session={session!r:.80} must be left out: sessions of TensorFlow 1 do not exist here. A name is passed "
            "by name=."
        )


class _Variables(list[Any]):
    """`optimizer.variables` which scripts may call, as they had to before Keras 2.11: `optimizer.variables()`.

    Keras 2 has the same list for the same reason; the optimizers of Keras 3 have lost it.
    """

    def __call__(self) -> _Variables:
        return self


def _make_variables_callable(kind: Any) -> None:
    read = kind.variables.fget
    kind.variables = property(lambda optimizer: _Variables(read(optimizer)), doc=kind.variables.__doc__)


if keras.backend.backend() == "tensorflow":
    # Scripts read the list before this package sees their optimizer, so the classes must have it.
    for _kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _make_variables_callable(_kind)
