"""`BackupAndRestore` in the middle of an epoch, and a job that saves and leaves when it is told to end.

**Problem.** Keras's `BackupAndRestore` saves weights and the number of the epoch, in two files. It goes on with the
first batch of that epoch, so samples are read twice; a process killed between the two files leaves a wrong pair.

**Here** the callback's own methods that save and load are replaced while `fit` runs. One file, put in place by a
rename, holds the weights, as Keras writes them, and beside them where the job is in its data (`resume.py`), the states
of random numbers, and what differs among ranks: moving statistics, accumulated gradients, and the states of metrics.
So as many ranks go on as if nothing had been. With another number of ranks, each takes the mean of the statistics and
gradients, and rank 0 the sum of the metrics' states, from which averages of all ranks are computed.

In the middle of an epoch all ranks take part: the rank that writes tells the others that it is due, in the exchange
behind each step (`SynchronizedStop`). The same exchange tells that a rank got SIGTERM (`PreemptionNotice`): all save
behind the same step and leave. Behind an epoch's last step the epoch, with its validation, is completed before.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np
from keras.src.random.seed_generator import global_seed_generator  # Keras 3.15.1, which does not export these
from keras.src.utils import file_utils

from ring_plugins.core.base.log import logger
from ring_plugins.core.base.types import Array
from ring_plugins.core.members.preemption_notice import TERMINATED, PreemptionNotice
from ring_plugins.core.world import current
from ring_plugins.keras.backends import backend
from ring_plugins.keras.joining import load_state, named, state_of
from ring_plugins.keras.patches import Patch
from ring_plugins.keras.resume import Rest
from ring_plugins.keras.running_fit import argument_of_fit, call_when_over, enclosing_list, end_on_all
from ring_plugins.keras.state import innermost, optimizers_of, value_of
from ring_plugins.keras.writers import HeldWriter

_GROUP = "ring_plugins"
#: Callbacks that begin anew in each run, and what they show or write, too.
_SHOWING = keras.callbacks.CSVLogger, keras.callbacks.ProgbarLogger, keras.callbacks.TensorBoard


class Backup(NamedTuple):
    """What a file holds beside weights and optimizer.

    Attributes:
        place: where the job was: `epoch`, `batch` and so on; see `Rest.plan`. Also what the root's callbacks know.
        seeds: states of seed generators, of the root.
        own: by rank, values of `own_variables`; empty at the end of an epoch.
        random: by rank, the state of the framework's random numbers, or empty.
        outer: the outer optimizer's velocity and the number of exchanges, where hosts exchange weights.
    """

    place: dict[str, Any]
    seeds: list[Array]
    own: list[list[Array]]
    random: list[Array]
    outer: Sequence[Array] = ()


class Backups:
    """The `BackupAndRestore`s of a `fit`.

    Args:
        callback: the `BroadcastCallback` whose `set_model` is running.
        callbacks: those of its list.

    Attributes:
        loaded: what this rank has read, until all know it.
        is_due: whether this rank is to write behind this step.
        exist: whether any rank writes.
        rest: the data of the fit.
        random: at the end of an epoch, by rank, the state of the framework's random numbers, if layers use these.
        outer: as of a `Backup`: what was read, until the exchanges begin, and then what is to be written.
    """

    def __init__(self, callback: Any, callbacks: Sequence[Any]) -> None:
        self._callback, self._patches = callback, list[Patch]()
        self.loaded: Backup | None = None
        self.is_due = False
        self.rest, self.random = Rest(None, None), list[Array]()
        self._resumed: Backup | None = None
        self._epoch: int | None = None
        self._metrics = list[Array]()  # what they had, until they get it
        self._asked: PreemptionNotice | None = None
        self.outer: Sequence[Array] = ()
        self._others = list[Any]()  # of the fit; the `CallbackList` itself must not outlive that
        self._writing: list[tuple[Any, Callable[[], bool]]] = []
        for one in callbacks:
            writer, writes = (one.writer, one._writes_here) if isinstance(one, HeldWriter) else (one, lambda: True)
            if isinstance(writer, keras.callbacks.BackupAndRestore):
                self._writing.append((writer, writes))
                self._replace(writer)
        self.exist = bool(self._writing)
        if self.exist:
            call_when_over(callback, self.undo)

    @property
    def are_written_here(self) -> bool:
        """Whether this rank writes: not one to which alone a script has given them, beside the root."""
        return any(writes() for _, writes in self._writing)

    def at_the_end(self, callbacks: Sequence[Any]) -> list[Any]:
        """The callbacks in the order in which those that save come last, before the `BroadcastCallback`."""
        saving = [one for one in callbacks if any(getattr(one, "writer", one) is writer for writer, _ in self._writing)]
        return [*(one for one in callbacks if one not in [*saving, self._callback]), *saving, self._callback]

    def _replace(self, writer: Any) -> None:
        load = writer._load_model
        save = {"epoch": lambda: self._save_epoch(writer), False: lambda: None}.get(writer.save_freq, self._note_due)
        self._patches.append(Patch(writer, _load_model=lambda: self._load(writer, load), _save_model=save))

    def _note_due(self) -> None:
        self.is_due = True

    def undo(self) -> None:
        """Leave the callbacks and the iterator over the data as they were."""
        self.rest.undo()
        for patch in self._patches:
            patch.restore()
        self._patches, self._others = [], []
        if self._asked is not None:
            notice, self._asked = self._asked, None
            notice.withdraw()

    # Going on -----------------------------------------------------------------------------------------

    def _load(self, writer: Any, load: Callable[[], None]) -> None:
        load()
        found = read(writer._weights_path) if file_utils.exists(writer._weights_path) else None
        if found is None:
            return
        model = writer.model
        model._initial_epoch = writer._current_epoch = found.place["epoch"]
        writer._last_batch_seen = max(found.place["batch"] - 1, 0)
        for variable, value in zip(_seeds(model), found.seeds, strict=False):
            variable.assign(value)
        rest = Rest(argument_of_fit("epoch_iterator"), argument_of_fit("x"))
        found.place["data"]["size here"] = rest.size  # of the root, as the one in the backup
        self.loaded = found

    def begin(self, told: Backup | None, exist: bool) -> None:
        """Begin where the root's backup says; all ranks call this in `on_train_begin`.

        Args:
            told: what the root has loaded.
            exist: whether any rank writes.
        """
        ranks, params = self._callback.ranks.communicator, self._callback.params or {}
        self.exist, self.loaded, self._resumed, self._epoch = exist, None, told, None
        self.outer = () if told is None or self._callback.sync_every is None else told.outer
        self.rest = Rest(argument_of_fit("epoch_iterator"), argument_of_fit("x"))
        if exist:
            notice = current().elastic.preemption_notice
            self._asked = None if notice.is_asked else notice
            notice.ask()
            callbacks = enclosing_list(self._callback)
            self._others = [] if callbacks is None else callbacks.callbacks
        if told is None:
            return
        for name, one in named(self._others):
            load_state(one, told.place["callbacks"].get(name))
        self.rest.plan(told.place, ranks.size, params.get("steps"))
        if self.rest.problem and ranks.rank == 0:
            logger.warning(
                f"fit() goes on behind step {told.place['batch']} of epoch {told.place['epoch'] + 1}, but "
                f"{self.rest.problem}"
            )

    def begin_epoch(self, epoch: int) -> None:
        """Called when all data has the order of this epoch."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self.rest.begin_epoch()
        told, self._resumed, self._metrics = self._resumed, None, []
        if told is None:
            return
        ranks = self._callback.ranks.communicator
        if len(told.random) == ranks.size:
            give = functools.partial(backend().set_random_state, told.random[ranks.rank])
            # In the middle of an epoch, behind what Keras has drawn to begin to read the data.
            self.rest.call_in_first_step(give) if told.place["batch"] and not self.rest.problem else give()
        if not told.own:
            return
        kept, metrics = own_variables(self._callback.model)
        is_same = len(told.own) == ranks.size
        count = told.place["kept"]
        for i, variable in enumerate(kept if len(kept) == count else ()):
            variable.assign(told.own[ranks.rank][i] if is_same else _mean([of_rank[i] for of_rank in told.own]))
        if self.rest.problem:
            return
        self._metrics = told.own[ranks.rank][count:] if is_same else _sums(told.own, count, ranks.rank)
        if len(metrics) == len(self._metrics):  # else the first step makes them, on TensorFlow
            self._add_metrics(metrics)

    def after_step(self) -> None:
        """Give metrics that the first step has made what they had."""
        if self._metrics:
            _, metrics = own_variables(self._callback.model)
            if len(metrics) == len(self._metrics):
                self._add_metrics(metrics)
            self._metrics = []

    def _add_metrics(self, metrics: Sequence[Any]) -> None:
        for variable, value in zip(metrics, self._metrics, strict=True):
            variable.assign(value_of(variable) + value)
        self._metrics = []

    # Saving -------------------------------------------------------------------------------------------

    def place_of_data(self, batch: int) -> dict[str, int]:
        """Where this rank is in its data behind a step, if others follow in this epoch."""
        return self.rest.place(batch + 1 - self.rest.first, False)

    def save(
        self,
        epoch: int,
        batch: int,
        has_more: bool,
        states: Sequence[tuple[list[Array], Array | None]],
        data: dict[str, int] | None = None,
    ) -> None:
        """Write behind a step, if this rank writes.

        Args:
            epoch, batch: numbers of the step.
            has_more: whether others follow in this epoch.
            states: by rank, its `own_state`.
            data: where the job is in its data, if it is not where this rank is.
        """
        self.is_due = False
        place = self._place(epoch, batch + 1, batch + 1 - self.rest.first, not has_more)
        if data is not None:
            place["data"] = data
        own, random = [one for one, _ in states] if has_more else [], [one for _, one in states if one is not None]
        self._write(Backup(place, [], own, random))

    def save_epoch(self) -> None:
        """Write at the end of an epoch, behind all other callbacks, if this rank writes and has not done so."""
        for writer, _ in self._writing:
            if writer.save_freq != "epoch":
                self._save_epoch(writer)

    def _save_epoch(self, writer: Any) -> None:
        assert self._epoch is not None
        if self._callback.ranks.communicator.size == 1 and (own := backend().random_state()) is not None:
            self.random = [own]
        self._write(Backup(self._place(self._epoch, 0, 0, True), [], [], self.random), writer)

    def _place(self, epoch: int, batch: int, batches: int, is_over: bool) -> dict[str, Any]:
        return {
            "epoch": epoch + is_over,
            "batch": 0 if is_over else batch,
            "steps": (self._callback.params or {}).get("steps"),
            "ranks": self._callback.ranks.communicator.size,
            "data": self.rest.place(batches, is_over),
            "kept": len(own_variables(self._callback.model)[0]),
            "callbacks": {name: found for name, one in named(self._others) if (found := _plain_state(one))},
        }

    def _write(self, backup: Backup, only: Any = None) -> None:
        seeds = list(map(value_of, _seeds(self._callback.model)))
        backup = backup._replace(seeds=seeds, outer=self.outer)
        for writer, writes in self._writing:
            if writes() and only in (None, writer):
                write(writer, backup)

    def end_batch_alone(self, epoch: int, batch: int) -> None:
        """Behind a step of a job of one rank, do what all ranks do otherwise."""
        if not self.exist:
            return
        self.after_step()
        steps = (self._callback.params or {}).get("steps")
        is_ending, has_more = self._is_told(), steps is None or batch + 1 < steps
        if (is_ending or self.is_due) and (has_more or not is_ending):
            self.save(epoch, batch, has_more, [own_state(self._callback.model)])
            if is_ending:
                self.leave()

    def end_epoch_alone(self) -> None:
        """At the end of an epoch of a job of one rank, do what all ranks do otherwise."""
        if self.exist and self._is_told():
            self.save_epoch()
            self.leave()

    def _is_told(self) -> bool:
        elastic = current().elastic
        elastic.is_ending |= elastic.wants_change
        return elastic.is_ending

    def leave(self) -> None:
        """End this process, as all ranks do behind the same step."""
        self._asked = None  # what it was told is heeded
        self._callback.ranks.communicator.all_gather_object(None, "backup")  # nobody ends before the root has written
        if self._callback.ranks.communicator.rank == 0:
            where = self._writing[0][0].backup_dir if self._writing else "the directory of its BackupAndRestore"
            logger.warning(f"the job was told to end: it has saved its state in {where}, from which fit() goes on.")
        end_on_all()
        current().exit_from_job(TERMINATED)


