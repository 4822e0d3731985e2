"""The events that torch reports: a gradient is accumulated, a backward ends, a module gets a parameter."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ring_plugins.core.control.wait import hindrances
from ring_plugins.torch import changes
from ring_plugins.torch.ownership import is_claimed


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


#: Of a backward, told to others that wait for its gradients.
_RAISED = (
    "a backward raised, and the script caught that, so its gradients are missing until its next forward or step. Let "
    "such an error end the job, or let all ranks skip the step by skip_step_on."
)


class Averager(Protocol):
    """What a `Backward` tells of its end; a `GradientAverager`."""

    def launch_rest(self) -> None:
        """Launch what is left at the end of a backward, without waiting."""

    def end_backward(self) -> None:
        """Launch what `launch_rest` has not, and wait for everything."""


class Counter(Protocol):
    """What counts gradients in a backward; `GradientHooks`."""

    def stop_counting(self) -> None:
        """Note that a backward has ended or raised; called at any moment, and perhaps twice."""


#: Number of the calling thread's innermost backward, -1 outside of one.
current_task: Callable[[], int] = torch._C._current_graph_task_id
#: The node of the graph that the calling thread works on: none in a callback, unless the backward runs inside another.
_current_node: Callable[[], Any] = torch._C._current_autograd_node


class Backward:
    """The backward, if any, in which an averager has seen gradients.

    Autograd drops its callbacks when backward raises. It holds the only reference to ours, so once the callback is gone
    the backward has failed.

    A backward may run several others inside, as reentrant checkpoints do. Autograd calls back at the end of the
    innermost one, and we ask again at the next node of the one around it, until the outermost ends.

    Averagers whose gradients come from the same backward are ended together, in an order that is the same on all ranks.
    Each launches what is left before any of them waits, so no two ranks wait for each other in different averagers. One
    that is alone need not launch: it may reduce synchronously.

    Args:
        order: place among all averagers of this process.
        averager: held weakly.
        counter: its hooks.

    Attributes:
        callback: weak reference to the callback that autograd holds; returns None outside of a backward.
        task: the backward, as autograd numbers them, in which the first gradient was seen.
        is_nested: whether the last backward contained others; True before the first, which might.
    """

    def __init__(self, order: int, averager: Averager, counter: Counter) -> None:
        self.order, self.averager, self._counter = order, weakref.ref(averager), counter
        self.callback: weakref.ref[_EndOfBackward] = no_callback
        self.task = -1
        self.is_nested = True

    @property
    def is_running(self) -> bool:
        """Whether autograd still holds the callback, and the calling thread is inside a backward."""
        return self.callback() is not None and current_task() != -1

    @property
    def has_raised(self) -> bool:
        """Whether a backward began and did not come to its end."""
        return self.callback is not no_callback and not self.is_running

    def begin(self) -> None:
        """Ask autograd for a callback at the end; called inside a backward, at its first gradient."""
        self.is_nested = False
        self.task = current_task()
        backward = weakref.ref(self)

        def gone(reference: Any) -> None:
            if (one := backward()) is not None and one.callback is reference:
                one._end_as(_raised)

        callback = _EndOfBackward(self)
        self.callback = weakref.ref(callback, gone)
        try:
            with _pending_lock:
                _pending.add(weakref.ref(callback, _pending.discard))
            callback.request()
        except BaseException:
            self.note_raised(callback)
            raise

    def end(self) -> None:
        """Note that the end has been handled."""
        self._end_as(no_callback)

    def note_raised(self, callback: _EndOfBackward) -> None:
        """Note that the backward of this callback raised; the error's traceback may keep the callback alive."""
        if self.callback() is callback:
            self._end_as(_raised)

    def _end_as(self, callback: weakref.ref[_EndOfBackward]) -> None:
        self.callback = callback
        if callback is _raised:
            hindrances[self] = _RAISED
        elif hindrances:
            hindrances.pop(self, None)
        self._counter.stop_counting()


