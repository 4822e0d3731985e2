"""The `fit` that is running: its list of callbacks, its arguments, and its end, also by an exception.

Keras gives callbacks no reference to their list, and does not tell them of an exception. So the list is looked for on
the stack. It is a local variable of `fit`, and freed once `fit` has returned and its exception has been handled.

`BroadcastCallback` tells the other ranks when an exception ends its `fit`, so that none waits for this rank's next
step. For an optimizer of the script's own in a `fit` without that callback, the first step finds the running `fit`, and
puts a callback into its list that does so. Later calls of `fit` may run a step that is compiled already, so
`make_train_function`, which each of them calls first, is replaced on the model.

Without `BroadcastCallback` nothing may have made the ranks' weights equal, and `MetricAverageCallback` shows averages
over different models, which look right. So it compares the weights after the first step. On JAX, the callback for an
optimizer of the script's own also reads weights where that is due, since a compiled step cannot.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import keras

from ring_plugins.core.base.errors import DriftError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.exit_hooks import exit_status
from ring_plugins.core.groups import Group
from ring_plugins.core.world import announce_training, current
from ring_plugins.keras.job import members
from ring_plugins.keras.state import optimizers_of, weight_checksums
from ring_plugins.observe.consistency import differing_weights, is_check_wanted, is_compared_after
from ring_plugins.other_names import HOROVODS_BROADCAST, as_in_script

#: Attribute of an optimizer that averages: its `GradientAveraging`.
AVERAGING = "_ring_averaging"
_REPLACED = "make_train_function"
#: Watches whose `fit` has begun and not ended, as far as they know.
_watching: weakref.WeakSet[_Watch] = weakref.WeakSet()


def enclosing_list(callback: Any) -> Any | None:
    """Find the `CallbackList` that is calling a method of `callback`; None if the caller is something else."""
    frame = sys._getframe(1)
    for _ in range(6):  # a joining process looks from four calls below a callback, whose class a script may extend
        if frame.f_back is None:
            return None
        frame = frame.f_back
        found = frame.f_locals.get("self")  # Keras 3.15.1, callbacks/callback_list.py:108
        if isinstance(found, keras.callbacks.CallbackList) and callback in found.callbacks:
            return found
    return None


def _fit_above(frame: FrameType | None, method: str = "fit") -> FrameType | None:
    # Keras 3.15.1, backend/*/trainer.py: the variables of `fit` and `evaluate`.
    while frame is not None:
        if frame.f_code.co_name == method and isinstance(frame.f_locals.get("callbacks"), keras.callbacks.CallbackList):
            return frame if isinstance(frame.f_locals.get("self"), keras.Model) else None
        frame = frame.f_back
    return None


def argument_of_fit(name: str) -> Any:
    """What the script passed to the `fit` that is calling a callback, None if no `fit` is."""
    return argument_of("fit", name)


def argument_of(method: str, name: str) -> Any:
    """What was passed to the innermost `fit` or `evaluate` of this name that is running, None if there is none."""
    frame = _fit_above(sys._getframe(1), method)
    return None if frame is None else frame.f_locals.get(name)


def call_when_over(callback: Any, undo: Callable[[], None]) -> weakref.finalize[..., Any] | None:
    """Call `undo` when the `fit` or `evaluate` that is calling `callback` ends, even by an exception.

    If something else refers to the list (because the caller passed a `CallbackList`), `undo` is not called.

    Args:
        callback: callback whose `on_..._begin` is running.
        undo: must be a no-op if there is nothing left to undo.

    Returns:
        The finalizer, which the caller may detach; None if no list is calling.
    """
    callbacks = enclosing_list(callback)
    return None if callbacks is None else _when_freed(callbacks, undo)


def _when_freed(callbacks: Any, undo: Callable[[], None]) -> weakref.finalize[..., Any]:
    finalizer = weakref.finalize(callbacks, undo)
    finalizer.atexit = False  # type: ignore[misc, unused-ignore] # at exit the other ranks learn how this one ended
    _finalizers.setdefault(callbacks, []).append(finalizer)
    return finalizer


#: By list of callbacks, what `_when_freed` was asked for.
_finalizers: weakref.WeakKeyDictionary[Any, list[weakref.finalize[..., Any]]] = weakref.WeakKeyDictionary()
_ends_on_all = False


def end_on_all() -> None:
    """Undo now what callbacks do when the running `fit` is over: an exception is to end it here, on all ranks alike.

    The other ranks need not be told of it, and keep the memory and communicators of the script's own optimizers.
    """
    global _ends_on_all
    frame = _fit_above(sys._getframe(1))
    _ends_on_all = True
    try:
        for finalizer in [] if frame is None else _finalizers.get(frame.f_locals["callbacks"], []):
            finalizer()
    finally:
        _ends_on_all = False


def ends_on_all() -> bool:
    """Whether `end_on_all` is ending the `fit`, and not an exception on some ranks."""
    return _ends_on_all


def _append(callbacks: Any, added: Any, model: Any) -> None:
    added.set_model(model)
    callbacks.callbacks = [*callbacks.callbacks, added]  # Keras may be iterating over the old list
    # Keras 3.15.1, callbacks/callback_list.py:82: a list whose callbacks have no batch hooks calls them in a thread.
    callbacks._async_train = False


def _any_has(callbacks: Any, attribute: str) -> bool:
    return any(getattr(callback, attribute, False) for callback in callbacks.callbacks)


def group_of(callback: Any) -> Group | None:
    """The group of a callback: that it was given, or that in which its model trains or has last been trained.

    Raises:
        ArgumentError: this rank is not in it.
    """
    callbacks, model = enclosing_list(callback), callback._model  # on JAX, `model` would synchronize it
    found: Group | None = callback.group
    if found is None:
        others = [] if callbacks is None else callbacks.callbacks
        averagings = [vars(optimizer).get(AVERAGING) for optimizer in optimizers_of(model)]
        groups = [one.group for one in others if getattr(one, "trains_group", False)]
        groups += [one.settings.group for one in averagings if one is not None]
        found = groups[0] if groups else _trained_in.get(model)
        if groups:
            _trained_in[model] = found
    members(found)
    return found


#: The groups of models that callbacks have seen in training, by default of their evaluation.
_trained_in: weakref.WeakKeyDictionary[Any, Group | None] = weakref.WeakKeyDictionary()


def expect_broadcast(callback: Any) -> None:
    """Compare the ranks' weights after the first step, if the list of `callback` has no `BroadcastCallback`.

    Args:
        callback: callback whose `on_train_begin` is running, on all ranks.
    """
    if is_check_wanted():
        announce_training()
        callbacks = enclosing_list(callback)
        if callbacks is not None and not _any_has(callbacks, "compares_weights"):
            _append(callbacks, _FirstStepCheck(group_of(callback)), callback.model)


class _FirstStepCheck(keras.callbacks.Callback):
    """Raises after the first step if the weights differ among ranks; warns if nothing averages the gradients."""

    compares_weights = True
    _is_done = False

    def __init__(self, group: Group | None) -> None:
        super().__init__()
        self._group = group

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_done:
            return
        self._is_done = True
        if found := differing_weights(
            lambda: weight_checksums(self.model), "after the first step", members(self._group).communicator
        ):
            switch = "If the weights differ on purpose, RING_WEIGHT_CHECK=0 switches this comparison off."
            raise DriftError(f"{found} {_remedy()} {switch}")
        averages = any(AVERAGING in vars(optimizer) for optimizer in optimizers_of(self.model))
        if members(self._group).communicator.rank == 0 and not averages:
            logger.warning(f"no gradients are averaged: each rank trains by itself. {_remedy()}")


def _remedy() -> str:
    broadcast = as_in_script("ring_plugins.keras.BroadcastCallback()", HOROVODS_BROADCAST)
    return (
        f"Add {broadcast} to fit(callbacks=...) on all ranks: it starts them from the same weights and averages their "
        "gradients."
    )


def tell_interrupted(communicators: Iterable[Communicator[Any]], cause: Exception | None = None) -> None:
    """Let ranks that wait for this one in the next step raise; called after an exception that ended `fit`.

    Args:
        communicators: of the steps.
        cause: the exception, if it is known.
    """
    # Not an interruption: a rank that raises in the same step, but later, still gets its averages before that.
    if cause is None and _is_process_ending():
        cause = RuntimeError(f"this rank ends in the middle of fit(), with exit status {exit_status()} (sys.exit).")
        current().leave(exit_status())  # so that they hear of a peer that failed, not only of one that rejects a step
    if cause is None:
        cause = RuntimeError("an exception ended fit(), and the script caught it. All ranks may call fit() again.")
    for communicator in communicators:
        communicator.reject("the next step", cause)


def _is_process_ending() -> bool:
    """Whether nothing has caught what ended `fit`: a `sys.exit`, of which no hook hears before the frames are freed.

    Then the finalizer of the list of callbacks is the outermost call.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code is weakref.finalize.__call__.__code__


