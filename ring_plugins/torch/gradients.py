"""Gradients of a torch model, averaged while backward is still running.

The path of one gradient: autograd accumulates it and calls `GradientAverager`'s hook; the hook marks it ready with the
core's `GradientReducer`; when the last gradient of a bucket is ready the reducer has `GradientBuckets` fill the bucket
and launches one all-reduce. The end of backward launches what is left and waits, so `p.grad` holds averages as soon as
`backward()` returns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import ArgumentError, MismatchError, RingError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketSizes
from ring_plugins.core.gradients.tuning import BucketTuner, is_wanted
from ring_plugins.core.world import current
from ring_plugins.torch.autograd import Backward, registrations, when_accumulated
from ring_plugins.torch.device import TorchStreams, index_of, is_on_gpu, is_supported, streams
from ring_plugins.torch.gradient_buckets import GradientBuckets, Named
from ring_plugins.torch.sparse import sparse_parameters

#: Sets of buckets kept for models that take turns in freezing their parts, as adversarial training does twice a step.
_KEPT = 4


class GradientAverager:
    """Averages the gradients of a model's parameters among all ranks.

    When `backward()` returns, `p.grad` of every parameter is the average over all ranks: clipping,
    unscaling, accumulation and any optimizer work as with one process. A gradient that no rank has stays
    None; one that some ranks have counts as zeros on the others.

    Frozen parameters take no part. Every backward first looks at the parameters again, so freezing,
    unfreezing and adding parameters work, if all ranks do it in the same step.

    Args:
        parameters: a module, or (name, parameter) pairs, equal on all ranks and in the same order.
        bucket_bytes: size at which a bucket is closed.
        first_bucket_bytes: the same for the first one, small so that communication starts early.
        sparse: "gather" keeps sparse gradients sparse, "densify" makes them dense.
        passes_per_step: number of backwards of which only the last communicates; the others accumulate.
        autotune: whether to try other bucket sizes in the first steps and keep the fastest; as RING_AUTOTUNE says by
            default. Rank 0's choice counts.
        compression: "fp16" or "bf16" sends float32 and float64 gradients in 16 bits: between hosts on the CPU (exact
            inside a host), and between all GPUs.
        error_feedback: whether the rounding error of a step is added to the next.
        communicator: reduces the gradients; by default a new one over all ranks, for the parameters' device.
            Nothing else may use it. If one is given, gradients go through it even if it has only one rank, which
            shows what averaging costs without a peer; otherwise a single rank gets no hooks.

    All ranks construct it together. Gradients must not be computed by several threads at once.

    Raises:
        MismatchError: the models differ among ranks; the text names the first parameter that does.
        ArgumentError: `sparse`, `passes_per_step` or `compression` is invalid, or the parameters are on several
            devices.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Named],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        sparse: Literal["gather", "densify"] = "gather",
        passes_per_step: int = 1,
        autotune: bool | None = None,
        compression: Literal["fp16", "bf16"] | None = None,
        error_feedback: bool = False,
        communicator: Communicator[Any] | None = None,
    ) -> None:
        if sparse not in ("gather", "densify"):
            raise ArgumentError(f'sparse={sparse!r} must be "gather" or "densify".')
        if isinstance(passes_per_step, bool) or not isinstance(passes_per_step, int) or passes_per_step < 1:
            raise ArgumentError(f"passes_per_step={passes_per_step!r} is not a positive number.")
        self._module = parameters if isinstance(parameters, nn.Module) else None
        self._listed = [] if isinstance(parameters, nn.Module) else list(parameters)
        self._sizes = BucketSizes(bucket_bytes, first_bucket_bytes)
        self._compression = Compression.named(compression, error_feedback)
        self._gathers_sparse = sparse == "gather"
        self._sparse = sparse_parameters(self._module) if self._module is not None and self._gathers_sparse else set()
        self._communicator = communicator or _communicator_for(self._listed_now())
        self._streams: TorchStreams | None = None
        if isinstance(self._communicator, DeviceCommunicator):
            self._streams = streams(self._communicator.device)
        self._named: list[Named] = []
        #: One for each set of parameters that are not frozen; all have `_sizes`.
        self._kept: dict[tuple[bool, ...], GradientBuckets] = {}
        self._buckets: GradientBuckets | None = None  # of the current pass; None if there is only one rank
        self._waited_before, self._bytes_before = 0.0, 0  # of buckets that were dropped
        self._tuner: BucketTuner | None = None
        self._passes_per_step, self._passes = passes_per_step, 0
        self._accumulates = False
        self._synchronizes = True
        self._hooks: list[Any] = []
        self._backward = Backward(self._backward_ended)
        self._seen_registrations = 0
        #: Reductions of all gradients so far.
        self.steps = 0
        if self._communicator.size > 1 or communicator is not None:
            self._take_parameters()
            self._buckets = self._current_buckets()
            if self._communicator.broadcast_object(is_wanted(autotune)):
                self._tuner = BucketTuner(self._sizes, self._buckets.plan.buckets_with)

    # Figures ----------------------------------------------------------------------------------------

    @property
    def waited_seconds(self) -> float:
        """Seconds in which backward was over and communication was not."""
        return self._waited_before + sum(buckets.reducer.waited for buckets in self._kept.values())

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self._bytes_before + sum(buckets.reducer.reduced_bytes for buckets in self._kept.values())

    # Which parameters, in which buckets -------------------------------------------------------------

    def set_parameters(self, parameters: Sequence[Named]) -> None:
        """Replace the list given at construction."""
        self._listed = list(parameters)
        if self._buckets is not None:
            self._take_parameters()

    def prepare(self) -> bool:
        """Check whether parameters were frozen, unfrozen or added, and make new buckets if so (collective then).

        The forward of a module given at construction and the first gradient of a backward call this, so scripts
        seldom need to.

        Returns:
            Whether the buckets changed.
        """
        if self._buckets is None:
            return False
        self.abandon()
        if self._module is not None and registrations() != self._seen_registrations:
            self._seen_registrations = registrations()
            if [id(p) for p in self._module.parameters()] != [id(p) for _, p in self._named]:
                self._take_parameters()
        buckets = self._current_buckets()
        changed, self._buckets = buckets is not self._buckets, buckets
        return changed

    def _listed_now(self) -> Iterable[Named]:
        return self._module.named_parameters() if self._module is not None else self._listed

    def _take_parameters(self) -> None:
        """Put hooks on the parameters that the model has now."""
        self._remove_hooks()
        self._drop_buckets()
        self._seen_registrations = registrations()
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self._listed_now():
            names.setdefault(parameter, name)  # a shared parameter may be listed by each of its names
        self._named = [(name, parameter) for parameter, name in names.items()]
        for position, parameter in enumerate(names):
            self._hooks += when_accumulated(parameter, self._hook(position))
        if self._module is not None:
            self._hooks.append(self._module.register_forward_pre_hook(self._before_forward))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _current_buckets(self) -> GradientBuckets:
        """The buckets for the parameters that are not frozen now; collective if there are none yet."""
        key = tuple([p.requires_grad for _, p in self._named])
        if key not in self._kept:
            if len(self._kept) >= _KEPT:
                self._drop(next(iter(self._kept)))
            self._kept[key] = GradientBuckets(
                self._named, self._communicator, self._sizes, self._compression, self._sparse, self._gathers_sparse
            )
        return self._kept[key]

    def _drop_buckets(self) -> None:
        """Give the memory of all buckets back; gradients in it stay valid."""
        for key in list(self._kept):
            self._drop(key)

    def _drop(self, key: tuple[bool, ...]) -> None:
        buckets = self._kept.pop(key)
        self._waited_before += buckets.reducer.waited
        self._bytes_before += buckets.reducer.reduced_bytes
        buckets.release()

    # A backward -------------------------------------------------------------------------------------

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._synchronizes and not self._backward.is_running:
            self.prepare()

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        """The function that autograd calls when the gradient of a parameter has been accumulated."""

        def ready(_: torch.Tensor) -> None:
            if not self._synchronizes:
                return
            if not self._backward.is_running:
                self._begin()
            if self._accumulates:
                return
            buckets = self._buckets
            assert buckets is not None
            reducer, entry = buckets.reducer, buckets.entries[position]
            if entry < 0:
                return
            if self._streams is not None:
                self._streams.note()
            if reducer.is_launched(entry) and reducer.is_ready(entry):
                raise RingError(
                    f"the gradient of {self._named[position][0]} was computed twice in one backward, after it had "
                    "been sent. Use torch.utils.checkpoint with use_reentrant=False, or wrap all but the last use in "
                    "no_sync()."
                )
            reducer.mark_ready(entry)

        return ready

    def _begin(self) -> None:
        """Handle the first gradient of a backward: see what changed, and ask autograd to call at the end."""
        self.prepare()
        self._passes += 1
        self._accumulates = self._passes < self._passes_per_step
        self._backward.begin()

    def _backward_ended(self) -> None:
        if self._accumulates:
            self._backward.end()
        else:
            self.finish()

    def finish(self) -> None:
        """Reduce what is not reduced yet and wait for everything.

        Autograd calls this at the end of backward. A script calls it only on a rank that ran no backward at all in a
        step in which others did: the rank then takes part with zeros.
        """
        if self._buckets is None:
            return
        if not self._backward.is_running and not self._buckets.reducer.is_under_way:
            self.prepare()
        self._backward.end()
        self._passes, self._accumulates = 0, False
        if found := self._buckets.finish():
            self._sparse.update(found)
            self._drop_buckets()  # the next backward makes buckets without them
        self.steps += 1
        if self._tuner is not None:
            self._tune(self._tuner)

    def abandon(self) -> None:
        """Get this rank back in step after a backward that raised; do nothing after one that did not.

        A pass that is under way outside of a backward belongs to one that failed. Other ranks may wait for its
        remaining buckets.
        """
        buckets = self._buckets
        if buckets is not None and buckets.reducer.is_under_way and not self._backward.is_running:
            buckets.abandon()

    def _tune(self, tuner: BucketTuner) -> None:
        """Choose the bucket sizes of the next step while other sizes are being tried."""
        if not tuner.finished and tuner.step_ended(time.perf_counter()):
            times = self._communicator.all_gather_object(tuner.times)
            is_first = self._communicator.rank == 0
            tuner.adopt(self._communicator.broadcast_object(tuner.decide(times) if is_first else None))
        if tuner.sizes != self._sizes:
            self._drop_buckets()  # one set of sizes at a time
            self._sizes = tuner.sizes
        if tuner.finished:
            self._tuner = None
            if self._communicator.rank == 0:
                logger.info(f"tuned after {self.steps} steps: {tuner.summary}.")

    # Control ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only accumulate this rank's gradients; the next backward outside averages the sum."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def check(self) -> None:
        """Raise if the failure of a rank made the last averages meaningless, which a GPU does not report.

        Call it before weights are saved; optimizer and strategy do when they are asked for their state.
        """
        if isinstance(self._communicator, DeviceCommunicator):
            self._communicator.check()

    def close(self) -> None:
        """Remove the hooks; gradients stay as they are. The object cannot be used afterwards."""
        self._remove_hooks()
        self._drop_buckets()
        self._buckets = None
        self._communicator.close()


