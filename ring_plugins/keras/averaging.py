"""Averages in front of an optimizer's update: what is common to all backends."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import keras

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.arrays.dtypes import STORAGE
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import FIRST_BUCKET_BYTES, MIB, Entry
from ring_plugins.keras.buckets import Buckets, HostBuckets
from ring_plugins.keras.connection import connect
from ring_plugins.keras.on_gpu import say_what_gpus_cost

#: Smaller than the core's: reductions of 4 MiB cost no more a byte, and networks of Keras's size (ResNet-50 has 100 MB,
#: most others less) are sent in enough pieces to go on their way while backward still runs.
BUCKET_BYTES = 4 * MIB

_numbers = itertools.count()
_ATTRIBUTE = "_ring_averaging"


class Averaging(abc.ABC):
    """Averages the gradients that one optimizer instance is given, among all ranks, before it uses them.

    Methods of the instance are replaced, not its class: `isinstance`, pickling and a saved `.keras` file know nothing
    of it, and clipping, loss scaling and moving averages, which happen inside the optimizer, see the averaged gradient.
    Where the optimizer accumulates (`gradient_accumulation_steps`), each rank does so for itself, and what is averaged,
    in the step that updates, is the sum; only a `LossScaleOptimizer` around it must see every gradient averaged, since
    ranks have to agree on whether one of them overflowed.

    Args:
        optimizer: the outermost one (a `LossScaleOptimizer`, say, not the one inside it), so that all ranks skip a
            step in which any rank's gradient overflowed.
        bucket_bytes: size of the buckets in bytes.
        first_bucket_bytes: of the first one, small so that communication starts early.
        compression: "fp16" or "bf16" sends gradients in 16 bits between hosts.
        error_feedback: whether what this rounding loses in a step is added to the next.
    """

    #: Names of the methods that are replaced.
    methods: tuple[str, ...]

    def __init__(
        self,
        optimizer: Any,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        compression: Literal["fp16", "bf16"] | None = None,
        error_feedback: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ArgumentError(f"bucket_bytes={bucket_bytes!r} is not a positive number of bytes.")
        self.compression = Compression.named(compression, error_feedback)
        self.wire_arguments: dict[str, Any] = {"compression": compression, "error_feedback": error_feedback}
        self.optimizer = optimizer
        self.bucket_bytes, self.first_bucket_bytes = bucket_bytes, min(first_bucket_bytes, bucket_bytes)
        self.world = connect()
        self.communicator = self.world.new_communicator(f"gradients {next(_numbers)}")
        if self.world.topology.size > 1:
            say_what_gpus_cost(self.world.topology.rank)
        self.buckets: Buckets | None = None
        self._indices: dict[int, int] = {}
        self._previous: dict[str, Callable[..., Any]] = {}

    # What a user may read -------------------------------------------------------------------------

    @property
    def reductions(self) -> int:
        """Steps whose gradients were averaged."""
        return self.buckets.reducer.passes if self.buckets else 0

    @property
    def waited_seconds(self) -> float:
        """Seconds in which an update waited for communication."""
        return self.buckets.reducer.waited if self.buckets else 0.0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self.buckets.reducer.reduced_bytes if self.buckets else 0

    # Life -----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Replace the instance's methods."""
        if self._previous:
            return
        for name in self.methods:
            self._previous[name] = getattr(self.optimizer, name)
            self.optimizer.__dict__[name] = getattr(self, name)
        self.optimizer.__dict__[_ATTRIBUTE] = self

    def remove(self) -> None:
        """Put the instance's methods back and give memory and communicator back."""
        for name in self._previous:
            self.optimizer.__dict__.pop(name, None)
        self._previous = {}
        self.optimizer.__dict__.pop(_ATTRIBUTE, None)
        self.close()
        if self.buckets is not None:
            self.buckets.release()
        self.communicator.close()

    def close(self) -> None:  # noqa: B027 - most backends have nothing more to give back
        """Give back what the backend holds."""

    def prepare(self, variables: Sequence[Any]) -> None:
        """Plan and memory for these variables; collective the first time, nothing afterwards."""
        if self._indices:
            return
        self._indices = {id(variable): i for i, variable in enumerate(variables)}
        self.build(variables)

    def build(self, variables: Sequence[Any]) -> None:
        """What a backend needs for these variables; collective."""
        self.buckets = HostBuckets(
            self.entries(variables), self.communicator, self.bucket_bytes, self.first_bucket_bytes
        )

    def entries(self, variables: Sequence[Any]) -> list[Entry]:
        """Names hold no path: automatic layer names count on per process, and may differ among equal models."""
        return [
            Entry(f"variable {i} ({variable.name})", *_dtype_and_count(variable), f"shape {tuple(variable.shape)}")
            for i, variable in enumerate(variables)
        ]

    @property
    def variables(self) -> list[Any]:
        """What the optimizer was built for. In Keras 3.10 a `LossScaleOptimizer` leaves that to the inner one."""
        inner = getattr(self.optimizer, "inner_optimizer", None)
        found = getattr(self.optimizer, "_trainable_variables", None) or getattr(inner, "_trainable_variables", None)
        return list(found or ())

    @property
    def accumulation(self) -> int:
        """Steps that the optimizer makes one update of."""
        return int(getattr(self.optimizer, "gradient_accumulation_steps", None) or 1)

    def accumulators(self, variables: Sequence[Any]) -> list[Any]:
        """Where the optimizer adds up gradients; None for a variable that is set to its gradient (scales of float8)."""
        optimizer = self.optimizer
        if not optimizer.built:
            optimizer.build(list(variables))
        # Keras 3.15.1, optimizers/base_optimizer.py:490: how it finds them itself.
        return [optimizer._accumulated_gradients[optimizer._get_variable_index(variable)] for variable in variables]

    def left_over(self) -> list[Any]:
        """What has been accumulated since the last update; its average may take the place of each rank's own."""
        if self.accumulation == 1 or not self.optimizer.built:
            return []
        return [accumulator for accumulator in self.accumulators(self.variables) if accumulator is not None]

    def previous(self, name: str) -> Callable[..., Any]:
        """The method that was replaced."""
        return self._previous[name]

    def index(self, variable: Any) -> int:
        """Position of a variable among those of the optimizer.

        Raises:
            ArgumentError: the optimizer was built for others.
        """
        found = self._indices.get(id(variable))
        if found is None:
            raise ArgumentError(
                f"variable {getattr(variable, 'path', variable)!r} is not among those the optimizer was built for; use "
                "an optimizer of its own for it."
            )
        return found


def averaging_of(optimizer: Any) -> Averaging | None:
    """The averaging installed on this optimizer."""
    found: Averaging | None = vars(optimizer).get(_ATTRIBUTE)
    return found


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer that the model was compiled with, and those held as attributes, as GANs do."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    found = [optimizer for optimizer in held if isinstance(optimizer, keras.optimizers.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def communication_of(model: Any) -> tuple[float, int]:
    """Seconds waited for communication and bytes reduced by a model's optimizers that are being averaged."""
    active: Iterable[Averaging] = filter(None, map(averaging_of, optimizers_of(model)))
    totals = [(averaging.waited_seconds, averaging.reduced_bytes) for averaging in active]
    return sum(seconds for seconds, _ in totals), sum(nbytes for _, nbytes in totals)


def _dtype_and_count(variable: Any) -> tuple[str, int]:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in STORAGE:
        raise ArgumentError(f"variable {variable.path} has dtype={dtype}, whose gradients cannot be averaged.")
    count = 1
    for length in variable.shape:
        count *= int(length)
    return dtype, count
