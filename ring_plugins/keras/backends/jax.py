"""JAX: one call out of the compiled step in front of the update."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from ring_plugins.core.arrays.codec import HalfCodec
from ring_plugins.core.arrays.dtypes import STORAGE, Op
from ring_plugins.core.arrays.memory import HostMemory
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import Entry
from ring_plugins.keras.averaging import Averaging
from ring_plugins.keras.backends.jax_ffi import in_place
from ring_plugins.keras.buckets import HostBuckets
from ring_plugins.keras.failure import remembering, unwrapped
from ring_plugins.keras.moments import BatchMoments, gradient_of_own

#: Bytes from which a gradient is worth a reduction of its own, which costs some microseconds, and saves two copies.
_LARGE = 64 * 1024


class GradientAveraging(Averaging):
    """Replaces `stateless_apply`, which `fit` calls, and `apply`, for loops that run eagerly."""

    methods = ("stateless_apply", "apply")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inside = False
        self._waited, self._reduced_in_place = 0.0, 0
        self._dtypes: list[str] = []
        self._large: list[bool] = []
        self._codecs: dict[int, HalfCodec] = {}

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """Stands in for the optimizer's method; takes and returns the same."""
        self.prepare(self.variables)
        state, gradients, indices = list(optimizer_variables), list(grads), list(range(len(grads)))
        if self.accumulation == 1:
            averaged = self.average(gradients, indices)
        else:
            places = {id(variable): place for place, variable in enumerate(self.optimizer.variables)}
            accumulators = [places.get(id(a)) for a in self.accumulators(self.variables)]
            sums = [None if place is None else state[place] for place in accumulators]
            iterations = state[places[id(self.optimizer._iterations)]]
            averaged, left = self._accumulate(iterations, gradients, sums, indices)
            for place, value in zip(accumulators, left, strict=True):
                if place is not None:
                    state[place] = value
        self._inside = True
        try:
            return self.previous("stateless_apply")(state, averaged, trainable_variables)
        finally:
            self._inside = False

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stands in for the optimizer's `apply`; takes the same."""
        gradients = list(grads)
        if not self._inside:
            given = self.variables if trainable_variables is None else trainable_variables
            variables = list(given)
            self.prepare(self.variables if self.optimizer.built else variables)
            indices = [self.index(variable) for variable in variables]
            if self.accumulation == 1:
                gradients = self.average(gradients, indices)
            else:
                accumulators = self.accumulators(variables)
                sums = [None if accumulator is None else accumulator.value for accumulator in accumulators]
                gradients, left = self._accumulate(self.optimizer._iterations.value, gradients, sums, indices)
                for accumulator, value in zip(accumulators, left, strict=True):
                    if accumulator is not None:
                        accumulator.assign(value)
        self.previous("apply")(gradients, trainable_variables)

    def _accumulate(
        self, iterations: Any, gradients: list[Any], sums: list[Any], indices: list[int]
    ) -> tuple[list[Any], list[Any]]:
        """In the step that updates, the averages of what all steps have accumulated, and nothing left accumulated.

        Args:
            iterations: steps so far, of the same number on all ranks.
            gradients: this step's.
            sums: of the steps before, for each gradient; None where there is none.
            indices: which variables' they are.

        Returns:
            What to give the optimizer for gradients and for its sums.
        """

        def update(gradients: list[Any], sums: list[Any]) -> tuple[list[Any], list[Any]]:
            totals = [g if g is None or s is None else g + s for g, s in zip(gradients, sums, strict=True)]
            left = [
                s if g is None or s is None else jax.numpy.zeros_like(s) for g, s in zip(gradients, sums, strict=True)
            ]
            return self.average(totals, indices), left

        is_update = (iterations + 1) % self.accumulation == 0
        if isinstance(is_update, jax.core.Tracer):
            result: tuple[list[Any], list[Any]] = jax.lax.cond(is_update, update, lambda *given: given, gradients, sums)
            return result
        return update(gradients, sums) if is_update else (gradients, sums)

    def build(self, variables: Sequence[Any]) -> None:
        """Small gradients travel in buckets; large ones are reduced where they are."""
        entries = self.entries(variables)
        self._dtypes = [entry.dtype for entry in entries]
        self._large = [entry.count * STORAGE[entry.dtype].itemsize >= _LARGE for entry in entries]
        in_buckets = [
            Entry(entry.name, entry.dtype, 0, f"{entry.layout}, in place") if large else entry
            for entry, large in zip(entries, self._large, strict=True)
        ]
        self.buckets = HostBuckets(
            in_buckets, self.communicator, self.bucket_bytes, self.first_bucket_bytes, self.compression
        )

    @property
    def waited_seconds(self) -> float:
        return self._waited

    @property
    def reduced_bytes(self) -> int:
        return super().reduced_bytes + self._reduced_in_place

    def average(self, gradients: list[Any], indices: list[int]) -> list[Any]:
        """The average of each gradient; None stays None."""
        present = [place for place, gradient in enumerate(gradients) if gradient is not None]
        given = [gradients[place] for place in present]
        mine = [indices[place] for place in present]

        def reduce(arrays: list[Array]) -> None:
            self._reduce(mine, arrays)

        def reduce_copies(*operands: Any) -> list[Array]:
            copies = [np.array(operand) for operand in operands]
            reduce([copy.reshape(-1) for copy in copies])
            return copies

        results: Any = None
        if any(isinstance(gradient, jax.core.Tracer) for gradient in given):
            results = in_place(remembering(reduce), given) if jax.default_backend() == "cpu" else None
            if results is None:
                shapes = [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in given]
                results = io_callback(remembering(reduce_copies), shapes, *given, ordered=True)
        else:
            results = [jax.numpy.array(average) for average in reduce_copies(*given)]
        averaged: list[Any] = [None] * len(gradients)
        for place, result in zip(present, results, strict=True):
            averaged[place] = result
        return averaged

    def _reduce(self, indices: list[int], arrays: list[Array]) -> None:
        """Overwrite flat arrays with their averages."""
        assert self.buckets is not None
        started = time.perf_counter()
        small = {i: array for i, array in zip(indices, arrays, strict=True) if not self._large[i]}
        self.buckets.give(list(small), list(small.values()))
        for i, array in reversed(list(zip(indices, arrays, strict=True))):
            if self._large[i]:
                memory = HostMemory(array.view(STORAGE[self._dtypes[i]]), self._dtypes[i])
                self.communicator.all_reduce(memory, Op.AVERAGE, self._codec(i, memory))
                self._reduced_in_place += array.nbytes
        for i, average in self.buckets.finish().items():
            np.copyto(small[i], average)
        self._waited += time.perf_counter() - started

    def _codec(self, i: int, memory: HostMemory) -> HalfCodec | None:
        if self.compression is None or not self.compression.applies_to(memory.dtype):
            return None
        codec = self._codecs.setdefault(i, HalfCodec(self.compression))
        codec.begin(memory.array)
        return codec


