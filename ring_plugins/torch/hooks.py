"""The hooks of an averager: on gradients as autograd accumulates them, on the end of a backward, on optimizers' steps.

Autograd calls a hook once a parameter and step, thousands of times, so a hook only counts. Parameters that lie in one
bucket share a counter (`Group`); the averager looks when all gradients of a counter have come, and at the first
gradient of a backward. While the order of gradients is being learned, a second hook notes each arrival.

torch has no hook in C++ for many parameters: `torch.autograd.graph.register_multi_grad_hook` puts a Python closure on
each, and takes 4.3 µs a parameter where these take 0.7 (5,000 parameters, torch 2.13, busy machine). A hook that does
nothing takes as long as these: the time is autograd's own.

Hooks hold the averager weakly: an averager that nobody refers to any more is gone. Unless it was closed or superseded,
its hooks stay and report gradients that nobody averages any more (`changes`), until another averager takes the
parameters.

**The end of a backward.** At the first gradient, an averager asks autograd for a callback. Autograd drops its callbacks
when backward raises. It holds the only reference to ours, so once the callback is gone the backward has failed. A
backward may run several others inside, as reentrant checkpoints do. Autograd calls back at the end of the innermost
one, and we ask again at the next node of the one around it, until the outermost ends.

Averagers whose gradients come from the same backward are ended together, in an order that is the same on all ranks.
Each launches what is left before any of them waits, so no two ranks wait for each other in different averagers. One
that is alone need not launch: it may reduce synchronously.

**No optimizer updates by gradients that are only this rank's own.** An optimizer reads `p.grad` without asking anybody,
and gradients may be a rank's own: the last passes only accumulated, as where an epoch ends with an odd number of
batches, or all passes ran in `no_sync()`; or the script assigned gradients that it computed without a backward. Ranks
that step on such gradients train different models from then on. So where gradients have come since the last reduction,
before an optimizer's step all ranks average once more. That is right whatever `p.grad` holds: averaging is linear, and
the part that was averaged before is equal on all ranks. Ranks that would pair such a reduction with one of another step
raise, since their numbers of updates differ (`observe.consistency`). Two things cannot be made right, and are errors.
Inside a backward, other gradients are still to come. And what a script has changed in place before the average, as
clipping does, is not linear.

A `GradScaler` looks for overflows before it calls the optimizer, so the average has to come before that: on a rank's
own gradients one would skip its step while others make theirs. It has no hooks, so the method of its class that reads
gradients, for `unscale_` as for `step`, is wrapped.

The file is longer than others, so that all that torch tells an averager of a step is in one place.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ring_plugins.core.control.wait import hindrances
from ring_plugins.observe.consistency import Checks
from ring_plugins.torch.changes import Claim, DroppedAverager, dropped, reject_dropped
from ring_plugins.torch.device import TorchStreams, is_capturing
from ring_plugins.torch.wrapped_optimizer import WrappedOptimizer

#: The count of a group whose gradients nobody counts.
_UNCOUNTED = 1 << 62
#: Of a backward, told to others that wait for its gradients.
_RAISED = (
    "a backward raised, and the script caught that, so its gradients are missing until its next forward or step. Let "
    "such an error end the job, or let all ranks skip the step by skip_step_on."
)

#: Number of the calling thread's innermost backward, -1 outside of one.
current_task: Callable[[], int] = torch._C._current_graph_task_id
#: The node of the graph that the calling thread works on: none in a callback, unless the backward runs inside another.
_current_node: Callable[[], Any] = torch._C._current_autograd_node


class Averager(Protocol):
    """What hooks use of a `GradientAverager`."""

    claim: Claim
    is_closed: bool
    is_on_host: bool
    steps: int

    @property
    def checks(self) -> Checks: ...

    @property
    def named_parameters(self) -> Sequence[tuple[str, torch.Tensor]]: ...

    def gradient_came(self, group: Group, parameter: torch.Tensor) -> None:
        """Handle the first gradient of a backward, the last one of a group, and any that came after it."""

    def before_forward(self) -> None:
        """Look what has changed before the forward of the module."""

    def launch_rest(self) -> None:
        """Launch what is left at the end of a backward, without waiting."""

    def end_backward(self) -> None:
        """Launch what `launch_rest` has not, and wait for everything."""

    def average_before_step(self) -> None:
        """Reduce once more, since an optimizer is about to use gradients that no backward has averaged."""

    def begin_step(self) -> None:
        """Forget the passes of a step that the script gave up."""


class Hooks:
    """The hooks of one averager, and the backward, if any, in which it has seen gradients.

    It refers to neither the model nor its parameters, so that what waits for the averager's end may hold it.

    Args:
        averager: held weakly.
        order: place among all averagers of this process.
        streams: those of the GPU on which gradients are computed; None on the host.

    Attributes:
        averager: a weak reference.
        order: as given.
        groups: that are in use.
        arrivals: `id` of each parameter whose gradient has come in this pass, while their order is being learned; else
            None. A change counts from the next `put`.
        callback: weak reference to the callback that autograd holds; returns None outside of a backward.
        task: the backward, as autograd numbers them, in which the first gradient was seen.
        is_nested: whether the last backward contained others; True before the first, which might.
        has_averaged: whether any pass has ended.
    """

    def __init__(self, averager: Averager, order: int, streams: TorchStreams | None) -> None:
        self.averager, self.order, self._streams = weakref.ref(averager), order, streams
        self.arrivals: list[int] | None = None
        self._handles: list[Any] = []  # but those of groups
        self._handles_of_groups: list[Any] = []
        self.groups: list[Group] = []
        self.callback: weakref.ref[_EndOfBackward] = no_callback
        self.task = -1
        self.is_nested, self.has_averaged = True, False

    def put(self, parameters: Sequence[nn.Parameter], kept: Sequence[Sequence[int]], module: nn.Module | None) -> None:
        """Put one hook on all parameters that are in one bucket in each of the sets of buckets, in place of all hooks.

        Args:
            parameters: of the model.
            kept: of each set of buckets, by position of a parameter its bucket, -1 for none.
            module: the model, if its forward is to be noticed.
        """
        self.remove()
        for parameter in parameters:
            dropped.pop(id(parameter), None)
            # torch 2.4 to 2.13: hooks by the number that their handle has, or None.
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                if isinstance(hook, Group) and hook.dropped is not None:  # of an averager that is gone
                    hook.left, hook.dropped = _UNCOUNTED, None
        together: dict[tuple[int, ...], list[int]] = {}
        for position in range(len(parameters)):
            key = tuple(bucket_of[position] for bucket_of in kept)
            together.setdefault(key, []).append(position)
        for positions in together.values():
            if self._streams is None:
                group = Group(self.averager, positions)
            else:
                group = _GroupOnGpu(self.averager, positions, self._streams)
            self.groups.append(group)
            for position in positions:
                self._handles_of_groups += when_accumulated(parameters[position], group)
        if (arrivals := self.arrivals) is not None:
            for parameter in parameters:
                self._handles += when_accumulated(parameter, lambda parameter: arrivals.append(id(parameter)))
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(_BeforeForward(self.averager)))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in itertools.chain(self._handles, self._handles_of_groups):
            handle.remove()
        self._handles.clear()
        self._handles_of_groups.clear()
        self.groups.clear()

    def leave_behind(self, remains: DroppedAverager) -> None:
        """The averager is gone: from now on, report every parameter that gets a gradient to what it left."""
        groups, handles = self.groups.copy(), self._handles_of_groups.copy()
        self._handles_of_groups.clear()
        self.remove()
        for group in groups if handles else ():
            group.left, group.dropped = 0, remains

    def fit(self, bucket_of: Sequence[int]) -> bool:
        """Whether the parameters of each group are in one bucket, which is given by position."""
        return all(len({bucket_of[i] for i in group.positions}) <= 1 for group in self.groups)

    # A backward -------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether autograd still holds the callback, and the calling thread is inside a backward."""
        return self.callback() is not None and current_task() != -1

    @property
    def has_raised(self) -> bool:
        """Whether a backward began and did not come to its end."""
        return self.callback is not no_callback and not self.is_running

    def begin(self, bucket_of: Sequence[int], counts: bool) -> None:
        """Ask autograd for a callback at the end, and count; called inside a backward, at its first gradient.

        Args:
            bucket_of: by position of a parameter its bucket in this pass, -1 for none.
            counts: whether to look when all gradients of a group have come.
        """
        self.is_nested = False
        self.task = current_task()
        own = weakref.ref(self)

        def gone(reference: Any) -> None:
            if (hooks := own()) is not None and hooks.callback is reference:
                hooks.end(_raised)

        callback = _EndOfBackward(self)
        self.callback = weakref.ref(callback, gone)
        try:
            with _pending_lock:
                _pending.add(weakref.ref(callback, _pending.discard))
            callback.request()
        except BaseException:
            self.note_raised(callback)
            raise
        for group in self.groups:
            group.bucket = bucket_of[group.positions[0]]
            group.left = len(group.positions) if counts and group.bucket >= 0 else _UNCOUNTED

    def end(self, callback: weakref.ref[_EndOfBackward] | None = None) -> None:
        """Note that the end of a backward has been handled, or that it raised; called at any moment, perhaps twice.

        Args:
            callback: what tells so: `no_callback`, the default, or `_raised`.
        """
        self.callback = callback or no_callback
        if callback is _raised:
            hindrances[self] = _RAISED
        elif hindrances:
            hindrances.pop(self, None)
        for group in self.groups:  # which look at the next gradient: it is the first one of a backward
            group.left = 0

    def note_raised(self, callback: _EndOfBackward) -> None:
        """Note that the backward of this callback raised; the error's traceback may keep the callback alive."""
        if self.callback() is callback:
            self.end(_raised)


