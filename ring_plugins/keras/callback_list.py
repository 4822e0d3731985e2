"""Keras's list of callbacks: finding it, putting ours first and last, removing writers, noticing its end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import keras

#: Callbacks that only write files or to the terminal. One rank does it for all.
WRITERS: tuple[type[Any], ...] = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def enclosing_list(callback: Any) -> Any | None:
    """Find the `CallbackList` that is calling a method of `callback` right now; None if something else is.

    Keras 3.15.1, callbacks/callback_list.py:108, calls its callbacks in a loop and gives them no reference to the list.
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
    """Move `first` before and `last` behind all others, and remove the writers on ranks that do not write.

    Args:
        callbacks: a `CallbackList`; it gets a new list, since Keras is iterating over the old one.
        first: the callback that prepares what the others see and write.
        last: the callback that must see what all others did.
        is_writer_rank: whether this rank writes.
        written_by_one: whether only one rank writes.
    """
    kept = [
        callback
        for callback in callbacks.callbacks
        if callback not in (first, last) and (is_writer_rank or not _only_writes(callback, written_by_one))
    ]
    callbacks.callbacks = [first, *kept, last]


def call_when_over(callback: Any, undo: Callable[[], None]) -> weakref.finalize[..., Any] | None:
    """Call `undo` when the `fit` or `evaluate` that is calling `callback` right now has ended, however it ends.

    Keras does not tell its callbacks of an exception. But the list is a local variable of `fit`, so it is freed once
    `fit` has returned and its exception has been handled; if something else holds it (the caller passed a list of its
    own), at exit.

    Args:
        callback: the one whose `on_..._begin` is running.
        undo: harmless if there is nothing left to undo.

    Returns:
        The finalizer, to be detached when it is no longer wanted; None if no list is calling.
    """
    callbacks = enclosing_list(callback)
    return None if callbacks is None else weakref.finalize(callbacks, undo)


def _only_writes(callback: Any, written_by_one: bool) -> bool:
    return isinstance(callback, WRITERS if written_by_one else keras.callbacks.ProgbarLogger)