def refuse_other_parallelism(model: Any) -> None:
    """See the protocol; `keras.distribution` is refused for all backends."""


def is_lazy(model: Any) -> bool:
    """See the protocol; Keras builds a model on this backend before any callback is called."""
    return False


def make_train_function(model: Any) -> None:
    """See the protocol."""
    model.make_train_function(force=True)
    train_function = model.train_function

    @functools.wraps(train_function)
    def step(state: Any, iterator: Any) -> Any:
        with unwrapped():
            return train_function(state, iterator)

    model.train_function = step


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """See the protocol."""
    action()


def moments_of_all(moments: BatchMoments, count: Any, own: Any) -> Any:
    """See the protocol. Ordered calls: layers that do not depend on each other must come in one order on all ranks."""
    like, number = jax.ShapeDtypeStruct(own.shape, own.dtype), jax.ShapeDtypeStruct((), own.dtype)

    def combine(own: Any, count: Any) -> tuple[Any, Any]:
        call = remembering(lambda count, own: moments.combine(np.asarray(count), np.asarray(own)))
        everyones, share = io_callback(call, (like, number), count, own, ordered=True)
        return everyones, (own, everyones, share)

    def gradient(saved: Any, upstream: Any) -> tuple[Any, None]:
        call = remembering(lambda upstream: moments.add_up(np.asarray(upstream)))
        own, everyones, share = saved
        return gradient_of_own(own, everyones, share, io_callback(call, like, upstream, ordered=True)), None

    combined = jax.custom_vjp(lambda own, count: combine(own, count)[0])
    combined.defvjp(combine, gradient)
    return combined(own, count)


def seed_apart(communicator: Communicator, root: int) -> None:
    """See the protocol; layers on this backend draw from seed generators only."""
