"""Tapes whose gradients are averages over all ranks, for loops of TensorFlow with any optimizer."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ring_plugins.core.arrays.dtypes import Op
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.validation import on_all_or_none, rejections_told
from ring_plugins.core.gradients.fusion import BucketSizes
from ring_plugins.core.groups import Group
from ring_plugins.core.world import current
from ring_plugins.horovod.basics import (
    Average,
    Compression,
    check_compression,
    gradient_factor,
    size,
)
from ring_plugins.horovod.common.process_sets import group_of
from ring_plugins.horovod.keras.optimizer import check_size_stays, layers_in
from ring_plugins.horovod.tensorflow.collectives import as_it_is
from ring_plugins.horovod.tensorflow.errors import with_tensorflow_errors
from ring_plugins.keras.averaging import BUCKET_BYTES
from ring_plugins.keras.backends import Exchange, Settings, backend
from ring_plugins.keras.job import members
from ring_plugins.keras.slices import describe_gradient

if TYPE_CHECKING:
    from typing_extensions import Self


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` returns averages over all ranks.

    Args:
        gradtape: the tape that it stands for; everything but `gradient` is the tape's own.
        compression: `Compression.none` or `Compression.fp16`.
        op: `Average` or `Sum`.
        process_set: the processes that train together, all by default.
        sparse_as_dense: whether sparse gradients are made dense.
        scale_local_gradients: whether gradients of local sources, which stay this rank's own, are divided by the number
            of ranks, as an average over ranks would be of which only this one has a gradient.
        device_dense, device_sparse, gradient_predivide_factor, num_groups, groups: have no effect.

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
        self._ranks, self._group = size(process_set), group_of(process_set)
        self._factor = gradient_factor(op, gradient_predivide_factor, self._ranks)
        check_size_stays(self._factor)
        if keras.backend.backend() != "tensorflow":
            raise ArgumentError(
                f"KERAS_BACKEND={keras.backend.backend()!r}, but DistributedGradientTape needs Keras on TensorFlow."
            )
        if not callable(getattr(gradtape, "gradient", None)):
            raise ArgumentError(f"gradtape={gradtape!r} is not a tf.GradientTape; pass the tape of the loss.")
        self._tape, self._compression = gradtape, check_compression(compression)
        self._sparse_as_dense, self._scales_local = sparse_as_dense, scale_local_gradients
        self._local: dict[int, Any] = {}  # sources, by their identity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._tape.__exit__(*exception)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable as this rank has computed it, but for `scale_local_gradients`."""
        self._local[id(source)] = source

    @as_it_is
    @with_tensorflow_errors
    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """The tape's gradients of `target`, averaged or summed over all ranks.

        Args:
            target: as for the tape.
            sources: variables of TensorFlow or Keras, in any structure; those of a rank whose gradient is None get
                None, too.
            arguments, options: further arguments of the tape's `gradient`; `use_generic_names` has no effect.

        Raises:
            ArgumentError: a source is no variable. Take gradients by other tensors from the tape itself.
            MismatchError: the variables differ among ranks.
        """
        options.pop("use_generic_names", None)
        own = self._tape.gradient(target, sources, *arguments[:1], **options)
        if self._ranks == 1 and not current().replaces:  # where others may join, and a function is traced only once
            return own
        gradients = tf.nest.flatten(own)
        if self._sparse_as_dense:
            gradients = [None if one is None else tf.convert_to_tensor(one) for one in gradients]
        pairs = dict(enumerate(zip(tf.nest.flatten(sources), gradients, strict=True)))
        found = {i: gradient for i, (source, gradient) in pairs.items() if id(source) in self._local}
        if self._scales_local:
            found = {i: _times(gradient, 1 / self._ranks) for i, gradient in found.items()}
        found |= self._reduced({i: pair for i, pair in pairs.items() if i not in found and pair[1] is not None})
        return tf.nest.pack_sequence_as(sources, [found.get(i) for i in pairs])

    def get_local_and_global_gradients(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """Pairs of source and gradient: a list of those of local sources, and one of the others'."""
        gradients = self.gradient(target, sources, *arguments, **options)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        is_local = [id(source) in self._local for source, _ in pairs]
        return [list(itertools.compress(pairs, which)) for which in (is_local, map(operator.not_, is_local))]

    def _reduced(self, present: dict[int, tuple[Any, Any]]) -> dict[int, Any]:
        """The averages or sums of these pairs of variable and gradient, by their numbers among the sources."""
        if not present:
            return {}
        self._check_dtypes(present)
        settings = (self._compression, self._sparse_as_dense, self._group)
        exchange = _exchange_for({i: variable for i, (variable, _) in present.items()}, settings)
        with rejections_told(exchange.communicator, "averaging gradients"):
            averages = exchange.average(dict(enumerate(gradient for _, gradient in present.values())))
        return {i: _times(averages[number], self._factor) for number, i in enumerate(present)}

    def _check_dtypes(self, present: dict[int, tuple[Any, Any]]) -> None:
        """Reject gradients of another dtype than their variable's, whose bytes the buckets would misread."""
        for variable, gradient in present.values():
            expected, found = (keras.backend.standardize_dtype(one.dtype) for one in (variable, gradient))
            if found != expected:
                raise ArgumentError(
                    f"the gradient of {variable.name!r} has dtype={found}, the variable {expected}. Compute the target "
                    "in the variable's dtype, on all ranks."
                )


def _times(gradient: Any, factor: float) -> Any:
    """A gradient, which may be None or sparse, times a factor."""
    if gradient is None or factor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


#: By settings, and identity of the variables that have gradients: what averages them. Scripts make a new tape for every
#: step.
_exchanges: dict[tuple[Any, ...], Exchange] = {}


def _exchange_for(variables: dict[int, Any], settings: tuple[Any, bool, Group | None]) -> Exchange:
    """What averages the gradients of these variables, made at their first step; collective then.

    Args:
        variables: by their number among the tape's sources. If other variables than before have a gradient, on all
            ranks, that is another exchange; if only on some ranks, it is a MismatchError.
        settings: the tape's compression, whether it makes sparse gradients dense, and its ranks.
    """
    key = (*settings, *map(id, variables.values()))
    if key not in _exchanges:
        group = settings[2]
        with on_all_or_none(members(group).communicator, "the first gradients of a DistributedGradientTape"):
            kinds = (tf.Variable, keras.Variable)
            if wrong := [one for one in variables.values() if not isinstance(one, kinds)]:
                raise ArgumentError(
                    f"sources has a {type(wrong[0]).__name__}, whose gradients are this rank's own; take them from the "
                    "tape itself, and only those of variables from the DistributedGradientTape."
                )
            entries = [describe_gradient(i, variable) for i, variable in variables.items()]
            sizes = BucketSizes(BUCKET_BYTES).checked()
            number = sum(other[2] is group for other in _exchanges)  # equal on all of these ranks
            chosen = Settings(f"gradients of tape {number}", sizes, settings[0], group=group)
            _exchanges[key] = backend().Exchange(list(variables.values()), entries, chosen)
        for variable in variables.values():  # whose identity another may have afterwards
            weakref.finalize(variable, _forget, key)
    return _exchanges[key]


def exchanges_of_all() -> list[Any]:
    """The exchanges of TensorFlow of tapes of all ranks, in the order in which they were made."""
    return [exchange for key, exchange in _exchanges.items() if key[2] is None]


def prepare_tape(variables: Iterable[Any]) -> None:
    """Make now what a tape with default arguments needs for these variables; collective, or in a process to join."""
    _exchange_for(dict(enumerate(variables)), (check_compression(Compression.none), False, None))


def _forget(key: tuple[Any, ...]) -> None:
    if (exchange := _exchanges.pop(key, None)) is not None:
        exchange.release()


def PartialDistributedGradientTape(  # noqa: N802 - known by this name
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> DistributedGradientTape:
    """A `DistributedGradientTape` for which the weights of some layers are local sources.

    Args:
        local_layers: Keras layers, or one.
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
            groups, process_set, scale_local_gradients: as for `DistributedGradientTape`.

    Raises:
        ArgumentError: something else is in `local_layers`; otherwise as `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers_in(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
