"""Work with Keras's list of callbacks: find it, put ours first and last, leave writing to one rank, detect its end."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.keras.job import connect
from ring_plugins.keras.validation import all_equal
from ring_plugins.keras.writers import ORBAX, WRITERS, HeldWriter

#: Callbacks that save weights.
_SAVERS = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint, *ORBAX)


def enclosing_list(callback: Any) -> Any | None:
    """Find the `CallbackList` that is calling a method of `callback`; None if the caller is something else.

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


def arrange(
    callbacks: Any,
    first: Any,
    last: Any,
    writes_here: Callable[[], bool],
    written_by_one: bool,
    recovers: bool,
    saves_together: bool = False,
) -> list[HeldWriter]:
    """Move `first` to the start and `last` to the end, and leave writing to one rank.

    Args:
        callbacks: a `CallbackList`; it gets a new list, since Keras is iterating over the old one.
        first: callback that synchronizes the state before the others read it.
        last: callback that must run after all others.
        writes_here: whether this rank is the one that writes now.
        written_by_one: whether only one rank writes checkpoints and logs; only one shows a progress bar anyway.
        recovers: whether another rank takes over if that one is lost, so that all keep the writers.
        saves_together: whether the other ranks take part, in `last`, when one saves. Callbacks that save then come
            after all others, which may call collectives themselves.

    Returns:
        The writers that are kept for that.
    """
    held: list[HeldWriter] = []
    kept = []
    for callback in callbacks.callbacks:
        if callback in (first, last):
            continue
        if not isinstance(callback, WRITERS if written_by_one else keras.callbacks.ProgbarLogger):
            kept.append(callback)
        elif recovers:
            held.append(HeldWriter(callback, writes_here))
            kept.append(held[-1])
        elif writes_here():
            kept.append(callback)
    savers = [callback for callback in kept if saves_together and isinstance(callback, _SAVERS)]
    callbacks.callbacks = [first, *(callback for callback in kept if callback not in savers), *savers, last]
    return held


def show_on_one_rank(callback: Any) -> None:
    """Leave the progress bar of the `evaluate` or `predict` that is calling `callback` to rank 0."""
    callbacks = enclosing_list(callback)
    if callbacks is not None and connect().topology.rank:
        shown = keras.callbacks.ProgbarLogger
        callbacks.callbacks = [one for one in callbacks.callbacks if not isinstance(one, shown)]


def check_first_step(callback: Any, check: Callable[[], Any]) -> None:
    """Add a callback to the running `fit` that compares the weights of all ranks after the first step.

    Does nothing if the list already has such a callback; `BroadcastCallback` is one.

    Args:
        callback: callback whose `on_train_begin` is running, on all ranks.
        check: constructs the callback that compares.
    """
    callbacks = enclosing_list(callback)
    if callbacks is None or any(getattr(other, "compares_weights", False) for other in callbacks.callbacks):
        return
    added = check()
    added.set_model(callback.model)
    added.set_params(callback.params)
    callbacks.callbacks = [*callbacks.callbacks, added]  # Keras is iterating over the old list
    # Keras 3.15.1, callbacks/callback_list.py:82: a list whose callbacks have no batch hooks calls them in a thread.
    callbacks._async_train = False


def saves_weights(callbacks: Any) -> bool:
    """Whether a `CallbackList` has a callback that saves weights."""
    return any(isinstance(callback, _SAVERS) for callback in callbacks.callbacks)


#: What a callback decides from the numbers that its rank sees, by class.
_DECISIONS = {
    keras.callbacks.EarlyStopping: ("best_epoch", "stopped_epoch"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


def decisions_of(callbacks: Any) -> dict[str, Any]:
    """What the callbacks of a `CallbackList`, None if it is unknown, have decided on this rank, by a name for each."""
    return {
        f"{type(callback).__name__}.{name}": vars(callback).get(name)
        for callback in (callbacks.callbacks if callbacks is not None else ())
        for kind, names in _DECISIONS.items()
        if isinstance(callback, kind)
        for name in names
    }


def differing_decisions(by_rank: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    """Those that differ among the ranks that have made them, in words; "" if none does."""
    found = []
    for name in dict.fromkeys(name for made in by_rank for name in made):
        made = {rank: decisions[name] for rank, decisions in zip(ranks, by_rank, strict=True) if name in decisions}
        if not all_equal([*made.values()]):
            found.append(f"{name} ({', '.join(f'rank {rank}: {value}' for rank, value in made.items())})")
    return ", ".join(found)


def check_formats(callbacks: Any) -> None:
    """Refuse to save models in a format for which Keras asks an optimizer's variables rather than the optimizer.

    Raises:
        ArgumentError: a `ModelCheckpoint` writes the old HDF5 format, or an `OrbaxCheckpoint` more than weights.
    """
    for callback in callbacks.callbacks:
        if isinstance(callback, ORBAX) and not callback.save_weights_only:
            raise ArgumentError(
                "OrbaxCheckpoint would save only a part of a sharded optimizer. Use ModelCheckpoint with the format "
                ".keras, or OrbaxCheckpoint(save_weights_only=True)."
            )
        if not isinstance(callback, keras.callbacks.ModelCheckpoint) or callback.save_weights_only:
            continue
        if str(callback.filepath).endswith((".h5", ".hdf5")):
            raise ArgumentError(
                f"ModelCheckpoint({str(callback.filepath)!r}) would save only a part of a sharded optimizer. Use the "
                "format .keras."
            )


def call_when_over(callback: Any, undo: Callable[[], None]) -> weakref.finalize[..., Any] | None:
    """Call `undo` when the `fit` or `evaluate` that is calling `callback` ends, even by an exception.

    Keras does not notify callbacks of an exception. But the list is a local variable of `fit`, so it is freed once
    `fit` has returned and its exception has been handled. If something else refers to the list (because the caller
    passed a `CallbackList`), `undo` runs at exit.

    Args:
        callback: callback whose `on_..._begin` is running.
        undo: must be a no-op if there is nothing left to undo.

    Returns:
        The finalizer, which the caller may detach; None if no list is calling.
    """
    callbacks = enclosing_list(callback)
    return None if callbacks is None else call_when_freed(callbacks, undo)


def call_when_freed(callbacks: Any, undo: Callable[[], None]) -> weakref.finalize[..., Any]:
    """As `call_when_over`, for a list that is known."""
    return weakref.finalize(callbacks, undo)
