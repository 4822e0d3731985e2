"""An optimizer for plain training loops."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ring_plugins.core.arrays.codec import CodecName
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.gradients.fusion import BUCKET_BYTES
from ring_plugins.core.groups import Group, communicator_of
from ring_plugins.core.world import announce_training, constructed_by_all
from ring_plugins.observe.consistency import DriftCheck, chosen_interval
from ring_plugins.torch.consistency import parameter_checksums
from ring_plugins.torch.gradients import GradientAverager
from ring_plugins.torch.join import share_step, some_wait
from ring_plugins.torch.sharded_optimizer import Shard, ShardedOptimizer, shard_optimizer
from ring_plugins.torch.skipped_steps import SkippableStep
from ring_plugins.torch.wrapped_optimizer import WrappedOptimizer

_params_of = operator.itemgetter("params")


class _NoAverager:
    """Takes the place of the averager in a copy, and rejects steps: without averages the ranks would drift apart."""

    def check(self) -> None:
        """Do nothing."""

    close = check

    def __getattr__(self, name: str) -> Any:
        raise RingError(
            "this DistributedOptimizer is a copy, made by pickle, torch.load or deepcopy, and averages no gradients. "
            "Wrap its inner optimizer again: DistributedOptimizer(copy.optimizer, model.named_parameters())."
        )


def _names_of(named_parameters: Any) -> dict[nn.Parameter, str]:
    """Names by parameter, from pairs that a script gave, if any."""
    try:
        return {parameter: name for name, parameter in named_parameters or ()}
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"named_parameters={type(named_parameters).__name__} does not hold (name, parameter) pairs; pass "
            "model.named_parameters()."
        ) from error


class DistributedOptimizer(WrappedOptimizer):
    """An optimizer that steps on gradients averaged over all ranks.

    The averages are there when `loss.backward()` returns, so clip and inspect them as with one process.
    It shares parameter groups and state with the optimizer it wraps; schedulers, `GradScaler` and
    checkpoints accept either.

    Args:
        optimizer: any torch optimizer.
        named_parameters: `model.named_parameters()`, for names in error messages; equal on all ranks. By
            default the parameters are numbered in the order of the parameter groups.
        backward_passes_per_step: number of `backward()` calls before each `step()`, of which only the last
            communicates. The gradients of the passes are summed, as torch does.
        bucket_bytes: size of the buckets in bytes, 25 MiB by default.
        sparse: "gather" keeps sparse gradients sparse, "densify" makes them dense.
        autotune: whether to try other bucket sizes in the first steps and keep the fastest; as RING_AUTOTUNE says by
            default.
        drift_check_every: steps between comparisons of the weights of all ranks, which raise `DriftError` if they
            differ; 0 for never, as RING_DRIFT_CHECK says by default.
        compression: "fp16" or "bf16" sends gradients in 16 bits, "int8" in 8, "auto" tries it; see `GradientAverager`.
        error_feedback: whether the rounding error of a step is added to the next; None: with "int8" only.
        shard: True lets each rank update 1/n of the parameters and keep 1/n of the optimizer's state (ZeRO stage 1),
            for torch's optimizers that treat each element on its own. "slices" does so for any optimizer, "tensors"
            gives whole tensors to ranks. `step` and `state_dict` are collective then; see docs/sharded_optimizer.md.
        overlap: whether averaging overlaps backward; see `GradientAverager`.
        group: whose ranks average, and share what is sharded, by default all; only these construct it.

    Raises:
        ArgumentError: an argument is invalid, `named_parameters` lacks a parameter that is optimized, or the optimizer
            cannot be sharded.
        MismatchError: the parameters differ among ranks.
    """

    #: See `compared_options.Options.remedy`.
    _remedy_at_first = ""

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        backward_passes_per_step: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        sparse: Literal["gather", "densify"] = "gather",
        autotune: bool | None = None,
        drift_check_every: int | None = None,
        compression: CodecName | None = None,
        error_feedback: bool | None = None,
        shard: Shard = False,
        overlap: bool | Literal["auto"] = "auto",
        group: Group | None = None,
    ) -> None:
        members = None if group is None else communicator_of(group)
        with constructed_by_all("the construction of a DistributedOptimizer", members):
            if not isinstance(optimizer, Optimizer):
                raise ArgumentError(f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer.")
            self.optimizer = optimizer
            self._drift = DriftCheck(chosen_interval(drift_check_every))
            self._names = _names_of(named_parameters)
            if self._names and (lacking := [p for p in self._optimized() if p not in self._names]):
                raise ArgumentError(
                    f"named_parameters lacks {len(lacking)} of the optimizer's parameters, the first of shape "
                    f"{tuple(lacking[0].shape)}; pass model.named_parameters() of the whole model."
                )
        self.averager = GradientAverager(
            self._named(),
            bucket_bytes=bucket_bytes,
            sparse=sparse,
            passes_per_step=backward_passes_per_step,
            autotune=autotune,
            compression=compression,
            error_feedback=error_feedback,
            overlap=overlap,
            group=group,
        )
        try:
            self.optimizer = shard_optimizer(optimizer, shard, self._named(), group)
            self.averager.checks.options.remedy = self._remedy_at_first
            self.averager.compare_options(partial(getattr, self.optimizer, "param_groups"), self._names)
            self.averager.checks.follow_others()
        except BaseException:
            if isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.close()
            self.averager.close()
            raise
        self._reductions_so_far = 0
        self._averaged_parameters = self._optimized()
        self._is_sharded = isinstance(self.optimizer, ShardedOptimizer)
        announce_training()

    def _optimized(self) -> list[nn.Parameter]:
        return list(itertools.chain.from_iterable(map(_params_of, self.optimizer.param_groups)))

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """Optimized parameters, in the order of the model where it is known: buckets rely on it for early starts."""
        optimized = self._optimized()
        if self._names:
            wanted = set(optimized)
            ordered = [p for p in self._names if p in wanted]
            return [(self._names[p], p) for p in ordered] + [
                (f"parameter {i}", p) for i, p in enumerate(optimized) if p not in self._names
            ]
        return [(f"parameter {i}", p) for i, p in enumerate(optimized)]

    # torch's Optimizer interface, delegated ---------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self.averager.check()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; all ranks must do it in the same step."""
        self.optimizer.add_param_group(param_group)
        self._take_new_parameters()

    def _take_new_parameters(self) -> bool:
        """Average from now on what the groups hold, and return whether a script has put others there."""
        parameters = self._optimized()
        before, self._averaged_parameters = self._averaged_parameters, parameters
        if len(before) == len(parameters) and all(map(operator.is_, before, parameters)):
            return False
        self.averager.set_parameters(self._named())
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.give_up_step()
        self.averager.prepare()
        self._take_new_parameters()
        self.averager.forget_gradients()
        self._reductions_so_far = self.averager.steps
        self.optimizer.zero_grad(set_to_none)

    def give_up_step(self) -> None:
        """Tell ranks that wait in `join` for a sharded step that the script leaves it out, as after an overflow."""
        if self._is_sharded and some_wait(self.averager) and self.averager.steps > self._reductions_so_far:
            self._reductions_so_far = self.averager.steps
            share_step(self.averager, None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        A rank that ran no backward since the last step or `zero_grad` contributes zeros to the others' averages.

        Args:
            closure: computes the loss and its gradients, as torch's optimizers want it; called by all ranks or by none.
                At each call the optimizer gets the averages of both. An optimizer that branches on the loss, such as
                LBFGS, takes the same branches on all ranks, those of one process on the concatenated batch.

        Returns:
            What the wrapped optimizer returns: for most the average loss, None without a closure.

        Raises:
            MismatchError: the closure returned a loss on some ranks only.
            RingError: after `close`, unless the last averages have not been used yet.
        """
        if self.averager.is_closed and (closure is not None or self.averager.steps == self._reductions_so_far):
            raise RingError(
                "this DistributedOptimizer has been closed and averages no gradients, so the ranks would drift apart. "
                "Build a new one on all ranks, or step its inner optimizer: optimizer.optimizer.step()."
            )
        if self._drift.every and self._is_sharded and not self.averager.ended:
            self._check_drift()  # before the step, which gives all ranks the same weights
        if closure is None:
            self._average_what_is_left()
            if self._take_new_parameters():
                self.averager.average_before_step()
            if self._is_sharded and some_wait(self.averager):
                share_step(self.averager, self.optimizer)
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(self._averaged(closure))
        self.averager.checks.updates.add()
        self._reductions_so_far = self.averager.steps
        if self._drift.every and not self._is_sharded and not self.averager.ended:
            self._check_drift()
        return result

    def _check_drift(self) -> None:
        self._drift.after_step(lambda: parameter_checksums(self._named()), self.averager.communicator)

    def _average_what_is_left(self) -> None:
        """Average gradients that came after the last reduction.

        Without a reduction in this step, this takes part in those of ranks that ran a backward, if this one did not or
        only accumulated.
        """
        if self.averager.steps == self._reductions_so_far or self.averager.own.present:
            self.averager.average_before_step()

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as all ranks together see it."""

        def evaluate() -> Any:
            self._reductions_so_far = self.averager.steps
            with torch.enable_grad():
                loss = closure()
            self._average_what_is_left()
            self._reductions_so_far = self.averager.steps
            if self.averager.ended:
                raise self._rejected_closure()
            return self.averager.average_loss(loss)

        return evaluate

    def _rejected_closure(self) -> RingError:
        error = RingError(
            "step(closure) averages the losses of all ranks, but some have run out of data and wait in join(). Compute "
            "the gradients before step(), or give all ranks equally many batches."
        )
        self.averager.communicator.interrupt("step(closure) in join()", error)
        return error

    # A copy (pickle, torch.save, deepcopy) has the wrapped optimizer, but no connection to the other ranks.

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optimizer = state["optimizer"]
        self.averager = cast(GradientAverager, _NoAverager())
        self._names, self._drift, self._reductions_so_far = {}, DriftCheck(0), 0
        self._is_sharded = isinstance(self.optimizer, ShardedOptimizer)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # Additions ------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Average the gradients of passes that only accumulated; otherwise they are averages when backward returns.

        Call it before clipping in a step that has had fewer passes than `backward_passes_per_step`, or
        had them all in `no_sync()`; on all ranks. A `GradScaler` has it called before it unscales.
        """
        self._average_what_is_left()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let backward only accumulate this rank's gradients inside the context."""
        return self.averager.no_sync()

    def skip_step_on(self, *exceptions: type[BaseException]) -> contextlib.AbstractContextManager[SkippableStep]:
        """Let all ranks skip a step in which some rank raises one of these; see `GradientAverager.skip_step_on`."""
        return self.averager.skip_step_on(*exceptions)

    @property
    def waited_seconds(self) -> float:
        """Seconds that the script has waited for communication after its backwards."""
        return self.averager.waited_seconds

    def close(self) -> None:
        """Stop averaging. A `step` on averages that are already there still works; so does the wrapped optimizer."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.close()
        self.averager.close()
