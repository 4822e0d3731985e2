"""The hooks of an averager: they count gradients as autograd accumulates them, and tell of a backward's end.

Autograd calls a hook once a parameter and step, thousands of times, so a hook only counts. Parameters that lie in one
bucket share a counter (`Group`); the averager looks when all gradients of a counter have come, and at the first
gradient of a backward. While the order of gradients is being learned, a second hook notes each arrival.

torch has no hook in C++ for many parameters: `torch.autograd.graph.register_multi_grad_hook` puts a Python closure on
each, and takes 4.3 µs a parameter where these take 0.7 (5,000 parameters, torch 2.13, busy machine). A hook that does
nothing takes as long as these: the time is autograd's own.

Hooks hold the averager weakly: an averager that nobody refers to any more is gone. If it averaged, its hooks stay, and
tell of gradients that nobody averages any more, until another averager takes the parameters.

**The end of a backward.** At the first gradient, an averager asks autograd for a callback. Autograd drops its callbacks
when backward raises. It holds the only reference to ours, so once the callback is gone the backward has failed. A
backward may run several others inside, as reentrant checkpoints do. Autograd calls back at the end of the innermost
one, and we ask again at the next node of the one around it, until the outermost ends.

Averagers whose gradients come from the same backward are ended together, in an order that is the same on all ranks.
Each launches what is left before any of them waits, so no two ranks wait for each other in different averagers. One
that is alone need not launch: it may reduce synchronously.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from ring_plugins.core.control.wait import hindrances
from ring_plugins.torch.device import TorchStreams
from ring_plugins.torch.gradient_buckets import GradientBuckets
from ring_plugins.torch.own_gradients import DroppedAverager, forget_dropped

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
    """What hooks call; a `GradientAverager`."""

    def gradient_came(self, group: Group, parameter: torch.Tensor) -> None:
        """Handle the first gradient of a backward, the last one of a group, and any that came after it."""

    def before_forward(self) -> None:
        """Look what has changed before the forward of the module."""

    def launch_rest(self) -> None:
        """Launch what is left at the end of a backward, without waiting."""

    def end_backward(self) -> None:
        """Launch what `launch_rest` has not, and wait for everything."""


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

    def put(
        self, parameters: Sequence[nn.Parameter], kept: Collection[GradientBuckets], module: nn.Module | None
    ) -> None:
        """Put one hook on all parameters that are in one bucket in each of the sets of buckets, in place of all hooks.

        Args:
            parameters: of the model.
            kept: the sets of buckets.
            module: the model, if its forward is to be noticed.
        """
        self.remove()
        for parameter in parameters:
            retire(parameter)
        together: dict[tuple[int, ...], list[int]] = {}
        for position in range(len(parameters)):
            key = tuple(buckets.bucket_of[position] for buckets in kept)
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

    def leave_behind(self, dropped: DroppedAverager) -> None:
        """From now on, tell what the averager left of every parameter that gets a gradient: the averager is gone."""
        groups, handles = self.groups.copy(), self._handles_of_groups.copy()
        self._handles_of_groups.clear()
        self.remove()
        for group in groups if handles else ():
            group.left, group.dropped = 0, dropped

    def fit(self, buckets: GradientBuckets) -> bool:
        """Whether the parameters of each group are in one of these buckets."""
        return all(len({buckets.bucket_of[i] for i in group.positions}) <= 1 for group in self.groups)

    def group_at(self, position: int) -> Group:
        """The group of the parameter at this position."""
        return next(group for group in self.groups if position in group.positions)

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


def retire(parameter: torch.Tensor) -> None:
    """Let hooks of averagers that are gone do nothing from now on."""
    forget_dropped(parameter)
    # torch 2.4 to 2.13: hooks by the number that their handle has, or None.
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, Group) and hook.dropped is not None:
            hook.left, hook.dropped = _UNCOUNTED, None


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
