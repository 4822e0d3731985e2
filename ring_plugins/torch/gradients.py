"""Gradients of a torch model averaged while backward is still running."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable

from ring_plugins.core.collectives.device import DeviceCommunicator
from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.compression import Compression
from ring_plugins.core.errors import ArgumentError, RingError
from ring_plugins.core.fusion import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, BucketSizes
from ring_plugins.core.memory import Memory
from ring_plugins.core.reducer import Fill, GradientReducer
from ring_plugins.core.tuning import BucketTuner, is_wanted
from ring_plugins.torch.buckets import GradientBuckets, Named
from ring_plugins.torch.device import TorchStreams, communicator_for, streams
from ring_plugins.torch.registration_count import registrations
from ring_plugins.torch.sparse import average_sparse, sparse_parameters

#: Plans kept for models that take turns in freezing their parts, as adversarial training does twice a step.
_PLANS_KEPT = 4


class _Plan(NamedTuple):
    """What is reduced while the same parameters are frozen.

    Attributes:
        buckets, reducer: for the dense gradients.
        entries: by position in the list of all parameters the entry of the plan, -1 for those without.
        sparse: parameters whose gradients are gathered.
    """

    buckets: GradientBuckets
    reducer: GradientReducer
    entries: list[int]
    sparse: list[nn.Parameter]


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
        self._sizes = BucketSizes(bucket_bytes, first_bucket_bytes)
        self._compression = Compression.named(compression, error_feedback)
        self._tuner: BucketTuner | None = None
        self._gathers = sparse == "gather"
        self._sparse = sparse_parameters(self._module) if self._module is not None and self._gathers else set()
        self._communicator = communicator or communicator_for("gradients", self._named_now())
        self._streams: TorchStreams | None = None
        if isinstance(self._communicator, DeviceCommunicator):
            self._streams = streams(self._communicator.device)
        self._passes_per_step, self._passes = passes_per_step, 0
        self._accumulates = False
        self._synchronise = True
        self._hooks: list[Any] = []
        self._end_of_backward: Callable[[], _EndOfBackward | None] = lambda: None
        self._all: list[nn.Parameter] = []
        self._names: list[str] = []
        self._seen_registrations = 0
        self._plans: dict[tuple[tuple[bool, ...], BucketSizes], _Plan] = {}
        self._plan: _Plan | None = None
        self._waited_before, self._bytes_before = 0.0, 0
        #: Reductions of all gradients so far.
        self.steps = 0
        if self._communicator.size > 1:
            self._look_anew()
            self._plan = self._plan_for(self._flags())
            if self._communicator.broadcast_object(is_wanted(autotune)):
                self._tuner = BucketTuner(self._sizes, self._plan.buckets.plan.buckets_with)

    # What a user may read -------------------------------------------------------------------------

    @property
    def waited_seconds(self) -> float:
        """Seconds in which backward was over and communication was not."""
        return self._waited_before + sum(plan.reducer.waited for plan in self._plans.values())

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self._bytes_before + sum(plan.reducer.reduced_bytes for plan in self._plans.values())

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
            if [id(p) for p in self._module.parameters()] != [id(p) for p in self._all]:
                self._look_anew()
        plan = self._plan_for(self._flags())
        changed, self._plan = plan is not self._plan, plan
        return changed

    def _named_now(self) -> Iterable[Named]:
        return self._module.named_parameters() if self._module is not None else self._listed

    def _flags(self) -> tuple[bool, ...]:
        return tuple([p.requires_grad for p in self._all])

    def _look_anew(self) -> None:
        """Take in the parameters that there are now, and let autograd tell us of their gradients."""
        self._forget()
        self._seen_registrations = registrations()
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self._named_now():
            names.setdefault(parameter, name)  # a shared parameter may be listed by each of its names
        self._names, self._all = list(names.values()), list(names)
        for position, parameter in enumerate(self._all):
            self._attach(parameter, self._hook(position))
        if self._module is not None:
            self._hooks.append(self._module.register_forward_pre_hook(self._before_forward))

    def _attach(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        """Hook a parameter, a frozen one too: once unfrozen, it may be the only one with a gradient."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        register: Any = parameter.register_post_accumulate_grad_hook
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)  # torch refuses hooks otherwise, and keeps those it has
        self._hooks.append(register(hook))
        if frozen:
            parameter.requires_grad_(False)

    def _plan_for(self, flags: tuple[bool, ...]) -> _Plan:
        """The plan for the parameters that are not frozen; collective if there is none yet."""
        key = (flags, self._sizes)
        if key in self._plans:
            return self._plans[key]
        if len(self._plans) >= _PLANS_KEPT:
            self._drop(next(iter(self._plans)))
        positions = [i for i, p in enumerate(self._all) if p.requires_grad and p not in self._sparse]
        buckets = GradientBuckets(
            [(self._names[i], self._all[i]) for i in positions],
            self._communicator,
            self._sizes,
            self._compression,
        )
        buckets.collects_sparse = self._gathers
        entries = [-1] * len(self._all)
        for entry, position in enumerate(positions):
            entries[position] = entry
        sparse = [p for p in self._all if p.requires_grad and p in self._sparse]
        reducer = GradientReducer(
            buckets.buffer, self._communicator, self._filling(buckets), compression=self._compression
        )
        plan = _Plan(buckets, reducer, entries, sparse)
        self._plans[key] = plan
        return plan

    def _filling(self, buckets: GradientBuckets) -> Fill:
        """How a bucket is filled: on a GPU only after every stream that its gradients were computed on."""
        streams_of_gradients = self._streams
        if streams_of_gradients is None:
            return buckets.fill

        def fill(bucket: Bucket) -> list[Memory]:
            streams_of_gradients.catch_up()
            return buckets.fill(bucket)

        return fill

    def _drop(self, key: tuple[tuple[bool, ...], BucketSizes]) -> None:
        plan = self._plans.pop(key)
        self._waited_before += plan.reducer.waited
        self._bytes_before += plan.reducer.reduced_bytes
        plan.buckets.release()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for key in list(self._plans):
            self._drop(key)

    # A backward -----------------------------------------------------------------------------------

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        """What autograd calls when the gradient of a parameter has been accumulated."""

        def ready(_: torch.Tensor) -> None:
            if not self._synchronise:
                return
            if self._end_of_backward() is None:
                self._begin()
            if self._accumulates:
                return
            assert self._plan is not None
            reducer, entry = self._plan.reducer, self._plan.entries[position]
            if entry < 0:
                return
            if self._streams is not None:
                self._streams.note()
            if reducer.is_launched(entry) and reducer.is_ready(entry):
                raise RingError(
                    f"the gradient of {self._names[position]} was computed twice in one backward, after it had "
                    "been sent. Use torch.utils.checkpoint with use_reentrant=False, or wrap all but the last use in "
                    "no_sync()."
                )
            reducer.mark_ready(entry)

        return ready

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._synchronise and self._end_of_backward() is None:
            self.prepare()

    def _begin(self) -> None:
        """First gradient of a backward: see what changed, and ask autograd to call at its end."""
        self.prepare()
        self._passes += 1
        self._accumulates = self._passes < self._passes_per_step
        end = _EndOfBackward(self)
        self._end_of_backward = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def abandon(self) -> None:
        """Bring this rank in step after a backward that raised; does nothing after one that did not.

        Autograd drops its callbacks when backward raises, so a pass that is under way while nobody holds
        its callback has failed. Peers may wait for the rest of its buckets.
        """
        plan = self._plan
        if plan is not None and plan.reducer.is_under_way and self._end_of_backward() is None:
            plan.reducer.abandon(plan.buckets.scratch)

    def _backward_ended(self) -> None:
        if self._accumulates:
            self._end_of_backward = lambda: None
        else:
            self.finish()

    def finish(self) -> None:
        """Reduce what is not reduced yet and wait for everything.

        Autograd calls this at the end of backward. To call it yourself is only needed on a rank that ran
        no backward at all in a step in which others did: it then takes part with zeros.
        """
        if self._plan is None:
            return
        if self._end_of_backward() is None and not self._plan.reducer.is_under_way:
            self.prepare()
        self._end_of_backward = lambda: None
        self._passes, self._accumulates = 0, False
        buckets, reducer, _, sparse = self._plan
        reducer.finish()
        buckets.settle()
        found = self._learn_sparse(buckets) if buckets.collects_sparse else []
        for parameter in (*sparse, *found):
            average_sparse(parameter, self._communicator)
        self.steps += 1
        if self._tuner is not None:
            self._tune(self._tuner)

    def _tune(self, tuner: BucketTuner) -> None:
        """After a step in which sizes were tried: the next backward finds the plan for those to try next."""
        if not tuner.finished and tuner.step_ended(time.perf_counter()):
            everyones = self._communicator.all_gather_object(tuner.times)
            first = self._communicator.rank == 0
            tuner.adopt(self._communicator.broadcast_object(tuner.decide(everyones) if first else None))
        if tuner.sizes != self._sizes:
            for key in list(self._plans):  # one set of buckets at a time
                self._drop(key)
            self._sizes = tuner.sizes
        if tuner.finished:
            self._tuner = None
            if self._communicator.rank == 0:
                print(f"ring_plugins: tuned after {self.steps} steps: {tuner.verdict}.", file=sys.stderr, flush=True)

    def _learn_sparse(self, buckets: GradientBuckets) -> list[nn.Parameter]:
        """After a plan's first pass: agree on which gradients are sparse; they are gathered from now on."""
        buckets.collects_sparse = False
        everyones = self._communicator.all_gather_object(sorted(buckets.sparse))
        found = [buckets.parameters[i] for i in sorted({i for seen in everyones for i in seen})]
        if found:
            self._sparse.update(found)
            for key in list(self._plans):  # the next backward builds plans without them
                self._drop(key)
        return found

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


class _EndOfBackward:
    """What autograd calls when backward is over. Autograd holds the only reference to it."""

    def __init__(self, averager: GradientAverager) -> None:
        self._averager = averager

    def __call__(self) -> None:
        self._averager._backward_ended()
