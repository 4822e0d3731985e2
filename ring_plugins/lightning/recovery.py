"""A Trainer that goes on when ranks are lost (`on_failure="continue"`): what follows the ranks that are left.

The step is repeated below, in backward (core/gradients/reducer), and Lightning asks the strategy for ranks whenever
it needs them. Three things remember:

- ``rank_zero_only`` has a number, by which loggers and checkpoints find out whether to write;
- data loaders have their samplers, so they are made anew for the next epoch;
- torch's process groups have a number of ranks for good, so there is none in such a job. What torchmetrics uses it for
  is done here, by collectives of ours, which are repeated when a rank is lost in them.

**Loggers** go on in the same place when another rank takes over from rank 0.

Lightning's loggers for files choose their directory when they are first asked, each rank for itself, by looking which
versions there are. Only rank 0 writes, so it does not matter that the other ranks find rank 0's and choose the next
one, until rank 0 is lost. So all ranks get the version of rank 0 at first.

`TensorBoardLogger` adds a file to its directory. `CSVLogger` deletes what it finds there, and knows only the columns
that it has written itself. So one that takes over gets a writer that adds lines to the file. Ranks may take over in
turn, so it reads the columns from the file each time.

Considered and rejected: to let each rank that takes over begin another version, beside which the old one stays as it
is. Nothing can be lost then, but whoever plots a training has to put pieces together.
"""

from __future__ import annotations

import csv
import sys
import weakref
from collections.abc import Sequence
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

import ring_plugins as ring
from ring_plugins.core.base.errors import ArgumentError
from ring_plugins.core.members.changes import MembershipChange
from ring_plugins.core.world import current
from ring_plugins.lightning.environment import set_rank_zero

T = TypeVar("T")


class LossFollower:
    """Lets a strategy and its Trainer follow the ranks that are left, from now on.

    Args:
        strategy: held weakly.
        trainer: its Trainer.
        module: whose metrics are to be gathered from the ranks that are left.
    """

    def __init__(self, strategy: Any, trainer: Any, module: nn.Module) -> None:
        self._strategy, self._trainer = weakref.ref(strategy), trainer
        self._reload_every = trainer.reload_dataloaders_every_n_epochs
        self._world = current()
        self._world.elastic.changes.add(self._follow)
        self._metrics = [_Gathered(metric) for metric in module.modules() if _is_metric(metric)]
        if not self._world.is_joining:
            take_versions(trainer.loggers, strategy.broadcast(versions_of(trainer.loggers)))

    def _follow(self, change: MembershipChange) -> None:
        if change.rank > change.rank_before == 0:  # a process has taken the place of rank 0, whose loggers go on
            for logger in self._trainer.loggers:
                logger.finalize("success")
        if change.rank < change.rank_before or change.joined:
            for logger in self._trainer.loggers if change.rank == 0 else ():
                take_over(logger)
        set_rank_zero(change.rank)
        strategy = self._strategy()
        if strategy is not None:
            strategy.parallel_devices = strategy.parallel_devices[:1] * change.size
        if self._world.replaces:  # each keeps the share of its slot
            return
        # Lightning makes them anew where an epoch begins, with samplers for the ranks that there are then.
        self._trainer.reload_dataloaders_every_n_epochs = 1

    def close(self) -> None:
        """Undo everything."""
        self._world.elastic.changes.remove(self._follow)
        self._trainer.reload_dataloaders_every_n_epochs = self._reload_every
        for metric in self._metrics:
            metric.undo()


# Loggers ------------------------------------------------------------------------------------------

#: Classes with a version that they choose by looking at files: Lightning 2.6.6, fabric/loggers/csv_logs.py:97.
_OF_FILES = ("CSVLogger", "TensorBoardLogger")

Versions = list[tuple[str, Any]]


def versions_of(loggers: Sequence[Any]) -> Versions:
    """Each logger's class and version; None for one of another kind."""
    return [(type(logger).__name__, logger.version if _class_of_files(logger) else None) for logger in loggers]


def take_versions(loggers: Sequence[Any], versions: Versions) -> None:
    """Let loggers write where others of the same classes do."""
    for logger, (name, version) in zip(loggers, versions, strict=False):
        if version is not None and type(logger).__name__ == name:
            logger._version = version


def take_over(logger: Any) -> None:
    """Let a `CSVLogger` that has not written yet add to its file; other loggers stay as they are."""
    kind = _class_of_files(logger)
    writer: Any = getattr(sys.modules[kind.__module__], "ExperimentWriter", None) if kind is not None else None
    if writer is None or logger._experiment is not None:
        return

    class AddingWriter(writer):  # type: ignore[misc]  # of either package
        """Lightning's writer, on a file in which other processes have written."""

        size = -1  # of the file when this has last written

        def _check_log_dir_exists(self) -> None:
            """Lightning's deletes the file."""

        def save(self) -> None:
            # The hyperparameters that rank 0 has written stay, unless the script has logged some here.
            lightnings: Any = super() if self.hparams else super(writer, self)
            lightnings.save()
            if self._fs.isfile(self.metrics_file_path):
                self.size = self._fs.size(self.metrics_file_path)

        def _record_new_keys(self) -> set[str]:
            if self._fs.isfile(self.metrics_file_path) and self._fs.size(self.metrics_file_path) != self.size:
                self.metrics_keys = self._columns()
            found: set[str] = super()._record_new_keys()
            return found

        def _columns(self) -> list[str]:
            """Those of the file, from which the beginning of a line is removed that nobody has written to its end."""
            with self._fs.open(self.metrics_file_path, "rb") as file:
                content: bytes = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                with self._fs.open(self.metrics_file_path, "wb") as file:
                    file.write(whole)
            return next(csv.reader(whole.decode().splitlines()), [])

    logger._experiment = AddingWriter(logger.log_dir)


def _class_of_files(logger: Any) -> type[Any] | None:
    """Lightning's class from which a logger's derives, if it is one for files."""
    for kind in type(logger).__mro__:
        if kind.__name__ in _OF_FILES and kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            return kind
    return None


# torchmetrics -------------------------------------------------------------------------------------


def _is_metric(module: nn.Module) -> bool:
    from torchmetrics import Metric  # Lightning requires it

    return isinstance(module, Metric) and module.dist_sync_fn is None


class _Gathered:
    """Lets a metric of torchmetrics gather its states by `_gather`."""

    def __init__(self, metric: Any) -> None:
        self._metric, self._is_distributed = metric, metric.distributed_available_fn
        metric.distributed_available_fn = _has_several_ranks
        metric.dist_sync_fn = _gather
        metric.sync = MethodType(_sync, metric)

    def undo(self) -> None:
        del self._metric.sync
        self._metric.dist_sync_fn = None
        self._metric.distributed_available_fn = self._is_distributed


def _has_several_ranks() -> bool:
    return ring.size() > 1 and not current().is_joining


def _gather(value: Tensor, group: Any = None) -> list[Tensor]:
    """As ``torchmetrics.utilities.distributed.gather_all_tensors``."""
    if group is not None:
        raise ArgumentError('a metric of a process group does not support on_failure="continue"; leave the group out.')
    # Through the CPU: what is pickled on a GPU lands on the GPU of that number, which is another rank's.
    return [one.to(value.device) for one in ring.all_gather_object(value.detach().cpu())]


def _sync(metric: Any, *args: Any, **options: Any) -> None:
    """``Metric.sync``, again if a rank was lost in it: all states of a metric must be of the same ranks."""
    while True:
        view = current().elastic.view
        type(metric).sync(metric, *args, **options)
        if current().elastic.view == view or not metric._is_synced:
            return
        metric.unsync()
