"""Who writes: progress bar, checkpoints and logs belong to one rank, also after that rank is lost.

In most jobs the callbacks that only write are removed from the lists of all ranks but one. A job that goes on when
ranks are lost (`on_failure="continue"`) keeps them everywhere, each in a `HeldWriter`:

- On the rank that writes, it passes every call on at once.
- On the others, it holds the calls back until the next exchange of all ranks, at the end of each batch and epoch. Who
  comes to that has written. The calls are then made up for with all writing switched off, so that the callback counts
  batches and remembers the best result as if it had written.
- If the writer dies before the exchange, its file may be missing or half written. The rank that takes over makes up
  for the calls with writing switched on: no step lies between, so it writes the same.

A writer's file is continued, not begun anew: a half-written line of a `CSVLogger` is cut off, and a `TensorBoard` adds
a file to the same directory.

Considered and rejected: to begin using a callback that was idle so far. `ModelCheckpoint(save_best_only=True)` would
replace the best model by the next one, and the file that the dead rank was writing would stay broken.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.base.log import logger
from ring_plugins.core.collectives.api import Communicator
from ring_plugins.keras.job import members
from ring_plugins.keras.patches import replaced
from ring_plugins.keras.running_fit import enclosing_list

#: `OrbaxCheckpoint`, which older versions of Keras do not have.
ORBAX: tuple[type[Any], ...] = tuple(filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]))
#: Callbacks that only write files or to the terminal. Only one rank needs them.
WRITERS: tuple[type[Any], ...] = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    *ORBAX,
)
#: Those that save weights.
_SAVERS = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint, *ORBAX)
_PHASES = ("epoch", "train", "train_batch", "test", "test_batch", "predict", "predict_batch")
_HOOKS = [f"on_{phase}_{when}" for phase in _PHASES for when in ("begin", "end")]


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
    """Leave the progress bar of the `evaluate` or `predict` that is calling `callback` to rank 0, or each group's."""
    callbacks = enclosing_list(callback)
    if callbacks is not None and members(callback.group).communicator.rank:
        shown = keras.callbacks.ProgbarLogger
        callbacks.callbacks = [one for one in callbacks.callbacks if not isinstance(one, shown)]


def saves_weights(callbacks: Any) -> bool:
    """Whether a `CallbackList` has a callback that saves weights."""
    return any(isinstance(callback, _SAVERS) for callback in callbacks.callbacks)


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


class HeldWriter(keras.callbacks.Callback):
    """A callback that writes, on a rank that may or may not be the one that writes now.

    Args:
        writer: an instance of one of `WRITERS`.
        writes_here: whether this rank is the one that writes now.
    """

    def __init__(self, writer: Any, writes_here: Callable[[], bool]) -> None:
        super().__init__()
        self.writer = writer
        self._kind = next(kind for kind in WRITERS if isinstance(writer, kind))
        self._writes_here, self._has_written = writes_here, writes_here()
        self._is_fitting = False
        self._held: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._lock = threading.RLock()  # Keras may call the hooks of test batches in another thread

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.writer.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.writer.set_model(model)

    def settle(self) -> None:
        """Make up for the calls that were held back: all ranks, and so the one that writes, have made theirs."""
        with self._lock:
            if self._writes_here() and not self._has_written:
                self._take_over()
            while self._held:
                name, args = self._held.popleft()
                if self._has_written:
                    getattr(self.writer, name)(*args)
                    if isinstance(self.writer, keras.callbacks.CSVLogger):
                        _drop_repeated_line(self.writer)
                    continue
                with _without_writing(self.writer) as is_called:
                    if is_called:  # as the class of Keras defines it: what a subclass adds may write
                        getattr(self._kind, name)(self.writer, *args)

    def hand_over(self) -> None:
        """Write no more if another rank does from now on, and leave files whole."""
        if not self._has_written or self._writes_here():
            return
        self._has_written = False
        if isinstance(self.writer, keras.callbacks.CSVLogger) and self.writer.csv_file is not None:
            self.writer.csv_file.close()
        elif isinstance(self.writer, keras.callbacks.TensorBoard):
            self.writer._close_writers()

    def _call_or_hold(self, name: str, args: tuple[Any, ...]) -> None:
        with self._lock:
            self._is_fitting |= name == "on_train_begin"
            if self._writes_here():
                self.settle()
                getattr(self.writer, name)(*args)
            elif self._is_fitting and getattr(self._kind, name) is not getattr(keras.callbacks.Callback, name):
                self._held.append((name, tuple(dict(arg) if isinstance(arg, dict) else arg for arg in args)))

    def _take_over(self) -> None:
        """Write from now on, maybe in the middle of a `fit`."""
        self._has_written = True
        if not self._is_fitting or any(name == "on_train_begin" for name, _ in self._held):
            return
        if isinstance(self.writer, keras.callbacks.CSVLogger):
            _continue_lines(self.writer)
        elif isinstance(self.writer, keras.callbacks.ProgbarLogger):
            self.writer._reset_progbar()  # the one until now shows nothing
            self.writer._maybe_init_progbar()


