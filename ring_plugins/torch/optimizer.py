"""An optimizer for plain training loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.gradients.fusion import BUCKET_BYTES
from ring_plugins.observe.drift import drift_check
from ring_plugins.torch.drift import parameter_checksums
from ring_plugins.torch.gradients import GradientAverager


class DistributedOptimizer(Optimizer):
    """An optimizer that steps on gradients averaged over all ranks.

    The averages are there when `loss.backward()` returns, so clip and inspect them as with one process.
    It shares parameter groups and state with the optimizer it wraps; schedulers, `GradScaler` and
    checkpoints accept either.

    Args:
        optimizer: any torch optimizer.
        named_parameters: `model.named_parameters()`, for names in error messages; equal on all ranks. By
            default the parameters are numbered in the order of the parameter groups.
        backward_passes_per_step: call `backward()` this often before `step()`; only the last is followed by
            communication. The gradients of the passes are summed, as torch does.
        bucket_bytes: size of the buckets in bytes.
        sparse: "gather" keeps sparse gradients sparse, "densify" makes them dense.
        autotune: whether to try other bucket sizes in the first steps and keep the fastest; as RING_AUTOTUNE says by
            default.
        drift_check_every: steps between comparisons of the weights of all ranks, which raise `DriftError` if they
            differ; 0 for never, as RING_DRIFT_CHECK says by default.
        compression: "fp16" or "bf16" sends gradients in 16 bits; see `GradientAverager`.
        error_feedback: whether the rounding error of a step is added to the next.

    Raises:
        ArgumentError: an argument is invalid, or `named_parameters` lacks a parameter that is optimized.
        MismatchError: the parameters differ among ranks.
    """

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
        compression: Literal["fp16", "bf16"] | None = None,
        error_feedback: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer.")
        self.optimizer = optimizer
        self._names = {parameter: name for name, parameter in named_parameters or ()}
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
        )
        self._reductions_so_far = 0
        self._drift = drift_check(drift_check_every, lambda: parameter_checksums(self._named()))

    def _optimized(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

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

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        self.averager.check()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; all ranks must do it in the same step."""
        self.optimizer.add_param_group(param_group)
        self.averager.set_parameters(self._named())

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.averager.prepare()
        self._reductions_so_far = self.averager.steps
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        A rank that ran no backward since the last step or `zero_grad` contributes zeros to the others' averages.
        """
        if closure is None and self.averager.steps == self._reductions_so_far:
            self.averager.finish()
        result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._reductions_so_far = self.averager.steps
        if self._drift is not None:
            self._drift.after_step()
        return result

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> Any:
        raise TypeError("a DistributedOptimizer cannot be pickled; save its state_dict().")

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    # Additions ------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Do nothing: gradients are averaged when backward returns. For scripts that call it with other libraries."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Let backward only accumulate this rank's gradients inside the context."""
        return self.averager.no_sync()

    @property
    def waited_seconds(self) -> float:
        """Seconds in which backward was over and communication was not."""
        return self.averager.waited_seconds

    def close(self) -> None:
        """Stop averaging; the wrapped optimizer remains usable."""
        if self._drift is not None:
            self._drift.close()
        self.averager.close()
