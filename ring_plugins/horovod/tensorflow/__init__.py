"""`import ring_plugins.horovod.tensorflow as hvd`: what scripts with a `GradientTape` use of `horovod.tensorflow`.

Operations work eagerly and inside `tf.function`, where they are calls of the host; `jit_compile=True` cannot contain
these. Functions of TensorFlow 1 (sessions, hooks) do not exist here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ring_plugins.horovod import basics
from ring_plugins.horovod import keras as horovod_keras

# isort: split
import keras as keras_itself  # `keras` is the module beside this one, once a script imports that
import tensorflow as tf

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.arguments import check_calls
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.validation import rejections_told
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.core.world import constructed_by_all
from ring_plugins.horovod.basics import *  # noqa: F403 - Horovod has these names in every module
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    check_averages,
    check_compression,
    check_process_set,
    size,
)
from ring_plugins.horovod.tensorflow import collectives
from ring_plugins.horovod.tensorflow.collectives import *  # noqa: F403 - all its public functions are Horovod's
from ring_plugins.horovod.tensorflow.collectives import as_it_is
from ring_plugins.keras.averaging import BUCKET_BYTES
from ring_plugins.keras.backends import Exchange, Settings, backend
from ring_plugins.keras.job import capture_exceptions, connect
from ring_plugins.keras.slices import describe_gradient
from ring_plugins.keras.state import broadcast_all
from ring_plugins.other_names import no_attribute

if TYPE_CHECKING:
    from typing_extensions import Self

DistributedOptimizer = horovod_keras.DistributedOptimizer

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "broadcast_variables",
]
__all__ += basics.__all__ + collectives.__all__


def __getattr__(name: str) -> object:
    raise no_attribute(__name__, name)


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` returns averages over all ranks.

    Args:
        gradtape: the tape that it stands for; everything but `gradient` is the tape's own.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average`; no other reduction of gradients is supported.
        process_set: all processes.
        sparse_as_dense: whether sparse gradients are made dense.
        device_dense, device_sparse, gradient_predivide_factor, num_groups, groups, scale_local_gradients: have no
            effect.

    Raises:
        ArgumentError: an argument is not supported, or Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: Op = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
    ) -> None:
        check_averages(op, gradient_predivide_factor)
        check_process_set(process_set)
        if keras_itself.backend.backend() != "tensorflow":
            raise ArgumentError(
                f"KERAS_BACKEND={keras_itself.backend.backend()!r}, but DistributedGradientTape needs Keras on "
                "TensorFlow."
            )
        if not callable(getattr(gradtape, "gradient", None)):
            raise ArgumentError(f"gradtape={gradtape!r} is not a tf.GradientTape; pass the tape of the loss.")
        self._tape, self._compression = gradtape, check_compression(compression)
        self._sparse_as_dense = sparse_as_dense

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tape.__exit__(*exception)

    @as_it_is
    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """The tape's gradients of `target`, averaged over all ranks.

        Args:
            target: as for the tape.
            sources: variables of TensorFlow or Keras, in any structure; those of a rank whose gradient is None get
                None, too.
            arguments, options: further arguments of the tape's `gradient`.

        Raises:
            ArgumentError: a source is no variable. Take gradients by other tensors from the tape itself.
            MismatchError: the variables differ among ranks.
        """
        own = self._tape.gradient(target, sources, *arguments, **options)
        if size() == 1:
            return own
        gradients = tf.nest.flatten(own)
        if self._sparse_as_dense:
            gradients = [None if one is None else tf.convert_to_tensor(one) for one in gradients]
        pairs = zip(tf.nest.flatten(sources), gradients, strict=True)
        present = {i: pair for i, pair in enumerate(pairs) if pair[1] is not None}
        if not present:
            return own
        self._check_dtypes(present)
        settings = (self._compression, self._sparse_as_dense)
        exchange = _exchange_for({i: variable for i, (variable, _) in present.items()}, settings)
        with rejections_told(exchange.communicator, "averaging gradients"):
            averages = exchange.average(dict(enumerate(gradient for _, gradient in present.values())))
        found = {i: averages[number] for number, i in enumerate(present)}
        return tf.nest.pack_sequence_as(sources, [found.get(i) for i in range(len(tf.nest.flatten(sources)))])

    def _check_dtypes(self, present: dict[int, tuple[Any, Any]]) -> None:
        """Reject gradients of another dtype than their variable's, whose bytes the buckets would misread."""
        for variable, gradient in present.values():
            expected, found = (keras_itself.backend.standardize_dtype(one.dtype) for one in (variable, gradient))
            if found != expected:
                raise ArgumentError(
                    f"the gradient of {variable.name!r} has dtype={found}, the variable {expected}. Compute the target "
                    "in the variable's dtype, on all ranks."
                )


