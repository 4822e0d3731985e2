"""Where ranks print: straight to the terminal, line by line through this process, or to files."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class Relay:
    """Hands each rank its standard output and error. Lines that it passes on never mix with those of other ranks.

    Leaving the context waits until everything printed has been passed on.

    Args:
        tag: put `[rank] ` in front of each line.
        directory: write each rank's output to `rank.N.out` and `rank.N.err` in this directory instead.
        always: relay lines without a tag too, because `sys.stdout` is no file here, as in a notebook.
    """

    def __init__(self, tag: bool, directory: str | None = None, always: bool = False) -> None:
        self._tag, self._directory = tag, Path(directory) if directory else None
        self._needed = tag or always
        self._threads: list[threading.Thread] = []
        self._open: list[int] = []
        self._lock = threading.Lock()
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Relay:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:  # a rank could not be started, and nobody called `start`
            self.start()
        for thread in self._threads:
            # A process that a rank left behind may keep its end of the pipe open.
            thread.join(5.0)

    def files(self, rank: int) -> tuple[int | None, int | None]:
        """File descriptors for a rank's standard output and error, as Popen takes them.

        Call `start` once all ranks have theirs.
        """
        if self._directory is not None:
            return self._file(f"rank.{rank}.out"), self._file(f"rank.{rank}.err")
        if not self._needed:
            return None, None
        return self._pipe(rank, lambda: sys.stdout), self._pipe(rank, lambda: sys.stderr)

    def start(self) -> None:
        """Begin to relay, and close this process's copies of the ranks' files, so that each pipe ends with its rank."""
        while self._open:
            os.close(self._open.pop())
        for thread in self._threads:
            thread.start()

    def _file(self, name: str) -> int:
        assert self._directory is not None
        self._open.append(os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        return self._open[-1]

    def _pipe(self, rank: int, stream: Callable[[], TextIO]) -> int:
        reading, writing = os.pipe()
        self._open.append(writing)
        prefix = f"[{rank}] " if self._tag else ""
        self._threads.append(
            threading.Thread(target=self._copy, args=(reading, stream, prefix), name=f"ring:output {rank}", daemon=True)
        )
        return writing

    def _copy(self, reading: int, stream: Callable[[], TextIO], prefix: str) -> None:
        with os.fdopen(reading, "rb") as pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):  # closed: drain the pipe
                    stream().write(prefix + text if text.endswith("\n") else f"{prefix}{text}\n")
                    stream().flush()
