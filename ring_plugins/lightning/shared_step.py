"""A step that all ranks take together: with the same loss where an optimizer decides by it, or not at all.

Lightning gives the optimizer a closure that runs `training_step` and backward. Most optimizers call it once and use
only the gradients, which backward has averaged. Two things need more than that:

- LBFGS and the like call the closure several times and choose their next step by the loss. `SharedStep` gives them the
  average of all ranks' losses, so they make the same decisions on all ranks, those of one process on the concatenated
  batch.
- With `skip_step_on`, an exception of `training_step` or backward on one rank makes all ranks skip the step. Lightning
  expects its closure to return and keeps the result, so the exception is caught at the two calls inside the closure,
  and raised again where the closure has returned: in the optimizer, inside the averager's own `skip_step_on` block.
  No code behind it runs then, neither clipping nor `GradScaler` nor the update. A step that accumulates several batches
  is skipped as a whole: a rank computes nothing more for it after an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim import LBFGS, Optimizer

from ring_plugins.core.base.errors import ArgumentError, RingError, StepSkipped
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.sharded_optimizer import ShardedOptimizer

T = TypeVar("T")

#: What a user may pass as `skip_step_on`.
SkipStepOn = type[BaseException] | tuple[type[BaseException], ...] | None


def exceptions_to_skip(skip_step_on: SkipStepOn) -> tuple[type[BaseException], ...]:
    """The argument as a tuple.

    Raises:
        ArgumentError: it has something else than exceptions in it.
    """
    found = skip_step_on if isinstance(skip_step_on, tuple) else () if skip_step_on is None else (skip_step_on,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in found):
        raise ArgumentError(
            f"skip_step_on={skip_step_on!r} needs an exception, such as torch.cuda.OutOfMemoryError, or a tuple of"
            " them."
        )
    return found


def reads_loss(optimizer: Optimizer) -> bool:
    """Whether an optimizer may decide by the loss that its closure returns. Of torch's own, only LBFGS does."""
    if isinstance(optimizer, ShardedOptimizer):  # keeps the loss from the optimizer inside
        return False
    is_torchs_own = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]
    return isinstance(optimizer, LBFGS) or not is_torchs_own


class SharedStep:
    """Runs the steps of a Trainer's optimizers.

    Args:
        averager: averages the gradients.
        is_automatic: whether Lightning, and not `training_step`, calls backward and the optimizer.
        accumulates: whether a step may have the gradients of several batches.
        skip_step_on: exceptions that make all ranks skip a step.

    Attributes:
        weight: of this rank's loss in the average, see `uneven`.

    Raises:
        ArgumentError: steps of manual optimization cannot be skipped.
    """

    def __init__(
        self,
        averager: GradientAverager,
        is_automatic: bool,
        accumulates: Callable[[], bool],
        skip_step_on: tuple[type[BaseException], ...],
    ) -> None:
        if skip_step_on and not is_automatic:
            raise ArgumentError(
                "skip_step_on needs automatic optimization: in manual optimization, only training_step knows where a "
                "step begins and ends. Use automatic optimization, or Fabric with strategy.skip_step_on()."
            )
        self._averager, self._accumulates, self.weight = averager, accumulates, 1.0
        self._exceptions = skip_step_on
        self._caught: tuple[type[BaseException], ...] = (StepSkipped, *skip_step_on)
        self._failure: BaseException | None = None  # of the step that is being computed

    def attempt(self, compute: Callable[[], T]) -> T | None:
        """Compute a part of a step, `training_step` or backward.

        Returns:
            Its result, or None if this step is skipped: `run` raises the exception.
        """
        if not self._exceptions:
            return compute()
        if self._failure is None:
            try:
                return compute()
            except self._caught as error:
                if isinstance(error, RingError) and not isinstance(error, StepSkipped):
                    raise
                # The traceback keeps the activations alive, and it is memory that this rank may lack.
                self._failure = error.with_traceback(None)
                self._failure.__context__ = None
        return None

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not compute a part of the step."""
        return self._failure is not None

    def run(self, optimizer: Optimizer, closure: Callable[[], Any], step: Callable[[Callable[[], Any]], Any]) -> Any:
        """Let an optimizer make its step.

        Args:
            optimizer: makes it.
            closure: Lightning's, or the one that the script gave to the optimizer.
            step: makes the step with the closure it is given.

        Returns:
            What `step` returns, None for a step that is skipped.

        Raises:
            ArgumentError: the optimizer needs several evaluations of a loss that has only one.
            MismatchError: an optimizer that decides by the loss has one on some ranks only.
        """
        shared = self._shared(optimizer, closure)
        if not self._exceptions:
            return step(shared)
        result = None
        try:
            with self._averager.skip_step_on(*self._exceptions):
                result = step(shared)
        finally:
            self._failure = None
        return result

    def _shared(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as all ranks together see it."""
        evaluations = 0

        def evaluate() -> Any:
            nonlocal evaluations
            evaluations += 1
            if evaluations > 1 and (self._exceptions or self._accumulates()):
                raise ArgumentError(
                    f"{type(optimizer).__name__} evaluates its closure several times a step"
                    + (
                        ", but a closure has only the last of the batches whose gradients are accumulated. Use "
                        "accumulate_grad_batches=1 (and no sync_grad=False, and no global_batch_size) with it."
                        if self._accumulates()
                        else " and changes the weights in between, so a step cannot be skipped. Use RingStrategy "
                        "without skip_step_on for it."
                    )
                )
            loss = closure()
            if self._failure is not None:
                raise self._failure
            if not reads_loss(optimizer):
                return loss
            return self._averager.average_loss(loss if loss is None or self.weight == 1 else loss * self.weight)

        return evaluate
