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
from ring_plugins.core.fusion import BUCKET_BYTES, FIRST_BUCKET_BYTES
from ring_plugins.core.reducer import GradientReducer
from ring_plugins.core.world import current
from ring_plugins.torch.buckets import GradientBuckets, Named
from ring_plugins.torch.registration_count import registrations
from ring_plugins.torch.sparse import average_sparse, sparse_parameters


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
        self._module = parameters if isinstance(parameters, nn.Module) else None
        self._listed = [] if isinstance(parameters, nn.Module) else list(parameters)
        self._bucket_bytes, self._first_bucket_bytes = bucket_bytes, first_bucket_bytes
        self._gathers = sparse == "gather"
        self._sparse = sparse_parameters(self._module) if self._module is not None and self._gathers else set()
        self._communicator = communicator or current().new_communicator("gradients")
        self._passes_per_step, self._passes = passes_per_step, 0
        self._accumulates = False
        self._synchronise = True
        self._hooks: list[Any] = []
        self._end_of_backward: Callable[[], _EndOfBackward | None] = lambda: None
        self._buckets: GradientBuckets | None = None
        self._reducer: GradientReducer | None = None
        self._all: list[nn.Parameter] = []
        self._seen_flags: list[bool] = []
        self._seen_registrations = 0
        self._sparse_order: list[nn.Parameter] = []
        self._waited_before, self._bytes_before = 0.0, 0
        #: Reductions of all gradients so far.
        self.steps = 0
        if self._communicator.size > 1:
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

    # Which parameters -----------------------------------------------------------------------------

    def set_parameters(self, parameters: Sequence[Named]) -> None:
        """Replace the list given at construction; takes effect with the next backward."""
        self._listed = list(parameters)
        self._seen_flags = []

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
        self._seen_registrations = registrations()
        self._all = [p for _, p in named]
        self._seen_flags = [p.requires_grad for p in self._all]
        self._sparse_order = [p for p in self._all if p.requires_grad and p in self._sparse]
        dense = [(name, p) for name, p in named if p.requires_grad and p not in self._sparse]
        buckets = GradientBuckets(dense, self._communicator, self._bucket_bytes, self._first_bucket_bytes)
        buckets.collects_sparse = self._gathers
        self._buckets = buckets
        self._reducer = GradientReducer(buckets.buffer, self._communicator, buckets.fill)
        for i, (name, parameter) in enumerate(dense):
            self._attach(parameter, self._hook(i, name))
        for parameter in self._sparse_order:
            self._attach(parameter, self._sparse_hook)
        if self._module is not None:
            self._hooks.append(self._module.register_forward_pre_hook(self._before_forward))

    def _attach(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        register: Any = parameter.register_post_accumulate_grad_hook
        self._hooks.append(register(hook))

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._waited_before, self._bytes_before = self.waited_seconds, self.reduced_bytes
        if self._buckets is not None:
            self._buckets.release()
        self._buckets = self._reducer = None

    # A backward -----------------------------------------------------------------------------------

    def _hook(self, i: int, name: str) -> Callable[[torch.Tensor], None]:
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
                    f"the gradient of {name} was computed twice in one backward, after it had been sent. "
                    "Use torch.utils.checkpoint with use_reentrant=False, or wrap all but the last use in no_sync()."
                )
            reducer.mark_ready(i)

        return ready

    def _sparse_hook(self, _: torch.Tensor) -> None:
        if self._synchronise and self._end_of_backward() is None:
            self._begin()

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._synchronise and self._end_of_backward() is None:
            self.prepare()

    def _begin(self) -> bool:
        """First gradient of a backward: see what changed, and ask autograd to call at its end.

        Returns:
            Whether the plan was built anew, with all gradients so far left to `finish`.
        """
        changed = self.prepare()
        self._passes += 1
        self._accumulates = self._passes < self._passes_per_step
        end = _EndOfBackward(self)
        self._end_of_backward = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)
        return changed

    def abandon(self) -> None:
        """Bring this rank in step after a backward that raised; does nothing after one that did not.

        Autograd drops its callbacks when backward raises, so a pass that is under way while nobody holds
        its callback has failed. Peers may wait for the rest of its buckets.
        """
        if self._reducer is not None and self._reducer.is_under_way and self._end_of_backward() is None:
            assert self._buckets is not None
            self._reducer.abandon(self._buckets.scratch)

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
        assert self._buckets is not None
        self._buckets.settle()
        if self._buckets.collects_sparse:
            self._learn_sparse(self._buckets)
        for parameter in self._sparse_order:
            average_sparse(parameter, self._communicator)
        self.steps += 1

    def _learn_sparse(self, buckets: GradientBuckets) -> None:
        """After a plan's first pass: agree on which gradients are sparse; they are gathered from now on."""
        buckets.collects_sparse = False
        everyones = self._communicator.all_gather_object(sorted(buckets.sparse))
        found = sorted({i for seen in everyones for i in seen})
        if found:
            self._sparse.update(buckets.parameters[i] for i in found)
            self._sparse_order.extend(buckets.parameters[i] for i in found)
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
