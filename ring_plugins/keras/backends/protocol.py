"""What the callbacks need of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.averaging import Averaging
from ring_plugins.keras.moments import BatchMoments


class Backend(Protocol):
    """A backend's adapter: a module with these names."""

    @property
    def GradientAveraging(self) -> type[Averaging]:  # noqa: N802 - a class, reached through a module
        """The backend's `Averaging`."""

    def refuse_other_parallelism(self, model: Any) -> None:
        """Raise ArgumentError where the framework already trains this model on several processes or devices."""

    def is_lazy(self, model: Any) -> bool:
        """Whether the model will have its variables only when the first batch is there."""

    def make_train_function(self, model: Any) -> None:
        """Make the model's train function anew, with the replaced methods in it; undone by setting it to None."""

    def before_first_step(self, model: Any, action: Callable[[], None]) -> None:
        """Build a lazy model from the first batch's shapes, then run `action`, then take the first step."""

    def moments_of_all(self, moments: BatchMoments, count: Any, own: Any) -> Any:
        """`BatchMoments.combine` of tensors, through which gradients flow back to every rank; returns the moments."""

    def seed_apart(self, communicator: Communicator, root: int) -> None:
        """Let the framework's own global source of random numbers differ among ranks, where layers draw from it."""