class _EndOfBackward:
    """The callback for the end of a backward. It is an object because bound methods cannot be referenced weakly."""

    def __init__(self, backward: Backward) -> None:
        self.backward = backward
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
        if self.backward.callback() is not self:
            return  # another averager's callback has already ended this one
        try:
            if (node := _current_node()) is not None:
                self._end_or_go_on(node)
            elif len(_pending) > 1:
                _end_together(self.task)
            elif (averager := self.backward.averager()) is not None:
                averager.end_backward()
        except BaseException:
            self.backward.note_raised(self)
            raise

    def _end_or_go_on(self, node: Any) -> None:
        """After an inner backward: the one around it goes on with one of the next nodes, or has nothing left to do."""
        self.backward.is_nested = True
        following = [function for function, _ in node.next_functions if function is not None]
        if not following:
            _end_together(self.task)
        self._prehooks += [function.register_prehook(lambda *_: self.request()) for function in following]


#: In place of a callback before the first backward and after one that ended, and after one that raised. Each refers to
#: an object that is gone, so calling it returns None.
no_callback, _raised = (weakref.ref(_EndOfBackward.__new__(_EndOfBackward)) for _ in range(2))

#: Of all threads: a process may run backwards in several. Going through a WeakSet takes more calls.
_pending: set[weakref.ref[_EndOfBackward]] = set()
_pending_lock = threading.RLock()


def _end_together(task: int) -> None:
    """End all averagers' parts in one backward; raises the first error after having ended all of them."""
    with _pending_lock:
        pending = _pending.copy()
    callbacks = [callback for reference in pending if (callback := reference()) is not None]
    ending = [c for c in callbacks if c.task == task and c.backward.callback() is c]
    ending.sort(key=lambda callback: callback.backward.order)
    errors: list[BaseException] = []
    for launches in (True, False) if len(ending) > 1 else (False,):
        for callback in list(ending):
            try:
                if (averager := callback.backward.averager()) is not None:
                    averager.launch_rest() if launches else averager.end_backward()
            except BaseException as error:
                errors.append(error)
                ending.remove(callback)
                callback.backward.note_raised(callback)
    if errors:
        raise errors[0]


# Walking through a model of thousands of parameters at every step would take milliseconds. Instead, torch calls these
# hooks whenever any module gets a parameter or a submodule, so an unchanged count means an unchanged model.
_registrations = 0


class Replaced:
    """An averager's parameter that a script has replaced in a module, which need not be the model that it trains.

    Args:
        old: the parameter, which requires a gradient.
        new: what came instead, nothing if it is gone.

    Attributes:
        is_used: whether a gradient of the old one has come since.
    """

    def __init__(self, old: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
        self.is_used = False
        self._old, self._new = weakref.ref(old), [weakref.ref(one) for one in new]
        # Comes before the hooks that average.
        self._hook: Any = old.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, gradient: torch.Tensor) -> None:
        self.is_used = True

    def new(self) -> list[torch.Tensor]:
        """What came instead and is still there."""
        return [one for reference in self._new if (one := reference()) is not None]

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Whether it tells about this parameter."""
        return self._old() is parameter

    def forget(self) -> None:
        """Look at the parameter no longer."""
        self._hook.remove()


_replaced: dict[int, Replaced] = {}  # by identity


def _note_registration(module: nn.Module, name: str, value: Any) -> None:
    global _registrations
    _registrations += 1
    changes.note()
    before = vars(module).get("_parameters", {}).get(name)
    before = vars(module).get("_modules", {}).get(name) if before is None else before
    if before is value or (before is None and not _replaced):
        return
    new, old = _tensors(value), _tensors(before)
    for one in itertools.chain(new, old):
        if (known := _replaced.pop(id(one), None)) is not None:
            known.forget()
    for one in old:
        if one.requires_grad and is_claimed(one) and all(one is not other for other in new):
            _replaced[id(one)] = Replaced(one, new)


def _tensors(registered: Any) -> list[torch.Tensor]:
    if isinstance(registered, nn.Module):
        return list(registered.parameters())
    return [] if registered is None else [registered]


def replaced(parameter: torch.Tensor) -> Replaced | None:
    """What a script has put in place of a parameter, None if nothing."""
    known = _replaced.get(id(parameter))
    return known if known is not None and known.is_of(parameter) else None


def are_some_replaced() -> bool:
    """Whether any parameter of an averager was replaced."""
    return bool(_replaced)


register_module_parameter_registration_hook(_note_registration)
register_module_module_registration_hook(_note_registration)


def registrations() -> int:
    """How many parameters and submodules have been registered with any module of this process so far."""
    return _registrations
