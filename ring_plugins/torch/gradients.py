"""Gradients of a torch model averaged while backward is still running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ring_plugins.core.arrays.codec import Compression
from ring_plugins.core.base.errors import ArgumentError, RingError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.gpu.communicator import DeviceCommunicator
from ring_plugins.core.gradients.fusion import BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketSizes
from ring_plugins.core.gradients.tuning import BucketTuner, is_wanted
from ring_plugins.torch.autograd import Backward, when_accumulated
from ring_plugins.torch.buckets import Named
from ring_plugins.torch.device import communicator_for
from ring_plugins.torch.gradient_plans import GradientPlans, Plan
from ring_plugins.torch.registration import registrations
from ring_plugins.torch.sparse import sparse_parameters


class GradientAverager:
    """Averages the gradients of a model's parameters among all ranks.

    When `backward()` returns, `p.grad` of every parameter is the average over all ranks: clipping,
    unscaling, accumulation and any optimizer work as with one process. A gradient that no rank has stays
    None; one that some ranks have counts as zeros on the others.

    Frozen parameters take no part; the parameters are looked at again at the start of every backward, so
    that freezing, unfreezing and adding parameters work, if all ranks do it in the same step.

    Args:
        parameters: a module, or (name, parameter) pairs, equal on all ranks and in the same order.
        bucket_bytes: size at which a bucket is closed.
        first_bucket_bytes: the same for the first one, small so that communication starts early.
        sparse: what becomes of sparse gradients: "gather" keeps them sparse, "densify" makes them dense.
        passes_per_step: only every so many-th backward communicates, the others accumulate.
        autotune: whether to try other bucket sizes in the first steps and keep what is faster; as RING_AUTOTUNE says by
            default. What rank 0 wants counts.
        compression: "fp16" or "bf16" sends float32 and float64 gradients in 16 bits: between hosts on the CPU, where
            what stays inside a host stays exact, and between all GPUs.
        error_feedback: whether what this rounding loses in a step is added to the next.
        communicator: reduces them; by default a new one over all ranks, for the device that the parameters are on.
            Nothing else may use it.

    All ranks construct it together. Not for gradients computed by several threads at once.

    Raises:
        MismatchError: the models differ among ranks; the text names the first parameter that does.
        ArgumentError: `sparse`, `passes_per_step` or `compression` have no meaning, or the parameters are on several
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
        sizes, gathers = BucketSizes(bucket_bytes, first_bucket_bytes), sparse == "gather"
        known_as_sparse = sparse_parameters(self._module) if self._module is not None and gathers else set()
        how = Compression.named(compression, error_feedback)
        self._communicator = communicator or communicator_for("gradients", self._named_now())
        self._plans = GradientPlans(self._communicator, sizes, how, known_as_sparse, gathers)
        self._plan: Plan | None = None
        self._tuner: BucketTuner | None = None
        self._passes_per_step, self._passes = passes_per_step, 0
        self._accumulates = False
        self._synchronise = True
        self._hooks: list[Any] = []
        self._backward = Backward(self._backward_ended)
        self._seen_registrations = 0
        #: Reductions of all gradients so far.
        self.steps = 0
        if self._communicator.size > 1:
            self._look_anew()
            self._plan = self._plans.current()
            if self._communicator.broadcast_object(is_wanted(autotune)):
                self._tuner = BucketTuner(sizes, self._plan.buckets.plan.buckets_with)

    # What a user may read -------------------------------------------------------------------------

    @property
    def waited_seconds(self) -> float:
        """Seconds in which backward was over and communication was not."""
        return self._plans.waited_seconds

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self._plans.reduced_bytes

    # Which parameters -----------------------------------------------------------------------------

    def set_parameters(self, parameters: Sequence[Named]) -> None:
        """Replace the list given at construction."""
        self._listed = list(parameters)
        if self._plan is not None:
            self._look_anew()

    def prepare(self) -> bool:
        """Look whether parameters were frozen, unfrozen or added, and plan anew if so; collective in that case.

        The forward of a module given at construction, and the first gradient of a backward, call this by
        themselves, so it is seldom needed.

        Returns:
            Whether the plan is another than before.
        """
        if self._plan is None:
            return False
        self.abandon()
        if self._module is not None and registrations() != self._seen_registrations:
            self._seen_registrations = registrations()
            if [id(p) for p in self._module.parameters()] != [id(p) for p in self._plans.parameters]:
                self._look_anew()
        plan = self._plans.current()
        changed, self._plan = plan is not self._plan, plan
        return changed

    def _named_now(self) -> Iterable[Named]:
        return self._module.named_parameters() if self._module is not None else self._listed

    def _look_anew(self) -> None:
        """Take in the parameters that there are now, and let autograd tell us of their gradients."""
        self._forget()
        self._seen_registrations = registrations()
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self._named_now():
            names.setdefault(parameter, name)  # a shared parameter may be listed by each of its names
        self._plans.take([(name, parameter) for parameter, name in names.items()])
        for position, parameter in enumerate(names):
            self._hooks += when_accumulated(parameter, self._hook(position))
        if self._module is not None:
            self._hooks.append(self._module.register_forward_pre_hook(self._before_forward))

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._plans.forget()

    # A backward -----------------------------------------------------------------------------------

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        """What autograd calls when the gradient of a parameter has been accumulated."""

        def ready(_: torch.Tensor) -> None:
            if not self._synchronise:
                return
            if not self._backward.is_under_way:
                self._begin()
            if self._accumulates:
                return
            assert self._plan is not None
            reducer, entry = self._plan.reducer, self._plan.entries[position]
            if entry < 0:
                return
            if self._plans.streams is not None:
                self._plans.streams.note()
            if reducer.is_launched(entry) and reducer.is_ready(entry):
                raise RingError(
                    f"the gradient of {self._plans.name(position)} was computed twice in one backward, after it had "
                    "been sent. Use torch.utils.checkpoint with use_reentrant=False, or wrap all but the last use in "
                    "no_sync()."
                )
            reducer.mark_ready(entry)

        return ready

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._synchronise and not self._backward.is_under_way:
            self.prepare()

    def _begin(self) -> None:
        """First gradient of a backward: see what changed, and ask autograd to call at its end."""
        self.prepare()
        self._passes += 1
        self._accumulates = self._passes < self._passes_per_step
        self._backward.begin()

    def abandon(self) -> None:
        """Bring this rank in step after a backward that raised; does nothing after one that did not.

        A pass that is under way outside of a backward belongs to one that failed. Peers may wait for the rest of its
        buckets.
        """
        plan = self._plan
        if plan is not None and plan.reducer.is_under_way and not self._backward.is_under_way:
            plan.reducer.abandon(plan.buckets.scratch)

    def _backward_ended(self) -> None:
        if self._accumulates:
            self._backward.is_over()
        else:
            self.finish()

    def finish(self) -> None:
        """Reduce what is not reduced yet and wait for everything.

        Autograd calls this at the end of backward. To call it yourself is only needed on a rank that ran
        no backward at all in a step in which others did: it then takes part with zeros.
        """
        if self._plan is None:
            return
        if not self._backward.is_under_way and not self._plan.reducer.is_under_way:
            self.prepare()
        self._backward.is_over()
        self._passes, self._accumulates = 0, False
        self._plans.finish(self._plan)
        self.steps += 1
        if self._tuner is not None:
            self._tune(self._tuner)

    def _tune(self, tuner: BucketTuner) -> None:
        """After a step in which sizes were tried: the next backward finds the plan for those to try next."""
        if not tuner.finished and tuner.step_ended(time.perf_counter()):
            everyones = self._communicator.all_gather_object(tuner.times)
            first = self._communicator.rank == 0
            tuner.adopt(self._communicator.broadcast_object(tuner.decide(everyones) if first else None))
        self._plans.sizes = tuner.sizes
        if tuner.finished:
            self._tuner = None
            if self._communicator.rank == 0:
                logger.info(f"tuned after {self.steps} steps: {tuner.verdict}.")

    def check(self) -> None:
        """Raise if a rank's failure made the last averages worthless, which a GPU does not tell by itself.

        Call it before weights are saved; optimizer and strategy do when they are asked for their state.
        """
        if isinstance(self._communicator, DeviceCommunicator):
            self._communicator.check()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate this rank's gradients only; the next one outside averages the sum."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def close(self) -> None:
        """Remove the hooks; gradients stay as they are. The object is of no use afterwards."""
        self._forget()
        self._plan = None
        self._communicator.close()
