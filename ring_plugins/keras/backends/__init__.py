"""The interface of Keras backends, and the choice of the running one.

Each backend is a module with a `BACKEND`. Only that of the running backend is imported, and it imports the framework.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras

from ring_plugins.core.arrays.codec import AUTO, CodecName, Compression
from ring_plugins.core.base import config
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.types import Array
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gradients.fusion import BucketSizes, Entry
from ring_plugins.core.gradients.trials import Wanted
from ring_plugins.core.groups import Group
from ring_plugins.core.joining.state_transfer import Root
from ring_plugins.keras.consistency import KerasChecks
from ring_plugins.keras.slices import Slices

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
        checks: what passes compare; None for what no optimizer of Keras averages.
        group: the ranks that average, all by default.
    """

    name: str
    sizes: BucketSizes
    compression: CodecName | None = None
    error_feedback: bool | None = None
    accumulates: bool = False
    overlap: Wanted = "auto"
    rate: Callable[[], Any] = lambda: None
    checks: KerasChecks | None = None
    group: Group | None = None

    @property
    def rounding(self) -> Compression | None:
        """The core's `Compression` for these settings."""
        return Compression.named(self.compression, self.error_feedback)

    @property
    def rounds_on_host(self) -> bool:
        """Whether gradients go through host memory to be rounded; "auto" tries nothing between GPUs."""
        return self.compression not in (None, AUTO)


class Statistics(NamedTuple):
    """Of an exchange: steps whose gradients were averaged, seconds that updates waited, and bytes reduced."""

    passes: int = 0
    waited_seconds: float = 0.0
    reduced_bytes: int = 0


class BatchShare:
    """How much the batch of a step counts in the averages: as many samples as it has.

    Args:
        full: samples of a full batch, the same on all ranks.
        count: returns the samples of a batch, 0 for one that does not count.

    Attributes:
        data: the batch, until the loss is computed.
        samples: of the batch; a number, or while TensorFlow traces a tensor. None before the first step.
        weigh: returns by how much it counts in the mean over ranks, a tensor, from its samples, where the optimizer
            accumulates gradients before they are averaged, or NCCL averages; None elsewhere. Collective, in a step.
        weight: what that has returned.
        is_weighed_later: whether the step is compiled in two parts, between which gradients are weighed.
        is_used: whether the loss was multiplied, so that the batch counts by its samples, and not as a full one.
    """

    def __init__(self, full: int, count: Callable[[Any], Any]) -> None:
        self.full, self.count, self.is_used = full, count, False
        self.samples: Any = None
        self.weigh: Callable[[Any], Any] | None = None
        self.weight: Any = None
        self.is_weighed_later = False
        self.data: Any = None

    def take(self, data: Any) -> None:
        """Begin a step with this batch."""
        self.data, self.samples, self.is_used = data, self.count(data), False

    @property
    def is_filling(self) -> bool:
        """Whether the batch does not count, since this rank repeats it."""
        return isinstance(self.samples, int) and self.samples == 0

    def of(self, loss: Any) -> Any:
        """The loss, multiplied by the batch's part of a full one, or its weight."""
        if self.weight is not None:
            return loss * keras.ops.cast(self.weight, loss.dtype)
        if isinstance(self.samples, int):
            return loss if self.samples == self.full else loss * (self.samples / self.full)
        return loss * keras.ops.cast(keras.ops.cast(self.samples, "float32") / self.full, loss.dtype)

    def check_used(self) -> None:
        """Raise ArgumentError if the batch does not count, and the step has computed as if it did."""
        if self.is_filling and not self.is_used:
            raise ArgumentError(
                "this rank has run out of data, and repeats a batch that is not to count, but the model's train_step "
                "does not call optimizer.scale_loss(loss) before it computes gradients. Let it do so, or give all "
                "ranks the same number of batches."
            )

    @property
    def counted(self) -> Any:
        """The samples that count. Raises as `check_used` does."""
        self.check_used()
        return self.samples if self.is_used else self.full


