"""Tells the other ranks when an exception ends a `fit` on this one, so that none waits for its next step.

`BroadcastCallback` does that itself. For an optimizer of the script's own in a `fit` without that callback, the first
step finds the running `fit` on the stack, and puts a callback into its list. Later calls of `fit` may run a step that
is compiled already, so `make_train_function`, which each of them calls first, is replaced on the model.

The same callback compares the ranks' weights once, after the first step: without `BroadcastCallback` nothing may have
made them equal.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, Protocol

import keras

from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.core.exit_hooks import exit_status
from ring_plugins.core.world import current
from ring_plugins.keras.callback_list import call_when_freed
from ring_plugins.keras.state import weight_checksums
from ring_plugins.observe.consistency import differing_weights, is_check_wanted


class Averaging(Protocol):
    """What `averaging.GradientAveraging` does; see there."""

    is_compared: bool

    @property
    def is_installed(self) -> bool: ...

    def communicators(self) -> list[Communicator[Any]]: ...

    def release(self) -> None: ...


#: Watches whose `fit` has begun and not ended, as far as they know.
_watching: weakref.WeakSet[_Watch] = weakref.WeakSet()
_REPLACED = "make_train_function"


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


def watch_fit(averaging: Averaging) -> bool:
    """Watch the `fit` that is calling an optimizer, and later ones of its model.

    Returns:
        Whether a `fit` is calling, so that it need not be looked for again.
    """
    frame = _fit_above(sys._getframe(1))
    if frame is None:
        return False
    model = frame.f_locals["self"]
    _add(frame.f_locals["callbacks"], model, averaging)
    if _REPLACED not in vars(model):
        _replace(model, averaging)
    return True


def _fit_above(frame: FrameType | None) -> FrameType | None:
    # Keras 3.15.1, backend/*/trainer.py: the variables of `fit`.
    while frame is not None:
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("callbacks"), keras.callbacks.CallbackList):
            return frame if isinstance(frame.f_locals.get("self"), keras.Model) else None
        frame = frame.f_back
    return None


def argument_of_fit(name: str) -> Any:
    """What the script passed to the `fit` that is calling a callback, None if no `fit` is."""
    frame = _fit_above(sys._getframe(1))
    return None if frame is None else frame.f_locals.get(name)


def _replace(model: Any, averaging: Averaging) -> None:
    original, watched = type(model).make_train_function, weakref.ref(averaging)

    @functools.wraps(original)
    def make_train_function(*args: Any, **options: Any) -> Any:
        model = reference()
        averaging, frame = watched(), _fit_above(sys._getframe(1))
        if averaging is not None and averaging.is_installed and frame is not None and frame.f_locals["self"] is model:
            _add(frame.f_locals["callbacks"], model, averaging)
        return original(model, *args, **options)

    reference = weakref.ref(model)
    vars(model)[_REPLACED] = make_train_function  # past Keras's `__setattr__`, which tracks what is assigned


def _add(callbacks: Any, model: Any, averaging: Averaging) -> None:
    """Put a watch into a list of callbacks, unless another callback does its work."""
    for watch in list(_watching):  # an exception that the script keeps may keep an interrupted fit alive
        if watch.averaging is averaging and watch not in callbacks.callbacks:
            watch.abandon()
    if any(getattr(callback, "tells_interruptions", False) for callback in callbacks.callbacks):
        return
    is_compared = averaging.is_compared or any(getattr(one, "compares_weights", False) for one in callbacks.callbacks)
    averaging.is_compared = True
    # A communicator of its own, on which `abandon` reaches ranks that already compare.
    comparing = None if is_compared or not is_check_wanted() else current().new_communicator("first step")
    watch = _Watch(averaging, comparing)
    watch.set_model(model)
    _watching.add(watch)
    callbacks.callbacks = [*callbacks.callbacks, watch]  # Keras may be iterating over the old list
    # Keras 3.15.1, callbacks/callback_list.py:82: a list whose callbacks have no batch hooks calls them in a thread.
    callbacks._async_train = False
    call_when_freed(callbacks, watch.abandon).atexit = False  # type: ignore[misc, unused-ignore]


class _Watch(keras.callbacks.Callback):
    """Notices whether `fit` comes to its end, and compares the weights after its first step.

    Args:
        averaging: of the optimizer.
        comparing: communicator for the comparison, None if there is to be none.
    """

    tells_interruptions = True

    def __init__(self, averaging: Averaging, comparing: Communicator[Any] | None) -> None:
        super().__init__()
        self.averaging = averaging
        self._comparing = comparing

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._comparing is None:
            return
        found = differing_weights(lambda: weight_checksums(self._model), "after the first step", self._comparing)
        if found and self._comparing.rank == 0:
            logger.warning(
                f"{found} Add ring_plugins.keras.BroadcastCallback() to fit(callbacks=...) on all ranks, or call "
                "ring_plugins.keras.broadcast_variables(model) before fit: ranks that begin with different weights "
                "train different models, although their gradients are averaged. If they differ on purpose, "
                "RING_WEIGHT_CHECK=0 switches this comparison off."
            )
        self._end_comparison()

    def _end_comparison(self) -> None:
        if self._comparing is not None:
            self._comparing.close()
            self._comparing = None

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        _watching.discard(self)

    def abandon(self) -> None:
        """Tell the ranks that still train, and release the averaging; do nothing after a `fit` that came to its end."""
        if self not in _watching:
            return
        _watching.discard(self)
        comparing = [] if self._comparing is None else [self._comparing]
        tell_interrupted([*self.averaging.communicators(), *comparing])
        self._end_comparison()
        self.averaging.release()
        self._model.train_function = None  # traced with the averaging; the next fit makes both anew
