"""Loggers that go on in the same place when another rank takes over from rank 0.

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
from collections.abc import Sequence
from typing import Any

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