#: By settings, and identity of the variables that have gradients: what averages them. Scripts make a new tape for every
#: step.
_exchanges: dict[tuple[Any, ...], Exchange] = {}


def _exchange_for(variables: dict[int, Any], settings: tuple[Any, bool]) -> Exchange:
    """What averages the gradients of these variables, made at their first step; collective then.

    Args:
        variables: by their number among the tape's sources. If other variables than before have a gradient, on all
            ranks, that is another exchange; if only on some ranks, it is a MismatchError.
        settings: the tape's compression and whether it makes sparse gradients dense.
    """
    key = (*settings, *map(id, variables.values()))
    if key not in _exchanges:
        with constructed_by_all("the first gradients of a DistributedGradientTape"):
            kinds = (tf.Variable, keras_itself.Variable)
            if wrong := [one for one in variables.values() if not isinstance(one, kinds)]:
                raise ArgumentError(
                    f"sources has a {type(wrong[0]).__name__}, whose gradients are this rank's own; take them from the "
                    "tape itself, and only those of variables from the DistributedGradientTape."
                )
            entries = [describe_gradient(i, variable) for i, variable in variables.items()]
            sizes = BucketSizes(BUCKET_BYTES).checked()
            chosen = Settings(f"gradients of tape {len(_exchanges)}", sizes, settings[0])
            _exchanges[key] = backend().Exchange(list(variables.values()), entries, chosen)
        for variable in variables.values():  # whose identity another may have afterwards
            weakref.finalize(variable, _forget, key)
    return _exchanges[key]


def _forget(key: tuple[Any, ...]) -> None:
    if (exchange := _exchanges.pop(key, None)) is not None:
        exchange.release()


@as_it_is
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = None, inplace: bool = False
) -> None:
    """Give all ranks the root's values of variables, now or whenever the `tf.function` that is being traced runs.

    Args:
        variables: `model.variables`, `optimizer.variables`, or `optimizer.variables()` of older Keras versions.
        root_rank: whose values all get.
        process_set: all processes.
        inplace: has no effect; variables are always overwritten.

    Raises:
        ArgumentError: there are no variables.
        MismatchError: the variables differ among ranks.
    """
    check_process_set(process_set)
    these = list(variables() if callable(variables) else variables)
    if tf.executing_eagerly() or not these:
        broadcast_all(these, root_rank)
        return
    connect()

    def call(*values: Any) -> list[Any]:
        return broadcast_all(these, root_rank, values)

    own = [tf.convert_to_tensor(variable) for variable in these]
    values = tf.numpy_function(capture_exceptions(call), own, [value.dtype for value in own])
    for variable, value in zip(these, tf.nest.flatten(values), strict=True):
        variable.assign(tf.ensure_shape(value, variable.shape))


class _Variables(list[Any]):
    """`optimizer.variables` which scripts may call, as they had to before Keras 2.11: `optimizer.variables()`.

    Keras 2 has the same list for the same reason; the optimizers of Keras 3 have lost it.
    """

    def __call__(self) -> _Variables:
        return self


def _make_variables_callable(kind: Any) -> None:
    read = kind.variables.fget
    kind.variables = property(lambda optimizer: _Variables(read(optimizer)), doc=kind.variables.__doc__)


if keras_itself.backend.backend() == "tensorflow":
    # Scripts read the list before this package sees their optimizer, so the classes must have it.
    for _kind in (keras_itself.optimizers.Optimizer, keras_itself.optimizers.LossScaleOptimizer):
        _make_variables_callable(_kind)


check_calls(globals(), __all__)
