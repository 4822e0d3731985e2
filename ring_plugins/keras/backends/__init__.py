"""The interface of Keras backends, and the choice of the running one.

A backend is a module with the functions of `Backend` and a class `Exchange`. Only the running backend's module is
imported, and only that module imports the framework.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import keras

from ring_plugins.core.arrays.codec import CodecName, Compression
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import BucketSizes, Entry
from ring_plugins.core.gradients.trials import Wanted
from ring_plugins.core.joining.root import Root
from ring_plugins.keras.slices import SliceGather, SliceLayout

_KNOWN = ("tensorflow", "torch", "jax")

T = TypeVar("T")


class Settings(NamedTuple):
    """Settings for averaging the gradients of one optimizer.

    Attributes:
        name: name of the communicator, for messages.
        sizes: bucket sizes.
        compression, error_feedback: compression between hosts, as for `BroadcastCallback`.
        accumulates: whether the optimizer accumulates gradients over several steps.
        overlap: whether gradients are averaged while others are still computed.
        rate: returns the learning rate, as `Exchange.average` gets it, where backward averages.
        after_pass: called when all ranks have averaged the gradients of a step, before the update, wherever variables
            can be read then: not in a step that JAX compiles.
    """

    name: str
    sizes: BucketSizes
    compression: CodecName | None = None
    error_feedback: bool = False
    accumulates: bool = False
    overlap: Wanted = "auto"
    rate: Callable[[], Any] = lambda: None
    after_pass: Callable[[], Any] = lambda: None

    @property
    def rounding(self) -> Compression | None:
        """The core's `Compression` for these settings."""
        return Compression.named(self.compression, self.error_feedback)


class Exchange(Protocol):
    """Takes the gradients of one optimizer out of the framework's step and puts their averages back.

    Args:
        variables: all variables that the optimizer updates.
        entries: description of each variable's gradient.
        settings: settings of the averaging.

    Construction is collective.

    Attributes:
        communicator: between the ranks; nothing else uses it.
        passes: steps whose gradients were averaged.
        waited_seconds: seconds that updates waited for communication.
        reduced_bytes: bytes of gradients reduced by the collectives.
    """

    @property
    def communicator(self) -> Communicator[Any]: ...

    @property
    def passes(self) -> int: ...

    @property
    def waited_seconds(self) -> float: ...

    @property
    def reduced_bytes(self) -> int: ...

    def average(self, gradients: dict[int, Any], rate: Any = None) -> dict[int, Any]:
        """Average gradients, by index of their variables. Called in `optimizer.apply`, traced or eagerly.

        Args:
            gradients: of this rank.
            rate: the learning rate, a scalar of the framework, to be compared among the ranks; None for one that
                follows from the number of steps. On GPUs it is not compared.
        """

    def release(self) -> None:
        """Release hooks, memory and communicator."""


class Slices(Protocol):
    """This rank's parts of an optimizer's variables, as variables of their own that the optimizer can update.

    Args:
        variables: all variables that the optimizer updates.
        layout: which parts of them are this rank's.

    Attributes:
        variables: by variable this rank's part: the variable itself if it is this rank's as a whole, maybe empty.
            Only between `load` and `gather` they have values.

    Raises:
        ArgumentError: a variable is on a GPU.
    """

    variables: list[Any]

    def connect(self, gather: SliceGather) -> None:
        """Use this from now on to gather parts."""

    def load(self, indices: Sequence[int]) -> None:
        """Give these parts the values of their variables."""

    def cut(self, i: int, gradient: Any) -> Any:
        """The part of a variable's gradient that belongs to this rank's part of the variable."""

    def gather(self, indices: Sequence[int], options: dict[str, Any]) -> None:
        """Give these variables the values of all ranks' parts. Collective; called in a step, traced or eagerly.

        Args:
            indices: of the variables that were updated, the same on all ranks.
            options: scalars that must be equal on all ranks, by what to call them in an error.
        """


class Backend(Protocol):
    """The module of a backend."""

    def Slices(self, variables: Sequence[Any], layout: SliceLayout) -> Slices:  # noqa: N802 - a class
        """Create the `Slices` of an optimizer."""

    def slice_layout(self, variables: Sequence[Any], rank: int, size: int) -> SliceLayout:
        """Decide which parts of an optimizer's variables are whose."""

    def Exchange(  # noqa: N802 - a class
        self, variables: Sequence[Any], entries: Sequence[Entry], settings: Settings
    ) -> Exchange:
        """Create the `Exchange` of an optimizer. Collective."""

    def at_once(self) -> contextlib.AbstractContextManager[Any]:
        """Let what is computed inside be computed now, also while a step is traced, if the framework can."""

    def opaque(self, function: Callable[..., T]) -> Callable[..., T]:
        """Keep the framework's compiler from tracing a function that calls collectives."""

    def forget_traces(self, optimizer: Any) -> None:
        """Have the script's own compiled functions, which may have updated with this optimizer, compiled anew.

        Raises:
            ArgumentError: there are some, and the framework keeps them as they are.
        """

    def choose(self, condition: Any, yes: Callable[[], T], no: Callable[[], T]) -> T:
        """Call one of two functions with equal result types; works in a compiled step too."""

    def to_dense(self, gradient: Any) -> Any:
        """Convert a sparse gradient to a dense tensor; return others unchanged."""

    def check_other_parallelism(self, model: Any) -> None:
        """Raise ArgumentError if the framework already trains this model on several processes or devices."""

    def is_lazy(self, model: Any) -> bool:
        """Whether the model gets its variables only with the first batch."""

    def make_train_function(self, model: Any, averaging: Any) -> None:
        """Rebuild the model's train function with the replaced methods. Setting it to None reverts that.

        Args:
            model: a compiled Keras model.
            averaging: the `GradientAveraging` of its optimizer, or None.
        """

    def before_first_step(self, model: Any, action: Callable[[], None]) -> None:
        """Build a lazy model from the shapes of the first batch, run `action`, and then the first step."""

    def host_call_with_gradient(
        self, forward: Callable[..., tuple[Array, Array]], backward: Callable[..., Array], own: Any, count: Any
    ) -> Any:
        """Call collectives on the host in the forward and backward passes of a step.

        Args:
            forward: takes `own` and `count` as numpy arrays; returns the result, of the shape and dtype of `own`, and a
                number of the same dtype for `backward`.
            backward: takes `own`, the result and the number that `forward` returned, and the gradient with respect to
                the result; returns the gradient with respect to `own`.
            own, count: tensors.

        Returns:
            The result as a tensor.
        """

    def offset_seed(self, communicator: Communicator, root: Root) -> None:
        """Seed the framework's global generator differently on each rank, if layers use it. Collective."""


@functools.cache
def backend() -> Backend:
    """Return the module for the backend that Keras runs on.

    Raises:
        ArgumentError: the backend cannot train (numpy, openvino).
    """
    name = keras.backend.backend()
    if name not in _KNOWN:
        raise ArgumentError(f"KERAS_BACKEND={name!r} has no gradients to average; use one of {', '.join(_KNOWN)}.")
    return cast("Backend", importlib.import_module(f"ring_plugins.keras.backends.{name}"))
