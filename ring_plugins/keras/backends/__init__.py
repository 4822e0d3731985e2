"""What a Keras backend provides, and which one is running.

A backend is a module with the functions of `Backend` and one class, its `Exchange`. Only the running backend's module
is imported, and only that module imports the framework.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import keras

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import BucketSizes, Entry

_KNOWN = ("tensorflow", "torch", "jax")

T = TypeVar("T")


class Settings(NamedTuple):
    """How the gradients of one optimizer are averaged.

    Attributes:
        name: of the communicator, for texts.
        sizes: of the buckets.
        compression, error_feedback: how gradients travel between hosts; see `BroadcastCallback`.
        accumulates: whether the optimizer accumulates gradients over several steps.
    """

    name: str
    sizes: BucketSizes
    compression: Literal["fp16", "bf16"] | None = None
    error_feedback: bool = False
    accumulates: bool = False

    @property
    def rounding(self) -> Compression | None:
        """The same as the core takes it."""
        return Compression.named(self.compression, self.error_feedback)


class Exchange(Protocol):
    """Takes the gradients of one optimizer out of the framework's step and puts their averages back.

    Args:
        variables: all that the optimizer updates.
        entries: for each of them what its gradient is like.
        settings: how they are averaged.

    All ranks construct it together.

    Attributes:
        passes: steps whose gradients were averaged.
        waited_seconds: seconds in which an update waited for communication.
        reduced_bytes: bytes of gradients given to the collectives.
    """

    @property
    def passes(self) -> int: ...

    @property
    def waited_seconds(self) -> float: ...

    @property
    def reduced_bytes(self) -> int: ...

    def average(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Average gradients, by index of their variables; called where the optimizer updates, traced or not."""

    def update(self, apply: Callable[..., None], gradients: list[Any], variables: Any) -> None:
        """Call `apply(gradients, variables)`, and let no later step overwrite the averages while it reads them."""

    def release(self) -> None:
        """Give back hooks, memory and communicator."""


class Backend(Protocol):
    """The module of a backend."""

    def Exchange(  # noqa: N802 - a class
        self, variables: Sequence[Any], entries: Sequence[Entry], settings: Settings
    ) -> Exchange:
        """Make the `Exchange` of an optimizer; collective."""

    def opaque(self, function: Callable[..., T]) -> Callable[..., T]:
        """Keep the framework's compiler from looking into a function that calls collectives."""

    def choose(self, condition: Any, yes: Callable[[], T], no: Callable[[], T]) -> T:
        """Call one of two functions that return alike, in the compiled step too."""

    def to_dense(self, gradient: Any) -> Any:
        """Return a sparse gradient as an ordinary tensor, others as they are."""

    def check_other_parallelism(self, model: Any) -> None:
        """Raise ArgumentError if the framework already trains this model on several processes or devices."""

    def is_lazy(self, model: Any) -> bool:
        """Whether the model gets its variables only with the first batch."""

    def make_train_function(self, model: Any, averaging: Any) -> None:
        """Make the model's train function anew, with the replaced methods in it; setting it to None undoes that.

        Args:
            model: a compiled Keras model.
            averaging: the `GradientAveraging` of its optimizer, or None.
        """

    def before_first_step(self, model: Any, action: Callable[[], None]) -> None:
        """Build a lazy model from the first batch's shapes, then run `action`, then take the first step."""

    def host_call_with_gradient(
        self, forward: Callable[..., tuple[Array, Array]], backward: Callable[..., Array], own: Any, count: Any
    ) -> Any:
        """Call collectives on the host from forward and backward of the step.

        Args:
            forward: takes `own` and `count` as numpy arrays; returns the result, of the shape and dtype of `own`, and a
                number of the same dtype for `backward`.
            backward: takes `own`, what `forward` returned, and the gradient by the result; returns that by `own`.
            own, count: tensors.

        Returns:
            The result as a tensor.
        """

    def offset_seed(self, communicator: Communicator, root: int) -> None:
        """Give ranks different seeds of the framework's global generator, if layers draw from it; collective."""


@functools.cache
def backend() -> Backend:
    """The module of the backend that Keras runs on.

    Raises:
        ArgumentError: a backend that does not train (numpy, openvino).
    """
    name = keras.backend.backend()
    if name not in _KNOWN:
        raise ArgumentError(f"KERAS_BACKEND={name!r} has no gradients to average; use one of {', '.join(_KNOWN)}.")
    return cast("Backend", importlib.import_module(f"ring_plugins.keras.backends.{name}"))