class Exchange(abc.ABC):
    """Takes the gradients of one optimizer out of the framework's step and puts their averages back.

    Args:
        variables: all variables that the optimizer updates.
        entries: description of each variable's gradient.
        settings: settings of the averaging.

    Construction is collective.

    Attributes:
        communicator: between the ranks; nothing else uses it.
        buckets: what averages; None as long as they are not planned.
    """

    communicator: Communicator[Any]
    buckets: Any = None

    @abc.abstractmethod
    def __init__(self, variables: Sequence[Any], entries: Sequence[Entry], settings: Settings) -> None: ...

    @property
    def statistics(self) -> Statistics:
        if self.buckets is None:
            return Statistics()
        reducer = self.buckets.reducer
        return Statistics(reducer.passes, reducer.waited, reducer.reduced_bytes)

    @abc.abstractmethod
    def average(self, gradients: dict[int, Any], rate: Any = None, share: BatchShare | None = None) -> dict[int, Any]:
        """Average gradients, by index of their variables. Called in `optimizer.apply`, traced or eagerly.

        Args:
            gradients: of this rank.
            rate: the learning rate, a scalar of the framework, to be compared among the ranks; None for one that
                follows from the number of steps. On GPUs it is not compared.
            share: how much the batch counts, if batches count by their samples.
        """

    def weigh(self, share: BatchShare) -> None:  # noqa: B027 - others than torch's average in the optimizer
        """Learn before backward how much the batch counts, where backward averages."""

    def release(self) -> None:
        """Release hooks, memory and communicator."""
        if self.buckets is not None:
            self.buckets.release()
        self.communicator.close()


class Backend:
    """What the backends of Keras do differently. What is defined here is right for those that say nothing else."""

    Exchange: type[Exchange]
    Slices: type[Slices]

    #: The variable by which NCCL is requested to average on GPUs; None if it does so anyway.
    nccl: config.Variable[bool] | None = None

    def has_gpus(self) -> bool:
        """Whether the framework computes on GPUs; for backends with a variable."""
        return False

    def at_once(self) -> contextlib.AbstractContextManager[Any]:
        """Let what is computed inside be computed now, also while a step is traced, if the framework can."""
        return contextlib.nullcontext()

    def opaque(self, function: Callable[..., T]) -> Callable[..., T]:
        """Keep the framework's compiler from tracing a function that calls collectives."""
        return function

    def forget_traces(self, optimizer: Any) -> None:
        """Have the script's own compiled functions, which may have updated with this optimizer, compiled anew.

        Raises:
            ArgumentError: there are some, and the framework keeps them as they are.
        """

    def choose(self, condition: Any, yes: Callable[[], T], no: Callable[[], T]) -> T:
        """Call one of two functions with equal result types; works in a compiled step too."""
        return yes() if condition else no()

    def batch_size(self, array: Any) -> Any:
        """The first dimension of an array of a batch."""
        return int(array.shape[0])

    def to_dense(self, gradient: Any) -> Any:
        """Convert a sparse gradient to a dense tensor; return others unchanged."""
        return gradient

    def check_other_parallelism(self, model: Any) -> None:
        """Raise ArgumentError if the framework already trains this model on several processes or devices."""

    def is_lazy(self, model: Any) -> bool:
        """Whether the model gets its variables only with the first batch, not before any callback is called."""
        return False

    def before_first_step(self, model: Any, action: Callable[[], None]) -> None:
        """Build a lazy model from the shapes of the first batch, run `action`, and then the first step."""
        action()

    def make_train_function(self, model: Any, averaging: Any) -> None:
        """Rebuild the model's train function with the replaced methods. Setting it to None reverts that.

        Args:
            model: a compiled Keras model.
            averaging: the `GradientAveraging` of its optimizer, or None.
        """
        model.make_train_function(force=True)

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
        raise NotImplementedError

    def offset_seed(self, communicator: Communicator, root: Root) -> None:
        """Seed the framework's global generator differently on each rank, if layers use it. Collective."""

    def random_state(self) -> Array | None:
        """The state of the framework's global generator, None if layers do not use it."""
        return None

    def set_random_state(self, state: Array) -> None:
        """Give the framework's global generator a state."""


@functools.cache
def backend() -> Backend:
    """Return the backend that Keras runs on.

    Raises:
        ArgumentError: the backend cannot train (numpy, openvino).
    """
    name = keras.backend.backend()
    if name not in _KNOWN:
        raise ArgumentError(f"KERAS_BACKEND={name!r} has no gradients to average; use one of {', '.join(_KNOWN)}.")
    found: Backend = importlib.import_module(f"ring_plugins.keras.backends.{name}").BACKEND
    return found