def own_variables(model: Any) -> tuple[list[Any], list[Any]]:
    """What differs among ranks: variables of which another number of ranks takes the mean, and those that add up."""
    sums = [getattr(innermost(one), "_accumulated_gradients", None) or [] for one in optimizers_of(model)]
    return [*model.non_trainable_weights, *(one for some in sums for one in some)], [*model.metrics_variables]


def own_state(model: Any) -> tuple[list[Array], Array | None]:
    """The values of `own_variables`, and the state of the framework's random numbers, if layers use these."""
    kept, metrics = own_variables(model)
    return list(map(value_of, [*kept, *metrics])), backend().random_state()


def _sums(own: list[list[Array]], begin: int, rank: int) -> list[Array]:
    """By metric's variable, what all ranks had together, on rank 0; nothing on others."""
    values = [[of_rank[i] for of_rank in own] for i in range(begin, len(own[0]))]
    return [np.sum(some, 0, dtype=some[0].dtype) if rank == 0 else np.zeros_like(some[0]) for some in values]


def _plain_state(callback: Any) -> Any:
    """What a callback knows, but for arrays; those of the learning rate compute theirs from the epoch and the ranks."""
    if type(callback).__module__.split(".")[0] == "ring_plugins" or isinstance(callback, _SHOWING):
        return None
    found = {}
    for name, value in (state_of(callback) or {}).items():
        with contextlib.suppress(TypeError):
            found[name] = json.loads(json.dumps(value, default=_number))
    return found


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError


def _seeds(model: Any) -> list[Any]:
    # Keras 3.15.1, layers/layer.py:393. A layer may be in the model twice.
    found = [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]
    return [*{id(state): state for state in found}.values(), global_seed_generator().state]


def _mean(values: Sequence[Array]) -> Array:
    kind = values[0].dtype
    return values[0] if kind.kind in "iub" else np.mean([one.astype(np.float64) for one in values], 0).astype(kind)


def write(writer: Any, backup: Backup) -> None:
    """Save a model and a backup in one file, in the place of the last one: there is always a whole one."""
    path, folder = writer._weights_path, writer.backup_dir
    if not file_utils.exists(folder):
        file_utils.makedirs(folder)
    is_remote = file_utils.is_remote_path(folder)
    temporary = os.path.join(tempfile.mkdtemp() if is_remote else folder, "new.weights.h5")
    writer.model.save_weights(temporary, overwrite=True)
    with h5py.File(temporary, "a") as file:
        group = file.create_group(_GROUP)
        group.attrs["place"] = json.dumps(backup.place)
        by_rank = [(f"rank {rank}", own) for rank, own in enumerate(backup.own)]
        for name, arrays in [("seeds", backup.seeds), ("random", backup.random), ("outer", backup.outer), *by_rank]:
            for i, array in enumerate(arrays):
                plain = array if array.dtype.kind in "iufb" else array.astype(np.float32)  # bfloat16 is no type of HDF5
                group[f"{name}/{i}"] = plain
    pairs = [(path, writer._prev_weights_path), (writer._training_metadata_path, writer._prev_training_metadata_path)]
    for last, previous in pairs if writer.double_checkpoint else ():
        if file_utils.exists(last):
            file_utils.copy(last, previous)
    if is_remote:
        file_utils.copy(temporary, path)
        shutil.rmtree(os.path.dirname(temporary))
    else:
        os.replace(temporary, path)
    with file_utils.File(writer._training_metadata_path, "w") as file:  # for Keras alone, as it writes it
        file.write(json.dumps({name: backup.place[name] for name in ("epoch", "batch")}))


def read(path: str) -> Backup | None:
    """What `write` has written beside the weights; None if Keras alone has written the file."""
    with file_utils.File(path, "rb") as stream, h5py.File(stream, "r") as file:
        group = file.get(_GROUP)
        if group is None:
            return None
        place = json.loads(group.attrs["place"])

        def arrays(name: str) -> list[Array]:
            found = group.get(name, {})
            return [found[str(i)][()] for i in range(len(found))]

        ranks = range(place["ranks"] if "rank 0" in group else 0)
        return Backup(
            place, arrays("seeds"), [arrays(f"rank {rank}") for rank in ranks], arrays("random"), arrays("outer")
        )