def _hook(name: str) -> Callable[..., None]:
    def call(self: HeldWriter, *args: Any, **options: Any) -> None:
        self._call_or_hold(name, (*args, *options.values()))

    return call


for _name in _HOOKS:
    setattr(HeldWriter, _name, _hook(_name))


def warn_of_lone_writers(writers: Sequence[HeldWriter], communicator: Communicator[Any]) -> None:
    """Warn, on a rank whose callbacks would have no successor because other ranks lack them. Collective."""
    kinds = [type(held.writer).__name__ for held in writers if held._kind is not keras.callbacks.ProgbarLogger]
    everywhere = set(kinds).intersection(*communicator.all_gather_object(kinds, "warn_of_lone_writers"))
    lone = sorted(set(kinds) - everywhere - _warned)
    _warned.update(lone)
    if lone:
        logger.warning(
            f"{' and '.join(lone)} of rank {communicator.ranks[communicator.rank]} would end with that rank: other "
            "ranks do not have it. Give it to all ranks; only one of them writes."
        )


#: What `warn_of_lone_writers` has warned of.
_warned: set[str] = set()


class _Unsaved:
    """A model that is not saved when it should be."""

    def __init__(self, model: Any) -> None:
        self._ring_model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring_model, name)

    def save(self, *_: Any, **__: Any) -> None:
        pass

    save_weights = save


@contextlib.contextmanager
def _without_writing(writer: Any) -> Iterator[bool]:
    """Let hooks of `writer` only count inside this block; yields whether it has anything to count.

    Names of attributes are those of Keras 3.15.1.
    """
    changed: dict[str, Any] = {}
    if isinstance(writer, keras.callbacks.ModelCheckpoint):
        changed = {"_model": _Unsaved(writer._model), "verbose": 0}
    elif isinstance(writer, keras.callbacks.BackupAndRestore):
        # The state of all ranks comes from the rank that writes, which restores it.
        changed = {"_load_model": _nothing, "_save_model": _nothing, "delete_checkpoint": False}
    elif isinstance(writer, ORBAX):
        changed = {"_save_checkpoint": _nothing}
    elif isinstance(writer, keras.callbacks.ProgbarLogger):
        changed = {"verbose": 0}
    elif isinstance(writer, keras.callbacks.TensorBoard):
        nowhere = writer.summary.create_noop_writer()
        changed = {"_model": _Unsaved(writer._model), "_should_trace": False, "_should_write_train_graph": False}
        changed["_writers"] = {"train": nowhere, "val": nowhere}
    with replaced(writer, **changed):
        yield bool(changed)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _continue_lines(logger: Any) -> None:
    """Open the file of a `CSVLogger` behind its last whole line."""
    header = ""
    if os.path.exists(logger.filename):
        with open(logger.filename, "r+b") as file:
            text = file.read()
            file.truncate(text.rfind(b"\n") + 1)
        header = text.decode().partition("\n")[0].strip() if b"\n" in text else ""
    appends, logger.append = logger.append, True
    keras.callbacks.CSVLogger.on_train_begin(logger)
    logger.append = appends
    logger.keys = header.split(logger.sep)[1:] or None


def _drop_repeated_line(logger: Any) -> None:
    """Remove the last line of a `CSVLogger`'s file if the rank before had written it, too."""
    if logger.csv_file is None or logger.csv_file.closed:
        return
    with open(logger.filename, "r+b") as file:
        lines = file.read().splitlines(keepends=True)
        if len(lines) > 1 and lines[-1] == lines[-2]:
            file.truncate(sum(map(len, lines[:-1])))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A `keras.callbacks.ModelCheckpoint` that saves only the best model.

    With a `BroadcastCallback` only the root writes; with a `MetricAverageCallback` the metric is of all ranks' data.

    Args:
        filepath: path ending in `.keras`.
        monitor: name of the metric.
        **options: options of `ModelCheckpoint`, such as `mode` and `save_weights_only`.
    """

    def __init__(self, filepath: str | os.PathLike[str], monitor: str = "val_loss", **options: Any) -> None:
        super().__init__(filepath, monitor=monitor, save_best_only=True, **options)
