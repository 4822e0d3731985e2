"""The interface of an optimizer that wraps another: groups, state, hooks and options are the other's."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def _passed_on(name: str) -> Any:
    """An attribute of the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
        lambda self: delattr(self.optimizer, name),
    )


class WrappedOptimizer(Optimizer):
    """Delegates torch's interface to `self.optimizer`; `Optimizer.__init__` is not called.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    optimizer: Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def synchronize(self) -> None:
        """Average gradients that are not averaged yet; nothing to do where others average them."""

    def before_unscale(self) -> None:
        """A `GradScaler` is about to look at the gradients, and calls `step` only if they are finite."""
        self.synchronize()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # `GradScaler` sets these two, and deletes them, around the step of an optimizer that unscales gradients itself, as
    # fused ones do. They must reach the optimizer that reads them.
    grad_scale = _passed_on("grad_scale")
    found_inf = _passed_on("found_inf")
