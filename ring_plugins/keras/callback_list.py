"""The list that Keras keeps of callbacks: who comes last in it, who writes, and when it is over."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import keras

#: Callbacks that only write files, or the terminal. One rank does it for all.
WRITERS: tuple[type[Any], ...] = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def enclosing_list(callback: Any) -> Any | None:
    """The `CallbackList` that calls `callback.set_model` right now, or None where something else does.

    Keras 3.15.1, callbacks/callback_list.py:108: a callback is told its model in a loop over the list, and has no
    other way to the list.
    """
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, keras.callbacks.CallbackList) and callback in found.callbacks:
            return found
    return None


def arrange(callbacks: Any, first: Any, last: Any, is_writer_rank: bool, written_by_one: bool) -> None:
    """Put `first` before and `last` behind all others, and on ranks that do not write leave the writers out.

    Args:
        callbacks: a `CallbackList`; it gets a new list, since Keras walks through the old one meanwhile.
        first: the callback that prepares what the others see and write.
        last: the callback that must see what all others did.
        is_writer_rank: whether this rank writes.
        written_by_one: whether only one rank is to write.
    """
    kept = [
        callback
        for callback in callbacks.callbacks
        if callback not in (first, last) and (is_writer_rank or not _only_writes(callback, written_by_one))
    ]
    callbacks.callbacks = [first, *kept, last]


def when_over(callback: Any, undo: Callable[[], None]) -> weakref.finalize[..., Any] | None:
    """Have `undo` called when the `fit` or `evaluate` that calls `callback` right now has ended, however it ends.

    Keras tells its callbacks nothing of an exception. But the list is a local variable of `fit`, so it goes when `fit`
    is left and its exception dealt with; where something keeps it (a list of the caller's own), at exit.

    Args:
        callback: whose `on_..._begin` is running.
        undo: harmless when there is nothing left to undo.

    Returns:
        What will call it, to be detached where that is no longer wanted; None where no list calls.
    """
    callbacks = enclosing_list(callback)
    return None if callbacks is None else weakref.finalize(callbacks, undo)


def _only_writes(callback: Any, written_by_one: bool) -> bool:
    return isinstance(callback, WRITERS if written_by_one else keras.callbacks.ProgbarLogger)
