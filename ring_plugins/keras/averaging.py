"""Average gradients among all ranks before an optimizer uses them.

Keras has no hook between backward and update. So `apply` of one optimizer instance is replaced, and `stateless_apply`,
which compiled steps call on JAX. The class stays the same, so `isinstance`, pickling and saved `.keras` files are not
affected. Clipping, loss scaling and moving averages happen inside the optimizer, so they see averages.

On every backend a gradient takes the same path:

    GradientAveraging.apply     finds the gradient's index, and handles gradient accumulation
    Exchange.average            leaves the framework's step: host calls on TensorFlow and JAX, hooks on torch
    HostBuckets.give, finish    copies small gradients into buckets (torch: GradientAverager)
    GradientReducer (core)      reduces each bucket as soon as it is full

An optimizer with `gradient_accumulation_steps` accumulates on each rank, and the sum is averaged in the step that
updates: the optimizer gets the average of the sums as its gradient, and zeros in its accumulators. A
`LossScaleOptimizer` around it must see every gradient averaged, since ranks have to agree on whether one overflowed.

Considered and rejected: a wrapper class or a dynamic subclass (a saved model would not load without this package), and
averaging in `train_step` (which would miss optimizers that a user's own step calls).
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import keras

from ring_plugins.core.arrays.codec import CodecName
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.collectives.validation import on_all_or_none, rejections_told
from ring_plugins.core.gradients.fusion import FIRST_BUCKET_BYTES, MIB, BucketSizes
from ring_plugins.core.gradients.trials import chosen_overlap
from ring_plugins.core.groups import Group
from ring_plugins.core.world import announce_training, current
from ring_plugins.keras.backends import BatchShare, Exchange, Settings, Statistics, backend
from ring_plugins.keras.buckets import call_weakly
from ring_plugins.keras.consistency import (
    KerasChecks,
    Options,
    check_equal_optimizers,
    check_equal_starts,
    checksums_of,
    options_of,
    updating_optimizers,
)
from ring_plugins.keras.job import members
from ring_plugins.keras.patches import Patch
from ring_plugins.keras.running_fit import AVERAGING, watch_fit
from ring_plugins.keras.sharded_optimizer import check_shardable, sharded
from ring_plugins.keras.slices import describe_gradient
from ring_plugins.keras.state import accumulation_steps, forget_compiled_steps, optimizers_of
from ring_plugins.keras.validation import warn_of_gpu_copies

#: Smaller than the core's: larger reductions cost as much per byte, and typical models fill enough of these to overlap.
BUCKET_BYTES = 4 * MIB

_numbers = itertools.count()
#: That replace methods of their optimizers.
installed: weakref.WeakSet[GradientAveraging] = weakref.WeakSet()

O = TypeVar("O", bound=keras.optimizers.Optimizer)  # noqa: E741 - one letter, as type variables are


def DistributedOptimizer(  # noqa: N802 - known by this name
    optimizer: O,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    compression: CodecName | None = None,
    error_feedback: bool | None = None,
    overlap: bool | Literal["auto"] = "auto",
    shard_optimizer: bool = False,
    group: Group | None = None,
) -> O:
    """Make an optimizer average its gradients among all ranks before it uses them.

    For custom training loops (`GradientTape`, `train_step` overrides, several optimizers); `BroadcastCallback` does it
    automatically. All ranks, or those of the group, call it in the same order. `undistribute` reverts it.

    Args:
        optimizer: any Keras optimizer; for mixed precision the outermost one, a `LossScaleOptimizer`.
        bucket_bytes: size of the buckets in bytes, 4 MiB by default.
        compression: "fp16" or "bf16" sends gradients in 16 bits between hosts, "int8" in 8, "auto" as is fastest;
            ranks on one host sum in full precision.
        error_feedback: whether the rounding error of a step is added to the next; None: with "int8" only.
        overlap: True averages gradients while others are still computed, False when all are there. "auto" does as
            RING_OVERLAP says, and by default tries both in the first steps and keeps the faster; on JAX it is False.
        shard_optimizer: whether each rank updates only its part of every variable and keeps only that part's slot
            variables, such as Adam's momentum and velocity. All ranks then save together; see
            docs/sharded_optimizer.md.
        group: the ranks that average, all by default.

    Returns:
        The same object, with `apply` and `stateless_apply` replaced. Its class does not change, so files saved with it
        load without this package.

    Raises:
        ArgumentError: `optimizer` is not a Keras optimizer, or cannot be sharded, `compression` is unknown, this rank
            is not in `group`, or a `tf.function` of the script has updated already, which would never average.
        MismatchError: the variables differ among ranks; raised at the first use.
    """
    ranks = members(group).communicator
    with on_all_or_none(ranks, "the construction of a DistributedOptimizer"):
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ArgumentError(f"optimizer={type(optimizer).__name__} is not a keras.optimizers.Optimizer.")
        if shard_optimizer:
            check_shardable(optimizer)
        averaging = averaging_of(optimizer)
        if averaging is not None:
            averaging.check_fits(shard_optimizer, group)
        # A process that is to join is alone until then, but has to make what the others have.
        if averaging is None and (ranks.size > 1 or current().replaces):
            options = bucket_bytes, compression, error_feedback, overlap
            averaging = GradientAveraging(optimizer, *options, shard_optimizer, group)
            forget_compiled_steps(optimizer)
            if optimizer.built:
                backend().forget_traces(optimizer)
            averaging.install()
            announce_training()
    return optimizer


def undistribute(optimizer: O) -> O:
    """Revert `DistributedOptimizer`. All ranks call it."""
    averaging = averaging_of(optimizer)
    if averaging is not None:
        if averaging.sharded is not None:
            averaging.sharded.restore()
        averaging.remove()
        forget_compiled_steps(optimizer)
    return optimizer


class GradientAveraging:
    """Averages the gradients passed to one optimizer instance.

    Args:
        optimizer: the outermost optimizer (a `LossScaleOptimizer`, not the one inside it), so that all ranks skip a
            step in which any rank's gradient overflowed.
        bucket_bytes: size of the buckets in bytes.
        compression, error_feedback, overlap, shard_optimizer, group: as for `DistributedOptimizer`.

    Attributes:
        settings: settings of the exchange.
        exchange: averages the gradients; None until the optimizer's variables are known.
        checks: what passes compare among the ranks.
        starts_equal: whether the ranks' weights are known to have been equal, so that parts of them fit together.
        sharded: divides the optimizer among the ranks; None if each has all of it.
        share: how much the batch of a step counts, in a `fit` that weighs them (`uneven.py`).
        ranks: the communicator of those that average, which others use too.
    """

    def __init__(
        self,
        optimizer: Any,
        bucket_bytes: int = BUCKET_BYTES,
        compression: CodecName | None = None,
        error_feedback: bool | None = None,
        overlap: bool | Literal["auto"] = "auto",
        shard_optimizer: bool = False,
        group: Group | None = None,
    ) -> None:
        sizes = BucketSizes(bucket_bytes).checked()
        self.optimizer = optimizer
        self.exchange: Exchange | None = None
        self.checks, self.starts_equal = KerasChecks(self._checksums, self._options), False
        self.settings = Settings(
            f"gradients {next(_numbers)}",
            sizes._replace(first_bucket_bytes=min(FIRST_BUCKET_BYTES, bucket_bytes)),
            compression,
            error_feedback,
            self.accumulation_steps > 1,
            overlap,
            call_weakly(self.rate),
            self.checks,
            group,
        )
        chosen_overlap(overlap)  # raises now if it is none of the choices
        self.settings.rounding  # noqa: B018 - raises now if `compression` is unknown
        self.ranks = members(group).communicator
        if self.ranks.size > 1:
            warn_of_gpu_copies(self.ranks.rank, compression is not None)
        self._variables: list[Any] = []
        self._indices: dict[int, int] = {}  # id of a variable -> its index
        self._dtypes: dict[int, Any] = {}  # index of a variable -> the dtype of its gradient
        self.share: BatchShare | None = None
        self._patch: Patch | None = None
        self._is_averaged = False  # while `stateless_apply` calls `apply`
        self.sharded = sharded(optimizer, shard_optimizer, group)
        self._is_watched = False  # whether `fit`, if it calls this, tells the other ranks of an exception

    def check_fits(self, shards: bool, group: Group | None) -> None:
        """Raise ArgumentError if a `DistributedOptimizer` was made without what is wanted now."""
        differs = "shard_optimizer=True" if shards and self.sharded is None else ""
        if members(group).communicator.ranks != self.ranks.ranks:
            differs = "this group, but averages in the " + (self.settings.group.name if self.settings.group else "job")
        if differs:
            raise ArgumentError(
                f"this {type(self.optimizer).__name__} was passed to DistributedOptimizer without {differs}. Pass it "
                "there, or call undistribute(optimizer) before."
            )

    @property
    def statistics(self) -> Statistics:
        """Of the gradients that this has averaged since its exchange was made."""
        return self.exchange.statistics if self.exchange else Statistics()

    @property
    def passes(self) -> int:
        """Steps whose gradients were averaged."""
        return self.statistics.passes

    @property
    def is_installed(self) -> bool:
        """Whether the instance's methods are replaced."""
        return self._patch is not None

    def install(self) -> None:
        """Replace the instance's methods."""
        if self._patch is None:
            methods = {name: backend().opaque(getattr(self, name)) for name in ("apply", "stateless_apply")}
            self._patch = Patch(self.optimizer, **methods, **{AVERAGING: self})
            installed.add(self)

    def remove(self) -> None:
        """Restore the instance's methods and release memory and communicator."""
        if self._patch is not None:
            self._patch.restore()
            self._patch = None
            installed.discard(self)
        self.release()

    def _original(self, name: str) -> Callable[..., Any]:
        assert self._patch is not None
        method: Callable[..., Any] = self._patch.before[name]
        return method

    def communicators(self) -> list[Communicator[Any]]:
        """Those in use by steps."""
        found = [] if self.exchange is None else [self.exchange.communicator]
        if self.sharded is not None and self.sharded.communicator is not None:
            found.append(self.sharded.communicator)
        return found

    def release(self) -> None:
        """Release memory and communicators; the next step makes new ones on all ranks."""
        if self.sharded is not None:
            self.sharded.disconnect()
        if self.exchange is not None:
            self.exchange.release()
            self.exchange = None

    def prepare(self, variables: Sequence[Any]) -> None:
        """Create the exchange for the optimizer's variables. Collective the first time, a no-op afterwards."""
        if self.exchange is not None:
            return
        if self.sharded is not None:
            with on_all_or_none(self.ranks, f"sharding the optimizer of {self.settings.name}"):
                self.sharded.share(variables)
        self.checks.begin_anew()
        self._variables = list(variables)
        self._indices, self._dtypes = {id(variable): i for i, variable in enumerate(variables)}, {}
        with on_all_or_none(self.ranks, f"preparing {self.settings.name}"):
            entries = [describe_gradient(i, variable) for i, variable in enumerate(variables)]
            self.exchange = backend().Exchange(variables, entries, self.settings)
            with backend().at_once():
                check_equal_optimizers(self.optimizer, self.exchange.communicator)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average, then update. Replaces the optimizer's `apply`, with the same arguments."""
        if self._is_averaged:
            self._original("apply")(grads, trainable_variables)
            return
        variables = self.variables if trainable_variables is None else list(trainable_variables)
        averages = self.average(list(grads), variables, self.rate())
        self._original("apply")(averages, trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        """Average, then compute the updated values. Replaces the optimizer's `stateless_apply`.

        Keras's own implementation calls `apply` in a scope in which variables have the given values
        (`LossScaleOptimizer` does not). Gradients of an optimizer that accumulates are averaged in that `apply`,
        because its accumulators are among those values.
        """
        if self.sharded is not None:
            self.sharded.check_is_known()
        if self.accumulation_steps == 1:
            grads = self.average(list(grads), self.variables, self.rate(optimizer_variables))
            self._is_averaged = True
        try:
            return self._original("stateless_apply")(optimizer_variables, grads, trainable_variables)
        finally:
            self._is_averaged = False

    def apply_averages(self, averages: list[Any], variables: list[Any]) -> None:
        """Update with gradients that are already averaged."""
        self._original("apply")(averages, variables)

    def rate(self, optimizer_variables: Sequence[Any] | None = None) -> Any:
        """The value to be compared among the ranks: the learning rate, or the sum of several.

        Args:
            optimizer_variables: the values of the optimizer's variables, in a step that gets them.

        Returns:
            None where schedules compute the rates, or sharded updates compare them.
        """
        # Keras 3.15.1, optimizers/base_optimizer.py:777.
        rates = [one._learning_rate for one in updating_optimizers(self.optimizer) if self.sharded is None]
        rates = [rate for rate in rates if isinstance(rate, keras.Variable)]
        if optimizer_variables is None:
            values = [rate.value for rate in rates]
        else:
            pairs = zip(self.optimizer.variables, optimizer_variables, strict=False)
            values = [value for variable, value in pairs if any(variable is rate for rate in rates)]
        return functools.reduce(operator.add, values) if values else None

    def average(self, gradients: list[Any], variables: list[Any], rate: Any = None) -> list[Any]:
        """Average the gradients of these variables; None stays None. `rate` is compared among the ranks."""
        if current().is_joining:  # and would train alone
            raise ArgumentError(
                "this process takes the place of a lost rank, and averages gradients before it has joined the others: "
                'with on_failure="replace", train by model.fit(callbacks=[BroadcastCallback()]), or make a '
                "ring_plugins.keras.TrainingState before the loop, and call commit() at the beginning of each epoch."
            )
        self._is_watched = self._is_watched or watch_fit(self)
        self.prepare(self.variables if self.optimizer.built else variables)
        assert self.exchange is not None
        if self.sharded is not None and not self.starts_equal:
            self.starts_equal = True
            with backend().at_once():
                check_equal_starts(self._variables, self.exchange.communicator)
        with rejections_told(self.exchange.communicator, "averaging gradients"):
            try:
                indices = [self._indices[id(variable)] for variable in variables]
            except KeyError:
                unknown = next(variable for variable in variables if id(variable) not in self._indices)
                raise ArgumentError(
                    f"variable {getattr(unknown, 'path', unknown)!r} is not among those the optimizer was built for; "
                    "use a separate optimizer for it."
                ) from None
            present = {i: gradient for i, gradient in zip(indices, gradients, strict=True) if gradient is not None}
            self._check_dtypes(present)
            share = self.share
            if share is not None and share.weigh is not None:  # the loss was multiplied by its weight in plain averages
                share.check_used()
                share = None
            if self.accumulation_steps > 1:
                averages = self._average_sums(present, rate)
            else:
                averages = self.exchange.average(present, rate, share)
        return [None if g is None else averages[i] for i, g in zip(indices, gradients, strict=True)]

    def _checksums(self) -> tuple[list[str], list[int]]:
        """Those of the variables that have gradients; of all before it is known which have."""
        with backend().at_once():
            return checksums_of([self._variables[i] for i in sorted(self._dtypes or range(len(self._variables)))])

    def _options(self) -> list[Options]:
        with backend().at_once():
            return [options_of(self.optimizer)]

    def _check_dtypes(self, gradients: dict[int, Any]) -> None:
        """Reject gradients of another dtype than their variable's, whose bytes the buckets would misread."""
        for i, gradient in gradients.items():
            if gradient.dtype == self._dtypes.get(i):  # of the framework; its name in Keras takes longer to find
                continue
            variable = self._variables[i]
            expected, found = map(keras.backend.standardize_dtype, (variable.dtype, gradient.dtype))
            if found != expected:
                name = getattr(variable, "path", variable)
                raise ArgumentError(
                    f"the gradient of {name!r} has dtype={found}, the variable {expected}. "
                    f'Cast it on all ranks before the optimizer gets it: keras.ops.cast(gradient, "{expected}").'
                )
            self._dtypes[i] = gradient.dtype

    @property
    def accumulation_steps(self) -> int:
        """Steps per update of the optimizer."""
        return accumulation_steps(self.optimizer)

    def accumulators(self) -> list[Any]:
        """Gradients accumulated since the last update. Replacing each rank's own by their average is correct."""
        if self.accumulation_steps == 1 or not self.optimizer.built:
            return []
        return [found for variable in self.variables if (found := self._accumulator(variable)) is not None]

    def _average_sums(self, gradients: dict[int, Any], rate: Any) -> dict[int, Any]:
        """In the step that updates, average the sums of all steps and reset the accumulators.

        In other steps, gradients and accumulators remain those of this rank.
        """
        exchange = self.exchange
        assert exchange is not None
        if not self.optimizer.built:
            self.optimizer.build(self._variables)
        own = {i: backend().to_dense(gradient) for i, gradient in gradients.items()}
        found = {i: self._accumulator(self._variables[i]) for i in own}
        accumulators = {i: accumulator for i, accumulator in found.items() if accumulator is not None}
        sums = {i: accumulator.value for i, accumulator in accumulators.items()}

        def update() -> tuple[dict[int, Any], dict[int, Any]]:
            totals = {i: g + keras.ops.cast(sums[i], g.dtype) if i in sums else g for i, g in own.items()}
            return exchange.average(totals, rate), {i: keras.ops.zeros_like(value) for i, value in sums.items()}

        is_update = (self.optimizer._iterations.value + 1) % self.accumulation_steps == 0
        averages, left = backend().choose(is_update, update, lambda: (own, sums))
        for i, accumulator in accumulators.items():
            if left[i] is not sums[i]:
                accumulator.assign(left[i])
        return averages

    def _accumulator(self, variable: Any) -> Any:
        """The accumulator of a variable; None for a variable that is set to its gradient (scales of float8)."""
        # Keras 3.15.1, optimizers/base_optimizer.py:490, finds it in the same way.
        return self.optimizer._accumulated_gradients[self.optimizer._get_variable_index(variable)]

    @property
    def variables(self) -> list[Any]:
        """The variables that the optimizer was built for. In Keras 3.10 a `LossScaleOptimizer` has none of its own."""
        inner = getattr(self.optimizer, "inner_optimizer", None)
        found = getattr(self.optimizer, "_trainable_variables", None) or getattr(inner, "_trainable_variables", None)
        return list(found or ())


def averaging_of(optimizer: Any) -> GradientAveraging | None:
    """The averaging installed on this optimizer."""
    found: GradientAveraging | None = vars(optimizer).get(AVERAGING)
    return found


def averagings_of(model: Any) -> list[GradientAveraging]:
    """Those of a model's optimizers."""
    return list(filter(None, map(averaging_of, optimizers_of(model))))


def communication_of(model: keras.Model) -> tuple[float, int]:
    """Return the seconds waited for communication and the bytes reduced so far, summed over a model's optimizers."""
    found = [averaging.statistics for averaging in averagings_of(model)]
    return sum(one.waited_seconds for one in found), sum(one.reduced_bytes for one in found)


def make_train_function(model: Any) -> None:
    """Rebuild a model's train function, because one that is already traced would ignore the replaced methods."""
    backend().make_train_function(model, averaging_of(model.optimizer) if model.optimizer is not None else None)