def _communicator_for(named: Iterable[Named]) -> Communicator[Any]:
    """A new communicator of all ranks for the device that the parameters are on; collective.

    Raises:
        ArgumentError: they are on several devices, or on one that is neither CPU nor CUDA.
        MismatchError: they are on the CPU on some ranks and on GPUs on others.
    """
    devices: dict[torch.device, Named] = {}
    for name, parameter in named:
        if not is_supported(parameter):
            raise ArgumentError(
                f"{name} is on {parameter.device}; ring_plugins averages in the memory of CPUs and of CUDA GPUs."
            )
        devices.setdefault(parameter.device, (name, parameter))
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, (name, _) in devices.items())
        raise ArgumentError(
            f"tensors lie on several devices: {places}. Each rank uses one; move the model there first."
        )
    _, example = next(iter(devices.values()), ("", torch.empty(0)))
    world = current()
    if world.topology.size == 1:
        return world.new_communicator("gradients")
    kinds = world.communicator.all_gather_object(example.device.type)
    if len(set(kinds)) > 1:
        raise MismatchError(
            f"gradients: the tensors of the ranks lie on {kinds}, in rank order; use one kind of device everywhere."
        )
    if not is_on_gpu(example):
        return world.new_communicator("gradients")
    return world.new_device_communicator("gradients", index_of(example), streams(index_of(example)))
