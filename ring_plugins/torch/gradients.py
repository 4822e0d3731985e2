"""Gradients of a torch model averaged while backward is still running."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd import Variable

from ring_plugins.core.collectives.protocol import Communicator
from ring_plugins.core.errors import ArgumentError, RingError
from ring_plugins.core.fusion import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, Entry, FusionBuffer, FusionPlan
from ring_plugins.core.reducer import GradientReducer
from ring_plugins.core.world import current
from ring_plugins.torch.registration_count import registrations
from ring_plugins.torch.sparse import average_sparse, sparse_parameters

Named = tuple[str, nn.Parameter]


class GradientAverager:
    """Averages the gradients of a model's parameters among all ranks.

    When `backward()` returns, `p.grad` of every parameter is the average over all ranks: clipping,
    unscaling, accumulation and any optimizer work as with one process. A gradient that no rank has stays
    None; one that some ranks have counts as zeros on the others. The gradients live in the buckets that
    are reduced: `p.grad` is a view.

    Frozen parameters take no part; the parameters are looked at again at the start of every backward, so
    that freezing, unfreezing and adding parameters work, if all ranks do it in the same step.

    Args:
        parameters: a module, or (name, parameter) pairs, equal on all ranks and in the same order.
        bucket_bytes: size at which a bucket is closed.
        first_bucket_bytes: the same for the first one, small so that communication starts early.
        sparse: what becomes of sparse gradients: "gather" keeps them sparse, "densify" makes them dense.
        passes_per_step: only every so many-th backward communicates, the others accumulate.
        communicator: reduces them; by default a new one over all ranks. Nothing else may use it.

    All ranks construct it together. Not for gradients computed by several threads at once.

    Raises:
        MismatchError: the models differ among ranks; the text names the first parameter that does.
        ArgumentError: `sparse` or `passes_per_step` have no meaning, or a parameter is not on the CPU.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Named],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        sparse: Literal["gather", "densify"] = "gather",
        passes_per_step: int = 1,
        communicator: Communicator | None = None,
    ) -> None:
        if sparse not in ("gather", "densify"):
            raise ArgumentError(f'sparse={sparse!r} must be "gather" or "densify".')
        if isinstance(passes_per_step, bool) or not isinstance(passes_per_step, int) or passes_per_step < 1:
            raise ArgumentError(f"passes_per_step={passes_per_step!r} is not a positive number.")
        world = current()
        self._module = parameters if isinstance(parameters, nn.Module) else None
        self._listed = [] if isinstance(parameters, nn.Module) else list(parameters)
        self._bucket_bytes, self._first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._gather_sparse = sparse == "gather"
        self._communicator = communicator or world.new_communicator("gradients")
        self._passes_per_step, self._passes = passes_per_step, 0
        self._accumulates = False
        self._synchronise = True
        self._hooks: list[Any] = []
        self._end_of_backward: Callable[[], _EndOfBackward | None] = lambda: None
        self._buffer: FusionBuffer | None = None
        self._reducer: GradientReducer | None = None
        self._sparse: set[nn.Parameter] = set()
        self._waited_before, self._bytes_before = 0.0, 0
        #: Reductions of all gradients so far.
        self.steps = 0
        if self._communicator.size > 1:
            self._sparse = sparse_parameters(self._module) if self._module is not None and self._gather_sparse else set()
            self._build()

    # What a user may read -------------------------------------------------------------------------

    @property
    def waited_seconds(self) -> float:
        """Seconds in which backward was over and communication was not."""
        return self._waited_before + (self._reducer.waited if self._reducer else 0.0)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients given to the collectives."""
        return self._bytes_before + (self._reducer.reduced_bytes if self._reducer else 0)

    # Building -------------------------------------------------------------------------------------

    def set_parameters(self, parameters: Sequence[Named]) -> None:
        """Replace the list given at construction; takes effect with the next backward."""
        self._listed = list(parameters)
        self._seen_flags = []

    def _named(self) -> list[Named]:
        return list(self._module.named_parameters()) if self._module is not None else self._listed

    def _has_changed(self) -> bool:
        if self._module is not None and registrations() != self._seen_registrations:
            self._seen_registrations = registrations()
            if [id(p) for _, p in self._named()] != [id(p) for p in self._all]:
                return True
        return [p.requires_grad for p in self._all] != self._seen_flags

    def _build(self) -> None:
        """Plan, memory and hooks for the parameters as they are now; collective."""
        self._forget()
        named = self._named()
        if self._module is not None:
            self._hooks.append(self._module.register_forward_pre_hook(self._before_forward))
        self._seen_registrations = registrations()
        self._all = [p for _, p in named]
        self._seen_flags = [p.requires_grad for p in self._all]
        taking_part = [(name, p) for name, p in named if p.requires_grad]
        dense = [(name, p) for name, p in taking_part if p not in self._sparse]
        self._sparse_order = [p for _, p in taking_part if p in self._sparse]
        plan = FusionPlan([_entry(name, p) for name, p in dense], self._bucket_bytes, self._first_bucket_bytes)
        plan.check_equal(self._communicator)
        self._names = [name for name, _ in dense]
        self._parameters = [p for _, p in dense]
        self._buffer = FusionBuffer(plan, self._communicator)
        self._reducer = GradientReducer(self._buffer, self._communicator, self._fill)
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(dense)
        self._flags: list[torch.Tensor] = []
        for bucket, memory in zip(plan.buckets, self._buffer.memories, strict=True):
            whole = torch.frombuffer(memory.array, dtype=getattr(torch, bucket.dtype))
            self._flags.append(whole[bucket.flags : bucket.flags + len(bucket.entries)])
            for i, offset in zip(bucket.entries, bucket.offsets, strict=True):
                self._views[i] = _view(whole, offset, self._parameters[i])
        self._absent: list[int] = []  # in this pass
        self._first_pass = True
        self._seen_sparse: set[int] = set()
        for i, parameter in enumerate(self._parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(i)))
        for parameter in self._sparse_order:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._sparse_hook))

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._waited_before, self._bytes_before = self.waited_seconds, self.reduced_bytes
        if self._buffer is not None:
            self._buffer.release()
        self._buffer = self._reducer = None

    # A pass ---------------------------------------------------------------------------------------

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        """What autograd calls when the gradient of parameter i has been accumulated."""

        def ready(_: torch.Tensor) -> None:
            if not self._synchronise:
                return
            if self._end_of_backward() is None and self._begin():
                return  # the plan is new, and knows this parameter by another number
            if self._accumulates:
                return
            reducer = self._reducer
            assert reducer is not None
            if reducer.is_launched(i) and reducer.is_ready(i):
                raise RingError(
                    f"the gradient of {self._names[i]} was computed twice in one backward, after it had been sent. "
                    "Use torch.utils.checkpoint with use_reentrant=False, or wrap all but the last use in no_sync()."
                )
            reducer.mark_ready(i)

        return ready

    def _sparse_hook(self, _: torch.Tensor) -> None:
        self._begin()

    def _begin(self) -> bool:
        """First gradient of a backward: see what changed, and ask autograd to call at its end.

        Returns:
            Whether the plan was built anew, with all gradients so far left to `finish`.
        """
        if not self._synchronise or self._end_of_backward() is not None:
            return False
        changed = self.prepare()
        self._passes += 1
        self._accumulates = self._passes < self._passes_per_step
        end = _EndOfBackward(self)
        self._end_of_backward = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)
        return changed

    def prepare(self) -> bool:
        """Look whether parameters were frozen, unfrozen or added, and plan anew if so; collective in that case.

        The forward of a module given at construction, and the first gradient of a backward, call this by
        themselves. Call it before a forward that neither of them would notice: one of a list of parameters,
        after which only newly unfrozen ones get a gradient.

        Returns:
            Whether the plan was built anew.
        """
        if self._reducer is None:
            return False
        self.abandon()
        changed = self._has_changed()
        if changed:
            self._build()
        return changed

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._synchronise and self._end_of_backward() is None:
            self.prepare()

    def abandon(self) -> None:
        """Bring this rank in step after a backward that raised; does nothing after one that did not.

        Autograd drops its callbacks when backward raises, so a pass that is under way while nobody holds
        its callback has failed. Peers may wait for the rest of its buckets.
        """
        if self._reducer is not None and self._reducer.is_under_way and self._end_of_backward() is None:
            self._reducer.abandon()

    def _fill(self, bucket: Bucket) -> None:
        """Move gradients that autograd left elsewhere into the bucket, and let `p.grad` be there."""
        views, parameters = self._views, self._parameters
        to: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        moved: list[int] = []
        absent: list[int] = []
        for place, i in enumerate(bucket.entries):
            gradient = parameters[i].grad
            if gradient is views[i]:
                continue
            if gradient is None:
                absent.append(place)
            elif gradient.is_sparse:
                self._fill_sparse(i, gradient, absent, place)
            else:
                to.append(views[i])
                source.append(gradient)
                moved.append(i)
        with torch.no_grad():
            if to:
                torch._foreach_copy_(to, source)
            flags = self._flags[bucket.index]
            flags.fill_(1)
            for place in absent:
                views[bucket.entries[place]].zero_()
                flags[place] = 0
        for i in moved:
            parameters[i].grad = views[i]
        self._absent.extend(bucket.entries[place] for place in absent)

    def _fill_sparse(self, i: int, gradient: torch.Tensor, absent: list[int], place: int) -> None:
        """A sparse gradient in a dense bucket: gathered if it is seen in the plan's first pass, else densified."""
        if self._gather_sparse and self._first_pass:
            self._seen_sparse.add(i)
            absent.append(place)
            return
        with torch.no_grad():
            self._views[i].copy_(gradient.to_dense())
        self._parameters[i].grad = self._views[i]

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
        if self._reducer is None:
            return
        if self._end_of_backward() is None and not self._reducer.is_under_way:
            self.prepare()
        self._end_of_backward = lambda: None
        self._passes, self._accumulates = 0, False
        self._reducer.finish()
        if self._first_pass and self._gather_sparse:
            self._learn_sparse()
        for parameter in self._sparse_order:
            average_sparse(parameter, self._communicator)
        if self._absent:
            self._settle_absent()
        self._first_pass = False
        self.steps += 1

    def _settle_absent(self) -> None:
        """Gradients that this rank does not have: the average if any rank has them, else none."""
        absent, self._absent = set(self._absent), []
        assert self._buffer is not None
        for bucket, flags in zip(self._buffer.plan.buckets, self._flags, strict=True):
            if absent.isdisjoint(bucket.entries):
                continue
            for i, flag in zip(bucket.entries, flags.tolist(), strict=True):
                if i in absent and flag != 0 and i not in self._seen_sparse:
                    self._parameters[i].grad = self._views[i]

    def _learn_sparse(self) -> None:
        """Agree on which parameters have sparse gradients; they are gathered from now on."""
        everyones = self._communicator.all_gather_object(sorted(self._seen_sparse))
        found = sorted({i for seen in everyones for i in seen})
        if not found:
            return
        self._absent = [i for i in self._absent if i not in found]
        self._sparse.update(self._parameters[i] for i in found)
        self._sparse_order.extend(self._parameters[i] for i in found)
        self._seen_flags = []  # the next backward builds a plan without them

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
        self._communicator.close()


class _EndOfBackward:
    """What autograd calls when backward is over. Autograd holds the only reference to it."""

    def __init__(self, averager: GradientAverager) -> None:
        self._averager = averager

    def __call__(self) -> None:
        self._averager._backward_ended()


def _entry(name: str, parameter: nn.Parameter) -> Entry:
    if parameter.device.type != "cpu":
        raise ArgumentError(f"parameter {name} is on {parameter.device}; gradients are averaged on the CPU only.")
    strides = "" if parameter.is_contiguous() else f", strides {tuple(parameter.stride())}"
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Entry(name, dtype, parameter.numel(), f"shape {tuple(parameter.shape)}{strides}")


def _view(whole: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """The gradient's place in the bucket, with the parameter's strides where they leave no gaps.

    Autograd accumulates fastest into a gradient laid out like its parameter (channels_last, say).
    """
    flat = whole[offset : offset + parameter.numel()]
    size, stride = tuple(parameter.shape), tuple(parameter.stride())
    dense = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 == parameter.numel()
    return flat.as_strided(size, stride) if dense and parameter.numel() else flat.view(size)