class Group:
    """Parameters of one bucket, whichever set of parameters is trained, and the hook that counts their gradients.

    The averager looks when all have come, and at the first gradient of a backward: outside of one, `left` is 0.

    A gradient that comes twice, as in a backward with others inside, makes the count end early. `GradientAverager`
    then holds the buckets back, or raises at the gradient that comes after its bucket has left.

    Args:
        averager: a weak reference.
        positions: of the parameters.

    Attributes:
        left: gradients that have not come in this pass.
        bucket: theirs in this pass, -1 for parameters that the reducer does not know.
        dropped: what the averager left when it was dropped.
    """

    __slots__ = ("_averager", "bucket", "dropped", "left", "positions")

    def __init__(self, averager: weakref.ref[Averager], positions: Sequence[int]) -> None:
        self._averager, self.positions = averager, tuple(positions)
        self.left, self.bucket = 0, -1
        self.dropped: DroppedAverager | None = None

    def __call__(self, parameter: torch.Tensor) -> None:
        self.left = left = self.left - 1
        if left > 0:
            return
        if (averager := self._averager()) is not None:
            averager.gradient_came(self, parameter)
        elif self.dropped is not None:
            self.dropped.note(parameter)


class _GroupOnGpu(Group):
    """As `Group`; also notes the stream of every gradient."""

    __slots__ = ("_streams",)

    def __init__(self, averager: weakref.ref[Averager], positions: Sequence[int], streams: TorchStreams) -> None:
        super().__init__(averager, positions)
        self._streams = streams

    def __call__(self, parameter: torch.Tensor) -> None:
        self._streams.note()
        super().__call__(parameter)