def watch_fit(averaging: Any) -> bool:
    """Watch the `fit` that is calling an optimizer, and later ones of its model.

    Args:
        averaging: the `GradientAveraging` of the optimizer.

    Returns:
        Whether a `fit` is calling, so that it need not be looked for again.
    """
    frame = _fit_above(sys._getframe(1))
    if frame is None:
        return False
    model = frame.f_locals["self"]
    _watch(frame.f_locals["callbacks"], model, averaging)
    if _REPLACED not in vars(model):
        _replace(model, averaging)
    return True


def _replace(model: Any, averaging: Any) -> None:
    original, watched = type(model).make_train_function, weakref.ref(averaging)

    @functools.wraps(original)
    def make_train_function(*args: Any, **options: Any) -> Any:
        model = reference()
        averaging, frame = watched(), _fit_above(sys._getframe(1))
        if averaging is not None and averaging.is_installed and frame is not None and frame.f_locals["self"] is model:
            _watch(frame.f_locals["callbacks"], model, averaging)
        return original(model, *args, **options)

    reference = weakref.ref(model)
    vars(model)[_REPLACED] = make_train_function  # past Keras's `__setattr__`, which tracks what is assigned


def _watch(callbacks: Any, model: Any, averaging: Any) -> None:
    """Put a watch into a list of callbacks, unless another callback does its work."""
    for watch in list(_watching):  # an exception that the script keeps may keep an interrupted fit alive
        if watch.averaging is averaging and watch not in callbacks.callbacks:
            watch.abandon()
    if _any_has(callbacks, "tells_interruptions"):
        return
    watch = _Watch(averaging)
    _append(callbacks, watch, model)
    _watching.add(watch)
    _when_freed(callbacks, watch.abandon)


class _Watch(keras.callbacks.Callback):
    """Notices whether `fit` comes to its end, and reads weights where the steps of the optimizer cannot.

    Args:
        averaging: of the optimizer.
    """

    tells_interruptions = True

    def __init__(self, averaging: Any) -> None:
        super().__init__()
        self.averaging, self._steps = averaging, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps += 1
        checks, is_due = self.averaging.checks, self._steps == 1 or is_compared_after(self._steps)
        if is_due and not checks.weights.is_readable and is_check_wanted():
            self._model.jax_state_sync()
            checks.look(self._steps)  # travels with the gradients of the next step

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        _watching.discard(self)

    def abandon(self) -> None:
        """Tell the ranks that still train, and release the averaging; do nothing after a `fit` that came to its end."""
        if self not in _watching:
            return
        _watching.discard(self)
        if _ends_on_all:
            return
        tell_interrupted(self.averaging.communicators())
        self.averaging.release()
        self._model.train_function = None  # traced with the averaging; the next fit makes both anew