class _BeforeForward:
    """Tells an averager of the module's forward; a copy of the module has no averager."""

    def __init__(self, averager: weakref.ref[Averager] | None = None) -> None:
        self._averager = averager

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._averager is not None and (averager := self._averager()) is not None:
            averager.before_forward()

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


def when_accumulated(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> list[Any]:
    """Call a function whenever the parameter's gradient has been accumulated; a frozen one may be unfrozen later.

    Returns:
        The hook, to be removed with its `remove()`; nothing for parameters that cannot have gradients.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return []
    register: Any = parameter.register_post_accumulate_grad_hook
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)  # torch rejects hooks otherwise, but keeps them when it is frozen again
    hook = register(call)
    if frozen:
        parameter.requires_grad_(False)
    return [hook]


class _EndOfBackward:
    """The callback for the end of a backward. It is an object because bound methods cannot be referenced weakly."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.task = -1
        self._prehooks: list[Any] = []

    def request(self) -> None:
        """Ask autograd to call this object at the end of the innermost backward."""
        for hook in self._prehooks:
            hook.remove()
        self._prehooks.clear()
        self.task = current_task()
        Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        if self.hooks.callback() is not self:
            return  # another averager's callback has already ended this one
        try:
            if (node := _current_node()) is not None:
                self._end_or_go_on(node)
            elif len(_pending) > 1:
                _end_together(self.task)
            elif (averager := self.hooks.averager()) is not None:
                averager.end_backward()
        except BaseException:
            self.hooks.note_raised(self)
            raise

    def _end_or_go_on(self, node: Any) -> None:
        """After an inner backward: the one around it goes on with one of the next nodes, or has nothing left to do."""
        self.hooks.is_nested = True
        following = [function for function, _ in node.next_functions if function is not None]
        if not following:
            _end_together(self.task)
        self._prehooks += [function.register_prehook(lambda *_: self.request()) for function in following]


#: Sentinels: no backward is running, and the last backward raised. Each is a reference to an object that is gone, so
#: calling it returns None.
no_callback, _raised = (weakref.ref(_EndOfBackward.__new__(_EndOfBackward)) for _ in range(2))

#: Of all threads: a process may run backwards in several. Going through a WeakSet takes more calls.
_pending: set[weakref.ref[_EndOfBackward]] = set()
_pending_lock = threading.RLock()


def _end_together(task: int) -> None:
    """End all averagers' parts in one backward; raises the first error after having ended all of them."""
    with _pending_lock:
        pending = _pending.copy()
    callbacks = [callback for reference in pending if (callback := reference()) is not None]
    ending = [c for c in callbacks if c.task == task and c.hooks.callback() is c]
    ending.sort(key=lambda callback: callback.hooks.order)
    errors: list[BaseException] = []
    for launches in (True, False) if len(ending) > 1 else (False,):
        for callback in list(ending):
            try:
                if (averager := callback.hooks.averager()) is not None:
                    averager.launch_rest() if launches else averager.end_backward()
            except BaseException as error:
                errors.append(error)
                ending.remove(callback)
                callback.hooks.note_raised(callback)
    if errors:
        raise errors[0]


# Gradients that are not averaged ---------------------------------------------------------------------

_watched: list[weakref.ref[OwnGradients]] = []


class OwnGradients:
    """What one averager knows of gradients that are not averaged.

    Args:
        averager: held weakly.

    Attributes:
        present: whether gradients have come since the last reduction.
        sees_steps: whether an optimizer that torch reports steps of updates the averager's parameters.
        counts_updates: whether these steps are the updates that ranks compare; if not, others count.
    """

    def __init__(self, averager: Averager) -> None:
        self.present = self.sees_steps = False
        self.counts_updates = True
        self._averager = weakref.ref(averager)
        self._task = -1
        self._noted: dict[int, int] = {}  # versions of the gradients after the last backward, by identity
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Look at the steps of all optimizers from now on."""
        _watched.append(weakref.ref(self, _watched.remove))
        watch_steps()

    def clear(self) -> None:
        """Note that all gradients are averages, or gone."""
        self.present = False
        self._noted = {}

    def come_in(self, task: int) -> bool:
        """Note that gradients come in a backward that does not average them.

        Returns:
            Whether this is the first one.
        """
        if is_first := task != self._task:
            self.present, self._task, self._noted = True, task, {}
            Variable._execution_engine.queue_callback(self.note)
        return is_first

    def note(self) -> None:
        """Note how the gradients are at the end of a backward that does not average them."""
        if (averager := self._averager()) is not None:
            self._noted = {id(gradient): _version(gradient) for gradient in _gradients(averager)}

    @property
    def were_changed(self) -> bool:
        """Whether the script has written to gradients since they came."""
        averager = self._averager()
        return averager is not None and any(
            self._noted.get(id(gradient), version) != version
            for gradient in _gradients(averager)
            for version in (_version(gradient),)
        )

    def before_use(self, optimizer: Optimizer, is_step: bool) -> None:
        """Average the gradients of an optimizer that are about to be used, if they have to be.

        Args:
            optimizer: whose.
            is_step: whether it updates by them now; a `GradScaler` looks at them before.
        """
        averager = self._averager()
        if averager is None or averager.is_closed:
            return
        last, groups = self._steps.get(optimizer), len(optimizer.param_groups)
        if last is None or last.groups != groups:
            own = {id(parameter) for _, parameter in averager.named_parameters}
            updated = [one for group in optimizer.param_groups for one in group["params"] if id(one) in own]
            last = self._steps[optimizer] = _Step(groups, updated)
        if not last.updated:
            return
        # Where nothing was reduced, the script has assigned gradients. Not on GPUs, where a graph that was captured may
        # have reduced.
        is_assigned = last.reductions == averager.steps and averager.is_on_host and last.first != _first(last.updated)
        if (self.present or is_assigned) and not averager.claim.newer():
            averager.average_before_step()
        if not is_step:
            return
        averager.begin_step()
        self.sees_steps = True
        if self.counts_updates:
            averager.checks.updates.add()
        last.reductions, last.first = averager.steps, _first(last.updated)


class _Step:
    """The last step of an optimizer.

    Attributes:
        groups: how many parameter groups it had.
        updated: the averager's parameters that it updates.
        reductions: the averager's so far.
        first: see `_first`.
    """

    __slots__ = ("first", "groups", "reductions", "updated")

    def __init__(self, groups: int, updated: list[torch.Tensor]) -> None:
        self.groups, self.updated, self.reductions = groups, updated, 0
        self.first: tuple[int, int] | None = None


def _first(parameters: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Identity and version of the first gradient that there is; None without any."""
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            # As `_version`, but without a call: each step asks.
            return id(gradient), 0 if gradient.is_inference() else gradient._version
    return None


def _gradients(averager: Averager) -> list[torch.Tensor]:
    return [gradient for _, one in averager.named_parameters if (gradient := one.grad) is not None]


def _version(gradient: torch.Tensor) -> int:
    return 0 if gradient.is_inference() else gradient._version


# Steps of optimizers ------------------------------------------------------------------------------


class Reader(Protocol):
    """Reads weights."""

    def read_again(self) -> None:
        """Read what an optimizer has just updated."""


#: Where weights are to be read behind the next update. Most steps find none.
after_update: weakref.WeakSet[Reader] = weakref.WeakSet()
_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_steps_lock = threading.Lock()


def before_use(optimizer: Optimizer, is_step: bool = True) -> None:
    """Average gradients of an optimizer that are about to be used, if a backward or the script left some of this rank.

    Raises:
        RingError: see `GradientAverager.average_before_step`.
    """
    for reference in _watched.copy():  # in the order in which the averagers were made, equal on all ranks
        if (own := reference()) is not None:
            own.before_use(optimizer, is_step)


@functools.cache
def watch_steps() -> None:
    """Look at the steps of all optimizers of this process from now on, and count them."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    unscale = GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_averages(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, WrappedOptimizer):
            optimizer.before_unscale()
        before_use(optimizer, is_step=False)
        return unscale(scaler, optimizer, *args, **kwargs)

    GradScaler._unscale_grads_ = unscale_averages  # type: ignore[assignment, method-assign, unused-ignore]


def steps_so_far() -> list[tuple[Optimizer, int]]:
    """The optimizers that live, in the order of their first step, and how many they have made."""
    with _steps_lock:
        return list(_steps.items())


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    with _steps_lock:
        _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if after_update and not is_capturing():
        for reader in list(after_update):
            reader.read_again()


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook. A closure computes gradients, so with one the look comes after each of its calls."""
    if not (_watched or dropped) or torch.compiler.is_compiling():
        return None
    if dropped:
        reject_dropped(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        before_use(optimizer)
        return None

    def evaluate(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        before_use(optimizer)
        return loss

    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}
